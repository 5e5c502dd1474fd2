"""Measures success over paired seeds, deterministic and stochastic, with Wilson intervals; writes a report with videos.

evaluate.base=CHECKPOINT evaluates a second policy on the same seeds and tests the difference. world=worldmodel
evaluates in imagination (world.model=CHECKPOINT) from the same initial states. For worlds with several instructions,
success is reported per instruction. evaluate.controls tests language conditioning: with another instruction
(wrong_instruction; unchanged success means the policy ignores it) or with the same one in other words (paraphrase).
evaluate.latency_steps=N gives every policy call a latency of N control steps; evaluate.chunking selects how the robot
executes chunks meanwhile. plan.model=CHECKPOINT evaluates the policy with planning in a world model, and without it for
comparison; with plan.kind=cem and no policy, the planner alone. evaluate.reference_dataset=DATASET normalises returns
between those of uniform random actions and of the expert. "evaluate.specification='G[0,8](abs(cube_y) < 0.4)'" (both
quotes) measures the episodes by a formula of signal temporal logic. evaluate.variations=[colour,mass] evaluates under
one factor of variation of the scene after another, from the same initial states. workers.count=N plays batches of
world.batch_size episodes in N processes, with equal results.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robopolicy.building.planning import planner_alone, with_planning
from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_acting
from robopolicy.building.workers import BatchPlayers, Built, Workers, open_workers
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, to_yaml
from robopolicy.configuration.sections.act import EvaluateSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy
from robopolicy.core.run import RunFolder
from robopolicy.core.temporal import with_specification
from robopolicy.core.tensors import file_hash
from robopolicy.core.world import World
from robopolicy.evaluation.episode_batches import SavedBatches
from robopolicy.evaluation.instructions import (
    CONTROLS,
    PARAPHRASE,
    WRONG,
    Control,
    controls_of,
    evaluate_controls,
    with_instruction,
)
from robopolicy.evaluation.report import UNPLANNED, report_for_run
from robopolicy.evaluation.scores import read_anchors
from robopolicy.evaluation.smoothness import SmoothnessMeter
from robopolicy.evaluation.success import (
    EvaluationResult,
    PolicyEvaluation,
    compare,
    evaluate_both_modes,
    evaluate_policy,
)
from robopolicy.evaluation.tables import difference_text, variation_table
from robopolicy.inference.chunking import Delay, HasSeams, with_chunking
from robopolicy.inference.configuration import CHUNKINGS, SYNCHRONOUS
from robopolicy.policies.loading import checkpoint_in
from robopolicy.runs import decisive, finish, open_fresh_run, output, print_table
from robopolicy.verbs.job import evaluation_seeds, normalised, note_invisible, print_evaluations, record_video
from robopolicy.verbs.unfinished import hashes, source_of
from robopolicy.verbs.verb import Verb
from sims.variations.protocol import session_changes, sweep
from worldmodels.configuration import CANDIDATES

VERB = Verb(
    summary="Evaluate a policy in a simulator or a world model",
    sections=("run", "world", "workers", "plan", "inference", "evaluate"),
    example="robopolicy evaluate runs/finetune/push_cube/0/checkpoint world=worldmodel "
    "world.model=runs/worldmodel/push_cube/0/checkpoint",
    targets=("evaluate.policy",),
    world_from={"evaluate.policy": ""},
    resumes=True,
)
VARIATIONS, UNVARIED = "evaluate.variations", "none"
"""Name of the setting, and label of the evaluation without its factors."""
WAVES = "waves.jsonl"
"""File of the batches played so far, until there is a result."""


def controlled(
    config: Config,
    world: World,
    policy: Policy,
    beside: EvaluationResult,
    device: torch.device,
    label: str,
    kept: SavedBatches | None = None,
    players: Callable[[str], BatchPlayers | None] = lambda told: None,
) -> dict[str, Control]:
    """Evaluate the language controls that the section configures, on the seeds of `beside`; return them by name.

    players: instruction -> what plays on workers. Returns nothing if evaluate.instruction already overrides the
    world's instruction.
    """
    names = () if config.evaluate.instruction else config.evaluate.controls

    def play(told: Policy, control: str) -> EvaluationResult:
        label_here = f"{label}, {control}"
        options = {"generator_seed": config.run.seed, "device": device, "label": label_here, "kept": kept}
        elsewhere = players(CONTROLS[control.replace(" ", "_")])
        return evaluate_policy(world, told, beside.seeds, **options, players=elsewhere)

    return evaluate_controls(policy, world.spec, controls_of(world.spec, names), beside, play)


def evaluated_under_variations(
    config: Config,
    name: str,
    policy: Policy,
    beside: EvaluationResult,
    device: torch.device,
    kept: SavedBatches,
    players: Callable[[Config], BatchPlayers | None],
) -> dict[str, dict[str, Any]]:
    """Evaluate `policy` in each of `varied_scenes`, without noise and on the seeds of `beside`.

    Returns factor with its value -> summary, with the paired difference to `beside`; the first entry is `beside`. Empty
    without variations. players: configuration -> the workers that play in its world.
    """
    results: dict[str, dict[str, Any]] = {}
    for label, variation in varied_scenes(config).items():
        varied_config = config.replaced(world=config.world.varied_by(variation))
        world = world_for(varied_config, policy, device)
        acting, _ = delayed(config.evaluate, adapt_policy_to_world(world, policy))
        instructed = with_instruction(acting, config.evaluate.instruction, world.spec)
        options = {"generator_seed": config.run.seed, "device": device, "label": f"{name}, {label}", "kept": kept}
        result = evaluate_policy(world, instructed, beside.seeds, **options, players=players(varied_config))
        results[label] = {**result.summary(), "difference": compare(beside, result).to_json()}
        world.close()
    return {UNVARIED: beside.summary(), **results} if results else {}


def varied_scenes(config: Config) -> dict[str, dict[str, Any]]:
    """Return the variations of the scene to evaluate in, by label: one factor each, or sessions that change more."""
    section = config.evaluate
    if section.sessions:
        return session_changes(section.variations, VARIATIONS, section.sessions, config.run.seed)
    return sweep(section.variations, VARIATIONS)


def varied_players(
    workers: Workers, given: Mapping[str, Any], instruction: str
) -> Callable[[Config], BatchPlayers | None]:
    """Return a function configuration -> the workers that play the policy `given` in its world."""

    def players(config: Config) -> BatchPlayers | None:
        return Workers(config, workers.pool).players("robopolicy.verbs.evaluate:in_worker", **given, told=instruction)

    return players


def require_variations(config: Config, policy: Policy, device: torch.device) -> None:
    """Raise ConfigError, before any episode is played, unless the world can vary in all of evaluate.variations."""
    for variation in varied_scenes(config).values():
        section = config.world.varied_by(variation)
        build_world(section, policy, batch_size=1, seed=config.run.seed, device=device).close()


def conditions(section: EvaluateSection) -> dict[str, str]:
    """Return non-default evaluation conditions as description -> value; usually empty."""
    texts: dict[str, str] = {}
    if section.instruction:
        wording = {WRONG: "another instruction of the world", PARAPHRASE: "a paraphrase"}
        texts["instruction"] = wording.get(section.instruction, f"'{section.instruction}'")
    if section.latency_steps:
        texts["inference latency"] = f"{section.latency_steps} control steps"
    if section.chunking != SYNCHRONOUS:
        texts["chunking"] = section.chunking
    return texts


def require_time_to_act(section: EvaluateSection, world: World) -> None:
    """Raise ConfigError when the latency exceeds the episode, so that no action would be executed."""
    if section.latency_steps >= world.spec.horizon:
        raise ConfigError(
            f"evaluate.latency_steps={section.latency_steps} is not shorter than an episode of '{world.spec.name}' "
            f"({world.spec.horizon} control steps): no action would be executed."
        )


def delayed(section: EvaluateSection, policy: Policy) -> tuple[Policy, Callable[[], SmoothnessMeter] | None]:
    """Return `policy` with the section's latency and chunking, and a factory of smoothness meters if either is set."""
    delay = Delay(section.latency_steps, section.hold, section.positions)
    acting = with_chunking(policy, section.chunking, delay, section.chunking_options)
    if section.chunking == SYNCHRONOUS and not section.latency_steps:
        return acting, None
    seams = acting.seams if isinstance(acting, HasSeams) else (0,)
    return acting, lambda: SmoothnessMeter(seams, section.latency_steps, policy.spec.action)


def print_controls(controls: Mapping[str, Mapping[str, Control]]) -> None:
    """Print success under each language control, one line per policy and control."""
    for name, controls_of_policy in controls.items():
        for control, result in controls_of_policy.items():
            output.print(f"{name}, {control.replace('_', ' ')}: {result.text}", markup=False, soft_wrap=True)


def kept_waves(config: Config, folder: RunFolder, policies: Sequence[Path]) -> SavedBatches:
    """Return the batches of this evaluation that were played before an interruption, if no checkpoint has changed
    since.
    """
    models = [path for path in (config.plan.model, config.world.model) if path is not None]
    classifiers = [] if config.world.success is None else [hashes(config.world.success)]
    world = source_of(config.world.name)
    of = {
        "settings": to_yaml(config, decisive(VERB.sections)),
        "files": [hashes(checkpoint_in(path)) for path in (*policies, *models)] + classifiers,
        "world": None if world is None else file_hash(world),
    }
    path = folder.path / WAVES
    if config.run.overwrite:
        path.unlink(missing_ok=True)
    cache = SavedBatches(path, of)
    if cache.episodes:
        output.print(f"Resuming: {cache.episodes} episodes were played before the interruption.")
    return cache


def loaded(config: Config, path: Path, planned: bool, device: torch.device) -> Policy:
    """Load the policy at `path` for inference; planned: with planning, if plan.model is set, which acts alone where
    `path` is the model.
    """
    if config.evaluate.policy is None and planned:
        return planner_alone(config.plan, device)
    policy = load_acting(config.inference, path, device, config.evaluate.chunking)
    return with_planning(config.plan, policy, device) if planned else policy


def world_for(config: Config, policy: Policy, device: torch.device) -> World:
    """Build the configured world for the episodes of `policy`, measured by evaluate.specification."""
    world = build_world(config.world, policy, episodes=config.evaluate.episodes, seed=config.run.seed, device=device)
    return with_specification(world, config.evaluate.specification)


def in_worker(config: Config, path: str, planned: bool, told: str) -> Built:
    """Build in a worker what `run` builds in its own process: the policy at `path`, given the instruction `told`."""
    device = choose_device(config.run)
    policy = loaded(config, Path(path), planned, device)
    world = world_for(config, policy, device)
    acting, _ = delayed(config.evaluate, adapt_policy_to_world(world, policy))
    return world, with_instruction(acting, told, world.spec), device


def run(config: Config) -> int:
    """Evaluate the policy, and the base if given."""
    with open_workers(config) as workers:
        return evaluated(config, workers)


def evaluated(config: Config, workers: Workers) -> int:
    """Evaluate the policies on these workers."""
    section = config.evaluate
    alone = section.policy is None and config.plan.model is not None and config.plan.kind != CANDIDATES
    if section.policy is None and not alone:
        raise ConfigError("No policy given. Usage: robopolicy evaluate CHECKPOINT")
    acting_path = config.plan.model if alone else section.policy
    CHUNKINGS.path(section.chunking)
    device = choose_device(config.run)
    paths = {"base": section.base, "policy": acting_path} if section.base else {"policy": acting_path}
    if config.plan.model is not None and section.base is None and not alone:
        paths = {UNPLANNED: section.policy, **paths}
    policies = {
        name: loaded(config, path, name == "policy", device) for name, path in paths.items() if path is not None
    }
    note_invisible(varied_scenes(config), [policy.spec for policy in policies.values()])
    require_variations(config, next(iter(policies.values())), device)
    seeds = evaluation_seeds(config, section.episodes)
    anchors = None if section.reference_dataset is None else read_anchors(section.reference_dataset)
    folder = open_fresh_run(config, "evaluate", VERB.sections)
    cache = kept_waves(config, folder, [path for path in paths.values() if path is not None])
    result: dict[str, Any] = {}
    verdicts: dict[str, PolicyEvaluation] = {}
    controls: dict[str, dict[str, Control]] = {}
    variations: dict[str, dict[str, dict[str, Any]]] = {}
    for name, policy in policies.items():
        world = world_for(config, policy, device)
        require_time_to_act(section, world)
        if anchors is not None:
            anchors.require_world(world.spec.name)
        acting, meter = delayed(section, adapt_policy_to_world(world, policy))
        policy = with_instruction(acting, section.instruction, world.spec)
        given = {"path": str(paths[name]), "planned": name == "policy"}
        players = partial(workers.players, "robopolicy.verbs.evaluate:in_worker", **given)
        if meter is not None and workers.pool is not None:
            output.print("Smoothness needs every action, so these episodes are played in this process, not on workers.")
        options = {"meter": meter, "kept": cache, "players": players(told=section.instruction)}
        verdicts[name] = evaluate_both_modes(world, policy, seeds, device, config.run.seed, name, **options)
        beside, told = verdicts[name].deterministic, lambda told, players=players: players(told=told)
        controls[name] = controlled(config, world, acting, beside, device, name, cache, told)
        result[name] = {"checkpoint": str(paths[name]), **verdicts[name].to_json()}
        played_by = varied_players(workers, given, section.instruction)
        variations[name] = evaluated_under_variations(config, name, policies[name], beside, device, cache, played_by)
        record_video(world, policy, seeds[: section.videos], folder, name, device)
        world.close()
    if len(verdicts) > 1:
        reference = next(iter(verdicts.values()))
        result["difference"] = compare(reference.deterministic, verdicts["policy"].deterministic).to_json()
    if any(controls.values()):
        control_results = {
            name: {control: each.to_json() for control, each in results.items()} for name, results in controls.items()
        }
        result["controls"] = control_results
    if any(variations.values()):
        result["variations"] = variations
    if special := conditions(section):
        result["conditions"] = special
        output.print(
            "Evaluation conditions: " + "; ".join(map(" ".join, special.items())), markup=False, soft_wrap=True
        )
    print_evaluations(verdicts)
    if "difference" in result:
        output.print(f"Difference to {next(iter(verdicts))}: {difference_text(result['difference'])}", soft_wrap=True)
    print_controls(controls)
    if "variations" in result:
        print_table("Success by factor of variation", *variation_table(variations))
    finish(config, folder, result | normalised(verdicts, anchors))
    cache.remove()
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0
