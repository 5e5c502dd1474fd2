"""Runs the complete workflow: demonstrations, pre-training, world model, fine-tuning, evaluation, and a served robot.

Runs the same verbs that you would run by hand, each in its own run folder, and combines their results in one report. If
interrupted, run it again: finished stages are kept.
"""

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.configuration import Config, compose
from robopolicy.core.errors import RobopolicyError
from robopolicy.core.run import RunFolder
from robopolicy.core.status import begin
from robopolicy.core.storage import read_json
from robopolicy.evaluation.report import report_for_run
from robopolicy.runs import finish, finished, open_folder, output, run_path
from robopolicy.verbs.verb import VERBS, Verb

VERB = Verb(
    summary="Run the complete workflow in ten minutes, ending with a report",
    sections=("run", "demo"),
    example="robopolicy demo",
    resumes=True,
)


def run(config: Config) -> int:
    """Run all stages and write one report."""
    start = time.perf_counter()
    root = config.run.root / "demo" / config.demo.recipe / str(config.run.seed)
    folder = open_folder(root)
    begin(root)
    stages = stage_config(config, root)
    seconds: dict[str, float] = {}

    def stage(title: str, verb: str, changed: Config = stages) -> None:
        output.print(Rule(f"[bold]{title}", align="left"))
        began = time.perf_counter()
        VERBS.load(verb)(changed)
        seconds[title] = time.perf_counter() - began

    stage("1. Record demonstrations of a noisy scripted expert", "collect")
    stage("2. Pre-train by behaviour cloning", "train")
    stage("3. Train a world model on demonstrations and rollouts", "worldmodel", with_policies(stages))
    stage("4. Fine-tune in the simulator with PPO in the denoising chain", "finetune")
    stage("5. Rank both policies in the simulator and the world model", "rank", with_ranking(stages))
    output.print(Rule("[bold]6. Serve the fine-tuned policy to a simulated robot", align="left"))
    began = time.perf_counter()
    drive_result = serve_and_drive(stages, root)
    seconds["6. Serve the fine-tuned policy to a simulated robot"] = time.perf_counter() - began
    verbs = ("collect", "train", "worldmodel", "finetune", "rank")
    results = {verb: finished(RunFolder(run_path(stages, verb))) for verb in verbs}
    total = time.perf_counter() - start
    suggested = next_steps(config.demo.recipe, stages)
    times = {"seconds_by_stage": seconds, "seconds": total}
    finish(config, folder, {**results, "drive": drive_result, **times, "next_steps": suggested})
    report = report_for_run(folder.path)
    output.print(f"\nDone in {total / 60:.1f} minutes. Report: {report}\n\nWhat to try next:")
    for line in suggested:
        output.print(f"  {line}", soft_wrap=True)
    return 0


def stage_config(config: Config, root: Path) -> Config:
    """Return the stages' configuration: the recipe's, with the demo's folder and seed."""
    stages = compose([f"recipe={config.demo.recipe}"])
    section = dataclasses.replace(config.run, root=root)
    return dataclasses.replace(stages, run=section, json=None)


def with_policies(stages: Config) -> Config:
    """Add rollouts of the pre-trained policy, failures included, to the world model's training data."""
    section = dataclasses.replace(stages.worldmodel, policies=(run_path(stages, "train") / "checkpoint",))
    return dataclasses.replace(stages, worldmodel=section)


def with_ranking(stages: Config) -> Config:
    """Rank the base and the tuned policy together with experts of several noise levels."""
    base, tuned_path = run_path(stages, "train") / "checkpoint", run_path(stages, "finetune") / "checkpoint"
    return dataclasses.replace(stages, rank=dataclasses.replace(stages.rank, policies=(base, tuned_path)))


def serve_and_drive(stages: Config, root: Path) -> dict[str, Any]:
    """Serve the tuned policy and drive a simulated robot, each in its own process; return the robot's results."""
    checkpoint, figures = run_path(stages, "finetune") / "checkpoint", root / "drive.json"
    command = [sys.executable, "-m", "robopolicy.cli"]
    serve = [*command, "serve", str(checkpoint), "serve.port=0", "serve.exit_with_parent=true"]
    with open(root / "server.log", "w") as log:
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        port = announced_port(server)
        target = [f"world.name={stages.world.name}", f"drive.port={port}", "drive.episodes=5", f"json={figures}"]
        done = subprocess.run([*command, "drive", *target], check=False)
        if done.returncode:
            raise RobopolicyError(f"The simulated robot failed (exit status {done.returncode}); see its message above.")
    finally:
        server.terminate()
        server.wait(timeout=30)
    return read_json(figures)


def announced_port(server: subprocess.Popen[str]) -> int:
    """Wait until the server prints its address, and return the port."""
    assert server.stdout is not None
    for line in server.stdout:
        if (match := re.search(r"ws://[^:]+:(\d+)", line)) is not None:
            return int(match[1])
    raise RobopolicyError(f"The policy server exited before it listened (exit status {server.wait()}): see server.log.")


def next_steps(recipe: str, stages: Config) -> list[str]:
    """Return suggested commands to run after the demo."""
    base, tuned_path, model = (run_path(stages, verb) / "checkpoint" for verb in ("train", "finetune", "worldmodel"))
    world = stages.world.name
    return [
        f"robopolicy evaluate {base} recipe={recipe} plan.model={model}   # planning instead of training",
        f"robopolicy evaluate {tuned_path} world={world} evaluate.episodes=500",
        f"robopolicy serve {tuned_path}",
        " && ".join(f"robopolicy {verb} recipe=pick_place" for verb in ("collect", "train", "finetune")),
        f"robopolicy doctor recipe={recipe}",
        "robopolicy train --help",
    ]
