"""Planning with a joint model on reach_planar: does it help, and does it need failures in the training data?

The same weights act with one candidate and plan with several; another model is trained on successes only. After Cosmos
Policy's best-of-N planning; its issue 17 asks the second question.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from robopolicy.benchmarks.rates import rate_text, spread_text
from robopolicy.benchmarks.runs import each_seed, expert_episodes
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.policies.configuration import JointConfig
from robopolicy.policies.joint import JointModel
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from robopolicy.verbs.bench import Benchmark, Table
from sims.registry import make_world

TASK = "reach_planar"


@dataclass(frozen=True)
class Scale:
    """Sizes. episodes: recorded at each noise level; fit: training steps; candidates: of planning; judged: evaluation
    episodes.
    """

    episodes: int = 100
    noise: tuple[float, ...] = (0.5, 2.0, 4.0)
    fit: int = 2500
    candidates: int = 8
    judged: int = 200
    model: JointConfig = field(default_factory=JointConfig)


def measure(seed: int, scale: Scale) -> dict[str, Any]:
    """Return the success of acting and of planning, by training data."""
    all_episodes = expert_episodes(make_world(TASK, 64, seed=seed), scale.noise, scale.episodes, seed)
    world = make_world(TASK, scale.judged, seed=seed)
    assert all_episodes.success is not None
    results: dict[str, Any] = {"data_success": float(all_episodes.success.float().mean())}
    for name, episodes in (
        ("all episodes", all_episodes),
        ("successes only", all_episodes.select(all_episodes.success)),
    ):
        model = JointModel.build(scale.model, world.spec, episodes, derive_seed(seed, "joint"))
        fitting = FitConfig(steps=scale.fit, learning_rate=2e-3, checkpoint_every=10**9)
        fit_stages(model, episodes, fitting, Generators(seed))
        for candidates in (1, scale.candidates):
            label = f"{name}, best of {candidates}" if candidates > 1 else f"{name}, no planning"
            seeds, actor = episode_seeds(seed, "judge", scale.judged), model.eval().planning(candidates)
            evaluation = evaluate_policy(world, actor, seeds, label=label)
            low, high = evaluation.interval
            results[label] = {"success": evaluation.success_rate, "low": low, "high": high}
    world.close()
    return results


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the success of acting and of planning."""
    runs, lines = list(figures["seeds"].values()), []
    for name in runs[0]:
        if isinstance(runs[0][name], Mapping):
            rates = [run[name] | {"success_rate": run[name]["success"]} for run in runs]
            each = ", ".join(map(rate_text, rates))
            lines.append([name, spread_text(rate["success_rate"] for rate in rates), each])
    header = ["learned from, and decides by", "mean over seeds (range)", "each seed (Wilson 95 %)"]
    return [Table(f"Success on {TASK}", header, lines)]


BENCHMARK = Benchmark(
    "Does planning with a model of actions, futures and values increase success, and does it need failures in "
    "its data?",
    ("seeds",),
    each_seed(lambda seed, folder: measure(seed, Scale())),
    tables,
)
