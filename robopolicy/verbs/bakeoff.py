"""Compares the off-policy evaluators of the gate on your data: each scores policies whose true performance is measured
in the world.

For each evaluator in gate.evaluators it reports the rank correlation with the true performance, the regret of its top
choice, and the error if units agree. It also reports the gate's decision on every pair of policies: the rate of
accepting one that is no better (false accepts) and of rejecting one that is better (false rejects).
gate.evaluators=[model,fqe,critic] compares these three. importance needs logged denoising chains and refuses policies
for which the effective sample size is too small. world.success=CLASSIFIER gate.evaluators=[world] examines a success
classifier: the evaluator is refused if the classifier accepts more failed episodes than it claims. workers.count=N
plays the episodes in N processes, with equal results.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from robopolicy.building.evaluators import (
    Elsewhere,
    WorldForPolicy,
    build_evaluators,
    clipped_fraction,
    gate_episodes,
    warn_of_divergence,
)
from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.workers import Built, Workers, open_workers
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Policy
from robopolicy.core.world import World
from robopolicy.evaluation.bakeoff import EvaluatorScore, best_evaluator, score_evaluator
from robopolicy.evaluation.classified import reason_to_refuse
from robopolicy.evaluation.evaluators import ModelEvaluator
from robopolicy.evaluation.gate import Evaluator, ceiling_of
from robopolicy.evaluation.importance import ImportanceEvaluator
from robopolicy.evaluation.intervals import plus_minus
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import evaluate_policy, require_success
from robopolicy.runs import finish, open_fresh_run, output, print_table, runs_of
from robopolicy.verbs.job import evaluation_seeds
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Compare off-policy evaluators on policies of known performance",
    sections=("run", "world", "workers", "gate", "bakeoff"),
    example="robopolicy bakeoff recipe=push_t bakeoff.policies=[A,B,C] gate.models=[MODEL] gate.evaluators=[model,fqe]",
    world_from={"bakeoff.policies": ""},
)
HEADER = ("evaluator", "Spearman [95 %]", "regret@1", "error", "false accepts", "false rejects", "accepted")


def run(config: Config) -> int:
    """Measure the true performance, run the evaluators, and score them."""
    with open_workers(config) as workers:
        return compared(config, workers)


def compared(config: Config, workers: Workers) -> int:
    """Compare the evaluators, playing episodes on these workers."""
    section, device = config.bakeoff, choose_device(config.run)
    if len(section.policies) < 3:
        raise ConfigError("Comparing evaluators needs at least three policies, better ten: bakeoff.policies=[A,B,C].")
    names = runs_of(section.policies)
    folder = open_fresh_run(config, "bakeoff", VERB.sections)
    policies = [load_policy(path, device) for path in section.policies]
    elsewhere = Elsewhere(workers, list(zip(policies, section.policies, strict=True)))
    recorded = gate_episodes(config, policies[0], device)
    judges = build_evaluators(config, policies[0], recorded, device, elsewhere=elsewhere)
    truth = true_performance(config, policies, judges, workers, device)
    scores: dict[str, EvaluatorScore] = {}
    values: dict[str, list[float]] = {}
    refusals: dict[str, str] = {}
    for judge in judges:
        name = judge.name if judge.name not in scores else f"{judge.name} ({len(scores) + 1})"
        try:
            judge_values = np.stack([judge.values(policy) for policy in policies])
        except DataError as error:
            if not isinstance(judge, ImportanceEvaluator):
                raise
            refusals[name] = str(error)
            output.print(f"{name} is not applicable: {error}", markup=False, soft_wrap=True)
            continue
        values[name] = judge_values.mean(1).tolist()
        if text := reason_to_refuse(getattr(judge, "classified", ())):
            refusals[name] = text
            output.print(f"{name} is refused: {text}.", markup=False, soft_wrap=True)
        scores[name] = score_evaluator(
            name,
            np.array(truth),
            judge_values,
            threshold=section.threshold,
            margin=config.gate.margin,
            relative=config.gate.relative_margin,
            confidence=config.gate.confidence,
            comparable=isinstance(judge, ModelEvaluator),
            ceiling=ceiling_of(judge),
        )
    warn_of_divergence(judges)
    metric = config.gate.metric
    table = [[name, f"{value:.3f}", *(f"{values[judge][place]:.3f}" for judge in values)] for place, (name, value) in
             enumerate(zip(names, truth, strict=True))]  # fmt: skip
    print_table("Policies", ("policy", f"true {metric}", *values), table)
    print_table(f"Evaluators, on {len(policies)} policies", HEADER, [_row(score) for score in scores.values()])
    best = best_evaluator({name: score for name, score in scores.items() if name not in refusals})
    output.print(f"Recommended: {best}." if best else _why_none(scores.values()), soft_wrap=True)
    result: dict[str, Any] = {
        "policies": dict(zip(names, truth, strict=True)),
        "judges": {name: score.to_json() | {"values": values[name]} for name, score in scores.items()},
        "best": best,
        "refused": refusals,
        **clipped_fraction(judges),
    }
    finish(config, folder, _without_nan(result))
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def true_performance(
    config: Config, policies: Sequence[Policy], judges: Sequence[Evaluator], workers: Workers, device: torch.device
) -> list[float]:
    """Return the measured success or return of every policy; raises, before any episode is played, when one does not
    fit its world or that of an evaluator, as `build_world` does.
    """
    section, by_success = config.bakeoff, config.gate.metric == "success"
    true_world = WorldForPolicy(lambda policy: world_for(config, policy, device))
    for policy in policies:
        for world_of in (true_world, *(judge.world_of for judge in judges if isinstance(judge, ModelEvaluator))):
            world_of(policy)
    print_reference(config)
    if by_success:
        require_success(true_world(policies[0]), "compare returns with gate.metric=return")
    seeds, truth = evaluation_seeds(config, section.episodes), list[float]()
    for name, path, policy in zip(runs_of(section.policies), section.policies, policies, strict=True):
        players = workers.players("robopolicy.verbs.bakeoff:in_worker", path=str(path))
        world, label = true_world(policy), f"ground truth: {name}"
        seen = adapt_policy_to_world(world, policy)
        true_result = evaluate_policy(world, seen, seeds, device=device, label=label, players=players)
        truth.append(float((true_result.success if by_success else true_result.returns).mean()))
    true_world.close()
    return truth


def world_for(config: Config, policy: Policy, device: torch.device) -> World:
    """Build the world of the true episodes of `policy`, with its own success."""
    return build_world(config.world.with_own_success, policy, episodes=config.bakeoff.episodes, device=device)


def print_reference(config: Config) -> None:
    """Print the reference of a success classifier, and the setting that includes it."""
    if config.world.success is None:
        return
    text = "True performance is the simulator's own success"
    if "world" in config.gate.evaluators:
        text += f"; trials (the evaluator world) count the success of the classifier {config.world.success}."
    else:
        text += ". To examine the classifier, add trials with its success: gate.evaluators=[world]."
    output.print(text, markup=False, soft_wrap=True)


def in_worker(config: Config, path: str) -> Built:
    """Build in a worker the policy at `path`, and its world."""
    policy = load_policy(path, device := choose_device(config.run))
    world = world_for(config, policy, device)
    return world, adapt_policy_to_world(world, policy), device


def _why_none(scores: Iterable[EvaluatorScore]) -> str:
    """Return why no evaluator is recommended."""
    if any(score.accepted for score in scores):
        return "No evaluator has at most 5 % false accepts: increase gate.margin."
    return (
        "No evaluator accepts any of these pairs, so they cannot be compared: use policies that differ more, more "
        "initial states (gate.num_states), or a smaller gate.margin."
    )


def _row(score: EvaluatorScore) -> list[str]:
    return [
        score.judge,
        f"{plus_minus(score.spearman, '.2f')} [{plus_minus(score.spearman_low, '.2f')}, "
        f"{plus_minus(score.spearman_high, '.2f')}]",
        plus_minus(score.regret, ".2f"),
        "n/a (other units)" if math.isnan(score.error) else f"{score.error:.3f}",
        plus_minus(score.false_accepts, ".0%"),
        "n/a (no better policy)" if math.isnan(score.false_rejects) else f"{score.false_rejects:.0%}",
        f"{score.accepted} of {score.pairs}",
    ]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
