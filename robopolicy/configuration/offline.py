"""Learning from recorded data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural
from robopolicy.core.structured import Tagged
from robopolicy.rl.offline.configuration import IqlConfig
from robopolicy.rl.offline.registry import AGENTS
from robopolicy.training.offline.configuration import IMPROVERS, BestOfConfig, CriticFitConfig, GuidedConfig


@dataclass(frozen=True)
class AgentSection(Tagged):
    """Whose critic is fitted to the recorded decisions."""

    kinds: ClassVar = AGENTS
    beside: ClassVar = True

    kind: str = "iql"
    """iql, td3_bc, rebrac, cql, cal_ql, edac, prdc, or your own."""
    config: Any = field(default_factory=IqlConfig)


@dataclass(frozen=True)
class ImproveSection(Tagged):
    """How a candidate is made of the incumbent and that critic."""

    kinds: ClassVar = IMPROVERS
    beside: ClassVar = True

    kind: str = "best_of"
    """best_of (imitate the best of several decisions), idql (do it, and imitate nothing), weighted_imitation (AWR),
    chain_ppo (RL-100), diffusion_ql (go up Q through the chain, or its last step: DPG), adjoint_matching (tilt a flow:
    QAM), recap (told what is better), filtered_imitation (of that alone), dsrl (steer by the initial noise),
    imagined_ppo (PPO in offline.model, by the settings of finetune), or your own.
    """
    config: Any = field(default_factory=BestOfConfig)


@dataclass(frozen=True)
class OfflineSection:
    """A policy that learns from recorded data alone, through a gate."""

    dataset: Path | None = None
    """Folder of a LeRobotDataset (default: what collect wrote under the same name and seed)."""
    more: tuple[Path, ...] = ()
    """Further datasets of the same world, such as recorded episodes of the policy itself."""
    data: tuple[Literal["recorded", "imagined", "guided"], ...] = ("recorded",)
    """What critics learn from: recorded decisions; such as the policy makes in the imagination of offline.model (with
    offline.agent=edac RAVL); such as a diffusion model of the recorded ones draws, guided towards the policy.
    """
    model: Path | None = None
    """Checkpoint of the world model that imagines."""
    imagined: Natural = 512
    """Imagined episodes."""
    imagined_steps: Natural = 0
    """Cut them after so many control steps, and begin in recorded steps; 0 plays whole ones on the simulator's starts.
    """
    guided: GuidedConfig = field(default_factory=GuidedConfig)
    reward: str = ""
    """For data that records none: success (1 where the episode succeeds, else 0), head:CHECKPOINT (the same, by the
    success head of a world model), or the dotted path of a function (episodes) -> reward [N]; empty for the recorded.
    """
    without: tuple[Natural, ...] = ()
    """Episodes of `dataset` to leave out, by number, such as broken ones."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, as train.rename (default: the policy's own)."""
    policy: Path | None = None
    """Checkpoint of the policy to improve (default: what train wrote under the same name and seed)."""
    agent: AgentSection = field(default_factory=AgentSection)
    critic: CriticFitConfig = field(default_factory=CriticFitConfig)
    improve: ImproveSection = field(default_factory=ImproveSection)
    rounds: Count = 3
    """Candidates, each made of the incumbent and put before the gate."""
    gated: bool = True
    """False accepts every candidate, which is what the gate is compared with."""
    evaluate_episodes: Natural = 200
    """Episodes in the world that judge base and result at the end, and choose nothing; 0 where there is no world."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.imagined < 1 or min(self.evaluate_episodes, self.imagined_steps) < 0:
            raise ConfigError(
                "offline: rounds and imagined are at least 1, evaluate_episodes and imagined_steps at least 0."
            )
        if "imagined" in self.data and self.model is None:
            raise ConfigError("offline.data names imagined: in which world model? Set offline.model=CHECKPOINT.")
        if not self.data:
            raise ConfigError("offline.data=[] leaves nothing to learn from.")
