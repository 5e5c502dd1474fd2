"""Finds out why success is low: replays demonstrations through the world, the normaliser and the policy.

Exit status 1 if a convention is off, so a script can check it.
"""

from rich.markup import escape
from rich.table import Table

from robopolicy.build import build_world, choose_device, open_policy
from robopolicy.configuration import Config
from robopolicy.core.randomness import Generators
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.doctor import (
    Finding,
    Health,
    check_action_range,
    check_fields,
    check_policy_fields,
    check_policy_on_data,
    check_replay,
)
from robopolicy.runs import default_path, output, publish, run_path

COLOURS = {Health.GOOD: "green", Health.WARNING: "yellow", Health.BAD: "bold red"}


def run(config: Config) -> int:
    """Examine data and world, and the policy when there is one; print findings."""
    device = choose_device(config.run)
    episodes = read_dataset(default_path(config, "collect", "dataset", config.doctor.data, "doctor.data"))
    world = build_world(config.world, episodes=min(config.doctor.episodes, len(episodes)), seed=config.run.seed)
    findings = check_fields(episodes, world)
    if all(finding.health is not Health.BAD for finding in findings):
        findings += check_action_range(episodes.actions, world.spec.action)
        findings += check_replay(episodes, world)
    world.close()
    trained = config.doctor.policy or run_path(config, "train") / "checkpoint"
    if config.doctor.policy is not None or trained.exists():
        policy = open_policy(trained, device)
        shapes = check_policy_fields(policy, episodes)
        findings += shapes
        if all(finding.health is not Health.BAD for finding in shapes):
            findings += check_policy_on_data(policy, episodes, Generators(config.run.seed)["doctor"])
    show(findings)
    publish(config, {"findings": [finding.to_json() for finding in findings]})
    return int(any(finding.health is Health.BAD for finding in findings))


def show(findings: list[Finding]) -> None:
    """Print one line a finding, with the way out under it."""
    table = Table(box=None, padding=(0, 2))
    for column in ("", "check", "measured", "what to do"):
        table.add_column(column)
    for finding in findings:
        colour = COLOURS[finding.health]
        table.add_row(f"[{colour}]{finding.health.value}[/]", finding.check, escape(finding.measured), finding.remedy)
    output.print(table)
