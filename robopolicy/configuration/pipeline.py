"""Several verbs in a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from robopolicy.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class PipelineSection:
    """Verbs that build on each other, one after the other; recipe=rl100 is such a list."""

    recipe: str = "push_t"
    """Recipe of the task, which every stage begins with."""
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Name of a stage -> its verb, then its settings, in which {name} is the run folder of an earlier stage and {seed}
    run.seed: pipeline.stages={imitation: [train], one_step: [distill, 'distill.policy={imitation}/checkpoint']}.
    """
    overrides: tuple[str, ...] = ()
    """Settings of every stage, quoted: pipeline.overrides=['run.threads=1']; what a stage says itself weighs more."""
    changes: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Further settings of single stages, which weigh most: pipeline.changes.offline=['offline.rounds=5']."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.changes if name not in self.stages]
        if unknown:
            raise ConfigError(
                f"pipeline.changes.{unknown[0]}: there is no such stage.{did_you_mean(unknown[0], self.stages)}"
            )
        stages: Mapping[str, object] = self.stages
        for name, said in stages.items():
            if isinstance(said, str) or not said:
                raise ConfigError(f"pipeline.stages.{name} is a list: its verb, then its settings.")
            if not name.isidentifier() or name == "seed":
                raise ConfigError(f"pipeline.stages: '{name}' names a folder and stands in braces: letters, digits, _.")
