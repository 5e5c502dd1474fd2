"""Diagnoses low success: replays demonstrations through the world, the normaliser and the policy.

Names inconsistencies (sign, order, scale, time, rate, cameras, statistics), and reports when the data cannot
distinguish two causes. Exit status 1 if a convention is violated, so scripts can check it.
"""

import os
from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.run import DEMONSTRATIONS
from robopolicy.core.episodes import Episodes, select_episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators
from robopolicy.core.storage import read_errors, read_object
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.data.lerobot_reading import is_dataset, require_known
from robopolicy.doctor import Finding, Health, examine
from robopolicy.doctor.data import check_columns, check_statistics
from robopolicy.doctor.policy import check_plan
from robopolicy.runs import default_path, input_path, output, publish
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Diagnose low success: check data, world and policy conventions by replay",
    sections=("run", "world", "doctor"),
    example="robopolicy doctor recipe=push_cube",
    targets=("doctor.data",),
    world_from={"doctor.data": "collect/dataset", "doctor.policy": ""},
)

COLOURS = {Health.GOOD: "green", Health.UNKNOWN: "dim", Health.WARNING: "yellow", Health.BAD: "bold red"}


def run(config: Config) -> int:
    """Examine the data, the world and, if there is one, the policy; print the findings."""
    device = choose_device(config.run)
    data = default_path(config, "collect", "dataset", config.doctor.data, "doctor.data")
    if (data / "config.json").is_file() and not is_dataset(data):
        raise ConfigError(
            f"{data} is a checkpoint, but doctor needs a dataset. Usage: robopolicy doctor DATA doctor.policy={data}"
        )
    trained = config.doctor.policy or input_path(config, "train") / "checkpoint"
    policy = load_policy(trained, device) if config.doctor.policy is not None or trained.exists() else None
    require_known(config.doctor.rename, (data,))
    all_episodes = read_dataset(data, rename=config.doctor.rename or renaming_of(policy))
    numbers = config.doctor.episodes
    numbers = 0 if isinstance(numbers, int) else numbers
    episodes = select_episodes(all_episodes, data, "doctor", numbers, config.doctor.exclude_episodes)
    world = replayed_in(config, episodes, policy)
    success = judged_success(Path(trained), data) if policy is not None else None
    findings = examine(episodes, world, policy, Generators(config.run.seed, device)["doctor"], success=success)
    findings += [*check_columns(data), *check_statistics(all_episodes, data)]
    if policy is not None:
        findings += check_plan(Path(trained), policy, episodes.to(device))
    if world is not None:
        world.close()
    show(findings)
    publish(config, {"findings": [finding.to_json() for finding in findings]})
    return int(any(finding.health is Health.BAD for finding in findings))


def replayed_in(config: Config, episodes: Episodes, policy: Policy | None) -> World | None:
    """Return the configured world with the policy's cameras; None if the world is the demonstrations themselves."""
    if config.world.name == DEMONSTRATIONS:  # a recording that is compared with itself agrees in everything
        return None
    cameras = dict.fromkeys([*config.world.cameras, *(policy.spec.cameras if policy is not None else ())])
    section = replace(config.world, cameras=tuple(cameras))
    replay_rows = config.doctor.episodes if isinstance(config.doctor.episodes, int) else len(config.doctor.episodes)
    return build_world(section, batch_size=min(replay_rows, len(episodes)), seed=config.run.seed)


def judged_success(checkpoint: Path, data: Path) -> float | None:
    """Return the success rate that `train` measured for a checkpoint trained on `data`; None if it measured none."""
    path = checkpoint.parent / "result.json"
    if not os.path.lexists(path):
        return None
    result = read_object(path)
    with read_errors(path):
        metrics = result.get("policy", {}).get("deterministic", {})
        same_data = "data" in result and Path(result["data"]).resolve() == data.resolve()
        return float(metrics["success_rate"]) if same_data and metrics.get("reports_success") else None


def show(findings: list[Finding]) -> None:
    """Print one line per finding with its remedy, and a summary."""
    table = Table(box=None, padding=(0, 2))
    for column in ("", "check", "measured", "what to do"):
        table.add_column(column)
    for finding in findings:
        colour = COLOURS[finding.health]
        cells = (escape(text) for text in (finding.check, finding.measured, finding.remedy))
        table.add_row(f"[{colour}]{finding.health.value}[/]", *cells)
    output.print(table)
    problems = list(dict.fromkeys(finding.check for finding in findings if finding.problem))
    output.print(escape(f"Fix or check: {', '.join(problems)}." if problems else "No problem found."))
