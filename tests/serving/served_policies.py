"""Policies with a visible answer, and the process that serves them; imported by the spawned process too."""

import asyncio
import time
from dataclasses import replace

import torch

from robopolicy.client.protocol import Limits
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind
from robopolicy.serving.server import PolicyServer, ServerSettings, serve

FRONT = "observation.images.front"
KEY = "secret"
KEEPALIVE = 0.4


class Echo:
    """Answers [newest state, oldest state, mean of the newest image, batch size] as a chunk of four one-D actions.

    State -1 makes it raise, -2 answer NaN; `pause` seconds pass in every call with a state of at least 5.
    """

    def __init__(self, pause: float = 0.0):
        self.pause = pause
        fields = {STATE: Field((2,)), FRONT: Field((4, 6, 3), "uint8", 0, 255)}
        self.spec = PolicySpec(fields, Field((1,)), 2, 4, 4, 1, 10.0, ("push the cube",))

    def act(self, observation, generator, *, deterministic=False):
        state = observation[STATE]
        rows = len(state)
        if (state[:, -1, 0] == -1).any():
            raise RuntimeError("the policy exploded")
        if (state[:, -1, 0] >= 5).any():
            time.sleep(self.pause)
        image = observation[FRONT][:, -1].float().mean((1, 2, 3))
        words = torch.tensor([float(len(text)) for text in observation["task"]])
        actions = torch.stack([state[:, -1, 0], state[:, 0, 0], image, torch.full((rows,), float(rows))], 1)
        actions[:, 2] += 1000 * words
        actions[state[:, -1, 0] == -2] = torch.nan
        return Decision(actions[..., None], {}, torch.zeros(rows, 1), torch.ones(rows, 1, dtype=torch.bool))

    def log_prob(self, observation, latents): ...

    def reset(self, rows=None): ...

    def save(self, folder): ...


class Odd(Echo):
    """Answers two chunks to whoever sends state -3, hangs at state -4, raises SystemExit at -5 and StopIteration at -6;
    noise: whether answers are drawn.
    """

    def __init__(self, noise: bool = False):
        super().__init__()
        self.noise = noise

    def act(self, observation, generator, *, deterministic=False):
        state = observation[STATE][:, -1, 0]
        if (state == -4).any():
            time.sleep(1000)
        if (state == -5).any():
            raise SystemExit(3)
        if (state == -6).any():
            raise StopIteration
        decision = super().act(observation, generator)
        if (state == -3).any():
            decision = Decision(decision.actions.repeat(2, 1, 1), {}, decision.logp, decision.mask)
        if self.noise:
            decision.actions[:, 0, 0] = torch.randn(len(state), generator=generator)
        return decision


class Steady:
    """A state of two numbers in, chunks of four two-dimensional actions out, all as large as can be."""

    spec = PolicySpec({STATE: Field((2,))}, Field((2,), low=-1.0, high=1.0), 1, 4, 4, 1, 20.0)

    def act(self, observation, generator, *, deterministic=False):
        rows = len(observation[STATE])
        actions = torch.ones(rows, 4, 2)
        return Decision(actions, {}, torch.zeros(rows, 1), torch.ones(rows, 1, dtype=torch.bool))

    def reset(self, rows=None): ...


class Centring:
    """Moves a camera's joints: pan to zero, lift to the brightness of its image."""

    def __init__(self):
        joints = Field((2,), low=-1.0, high=1.0, unit="rad", names=("pan", "lift"))
        self.spec = PolicySpec({STATE: joints, FRONT: Field((4, 6, 3), "uint8", 0, 255)}, joints, 1, 1, 1, 1, 10.0)

    def act(self, observation, generator, *, deterministic=False):
        brightness = observation[FRONT][:, -1].float().mean((1, 2, 3)) / 255
        actions = torch.stack([torch.zeros_like(brightness), brightness], 1)[:, None]
        return Decision(actions, {}, torch.zeros(len(actions), 1), torch.ones(len(actions), 1, dtype=torch.bool))

    def reset(self, rows=None): ...


def ahead():
    """A flow of two-dimensional actions that predicts eight steps and executes four."""
    config = DenoisingPolicyConfig(kind=PolicyKind.FLOW, width=32, sampling_steps=4, chunk=4, prediction_steps=8)
    return DenoisingPolicy(config, {STATE: Field((2,))}, Field((2,), low=-1.0, high=1.0), fps=20.0)


POLICIES = {
    "ahead": ahead,
    "steady": Steady,
    "centring": Centring,
    "echo": Echo,
    "odd": Odd,
    "noisy": lambda: Odd(noise=True),
    "slow": lambda: Echo(pause=1.5),
}

PLAIN = {
    "open": ("echo", {}),
    "locked": ("echo", {"api_key": KEY}),
    "slow": ("slow", {"keepalive": KEEPALIVE}),
    "steady": ("steady", {}),
    "going_on": ("ahead", {"chunking": "rtc", "chunking_options": {"max_guidance_weight": 4.0}}),
}
"""A quick policy, the same behind a key, a slow one, one whose actions are known, and one whose plans follow on."""


def run_servers(pipe, wanted: dict[str, tuple[str, dict]]) -> None:
    """Serve the policies that are wanted, name -> (policy, settings); send their ports; stop when told."""

    async def main() -> None:
        stop, ports = asyncio.Event(), {}

        def ready(name, port):
            ports[name] = port
            if len(ports) == len(wanted):
                pipe.send(ports)

        def told() -> None:
            pipe.recv()
            stop.set()

        asyncio.get_running_loop().add_reader(pipe.fileno(), told)
        servers = {name: PolicyServer(*made(*each)) for name, each in wanted.items()}
        tasks = [server.run(stop, lambda port, name=name: ready(name, port)) for name, server in servers.items()]
        await asyncio.gather(*tasks)

    asyncio.run(main())


def made(policy: str, settings: dict) -> tuple[Echo, ServerSettings]:
    """Return a policy by name and the settings of its server; `limits` among them replace single ones."""
    served, chosen = POLICIES[policy](), dict(settings)
    if "limits" in chosen:
        chosen["limits"] = replace(Limits.of(served.spec), **chosen["limits"])
    return served, ServerSettings(port=0, **chosen)


def run_serve(pipe, port: int) -> None:
    """Serve until a signal comes, then report a clean end."""
    serve(Echo(pause=0.3), ServerSettings(port=port), pipe.send)
    pipe.send("stopped")


def run_one(pipe, policy: str, settings: dict) -> None:
    """Serve one policy until a signal comes."""
    serve(*made(policy, settings), pipe.send)


def run_with_parent(pipe) -> None:
    """Serve until the process that started this one ends."""
    serve(Echo(), ServerSettings(port=0, exit_with_parent=True), pipe.send)
