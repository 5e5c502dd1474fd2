"""Finds the fastest inference engine for a checkpoint, and stores the choice next to the checkpoint (inference.json).

Engines, samplers with fewer steps, block caches and bf16 are timed in turns on the same observations and compared with
the policy as trained. Only exact engines are candidates, unless optimize.max_action_error sets an allowed action error;
the table then also shows the error of the cheaper methods. evaluate, serve and collect then use the stored choice
(inference.engine=reference ignores it). It becomes invalid when the weights change. Methods are compared by their
minimum time, which is least affected by other load. For a world model with many denoising steps
(worldmodel.kind=video), block caches are tested in the same way.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.act import OptimizeSection
from robopolicy.core.candidates import rows_of_observation
from robopolicy.core.delayed import episodes_for_policy
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import renaming_of
from robopolicy.core.policy import Policy, TensorObservation, innermost
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.data.record import record
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import compare
from robopolicy.evaluation.tables import way_rows, ways_header
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.calibration import Calibration, calibrate
from robopolicy.inference.comparison import EXACT, Timing, action_error, noise_free_actions, time_decisions
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import ENGINES, with_engine
from robopolicy.inference.plan import InferencePlan, device_name, save_plan, weights_hash
from robopolicy.inference.schedules import plans_to_try
from robopolicy.nn.schedules import FlowSchedule
from robopolicy.policies.abilities import Denoises
from robopolicy.policies.loading import checkpoint_in
from robopolicy.rl.offline.decisions import observations_at
from robopolicy.runs import default_path, finish, open_fresh_run, output, print_table
from robopolicy.verbs.job import evaluate_in_own_world
from robopolicy.verbs.optimize_model import optimize_model
from robopolicy.verbs.verb import Verb
from worldmodels.checkpoint import holds_world_model

VERB = Verb(
    summary="Find the fastest inference engine for a policy",
    sections=("run", "world", "optimize"),
    example="robopolicy optimize runs/finetune/push_t/0/checkpoint optimize.max_action_error=0.05",
    targets=("optimize.policy",),
    world_from={"optimize.policy": "finetune/checkpoint"},
)

REFERENCE = "reference"


@dataclass(frozen=True)
class InferenceMethod:
    """An inference method: engine settings and an optional block cache."""

    config: InferenceConfig
    cache: CachePlan | None = None

    @property
    def exact(self) -> bool:
        """Whether the method should give the same actions as the reference."""
        return self.config.exact and self.cache is None


def run(config: Config) -> int:
    """Collect observations, time and compare the methods, choose one, evaluate it and store it."""
    section, device = config.optimize, choose_device(config.run)
    path = default_path(config, "finetune", "checkpoint", section.policy, "optimize.policy")
    if holds_world_model(path):
        return optimize_model(config, path, device)
    path = checkpoint_in(path)
    for name in section.engines:
        ENGINES.path(name)
    policy = load_policy(path, device)
    folder = open_fresh_run(config, "optimize", VERB.sections)
    observation = observations(config, policy, device)
    ways = methods_to_test(section, policy, observation)
    policies, refusals = policies_of(policy, ways)
    errors = errors_of(policies, observation)
    for name, error in list(errors.items()):
        if ways[name].exact and error > EXACT:
            refusals[name] = f"its action error is {error:.2g} standard deviations, but this engine should be exact"
            del policies[name], errors[name]
    times = time_decisions(policies, first_rows(observation, section.batch_size), section.rounds)
    candidates = [name for name in policies if errors[name] <= max(section.max_action_error, EXACT)]
    fastest = min(candidates, key=lambda name: times[name].least)
    rows = {name: row(ways[name], errors[name], times[name], times[REFERENCE]) for name in policies}
    print_table("Policy call", ways_header(), way_rows(rows, fastest))
    for name, reason in refusals.items():
        output.print(f"{name}: excluded, {reason}", markup=False, soft_wrap=True)
    plan = InferencePlan(
        ways[fastest].config,
        weights_hash(path),
        ways[fastest].cache,
        device=device_name(device),
        batch=section.batch_size,
        measured=rows[fastest],
    )
    save_plan(path, plan)
    result: dict[str, Any] = {"checkpoint": str(path), "chosen": fastest, "ways": rows, "left_out": refusals}
    finish(config, folder, result | evaluated(config, {REFERENCE: policy, fastest: policies[fastest]}, device))
    faster = times[REFERENCE].least / times[fastest].least
    output.print(f"Chosen: {fastest}, {faster:.1f}x faster than the reference; saved in {path / 'inference.json'}.")
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def observations(config: Config, policy: Policy, device: torch.device) -> TensorObservation:
    """Return observations [N, H, ...] from recorded episodes, or from episodes that the policy plays in its world."""
    section, spec = config.optimize, policy.spec
    if section.data:
        parts = [
            episodes_for_policy(policy, read_dataset(path, cameras=spec.cameras, rename=renaming_of(policy)))
            for path in section.data
        ]
        episodes = Episodes.concatenate(parts)
        require_recorded("the recorded data", episodes, spec.observation, spec.action)
    else:
        world = build_world(config.world, policy, episodes=section.episodes, device=device)
        seeds = episode_seeds(config.run.seed, "optimize", section.episodes)
        episodes = record(world, policy, seeds, generator=Generators(config.run.seed, device)["optimize/play"])
        world.close()
    draws = torch.Generator().manual_seed(derive_seed(config.run.seed, "optimize"))
    steps = torch.randperm(episodes.step_count, generator=draws)[: section.observations]
    frames = (steps + episodes.episode_of_step[steps]).to(device)
    return observations_at(episodes.to(device), frames, spec.history, list(spec.observation))


def first_rows(seen: TensorObservation, count: int) -> TensorObservation:
    """Return `count` observations [count, H, ...], repeating them when there are fewer."""
    rows = next(len(value) for value in seen.values())
    return rows_of_observation(seen, [place % rows for place in range(count)])


def methods_to_test(section: OptimizeSection, policy: Policy, seen: TensorObservation) -> dict[str, InferenceMethod]:
    """Return the inference methods to test, by name: exact engines, and cheaper methods if the section allows an error.

    Cheaper methods use the first engine that is not the reference. For a policy that wraps another policy, they apply
    to the wrapped one.
    """
    ways = {
        REFERENCE: InferenceMethod(InferenceConfig()),
        **{name: InferenceMethod(InferenceConfig(name)) for name in section.engines},
    }
    deciding = innermost(policy)
    if not section.max_action_error:
        return ways
    if not isinstance(deciding, Denoises):
        output.print(
            "Only exact engines: fewer steps, block caches and bf16 apply to diffusion and flow policies, and this "
            f"is a {type(deciding).__name__}.",
            markup=False,
            soft_wrap=True,
        )
        return ways
    cheaper = [name for name in section.engines if name != REFERENCE]
    if not cheaper:
        output.print("Only the reference engine: bf16, fewer steps and block caches need the engine lean.")
        return ways
    engine = InferenceConfig(cheaper[0])
    caches = cached_methods(section, policy, seen, engine)
    schedule = deciding.own_schedule
    if schedule is None:
        return ways | caches
    total = schedule.steps
    ways["bf16"] = InferenceMethod(replace(engine, precision="bf16"))
    # With fewer steps than these the second of each pair is the first.
    samplers = {"euler": 1, "heun": 3} if isinstance(schedule, FlowSchedule) else {"ddim": 1, "dpm++": 2}
    for sampler, least_steps in samplers.items():
        for steps in section.steps:
            if least_steps <= steps < total:
                ways[f"{sampler} {steps}"] = InferenceMethod(replace(engine, sampler=sampler, steps=steps))
    return ways | caches


def cached_methods(
    section: OptimizeSection, policy: Policy, seen: TensorObservation, engine: InferenceConfig
) -> dict[str, InferenceMethod]:
    """Return the block caches to test, calibrated on the observations.

    Returns none for a network without known blocks, and for a policy that wraps another policy.
    """
    if not isinstance(policy, Denoises):
        if section.schedulers:
            output.print(
                f"No block caches: {type(policy).__name__} wraps another policy. Optimize that policy instead."
            )
        return {}
    schedule = policy.own_schedule
    step_limit = sys.maxsize if schedule is None else schedule.steps  # of another library's chain: once calibrated
    budgets = [budget for budget in section.budgets if 2 < budget < step_limit]
    if not budgets or not section.schedulers:
        return {}
    try:
        calibration: Calibration = calibrate(policy, seen, torch.Generator(policy.device).manual_seed(0))
    except ConfigError as error:
        output.print(f"No block caches: {error}", markup=False, soft_wrap=True)
        return {}
    budgets = [budget for budget in budgets if budget < calibration.steps]
    plans = plans_to_try(calibration, section.schedulers, budgets, section.orders)
    return {name: InferenceMethod(engine, plan) for name, plan in plans.items()}


def policies_of(policy: Policy, ways: Mapping[str, InferenceMethod]) -> tuple[dict[str, Policy], dict[str, str]]:
    """Return the policy with each inference method, and the reasons why some methods are not supported."""
    policies, refusals = dict[str, Policy](), dict[str, str]()
    for name, way in ways.items():
        try:
            policies[name] = with_engine(policy, way.config, way.cache)
        except ConfigError as error:
            refusals[name] = str(error)
    return policies, refusals


def errors_of(policies: Mapping[str, Policy], seen: TensorObservation) -> dict[str, float]:
    """Return the error of each method's actions at observations [N, H, ...] relative to the reference's; see
    `action_error`.
    """
    actions: dict[str, Tensor] = {}
    with progress("Comparing", len(policies)) as advance:
        for name, policy in policies.items():
            actions[name] = noise_free_actions(policy, seen)
            advance()
    return {name: action_error(each, actions[REFERENCE]) for name, each in actions.items()}


def row(way: InferenceMethod, error: float, time: Timing, reference: Timing) -> dict[str, Any]:
    """Return the results of one method, JSON-serialisable."""
    share = {} if way.cache is None else {"block_share": way.cache.share}
    return {"error": error, **time.to_json(), "times_as_fast": reference.least / time.least, **share}


def evaluated(config: Config, policies: Mapping[str, Policy], device: torch.device) -> dict[str, Any]:
    """Evaluate the reference and the choice; print and return the results. Returns nothing without
    optimize.evaluate_episodes, or if the reference is chosen.
    """
    count = config.optimize.evaluate_episodes
    if not count:
        return {}
    if len(policies) < 2:
        output.print("No evaluation: the reference was chosen, so there is nothing to compare.")
        return {}
    verdicts = evaluate_in_own_world(config, policies, count, device)
    first, second = verdicts.values()
    difference = compare(first.deterministic, second.deterministic)
    return {"verdicts": {name: each.to_json() for name, each in verdicts.items()}, "difference": difference.to_json()}
