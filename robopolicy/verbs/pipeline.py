"""Runs verbs that build on each other as one command with one report: recipe=rl100, or your own stages.

A recipe lists the stages (pipeline.stages), each a verb with its settings; {name} in them is the run folder of an
earlier stage. recipe=rl100 runs imitation, gated offline rounds on the policy's own log, a short online phase, and
distillation to one denoising step (after RL-100, arXiv:2510.14830). recipe=sight fine-tunes with the simulator's state
and distils the result into a student with a camera. pipeline.recipe names the task. Every stage has its own run folder
and can be inspected and run by itself. If interrupted, run the same command again: finished stages are kept, the
interrupted one resumes.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.configuration import Config, compose, with_downloads
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_object, write_json
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.tables import STAGES, stage_rows, stage_summary
from robopolicy.runs import finish, finished, open_run, output, print_table, run_path
from robopolicy.verbs.verb import VERBS, Verb, declaration

VERB = Verb(
    summary="Run several verbs as one resumable job with one report",
    sections=("run", "pipeline"),
    example="robopolicy pipeline recipe=rl100 pipeline.recipe=push_t",
    resumes=True,
)


def run(config: Config) -> int:
    """Run all stages, then write one report."""
    section = config.pipeline
    if not section.stages:
        raise ConfigError("The pipeline has no stages: set recipe=rl100, or list stages in pipeline.stages.")
    run_config = config if config.run.name else replace(config, run=replace(config.run, name=section.recipe))
    folder = open_run(run_config, "pipeline", VERB.sections)
    if finished(folder) is not None:
        output.print(f"{folder.path} is done; run.overwrite=true starts over.")
        return 0
    stages = stages_of(config, folder.path)  # all of them, so that a wrong setting shows before the first one runs
    seconds = folder.path / "seconds.json"
    seconds_of: dict[str, float] = read_object(seconds) if seconds.exists() else {}
    for name, (verb, settings) in stages.items():
        if name in seconds_of and finished(RunFolder(run_path(settings, verb))) is not None:
            continue
        output.print(Rule(f"[bold]{name}: robopolicy {verb}", align="left"))
        began = time.perf_counter()
        VERBS.load(verb)(settings)
        seconds_of[name] = seconds_of.get(name, 0.0) + time.perf_counter() - began
        write_json(seconds, seconds_of)
    summaries = {
        name: stage_summary(verb, result_of(each, verb), seconds_of[name]) for name, (verb, each) in stages.items()
    }
    folders = {name: str(run_path(settings, verb)) for name, (verb, settings) in stages.items()}
    finish(config, folder, {"stages": summaries, "folders": folders, "seconds": sum(seconds_of.values())})
    print_table(f"{section.recipe}, seed {config.run.seed}", STAGES, stage_rows(summaries))
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def stages_of(config: Config, root: Path) -> dict[str, tuple[str, Config]]:
    """Return verb and configuration of every stage, in order, with run folders under `root`.

    Raises ConfigError for an unknown verb, a verb that runs other verbs, an invalid setting, or a reference to a stage
    that does not come before.
    """
    section, seed = config.pipeline, str(config.run.seed)
    shared_settings = [f"run.root={root}", f"run.seed={seed}", f"run.threads={config.run.threads}"]
    stages: dict[str, tuple[str, Config]] = {}
    places = {"seed": seed}
    for name, (verb, *settings) in section.stages.items():
        if verb not in VERBS or verb in ("pipeline", "demo", "bench"):
            raise ConfigError(
                f"pipeline.stages.{name}: '{verb}' is not a verb that can be a "
                f"stage.{did_you_mean(verb, VERBS.names())}"
            )
        settings += section.changes.get(name, ())
        later = [each for each in section.stages if each not in places and any(f"{{{each}}}" in s for s in settings)]
        if later:
            raise ConfigError(f"pipeline.stages.{name} uses {later[0]}, which is not an earlier stage.")
        overrides = [_filled(setting, places) for setting in (*section.overrides, *settings)]
        basis = [f"recipe={section.recipe}", *shared_settings, f"run.device={config.run.device}", f"run.name={name}"]
        stages[name] = verb, with_downloads(compose([*basis, *overrides]), declaration(verb).sections)
        places[name] = str(run_path(stages[name][1], verb))
    return stages


def _filled(setting: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        setting = setting.replace(f"{{{name}}}", place)
    return setting


def result_of(config: Config, verb: str) -> dict[str, Any]:
    """Return the results of a finished stage; raises ConfigError when there are none."""
    folder = RunFolder(run_path(config, verb))
    result = finished(folder)
    if result is None:
        raise ConfigError(f"{folder.path} has no result.json: '{verb}' cannot be a stage of a pipeline.")
    return result
