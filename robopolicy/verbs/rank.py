"""Ranks policies in world models and in the simulator on the same seeds, and reports how well one predicts the other.

Prints Pearson, Spearman, Kendall, MMRV, error and bias with bootstrap intervals, and draws a scatter plot for every
model. Give checkpoints of independently trained policies, from robopolicy or LeRobot, with rank.policies=[A,B,...]. The
scripted expert (or collect.controller) at several noise levels is ranked with them unless rank.noise=[].
rank.models=[A,B,...], of any kinds, defaults to the output of `worldmodel` with the same name and seed. rank.trials=20
plays only so many episodes in the simulator and estimates success from them and the model's episodes together, with an
interval, and says how many trials alone would do as well; without it, a table says what few trials would have said.
A table says how many of a policy's steps are unlike all that a model has learned from (rank.coverage_episodes), where
its imagined success is a guess. rank.variations=[colour,mass] repeats the ranking under one factor of variation of the
scene after another. workers.count=N plays batches of world.batch_size episodes in N processes, with equal results.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.workers import BatchPlayers, Built, Workers, open_workers, play_together
from robopolicy.building.worlds import build_noisy_expert, build_world, recorded_for
from robopolicy.configuration import Config
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed, numpy_generator
from robopolicy.core.spec import IMAGE_PREFIX, images_of
from robopolicy.core.world import Controller, World
from robopolicy.data.record import record
from robopolicy.evaluation.coverage import Coverage, elements
from robopolicy.evaluation.few_trials import calibrated, savings, savings_rows
from robopolicy.evaluation.ranking import RankingResult, rank
from robopolicy.evaluation.report import agreement, calibrated_table, report_for_run, varied_agreement
from robopolicy.evaluation.success import Evaluation, EvaluationResult, evaluate_policy, require_success
from robopolicy.evaluation.tables import UNLIKE, coverage_table, coverage_warnings
from robopolicy.runs import default_path, finish, open_fresh_run, output, print_table, runs_of
from robopolicy.verbs.job import evaluation_seeds, note_invisible
from robopolicy.verbs.verb import Verb
from sims.play import behaviour_name
from sims.variations.protocol import sweep
from worldmodels.checkpoint import kind_of, load_world_model
from worldmodels.protocol import DecoderFree, fields_read
from worldmodels.readout import HasReadout

VERB = Verb(
    summary="Rank policies in a world model and compare with the simulator",
    sections=("run", "world", "workers", "collect", "rank"),
    example="robopolicy rank recipe=push_cube",
    world_from={"rank.policies": "", "rank.models": "worldmodel/checkpoint"},
)
SIMULATOR = "simulator"
"""Name of the world that models are compared with."""
BOOTSTRAP = "rank/bootstrap"
"""Name of the random numbers of the intervals."""
RECORDED = 8
"""Episodes recorded at a time to measure coverage: those of large cameras fill the memory."""
FEW = "rank/few_trials"
"""Name of the random numbers that choose few trials."""


def run(config: Config) -> int:
    """Rank the policies and write the report."""
    models = name_models(
        [
            default_path(config, "worldmodel", "checkpoint", path, "rank.models")
            for path in config.rank.models or (None,)
        ]
    )
    folder = open_fresh_run(config, "rank", VERB.sections)
    candidates = load_candidates(config)
    require_seen_by_experts(models.values(), config.rank.noise)
    worlds = {SIMULATOR: config.world, **{name: config.world.imagined_by(path) for name, path in models.items()}}
    variations = sweep(config.rank.variations, "rank.variations")
    note_invisible(variations, [each.spec for each in candidates.values() if not isinstance(each, str)])
    varied_worlds = {
        label: {name: section.varied_by(variation) for name, section in worlds.items()}
        for label, variation in variations.items()
    }
    every_world = [section for sections in (worlds, *varied_worlds.values()) for section in sections.values()]
    require_fitting(config, every_world, candidates)
    with open_workers(config) as workers:
        scores = score(config, worlds, candidates, workers)
        varied_scores = {
            label: score(config, sections, candidates, workers) for label, sections in varied_worlds.items()
        }
    rankings = ranked(config, scores)
    show(rankings)
    coverage = coverages(config, models, candidates)
    figures = {name: {"path": str(models[name]), **ranking.to_json()} for name, ranking in rankings.items()}
    for name, shares in coverage.items():
        figures[name]["coverage"] = shares
    if coverage:
        print_table(UNLIKE, *coverage_table(coverage))
        for warning in coverage_warnings(coverage):
            output.print(f"Warning: {warning}")
    varied_rankings = {label: ranked(config, each) for label, each in varied_scores.items()}
    if variations:
        for name, each in figures.items():
            each["variations"] = {label: under[name].to_json() for label, under in varied_rankings.items()}
        print_table("Agreement by factor of variation", agreement(figures)[0], varied_agreement(figures))
    if config.rank.trials:
        for name in models:
            rates = calibrated(scores[SIMULATOR], scores[name])
            figures[name]["calibrated"] = {policy: rate.to_json() for policy, rate in rates.items()}
        print_table(f"Success from {config.rank.trials} trials and the model", *calibrated_table(figures))
    else:
        for name in models:
            generator = numpy_generator(config.run.seed, FEW)
            rows = [each.to_json() for each in savings(scores[SIMULATOR], scores[name], generator)]
            figures[name]["savings"] = rows
            if rows:
                print_table(f"What few trials would have said, alone and with {name}", *savings_rows(rows))
    finish(config, folder, {"models": figures})
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def coverages(
    config: Config, models: Mapping[str, Path], candidates: Mapping[str, Policy | str]
) -> dict[str, dict[str, float]]:
    """Return model -> policy -> fraction of its steps in the simulator that are unlike the data of the model; without
    models whose data is gone, and policies whose world does not show what the model reads.

    A policy acts once for all models that read the same cameras.
    """
    seeds, device = evaluation_seeds(config, config.rank.coverage_episodes), choose_device(config.run)
    paths = {name: path for name, path in models.items() if len(seeds) and (path.parent / "dataset").exists()}
    loaded = {name: load_world_model(path) for name, path in paths.items()}
    draws = {name: torch.Generator().manual_seed(derive_seed(config.run.seed, "rank/coverage/data")) for name in loaded}
    covered = {
        name: Coverage.of(model, recorded_for(model, paths[name].parent / "dataset"), draws[name])
        for name, model in loaded.items()
    }
    sections = {name: replace(config.world, **images_of(fields_read(model))) for name, model in loaded.items()}
    shares: dict[str, dict[str, float]] = {name: {} for name in loaded}
    parts = np.array_split(seeds, range(RECORDED, len(seeds), RECORDED))
    for first, section in sections.items():
        models_alike = [name for name, other in sections.items() if other == section]
        if models_alike[0] != first:
            continue
        generators = Generators(derive_seed(config.run.seed, "rank/coverage"), device)
        for candidate, actor in candidates.items():
            world, acting = acting_in(config, section, candidate, actor, device, filmed=True)
            readers = [
                name for name in models_alike if not fields_read(loaded[name]).keys() - world.spec.observation.keys()
            ]
            steps: dict[str, list[Tensor]] = {name: [] for name in readers}
            for part in parts if readers else ():
                episodes = record(world, acting, part, deterministic=True, generator=generators["act"])
                for name in readers:
                    steps[name].append(elements(loaded[name], episodes))
            for name in readers:
                shares[name][candidate] = covered[name].unlike(torch.cat(steps[name]), draws[name])
            world.close()
    return {name: each for name, each in shares.items() if each}


def ranked(config: Config, scores: Mapping[str, Mapping[str, EvaluationResult]]) -> dict[str, RankingResult]:
    """Return the agreement of every model with the simulator, from world -> policy -> evaluation."""
    return {
        name: rank(real=scores[SIMULATOR], model=each, generator=numpy_generator(config.run.seed, BOOTSTRAP))
        for name, each in scores.items()
        if name != SIMULATOR
    }


def name_models(paths: Sequence[Path]) -> dict[str, Path]:
    """Return checkpoints of world models by kind, with the run added when a kind occurs twice."""
    kinds = [kind_of(path) for path in paths]
    names = [
        kind if kinds.count(kind) == 1 else f"{kind}, {run}" for kind, run in zip(kinds, runs_of(paths), strict=True)
    ]
    return dict(zip(names, paths, strict=True))


def load_candidates(config: Config) -> dict[str, Policy | str]:
    """Return the candidates by name: checkpoints, and the expert at each noise level."""
    device = choose_device(config.run)
    paths = config.rank.policies
    candidates: dict[str, Policy | str] = {
        name: load_policy(path, device) for name, path in zip(runs_of(paths), paths, strict=True)
    }
    candidates |= {behaviour_name(level): level for level in config.rank.noise}
    if len(candidates) < 3:
        raise ConfigError(
            "Ranking needs at least 3 policies (6 or more for a meaningful result): rank.policies=[A,B,C]."
        )
    return candidates


def require_seen_by_experts(models: Iterable[Path], noise: Sequence[str]) -> None:
    """Raise ConfigError if experts are to be ranked in a world model off whose latent no state can be read."""
    for path in models if noise else ():
        model = load_world_model(path)
        # Pictures can be drawn of a latent off which no state is read.
        state = [key for key in model.readable if key not in model.reads] if isinstance(model, HasReadout) else []
        if isinstance(model, DecoderFree) and all(key.startswith(IMAGE_PREFIX) for key in state):
            raise ConfigError(
                f"The expert cannot act in {path}, which outputs only its latent, without a readout of the state: set "
                "rank.noise=[], or train the model on data with the state "
                "(latent_ensemble with worldmodel.config.readout_step_ratio above 0)."
            )


def require_fitting(config: Config, sections: Iterable[WorldSection], candidates: Mapping[str, Policy | str]) -> None:
    """Raise, before any episode is played, when a policy does not fit one of the worlds; as `build_world` does."""
    device = choose_device(config.run)
    policies = [each for each in candidates.values() if not isinstance(each, str)]
    unlike = {repr((each.spec.observation, each.spec.action, each.spec.history)): each for each in policies}
    for section in sections:
        for policy in unlike.values():
            build_world(section, policy, batch_size=1, seed=config.run.seed, device=device).close()


def score(
    config: Config, sections: Mapping[str, WorldSection], candidates: dict[str, Policy | str], workers: Workers
) -> dict[str, dict[str, EvaluationResult]]:
    """Evaluate every candidate in each world, deterministically, on the evaluation seeds that all verbs share; in the
    simulator on the first rank.trials of them only.

    On workers, all episodes of all candidates in all worlds are played together.
    """
    all_seeds, device = evaluation_seeds(config, config.rank.episodes), choose_device(config.run)
    paths = dict(zip(runs_of(config.rank.policies), config.rank.policies, strict=True))
    scores: dict[str, dict[str, EvaluationResult]] = {label: {} for label in sections}
    asked: dict[tuple[str, str], tuple[BatchPlayers, Evaluation]] = {}
    for label, section in sections.items():
        here = Workers(config.replaced(world=section), workers.pool)
        seeds = all_seeds if label != SIMULATOR else all_seeds[: config.rank.trials or None]
        for name, candidate in candidates.items():
            world, actor = acting_in(config, section, name, candidate, device)
            require_success(world, "compare policies with robopolicy evaluate, which also compares returns")
            given = {"name": name, "path": str(paths.get(name, "")), "noise": "" if name in paths else candidate}
            players = here.players("robopolicy.verbs.rank:in_worker", **given) if workers.pool else None
            if players is not None:
                asked[label, name] = players, Evaluation.of(world, seeds)
            else:
                options = {"generator_seed": config.run.seed, "device": device, "label": f"{label}: {name}"}
                scores[label][name] = evaluate_policy(world, actor, seeds, **options)
            world.close()
    results = play_together(list(asked.values()), config.run.seed, "ranking")
    for (label, name), result in zip(asked, results, strict=True):
        scores[label][name] = result
    return scores


def acting_in(
    config: Config,
    section: WorldSection,
    name: str,
    candidate: Policy | str,
    device: torch.device,
    filmed: bool = False,
) -> tuple[World, Policy | Controller]:
    """Build the world for a candidate, and the candidate in the form that acts there (a text: the expert's noise).

    filmed: the world also has the cameras of the section.
    """
    policy = None if isinstance(candidate, str) else candidate
    options = {"episodes": config.rank.episodes, "seed": config.run.seed, "device": device, "filmed": filmed}
    world = build_world(section, policy, **options)
    if policy is None:
        seed = derive_seed(config.run.seed, f"rank/{name}")
        return world, build_noisy_expert(section, world, str(candidate), seed, config.collect.controller)
    return world, adapt_policy_to_world(world, policy)


def in_worker(config: Config, name: str, path: str, noise: str) -> Built:
    """Build in a worker the candidate `name`: the policy at `path`, or the expert with this noise."""
    device = choose_device(config.run)
    candidate: Policy | str = load_policy(path, device) if path else noise
    return *acting_in(config, config.world, name, candidate, device), device


def show(rankings: Mapping[str, RankingResult]) -> None:
    """Print scores, statistics and warnings."""
    real = next(iter(rankings.values())).real
    lines = [
        [name, f"{real[name]:.1%}", *(f"{ranking.model[name]:.1%}" for ranking in rankings.values())]
        for name in sorted(real, key=lambda key: real[key])
    ]
    print_table("Success", ["policy", "simulator", *rankings], lines)
    figures: dict[str, Any] = {name: ranking.to_json() for name, ranking in rankings.items()}
    print_table("Agreement with the simulator (in brackets: bootstrap interval over policies)", *agreement(figures))
    for warning in dict.fromkeys(warning for ranking in rankings.values() for warning in ranking.warnings):
        output.print(f"Warning: {warning}")
