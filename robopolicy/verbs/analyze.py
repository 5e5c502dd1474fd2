"""Tells before training whether online RL is likely to learn a task, and from where it should start.

Measures the effective horizon: values of random play are learned from rollouts, greedy play looks k decisions ahead on
them (shallow Q-iteration, SQIRL), and the first k and number of rollouts m per decision that solve the task give the
horizon k + log_A(m), for A candidate actions. Settings are tried from the shortest horizon on. Where greedy play on
values of random play does well, so does PPO; where random play never succeeds and nothing is found, start from
demonstrations or reward progress. With a policy its samples take the place of random actions.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.tools import AnalyzeSection
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators
from robopolicy.core.world import World
from robopolicy.evaluation.intervals import percent
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import counted_rate, require_success
from robopolicy.evaluation.tables import horizon_rows
from robopolicy.rl.effective_horizon import (
    Found,
    Propose,
    fixed,
    measured_horizon,
    network_regression,
    primitives,
    sampled,
    sqirl,
)
from robopolicy.runs import finish, open_fresh_run, output, print_table
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Tell before training whether online RL will learn a task (effective horizon)",
    sections=("run", "world", "analyze"),
    example="robopolicy analyze world=reach_planar",
    targets=("analyze.policy",),
    world_from={"analyze.policy": ""},
)


def run(config: Config) -> int:
    """Try depths and numbers of rollouts from the shortest horizon on, until one solves the task."""
    section, seed = config.analyze, config.run.seed
    device = choose_device(config.run)
    folder = open_fresh_run(config, "analyze", VERB.sections)
    clock = folder.clock()
    policy = None if section.policy is None else load_policy(section.policy, device)
    world = build_world(config.world, policy, seed=seed, device=device)
    require_success(world)
    propose, candidates, hold = tried(section, world, policy, Generators(seed, device)["analyze"])
    regress = network_regression(world.spec, -(-world.spec.horizon // hold), seed)
    settings = attempts(section, candidates)
    results: list[dict[str, Any]] = []
    solved = None
    for k, rollouts in settings:
        attempt = sqirl(world, propose, regress, k=k, rollouts=rollouts, episodes=section.episodes, seed=seed)
        results.append(figures(attempt))
        output.print(f"k={k}, {rollouts} rollouts per decision: success {percent(results[-1]['success'])}")
        if results[-1]["success"]["rate"] >= section.target:
            solved = results[-1]["horizon"]
            break
    world.close()
    print_table("Greedy play on values of random play", *horizon_rows(results))
    largest = max(measured_horizon(k, rollouts, candidates) for k, rollouts in settings)
    verdict = judged(results, solved, largest, section.target)
    output.print(verdict, markup=False, soft_wrap=True)
    result = {"horizons": results, "effective_horizon": solved, "verdict": verdict, "candidates": candidates}
    finish(config, folder, {**result, "seconds": clock.seconds})
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def tried(
    section: AnalyzeSection, world: World, policy: Policy | None, generator: torch.Generator
) -> tuple[Propose, int, int]:
    """Return the function that proposes candidates of a decision, their number, and their control steps."""
    if policy is not None:
        acting = adapt_policy_to_world(world, policy)
        return sampled(acting, section.candidates, generator), section.candidates, acting.spec.chunk
    chunks = primitives(world.spec.action, section.hold)
    return fixed(chunks), len(chunks), section.hold


def attempts(section: AnalyzeSection, candidates: int) -> list[tuple[int, int]]:
    """Return (k, rollouts per decision) by their horizon, shortest first."""
    counts = sorted({max(section.rollouts // part, 1) for part in (16, 4, 1)})
    pairs = itertools.product(range(1, section.depth + 1), counts)
    return sorted(pairs, key=lambda pair: (measured_horizon(*pair, candidates), pair))


def figures(found: Found) -> dict[str, Any]:
    """Return JSON-ready results of one attempt."""
    return {
        "k": found.k,
        "rollouts": found.rollouts,
        "horizon": found.horizon,
        "steps": found.steps,
        "success": counted_rate(int(found.success.sum()), len(found.success)),
        "return": float(found.returns.mean()),
        "random_success": counted_rate(int(found.random_success.sum()), len(found.random_success)),
        "random_return": float(found.random_returns.mean()),
    }


def judged(results: Sequence[dict[str, Any]], solved: float | None, largest: float, target: float) -> str:
    """Return the verdict in words."""
    last = results[-1]
    best = max(results, key=lambda each: each["success"]["rate"])
    lucky = sum(each["random_success"]["count"] for each in results)
    if solved is not None:
        return (
            f"Effective horizon: {solved:.1f} (k={last['k']}, {last['rollouts']} rollouts per decision reach "
            f"{last['success']['rate']:.0%}). Online RL is likely to learn this task from these actions: here "
            f"{last['steps']} control steps sufficed."
        )
    if lucky == 0 and best["success"]["count"] == 0:
        return (
            "Random play never succeeded, and neither did greedy play on its values: online RL is unlikely to learn "
            "this task from these actions. Start from demonstrations (robopolicy train, then analyze CHECKPOINT), or "
            "reward progress."
        )
    return (
        f"Effective horizon: above {largest:.1f}. Greedy play reached {best['success']['rate']:.0%} at most, short of "
        f"analyze.target={target}: online RL from these actions will be slow. Start from demonstrations, or allow "
        "more: analyze.rollouts, analyze.depth, or a shorter analyze.hold."
    )
