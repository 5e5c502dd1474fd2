"""Measurements of papers whose claim is not the outcome of one fine-tuning run: `measured_by` in papers.yaml.

Each is a function (configuration, folder of the benchmark, seed) -> {"baseline": value, "method": value}, numbers or
success rates with their episodes; both differ in what the paper claims alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks.papers import EPISODES, arm_in, composed, tuned
from robopolicy.benchmarks.rates import rate_of, short
from robopolicy.benchmarks.runs import logged, modelled, pretrained, settings_of
from robopolicy.benchmarks.small_worlds import DOORS, TRIES, DoorsWorld, LineWorld
from robopolicy.benchmarks.table_learning import covering_length, effective_horizon, random_table, steps_to_learn
from robopolicy.configuration import Config, compose
from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.core.policy import Decision, Policy, Trainable
from robopolicy.core.randomness import derive_seed, episode_seeds, numpy_generator
from robopolicy.core.run import RunFolder
from robopolicy.core.scheduled import ScheduledWorld
from robopolicy.core.spec import WorldSpec
from robopolicy.core.storage import read_json
from robopolicy.core.trials import EPISODES_OPTION, with_trials_of
from robopolicy.core.world import World
from robopolicy.evaluation.ranking import spearman
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.precision import training_precision
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.memory import MemoryPolicy
from robopolicy.rl.critic import Critic, state_critic
from robopolicy.rl.experimental.seen_starts import kernel_rates
from robopolicy.rl.in_context_value import brier_score, train_value_model
from robopolicy.runs import is_complete, run_path
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune as learn
from robopolicy.training.schedules import schedule_by
from robopolicy.verbs import finetune, imagine, offline

Values = dict[str, Any]
"""{"baseline": value, "method": value}."""

PLAYED = 64
"""Initial states from which V0's policies have played."""
TABLES = 300
"""Random tables whose learning is predicted."""
DOORS_HISTORY = 8
"""Frames of memory of ReLIC's policy, which are the six tries of two episodes and what began them."""
LINE_STEPS = 26
FORMULA = "F[1,26](x > 5) & F[1,26](x < -5) & F[1,26](x > 9)"
"""TGPO's: three places on a line; 458 of the 26^3 schedules, 2.6 %, can be met."""
SMALL_PPO: dict[str, Any] = {
    "algorithm": "ppo",
    "epochs": 4,
    "minibatch": 512,
    "learning_rate": 2e-3,
    "critic_learning_rate": 3e-3,
    "critic_warmup": 1,
    "actor_warmup": 1,
    "discount": 0.99,
    "target_kl": None,
    "evaluate_every": 0,
    "auxiliaries": ("entropy",),
}
"""Settings of policies that learn from nothing in a world of a few lines."""
WORKERS = (
    "workers.count=2",
    "finetune.algorithm=grpo",
    "finetune.shards=8",
    "finetune.groups=32",
    "finetune.group_size=8",
    "finetune.iterations=5",
    "finetune.epochs=1",
    "finetune.minibatch=100000",
    "finetune.target_success=null",
    "finetune.target_kl=null",
    "finetune.evaluate_every=0",
    "finetune.evaluate_episodes=1",
    "finetune.videos=0",
    "finetune.world_options.substeps=5",
)
"""Settings of Periodic-Async's runs."""
IMITATION = (
    "imagine.method=sft",
    "imagine.real_eval_episodes=0",
    "finetune.target_success=null",
    "finetune.evaluate_episodes=400",
    "finetune.videos=0",
)
"""Settings of Ctrl-World's run."""


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


def remembered_doors(config: Config, root: Path, seed: int) -> Values:
    """ReLIC: success of 400 second episodes of a scene, without and with memory of the first, after equal PPO."""
    return {part: doors_success(history, seed) for part, history in (("baseline", 1), ("method", DOORS_HISTORY))}


def doors_success(history: int, seed: int) -> dict[str, float]:
    """Return the success of the second episode of trials, of a policy that learned with a window of `history` frames.

    With one frame, which has the last action, it is 75 % at most: three of the four doors may be tried in each episode.
    """

    def trials(rows: int) -> World:
        return with_trials_of({EPISODES_OPTION: 2}, DoorsWorld(rows, history))

    world = trials(128)
    policy, critic = learners(world.spec, DOORS, seed)
    settings = {
        **SMALL_PPO,
        "iterations": 60,
        "rollout_length": 2 * (TRIES + 4),
        "options": {"entropy": {"weight": 0.02}},
    }
    learn(policy, critic, world, FinetuneConfig(**settings), seed=seed)
    return judged(trials(200), policy, seed, deterministic=False)


def learners(spec: WorldSpec, bins: int, seed: int) -> tuple[MemoryPolicy, Critic]:
    """Return an untrained policy of one action in `bins` with the world's history as its memory, and a critic."""
    raw = NormalizationMode.IDENTITY
    network = MemoryPolicyConfig(
        history=spec.history, bins=bins, width=32, state_normalization=raw, action_normalization=raw
    )
    policy = MemoryPolicy(network, spec.observation, spec.action, fps=spec.fps, seed=seed)
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        critic = state_critic(spec.observation, spec.history, width=64)
    return policy, critic


def judged(world: World, policy: Policy, seed: int, *, deterministic: bool) -> dict[str, float]:
    """Return the success rate of `EPISODES` episodes."""
    result = evaluate_policy(world, policy, episode_seeds(seed, "judged", EPISODES), deterministic=deterministic)
    return rate_of(int(result.success.sum()), EPISODES)


def scheduled_line(config: Config, root: Path, seed: int) -> Values:
    """TGPO: success of 400 episodes after learning on uniform schedules, and on those that the critic samples.

    Both are judged on the best of 64 schedules by their own critic; 81 % of such draws contain one that can be met.
    """
    return {part: line_success(by_value, seed) for part, by_value in (("baseline", False), ("method", True))}


def line_success(by_value: bool, seed: int) -> dict[str, float]:
    """Return the success of `FORMULA` after PPO; by_value: whether the critic samples the schedules of learning."""
    world = ScheduledWorld(LineWorld(64, LINE_STEPS), FORMULA, by_value=by_value, seed=seed)
    policy, critic = learners(world.spec, 5, seed)
    settings = {**SMALL_PPO, "iterations": 60, "rollout_length": LINE_STEPS, "options": {"entropy": {"weight": 0.01}}}
    learn(policy, critic, world, FinetuneConfig(**settings), seed=seed)
    judging = ScheduledWorld(LineWorld(200, LINE_STEPS), FORMULA, seed=seed)
    schedule_by(judging, critic, best=True)
    return judged(judging, policy, seed, deterministic=True)


def eight_bits(config: Config, root: Path, seed: int) -> Values:
    """Jet-RL: success of 400 episodes of tokens after GRPO whose episodes are played in 8 bits, learned from in 32 bits
    and in the same 8 bits; both are judged in 8 bits.

    Ratios are to the probabilities in 8 bits, so that in 32 bits they start away from 1, which is tolerated here.
    """
    values: Values = {}
    for part, precision in (("baseline", "fp32"), ("method", "fp8")):
        arm = arm_in("tokens", f"finetune.precision={precision}", "finetune.ratio_tolerance=10")
        values[part] = tuned(composed(config, root, arm, seed), arm.task, in_eight_bits)["success"]
    return values


def in_eight_bits(policy: Trainable) -> None:
    """Let the policy act in 8 bits, whatever it is scored in."""
    act = policy.act

    def acting(*inputs: Any, **options: Any) -> Decision:
        with training_precision("fp8"):
            return act(*inputs, **options)

    policy.act = acting


def overlapping(config: Config, root: Path, seed: int) -> Values:
    """Periodic-Async: seconds of an iteration of GRPO with two workers that play, median of 12 in three runs of each
    kind by turns; without and with learning from groups while others are played. The first of a run is left out.

    Raises DataError if the gradients of the first iteration differ.
    """
    seconds: dict[str, list[float]] = {"baseline": [], "method": []}
    norms: list[float] = []
    shared = settings_of(config, root, "push_cube", seed)
    policy = pretrained(config, root, "push_cube", "diffusion", seed) / "checkpoint"
    for turn in range(3):
        for part, overlap in (("baseline", "false"), ("method", "true")):
            name = f"run.name=overlap_{overlap}_{turn}"
            run = compose([*shared, *WORKERS, f"finetune.policy={policy}", f"finetune.overlap_update={overlap}", name])
            finetune.run(run)
            records = [row for row in RunFolder(run_path(run, "finetune")).metrics() if row["iteration"]]
            norms.append(records[0]["gradient_norm"])
            seconds[part] += [row["seconds_collect"] + row["seconds_update"] for row in records[1:]]
    if max(norms) > min(norms) * (1 + 1e-3):
        raise DataError(f"Overlapping changes the gradient: norms {norms}.")
    return {part: float(np.median(each)) for part, each in seconds.items()}


def imagined_successes(config: Config, root: Path, seed: int) -> Values:
    """Ctrl-World: success of 400 episodes of a policy, and after it has imitated the successes that it had in a world
    model, without a real episode of its own.

    The world model is an ensemble of states, not one of pictures, and its own head says what succeeded.
    """
    task = "push_cube"
    folder = root / task / "imagine" / "imagined_successes" / str(seed)
    if not is_complete(folder):
        policy = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
        model = modelled(config, root, task, "ensemble", seed, ("worldmodel.kind=ensemble",)) / "checkpoint"
        paths = f"finetune.policy={policy}", f"imagine.model={model}", "run.name=imagined_successes"
        imagine.run(compose([*settings_of(config, root, task, seed), *paths, *IMITATION]))
    result = read_json(folder / "result.json")
    return {part: short(result[name]["deterministic"]) for part, name in (("baseline", "base"), ("method", "tuned"))}
