"""Measurements of papers whose claim is not the outcome of one fine-tuning run: `measured_by` in papers.yaml.

Each is a function (configuration, folder of the benchmark, seed) -> {"baseline": value, "method": value}, numbers or
success rates with their episodes; both differ in what the paper claims alone.
"""

from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.benchmarks.rates import short
from robopolicy.benchmarks.runs import logged, pretrained, settings_of
from robopolicy.benchmarks.table_learning import covering_length, effective_horizon, random_table, steps_to_learn
from robopolicy.configuration import Config, compose
from robopolicy.core.arrays import Array
from robopolicy.core.randomness import derive_seed, numpy_generator
from robopolicy.core.storage import read_json
from robopolicy.evaluation.ranking import spearman
from robopolicy.rl.experimental.seen_starts import kernel_rates
from robopolicy.rl.in_context_value import brier_score, train_value_model
from robopolicy.runs import is_complete
from robopolicy.verbs import offline

Values = dict[str, Any]
"""{"baseline": value, "method": value}."""

PLAYED = 64
"""Initial states from which V0's policies have played."""
TABLES = 300
"""Random tables whose learning is predicted."""


def predicted_success(config: Config, root: Path, seed: int) -> Values:
    """V0: Brier scores on 100 unseen policies, of a kernel over their own results and of the value model.

    Of 300 initial states in a cube each policy has played `PLAYED` once; it reaches what lies around its own place, a
    shape that the value model's synthetic policies do not have. The kernel's width is the best of four on seed 10.
    """
    draws = numpy_generator(seed, "papers/V0")
    starts = draws.uniform(-1, 1, (300, 3))
    model = train_value_model(starts, seed=seed)
    standard = starts / (0.7 * starts.std(0))
    episodes = np.ones(PLAYED)
    scores: dict[str, list[float]] = {"baseline": [], "method": []}
    for _ in range(100):
        successes = outcomes(starts, draws)
        results = successes[:PLAYED].astype(float)
        targets = successes[PLAYED:]
        kernel = kernel_rates(standard[:PLAYED], results, episodes, standard[PLAYED:], 1.0)
        scores["baseline"].append(brier_score(kernel, targets))
        predictions = model.predict(starts[:PLAYED], results, episodes, starts[PLAYED:])
        scores["method"].append(brier_score(predictions, targets))
    return {part: float(np.mean(each)) for part, each in scores.items()}


def outcomes(starts: Array, draws: np.random.Generator) -> Array:
    """Return whether a policy succeeds from initial states [N, 3], bool [N]: its rate is sigmoid(6 (reach - distance))
    of the distance to its own place in the first two elements.
    """
    distance = np.linalg.norm(starts[:, :2] - draws.uniform(-1, 1, 2), axis=1)
    reach = draws.uniform(0.4, 1.4)
    return draws.random(len(starts)) < 1 / (1 + np.exp(6 * (distance - reach)))


def sought_noise(config: Config, root: Path, seed: int) -> Values:
    """LatentSeek: success of 400 episodes of a policy, and of the same weights from noise that a critic prefers.

    The critic (IQL) is fitted to 512 episodes of the policy itself.
    """
    task = "push_cube"
    folder = root / task / "offline" / "latent_seek" / str(seed)
    if not is_complete(folder):
        dataset = logged(config, root, task, "diffusion", seed)
        policy = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
        paths = f"offline.dataset={dataset}", f"offline.policy={policy}", "run.name=latent_seek"
        method = "offline.improve=latent_seek", "offline.rounds=1", "offline.gated=false"
        shared = settings_of(config, root, task, seed)
        offline.run(compose([*shared, *paths, *method, "offline.evaluate_episodes=400"]))
    result = read_json(folder / "result.json")
    return {part: short(result[name]["deterministic"]) for part, name in (("baseline", "base"), ("method", "tuned"))}


def predicted_effort(config: Config, root: Path, seed: int) -> Values:
    """Effective horizon: rank correlation over `TABLES` random tables of a bound with the decisions that PPO needs to
    learn them; baseline: the covering length, in our tables the best of the older bounds on seed 10.
    """
    draws = numpy_generator(seed, "papers/effective horizon")
    tables = [random_table(draws) for _ in range(TABLES)]
    # What is not learned in time needs more than all others.
    effort = [
        min(steps_to_learn(table, derive_seed(seed, f"table {number}")), 1e9) for number, table in enumerate(tables)
    ]
    bounds = {"baseline": covering_length, "method": effective_horizon}
    predictions = {part: np.array([bound(table) for table in tables]) for part, bound in bounds.items()}
    return {part: float(spearman(prediction, np.array(effort))) for part, prediction in predictions.items()}
