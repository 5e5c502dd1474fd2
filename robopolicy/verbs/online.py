"""Trains an agent with critics online in the world, acting by itself or steering a frozen policy.

online.method=dsrl: the agent chooses the noise that a frozen diffusion or flow policy denoises (DSRL).
online.method=edit: the agent edits the action chunks of a frozen policy of any kind, and the best by Q of the policy's
chunks and the edited ones acts (EXPO); needs few environment steps, so use it where a simulator is slow.
online.method=actions: the agent outputs action chunks itself; with online.dataset it first trains on recorded data, and
online.steps=0 stops there. A frozen policy plays the first online.warmup steps. online.offline_ratio=0 then uses online
data only (WSRL: online.agent=cal_ql); online.offline_ratio=0.5 keeps half of every batch recorded (RLPD).
Operators intervene with online.assist.random_rate=0.02 online.assist.operator_steps=8: what they do is learned from as
own data and as demonstrations (HIL-SERL). Base and result are evaluated on the same seeds. If interrupted, run the same
command again: it resumes and gives the same result.
"""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from robopolicy.building.origins import origin_of_section
from robopolicy.building.policies import load_policy
from robopolicy.building.worlds import build_controller, build_world
from robopolicy.configuration import Config
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.finite_values import require_finite_columns
from robopolicy.core.origin import origin_of, remember_origin, renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import WorldSpec
from robopolicy.core.storage import recover_folder
from robopolicy.core.structured import narrowed
from robopolicy.core.transitions import Transitions
from robopolicy.core.world import World
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.evaluation.success import compared
from robopolicy.operators.operated_world import OperatedWorld
from robopolicy.operators.operator import Site, make_operator
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.runs import default_path, input_path, output
from robopolicy.success.relabelling import relabelled_by
from robopolicy.training.configuration import ONLINE_METHODS, OnlineConfig
from robopolicy.training.critics import fit_agent
from robopolicy.training.online import OnlineResult, learn_online
from robopolicy.training.online_methods import InitialState, OnlineMethod, OnlineStart, method_of
from robopolicy.verbs.advice import CEILING
from robopolicy.verbs.job import Job, Saved, print_evaluations, starting_checkpoint
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Online RL with critics: train an agent, steer a frozen policy (DSRL) or edit its actions (EXPO)",
    sections=("run", "world", "workers", "online"),
    example="robopolicy online runs/train/push_cube/0/checkpoint online.method=dsrl",
    targets=("online.policy",),
    world_from={"online.policy": "train/checkpoint", "online.dataset": ""},
    resumes=True,
)


def run(config: Config) -> int:
    """Train on recorded data, then online; evaluate base and result on the same seeds."""
    job = Job.open(config, "online", VERB.sections)
    if job is None:
        return 0
    section = config.online
    folder, device = job.folder, job.device
    path = policy_path(config)
    base_policy = None if path is None else load_policy(path, device)
    world = build_world(config.world, base_policy, batch_size=section.num_envs, device=device)
    if section.assist.wanted:
        world = operated_world(config, world)
    clock = folder.clock()
    beginning = initialise(config, base_policy, world, folder, device)
    policy = beginning.policy
    base = copy.deepcopy(policy) if base_policy is None else load_policy(path or Path(), device)
    remember_origin(policy, origin_of_section(config.world, world) or origin_of(base))
    judging = build_world(config.world, policy, episodes=section.evaluate_episodes, device=device)
    online_result = learn_online(
        policy,
        world,
        beginning.frozen,
        narrowed(OnlineConfig, section),
        recorded=beginning.recorded,
        begins=beginning.begins,
        evaluate=job.evaluator(judging, section.evaluate_episodes),
        seed=config.run.seed,
        run=folder,
    )
    seconds = clock.seconds
    tuned = job.folder.checkpoint
    saved = Saved({"base": path, "tuned": tuned} if path is not None else {"tuned": tuned}, like=tuned)
    verdicts = job.judge(judging, {"base": base, "tuned": policy}, section.evaluate_episodes, saved)
    for each in (world, judging):
        each.close()
    print_evaluations(verdicts)
    print_result(online_result, section.method.kind)
    result: dict[str, Any] = {
        **({"base_checkpoint": None} if path is None else starting_checkpoint(path)),
        "method": section.method.kind,
        "env_steps": online_result.env_steps,
        "updates": online_result.updates,
        "collected_episodes": online_result.episodes,
        "evaluations": list(online_result.evaluations),
        "dip": online_result.dip(steps_per_update(online_result)),
        "seconds": seconds,
    }
    job.finish(compared(verdicts) | result)
    return 0


def operated_world(config: Config, world: World) -> World:
    """Return `world` with the operators of online.assist."""
    assist = config.online.assist
    site = Site(world.spec.action, world.spec.fps, world.batch_size, lambda: build_controller(config.world, world))
    return OperatedWorld(world, make_operator(assist.operator, site, assist.operator_options), assist)


def policy_path(config: Config) -> Path | None:
    """Return the path of the given policy; None for a method that needs none, such as online.method=actions."""
    section = config.online
    default_checkpoint = recover_folder(input_path(config, "train") / "checkpoint")
    needs_policy = ONLINE_METHODS.builds(section.method.kind).needs_policy
    if not needs_policy and section.policy is None and not default_checkpoint.exists():
        return None
    return default_path(config, "train", "checkpoint", section.policy, "online.policy")


def initialise(
    config: Config, given: Policy | None, world: World, folder: RunFolder, device: torch.device
) -> InitialState:
    """Build the learner, or resume an earlier one, and train it on recorded data."""
    section = config.online
    method: OnlineMethod[Any] = ONLINE_METHODS.builds(section.method.kind)(section.method.config)
    generators = Generators(derive_seed(config.run.seed, "online/pretrain"), device)

    def fit(agent: OfflineAgent, data: Transitions) -> None:
        fit_agent(agent, data, section.pretrain_steps, section.batch_size, generators, run=folder, label="agent")

    start = OnlineStart(
        given,
        world.spec,
        section.agent.kind,
        section.agent.config,
        section,
        config.run.seed,
        device,
        lambda: recorded_episodes(config, given, world.spec, device),
        fit,
    )
    if type(given) is method.learns:
        return method.resume(given, start)
    if earlier := method_of(given, ONLINE_METHODS):
        raise ConfigError(
            f"online.policy={section.policy} was trained with online.method={earlier}: pass that setting."
        )
    return method.start(start)


def recorded_episodes(config: Config, given: Policy | None, world: WorldSpec, device: torch.device) -> Episodes | None:
    """Return the recorded episodes, with the success of world.success, None if there are none.

    Raises DataError when values are not finite or do not fit the given policy, SpecError when they lack what the
    classifier reads; warns when their rewards are not those that `world` pays.
    """
    section = config.online
    if section.dataset is None:
        return None
    paths = (default_path(config, "collect", "dataset", section.dataset, "online.dataset"), *section.extra_datasets)
    episodes = Episodes.concatenate([read_dataset(path, rename=renaming_of(given)) for path in paths])
    require_finite_columns(episodes, rewards=True)
    if given is not None:
        require_recorded(section.dataset, episodes, given.spec.observation, given.spec.action)
    episodes = relabelled_by(config.world.success, episodes, config.world.success_reward)
    recorded = tuple(episodes.rewards or ())
    if recorded and set(recorded) != set(world.rewards):
        warnings.warn(
            f"online.dataset has the rewards {', '.join(recorded)}, but '{world.name}' pays "
            f"{', '.join(world.rewards)}, and the agent learns from both alike: record the data with the same "
            "world.options.reward.",
            RobopolicyWarning,
            stacklevel=2,
        )
    return episodes.to(device)


def steps_per_update(found: OnlineResult) -> str:
    """Return the metric that compares evaluations: success, or the return if the world reports no success."""
    by_return = any("deterministic_return" in record for record in found.evaluations)
    return "deterministic_return" if by_return else "deterministic_success"


def print_result(found: OnlineResult, method: str) -> None:
    """Print the learning curve of the online method, and advice if nothing improved."""
    by = steps_per_update(found)
    curve = [(record["updates"], record[by]) for record in found.evaluations]
    if curve:
        text = ", ".join(f"{value:.3g} after {updates}" for updates, value in curve)
        output.print(f"By number of updates: {text}. Largest drop: {found.dip(by):.3g}.")
    if not found.updates and found.env_steps:
        output.print("No updates were made: the warm-up used all steps. Set online.steps above online.warmup.")
    elif len(curve) > 1 and curve[-1][1] <= curve[0][1]:
        output.print(why_no_gain(curve, by == "deterministic_success", method), markup=False, soft_wrap=True)


def why_no_gain(curve: Sequence[tuple[int, float]], success: bool, method: str) -> str:
    """Return why the last of at least two evaluations (updates, value) is no better than the first.

    success: whether the values are success rates; method: online.method.
    """
    first, last = curve[0][1], curve[-1][1]
    best = max(value for _, value in curve)
    if success and best == 0:
        alternative = " or with recorded episodes that succeed (online.dataset=DATASET)" if method == "actions" else ""
        return (
            "No evaluation episode succeeded, so there is almost no learning signal. Start from a policy that "
            f"sometimes succeeds (online.policy=CHECKPOINT){alternative}."
        )
    if success and first >= CEILING:
        return f"Almost no improvement is possible: the agent started at {first:.1%}."
    if best > first:
        return (
            f"The agent reached {best:.3g} during training and dropped to {last:.3g}: a smaller learning rate is "
            "more stable, online.agent.learning_rate=1e-4."
        )
    return (
        f"After {curve[-1][0]} updates the agent is at {last:.3g}, starting from {first:.3g}: train for more steps "
        "(online.steps)."
    )
