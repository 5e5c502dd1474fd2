"""Drives a robot in real time, in its own process, with actions from a policy server; prints success and latency.

Start `robopolicy serve CHECKPOINT` first. By default the robot is simulated, in the world in which the policy was
trained, or in world=NAME. drive.rate=-1 runs as fast as the server answers. drive.robot=TYPE drives a LeRobot robot
instead, configured by drive.robot_options. drive.robots=8 drives several simulated robots; drive.console.port=8080
opens a web page from which people watch them, take them over and stop them; drive.assist.operator=expert lets the
world's expert help when the server's failure detector alarms. The robot holds its position and is disconnected at the
end of its time, on Ctrl-C, and on any error.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from rich.markup import escape

from robopolicy.building.worlds import build_controller, build_world
from robopolicy.client.driver import described_policy
from robopolicy.client.element_kinds import Kind
from robopolicy.client.element_mapping import ElementMapping, map_elements
from robopolicy.client.holding import with_served_hold
from robopolicy.client.lerobot_robot import ENDING_SIGNALS, AttachedLeRobot, drive_robot, make_lerobot_robot
from robopolicy.client.notices import Notices
from robopolicy.client.policy_client import PolicyClient, connected
from robopolicy.client.policy_description import DescribedPolicy
from robopolicy.configuration import Config
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.configuration.sections.serve import DriveAssist
from robopolicy.core.delayed import without_latency
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.progress import console, progress
from robopolicy.core.registry import is_dotted, load_dotted
from robopolicy.core.spec import Field, images_of, same_rate
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.evaluation.intervals import wilson
from robopolicy.operators.alarms import counting_alarms
from robopolicy.operators.assistance import assisted
from robopolicy.operators.operator import Site, make_operator
from robopolicy.runs import output, publish
from robopolicy.serving.configuration import AttachedRobot, RobotSettings
from robopolicy.serving.console.fleet import Fleet
from robopolicy.serving.console.site import Console
from robopolicy.serving.drive import drive
from robopolicy.serving.recording import RecordedStep, RobotRecorder
from robopolicy.serving.shared import SharedRobots
from robopolicy.verbs.job import evaluation_seeds
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Drive a robot (simulated or LeRobot) from a policy server",
    sections=("run", "world", "drive"),
    example="robopolicy drive drive.port=8000",
    world_from={"drive.port": "server"},
)


def run(config: Config) -> int:
    """Connect to the server, drive the robot, print the results."""
    section = config.drive
    if section.robot:
        return _run_robot(config)
    with connected(section, section.server_timeout) as client:
        simulated = _as_seen(config.world, client)
        if described_policy(client.metadata).ahead:  # then the driver lets decisions take their time
            simulated = replace(simulated, options=without_latency(simulated.options))
        world = build_world(simulated, batch_size=section.robots, episodes=section.episodes, seed=config.run.seed)
        rate = world.spec.fps if section.rate == 0 else max(section.rate, 0.0)
        robot, seeds = _settings(config, client), evaluation_seeds(config, section.episodes)
        labels = {"rewards": list(world.spec.rewards), "success": world.spec.reports_success}
        with _shared(config, world) as shared, _recording(config, {**client.metadata, **labels}) as recorder:
            result = drive(
                world,
                client,
                seeds,
                rate=rate,
                robot=robot,
                notices=Notices(_note),
                recorder=recorder,
                shared=shared,
            )
        world.close()
    low, high = wilson(result["successes"], result["episodes"])
    output.print(f"Success {result['successes']}/{result['episodes']} [{low:.0%}, {high:.0%}]; {_figures(result)}")
    publish(config, {**result, "low": low, "high": high})
    return 0


@contextmanager
def _shared(config: Config, world: World) -> Iterator[SharedRobots | None]:
    """Alarms, operators and console of the robots while the body runs; None if none is configured."""
    section, rows = config.drive, world.batch_size
    assist = section.assist
    if assist == DriveAssist() and section.console.port is None:
        yield None
        return
    if assist.rewind == "adaptive":
        raise ConfigError("drive.assist.rewind=adaptive is for collect: set a number of control steps.")
    site = Site(world.spec.action, world.spec.fps, rows, lambda: build_controller(config.world, world))
    operator = make_operator(assist.operator, site, assist.operator_options) if assist.operator else None
    begin = time.monotonic()
    assistance = assisted(assist, world.spec.action, rows, operator, lambda: time.monotonic() - begin)
    with ExitStack() as stack:
        stack.callback(assistance.close)
        fleet = None
        if section.console.port is not None:
            fleet = Fleet(assistance, site, [f"robot {row + 1}" for row in range(rows)])
            key = section.console.api_key or os.environ.get("ROBOPOLICY_API_KEY", "")
            console_page = stack.enter_context(Console(fleet, replace(section.console, api_key=key)))
            output.print(f"Console: {console_page.address}")
        yield SharedRobots(world, assistance, counting_alarms(assist, rows), fleet)


def _run_robot(config: Config) -> int:
    """Drive a LeRobot robot."""
    section = config.drive
    attached = narrowed(AttachedRobot, section)
    with connected(section, section.server_timeout) as client:
        lerobot_robot = make_lerobot_robot(
            load_dotted(section.robot, "Robot") if is_dotted(section.robot) else section.robot, section.robot_options
        )

        def wire(shows: Mapping[str, Any], takes: Mapping[str, Any]) -> ElementMapping:
            return map_elements(client.metadata, shows, takes, section.rename, section.scale)

        settings = _settings(config, client)
        robot = AttachedLeRobot(
            lerobot_robot,
            wire,
            robot_timeout=section.robot_timeout,
            frozen_camera_timeout=section.frozen_camera_timeout,
            settings=settings,
        )
        output.print(robot.wiring.text(), markup=False)
        fps = described_policy(client.metadata).fps
        rate = section.rate or fps
        if not same_rate(rate, fps):
            warnings.warn(
                f"drive.rate={rate:g}, but the policy was trained for {fps:g} steps per second: the robot moves "
                "faster or slower than in its training data.",
                RobopolicyWarning,
                stacklevel=2,
            )
        steps = section.episodes * round(section.seconds * rate)
        with (
            _recording(config, client.metadata) as recorder,
            _ended_by_signals(),
            robot,
            progress("driving", steps) as advance,
        ):

            def executed(step: Mapping[str, Any] | None) -> None:
                if recorder is not None and step is None:
                    recorder.end("robot")
                elif recorder is not None and step is not None:
                    recorder.step("robot", RecordedStep(**step), section.task)

            result = drive_robot(
                robot,
                client,
                episodes=section.episodes,
                rate=rate,
                attached=attached,
                settings=settings,
                notices=Notices(_note),
                advance=advance,
                executed=executed,
            )
    output.print(f"{result['wall_seconds']:.1f} s at {result['rate']:g} control steps per second; {_figures(result)}")
    publish(config, {**result, "robot": section.robot})
    return 0


@contextmanager
def _recording(config: Config, description: Mapping[str, Any]) -> Iterator[RobotRecorder | None]:
    """Record in drive.record while the body runs; None if it is not set. Prints what was recorded."""
    section = config.drive
    if section.record is None:
        yield None
        return
    with RobotRecorder(section.record, description, limit=1e9 * section.record_limit) as recorder:
        recorder.require_ready()
        yield recorder
    text = f"Recorded {recorder.state['steps']} steps in {section.record}"
    if recorder.dropped:
        text += f"; {recorder.dropped} were lost: {recorder.error or 'the disk is too slow, or the limit reached'}"
    output.print(text, markup=False, soft_wrap=True)


def _as_seen(section: WorldSection, client: PolicyClient) -> WorldSection:
    """Return the world with the cameras that the served policy reads, if any."""
    described_policy(client.metadata)  # which says what is wrong with a server that describes none
    fields = {key: Field(tuple(field["shape"])) for key, field in client.metadata["observation"].items()}
    return replace(section, **images_of(fields))


def _settings(config: Config, client: PolicyClient) -> RobotSettings:
    """Return the robot settings; warns when prefetch has no effect because the server's policy determines it."""
    settings = with_served_hold(narrowed(RobotSettings, config.drive), client.metadata)
    policy = described_policy(client.metadata)
    for message in _without_effect(config, policy):
        warnings.warn(message, RobopolicyWarning, stacklevel=2)
    if settings.prefetch and (policy.overlap or policy.ahead):
        when_asked = (
            "whenever a chunk of its predicted actions has been executed"
            if policy.overlap
            else ("according to the latency that it was trained for")
        )
        warnings.warn(
            f"drive.prefetch={settings.prefetch} has no effect: this server is called {when_asked}.",
            RobopolicyWarning,
            stacklevel=2,
        )
        return replace(settings, prefetch=0)
    return settings


def _without_effect(config: Config, policy: DescribedPolicy) -> Iterator[str]:
    """Yield a message for each setting that has no effect with this policy, with the reason."""
    section = config.drive
    if section.hold != "auto" and Kind.UNKNOWN not in policy.kinds:
        yield (
            f"drive.hold={section.hold} has no effect: names and units define the hold action of every element "
            "(override with drive.positions or drive.hold_values)."
        )
    if section.blend and policy.ahead:
        yield (
            f"drive.blend={section.blend} has no effect: this policy was trained with latency, so its chunks do not "
            "overlap."
        )
    elif section.blend and not section.prefetch and not policy.overlap:
        yield (
            f"drive.blend={section.blend} has no effect: with drive.prefetch=0 a chunk is completely executed before "
            "the next one arrives."
        )
    if section.max_observation_age is not None and section.rate < 0:
        yield (
            f"drive.max_observation_age={section.max_observation_age:g} has no effect: with drive.rate=-1 the robot "
            "waits for every answer."
        )


def _figures(result: Mapping[str, Any]) -> str:
    latency = ", ".join(f"{name} {value:.1f} ms" for name, value in result["latency_ms"].items() if name != "max")
    return (
        f"latency {latency or 'unknown'}; of {result['steps']} steps {result['deadline_misses']} late, "
        f"{result['held']} held, {result['clipped']} clipped, {result['outside']} far outside the training data; "
        f"{result['stale']} answers discarded as too late; {result['failures']} server failures"
    )


def _note(text: str) -> None:
    """Print a line next to the progress bar."""
    console.print(f"[bold yellow]Note:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Handle termination and hang-up signals like Ctrl-C while the body runs: a robot must not be left moving."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.default_int_handler) for each in ENDING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
