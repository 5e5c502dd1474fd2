"""Drives a simulated robot, in its own process and in real time, against a policy server; prints success and latency.

Start `robopolicy serve CHECKPOINT` first; the world is the one that its policy comes from, unless you name one.
drive.rate=-1 runs as fast as the server answers.
"""

from dataclasses import replace

from robopolicy.build import build_world
from robopolicy.configuration import Config
from robopolicy.core.structured import narrowed
from robopolicy.evaluation.intervals import wilson
from robopolicy.runs import output, publish
from robopolicy.serving.client import PolicyClient
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.drive import drive
from robopolicy.verbs.evaluate import evaluation_seeds
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Drive a simulated robot against a policy server",
    sections=("run", "world", "drive"),
    example="robopolicy drive drive.port=8000",
    world_from={"drive.port": "server"},
)


def run(config: Config) -> int:
    """Connect, drive, print."""
    section = config.drive
    with PolicyClient(section.host, section.port, api_key=section.api_key or None) as client:
        world = build_world(config.world, batch_size=1, seed=config.run.seed)
        rate = world.spec.fps if section.rate == 0 else max(section.rate, 0.0)
        chunk = int(client.metadata.get("chunk", 1))
        robot = replace(narrowed(RobotSettings, section), prefetch=min(section.prefetch, chunk - 1))
        result = drive(world, client, evaluation_seeds(config, section.episodes), rate=rate, robot=robot)
        world.close()
    low, high = wilson(result["successes"], result["episodes"])
    output.print(
        f"Success {result['successes']}/{result['episodes']} [{low:.0%}, {high:.0%}]; "
        f"latency p50 {result['latency_ms']['p50']:.1f} ms, p90 {result['latency_ms']['p90']:.1f} ms, "
        f"p99 {result['latency_ms']['p99']:.1f} ms; {result['deadline_misses']} late, {result['held']} held still and "
        f"{result['clipped']} clipped of {result['steps']} steps"
    )
    publish(config, {**result, "low": low, "high": high})
    return 0
