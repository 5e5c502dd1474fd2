"""Scores policies in a world model and in the simulator on the same seeds, and says how well one predicts the other.

Prints Pearson, Spearman, Kendall, MMRV, error and bias with bootstrap intervals, and draws the scatter plot. Give
checkpoints of independently trained policies, rank.policies=[A,B,...]; the scripted expert at graded noise is ranked
beside them unless rank.noise=[]. rank.model defaults to what `worldmodel` wrote under the same name and seed.
"""

import dataclasses

from rich.table import Table

from robopolicy.build import WORLD_MODEL, build_noisy_expert, build_world, choose_device, open_policy
from robopolicy.configuration import Config, WorldSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import derive, numpy_generator
from robopolicy.core.world import Controller
from robopolicy.evaluation.ranking import RankingResult, rank
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.runs import default_path, finish, open_fresh_run, output
from robopolicy.verbs.evaluate import evaluation_seeds

SECTIONS = ("run", "world", "rank")


def run(config: Config) -> int:
    """Rank and report."""
    model = default_path(config, "worldmodel", "checkpoint", config.rank.model, "rank.model")
    folder = open_fresh_run(config, "rank", SECTIONS)
    imagined = dataclasses.replace(config.world, name=WORLD_MODEL, model=model, simulator=config.world.name)
    candidates = load_candidates(config)
    real = score(config, config.world, candidates, "simulator")
    model_scores = score(config, imagined, candidates, "world model")
    result = rank(real=real, model=model_scores, generator=numpy_generator(config.run.seed, "rank/bootstrap"))
    show(result)
    finish(config, folder, {"model": str(model), **result.to_json()})
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def load_candidates(config: Config) -> dict[str, Policy | str]:
    """Return what is to be ranked by name: checkpoints, and the scripted expert at each level of noise."""
    device = choose_device(config.run)
    candidates: dict[str, Policy | str] = {str(path): open_policy(path, device) for path in config.rank.policies}
    candidates |= {f"expert, noise {noise}": noise for noise in config.rank.noise}
    if len(candidates) < 3:
        raise ConfigError("Ranking needs at least 3 policies (6 or more to mean anything): rank.policies=[A,B,C].")
    return candidates


def score(
    config: Config, section: WorldSection, candidates: dict[str, Policy | str], label: str
) -> dict[str, EvaluationResult]:
    """Evaluate every candidate in one world, deterministically, on the seeds that every verb judges on."""
    seeds, device = evaluation_seeds(config, config.rank.episodes), choose_device(config.run)
    results = {}
    for name, candidate in candidates.items():
        policy = None if isinstance(candidate, str) else candidate
        world = build_world(section, policy, episodes=config.rank.episodes, seed=config.run.seed, device=device)
        if isinstance(candidate, str):
            seed = derive(config.run.seed, f"rank/{name}")
            actor: Policy | Controller = build_noisy_expert(section, world.spec, candidate, seed)
        else:
            actor = candidate
        results[name] = evaluate_policy(
            world, actor, seeds, generator_seed=config.run.seed, device=device, label=f"{label}: {name}"
        )
        world.close()
    return results


def show(result: RankingResult) -> None:
    """Print scores and statistics."""
    table = Table(box=None, padding=(0, 2))
    for column in ("policy", "simulator", "world model"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name in sorted(result.real, key=lambda key: result.real[key]):
        table.add_row(name, f"{result.real[name]:.1%}", f"{result.model[name]:.1%}")
    output.print(table)
    for name, estimate in result.statistics.items():
        value = "undefined" if estimate.value is None else f"{estimate.value:+.3f}"
        interval = "" if estimate.policies is None else f" [{estimate.policies[0]:+.3f}, {estimate.policies[1]:+.3f}]"
        output.print(f"  {name.replace('_', ' ')}: {value}{interval}")
