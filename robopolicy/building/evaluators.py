"""Builds the evaluators of the gate: episodes in world models or trials, critics on recorded data, importance-weighted
logs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.workers import BatchPlayers, Built, Workers
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.recorded import GateSection
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.world import World
from robopolicy.data.chains import read_chains
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.evaluation.evaluators import (
    CriticEvaluator,
    FqeEvaluator,
    ModelEvaluator,
    RecordedDecisions,
    episode_starts,
    highest_credible,
)
from robopolicy.evaluation.gate import Evaluator
from robopolicy.evaluation.importance import ImportanceEvaluator, effective_text
from robopolicy.rl.offline.configuration import IqlConfig
from robopolicy.rl.offline.decisions import recorded_decisions, value_bound
from robopolicy.rl.offline.fqe import FqeConfig
from robopolicy.rl.offline.iql import Iql
from robopolicy.runs import default_path, output
from robopolicy.success.relabelling import relabelled_by
from robopolicy.training.critics import critic_interface, fit_agent
from worldmodels.protocol import EncodesForPolicy

CRITICS = frozenset({"fqe", "critic"})
"""Evaluators that see recorded data through a fitted critic alone."""


def gate_episodes(config: Config, policy: Policy, device: torch.device) -> Episodes | None:
    """Return the episodes of gate.data (default: the output of collect), renamed as for `policy` and with the success
    of the classifier world.success, if given; None if no evaluator uses recorded data.
    """
    if set(config.gate.evaluators) <= {"model", "world"}:
        return None
    episodes = Episodes.concatenate(
        [read_dataset(path, rename=renaming_of(policy)) for path in gate_data_paths(config)]
    )
    return relabelled_by(config.world.success, episodes).to(device)


def gate_data_paths(config: Config) -> tuple[Path, ...]:
    """Return gate.data, by default the output of collect."""
    return config.gate.data or (default_path(config, "collect", "dataset", None, "gate.data"),)


def build_evaluators(
    config: Config,
    incumbent: Policy,
    episodes: Episodes | None,
    device: torch.device,
    trained_in: Sequence[Path] = (),
    elsewhere: "Elsewhere | None" = None,
) -> list[Evaluator]:
    """Return the evaluators that `config.gate` selects.

    incumbent: policy whose observation and action fields critics use; episodes: recorded data that training has not
    used, None if no evaluator needs any; trained_in: world models that candidates were trained in, which cannot be the
    only evaluators; elsewhere: plays episodes in world models and trials on workers. Raises ConfigError and DataError
    when something is missing.
    """
    section, judges = config.gate, list[Evaluator]()
    critics = not set(section.evaluators) <= {"model", "importance", "world"}
    learned_in = {path.resolve() for path in trained_in}
    recorded_data = evaluator_data(section, incumbent, episodes) if critics and episodes is not None else None
    for name in section.evaluators:
        if name == "model":
            paths = section.models or (default_path(config, "worldmodel", "checkpoint", None, "gate.models"),)
            judges += [
                played_evaluator(config, path, incumbent, device, path.resolve() not in learned_in, elsewhere)
                for path in paths
            ]
            continue
        if name == "world":
            judges.append(played_evaluator(config, None, incumbent, device, elsewhere=elsewhere))
            continue
        if name == "importance":
            judges.append(importance_evaluator(config, incumbent, episodes))
            continue
        if recorded_data is None:
            raise ConfigError(f"gate.evaluators contains {name}, which needs recorded data: set gate.data=[DATASET].")
        if name == "fqe":
            fitting = FqeConfig(steps=section.steps, width=section.width, discount=section.discount)
            judges.append(FqeEvaluator(recorded_data, fitting, seed=config.run.seed))
        else:
            judges.append(
                CriticEvaluator(critic_of(section, recorded_data, config.run.seed), recorded_data, seed=config.run.seed)
            )
    return judges


def evaluator_data(section: GateSection, policy: Policy, episodes: Episodes) -> RecordedDecisions:
    """Return the input of evaluators that use recorded data; raises DataError when rewards are missing."""
    require_recorded("the recorded data", episodes, policy.spec.observation, policy.spec.action)
    if episodes.reward is None:
        raise DataError(
            "Evaluators on recorded data need rewards, and this dataset has none: use gate.evaluators=[model]."
        )
    interface = critic_interface(policy, episodes)
    decisions = recorded_decisions(episodes, interface, section.discount)
    bounds = value_bound(episodes.reward, section.discount)
    ceiling = highest_credible(episodes, section.discount)
    return RecordedDecisions(decisions, interface, bounds, episode_starts(episodes, section.num_states), ceiling)


def critic_of(section: GateSection, recorded: RecordedDecisions, seed: int) -> Iql:
    """Fit a critic to the recorded data with expectile 0.5 (the mean): values of the actions as they were taken."""
    interface = recorded.interface
    config = IqlConfig(expectile=0.5, width=section.width, discount=section.discount)
    agent = Iql(config, interface.size, interface.actions, derive_seed(seed, "gate/critic"))
    data = recorded.decisions.transitions
    generators = Generators(derive_seed(seed, "gate"), data.state.device)
    fit_agent(agent.to(data.state.device), data, section.steps, 256, generators, label="judging critic")
    return agent


@dataclass(frozen=True)
class Elsewhere:
    """Plays the episodes of evaluators on workers. paths: checkpoint of every policy that is evaluated."""

    workers: Workers
    paths: Sequence[tuple[Policy, Path]]

    def players(self, policy: Policy, model: Path | None) -> BatchPlayers | None:
        """Return the players of `policy` in the world model at `model`, or in trials for None; None for no workers."""
        path = next(path for each, path in self.paths if each is policy)
        given = {"model": "" if model is None else str(model), "path": str(path)}
        return self.workers.players("robopolicy.building.evaluators:in_worker", **given)


class WorldForPolicy:
    """Builds the world with what a policy reads, again only for one that reads something else than the last."""

    def __init__(self, build: Callable[[Policy], World]):
        self._build = build
        self._world: World | None = None
        self._read: tuple[str, Policy | None] = "", None

    def __call__(self, policy: Policy) -> World:
        """Return the world for `policy`; that of another is closed. Raises the errors of `build_world`."""
        # One with an encoder may read the latent of the world's model instead.
        encoded = policy if isinstance(policy, EncodesForPolicy) else None
        read = repr((policy.spec.observation, policy.spec.action, policy.spec.history)), encoded
        if self._world is None or read[0] != self._read[0] or encoded is not self._read[1]:
            if self._world is not None:
                self._world.close()
                self._world = None
            self._world, self._read = self._build(policy), read
        return self._world

    def close(self) -> None:
        """Close the last world."""
        if self._world is not None:
            self._world.close()


def world_of_evaluator(config: Config, model: Path | None, policy: Policy, device: torch.device) -> World:
    """Build the world in which an evaluator plays `policy`: the world model at `model`, or that of trials for None."""
    section = config.world if model is None else config.world.imagined_by(model)
    return build_world(section, policy, episodes=config.gate.num_states, device=device)


def in_worker(config: Config, model: str, path: str) -> Built:
    """Build in a worker the world of an evaluator, and the policy at `path`."""
    policy = load_policy(path, device := choose_device(config.run))
    world = world_of_evaluator(config, Path(model) if model else None, policy, device)
    return world, adapt_policy_to_world(world, policy), torch.device("cpu")


def played_evaluator(
    config: Config,
    model: Path | None,
    policy: Policy,
    device: torch.device,
    independent: bool = True,
    elsewhere: Elsewhere | None = None,
) -> ModelEvaluator:
    """Return the evaluator that plays episodes in the world model at `model`, or trials for None; `policy` is the first
    that it is to play.
    """
    section = config.gate
    world_of = WorldForPolicy(lambda each: world_of_evaluator(config, model, each, device))
    return ModelEvaluator(
        world_of(policy),
        episode_seeds(config.run.seed, "gate/trials" if model is None else "gate", section.num_states),
        by=section.metric,
        as_inside=lambda each: adapt_policy_to_world(world_of(each), each),
        independent=independent,
        trials=model is None,
        seed=config.run.seed,
        players=lambda each: None if elsewhere is None else elsewhere.players(each, model),
        world_of=world_of,
    )


def importance_evaluator(config: Config, policy: Policy, episodes: Episodes | None) -> Evaluator:
    """Return the evaluator that uses the denoising chains logged in gate.data for `episodes`; raises DataError when
    there are none.
    """
    section, spec = config.gate, policy.spec
    assert episodes is not None  # `gate_episodes` reads them for every judge but models
    chains = read_chains(gate_data_paths(config), spec.prediction, spec.action.size).to(episodes.device)
    weighed = {"per_decision": section.per_decision, "least": section.min_effective_episodes}
    return ImportanceEvaluator(episodes, chains, by=section.metric, **weighed)


def clipped_fraction(judges: Sequence[Evaluator]) -> dict[str, list[float]]:
    """Return the fraction of critic targets outside the reward bounds (fitted evaluators) and the effective number of
    episodes (importance sampling).
    """
    result = {"clipped": [share for judge in judges if isinstance(judge, FqeEvaluator) for share in judge.clipped]}
    counts = [count for judge in judges if isinstance(judge, ImportanceEvaluator) for count in judge.effective]
    return result | ({"effective_episodes": counts} if counts else {})


def warn_of_divergence(judges: Sequence[Evaluator]) -> None:
    """Print a note when a fitted critic has diverged beyond the reward bounds, and the effective number of logged
    episodes.
    """
    for judge in judges:
        if isinstance(judge, ImportanceEvaluator) and judge.effective:
            output.print(
                f"Effective sample size of {len(judge.episodes)} recorded episodes: {effective_text(judge.effective)}."
            )
        if isinstance(judge, FqeEvaluator) and judge.diverged:
            output.print(
                f"Note: {max(judge.clipped):.0%} of the targets of {judge.name} exceeded the bounds that the rewards "
                "allow: it has diverged, and its result is unreliable. Use more data (gate.data), or evaluate with "
                "gate.evaluators=[model].",
                markup=False,
            )


def warn_of_critics_alone(section: GateSection, accepted: bool) -> None:
    """Print a note when a candidate was accepted by critics alone, which also accept worse policies."""
    if accepted and CRITICS.issuperset(section.evaluators):
        output.print(
            "Note: critics on recorded data alone also accept worse policies: of 147 truly worse candidates fqe "
            "accepted 10 and critic 15, an evaluation in a world model none (robopolicy/benchmarks/README.md, gate). "
            "Add one, gate.evaluators=[model,fqe], or evaluate the candidate in a simulator before it is used.",
            markup=False,
        )


keep_former_names(
    __name__,
    {
        "recorded_for_gate": "gate_episodes",
        "recorded_paths": "gate_data_paths",
        "build_judges": "build_evaluators",
        "recorded_for_judges": "evaluator_data",
        "model_judge": "played_evaluator",
        "model_evaluator": "played_evaluator",
        "importance_judge": "importance_evaluator",
        "clipped": "clipped_fraction",
    },
)
