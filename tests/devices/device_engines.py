"""Every engine, sampler and chunking on a device; a new one of the registries comes by itself."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from device_policies import made, played

from robopolicy.core.errors import ConfigError
from robopolicy.inference.chunking import Delay
from robopolicy.inference.configuration import CHUNKINGS, SYNCHRONOUS, InferenceConfig
from robopolicy.inference.engine import ENGINES, with_engine
from robopolicy.inference.samplers import SAMPLERS
from robopolicy.nn.configuration import DenoiserKind

UNTRIED = {"compiled": "torch.compile traces tensors of the device itself, and pretended ones are none"}
"""Engines that cannot run on a device that is not there, and why."""


def decided(engine: str, kind: str, denoiser: DenoiserKind, device: str, sampler: str = "") -> dict[str, Any]:
    """Let an engine decide for a policy that was prepared for fine-tuning."""
    policy = made(kind, device, {"denoiser": denoiser, "sampling_steps": 4})
    if not sampler:
        policy.prepare_finetuning(2)
    return played(with_engine(policy, InferenceConfig(engine=engine, sampler=sampler)), device)


def engines() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every engine with every denoiser, every sampler, every chunking: name, device -> what comes of it."""
    for engine in ENGINES:
        for denoiser in DenoiserKind if engine not in UNTRIED else ():
            for kind in ("diffusion", "flow"):
                given = engine, kind, denoiser
                yield f"engine, {engine}, {kind}, {denoiser.value}", lambda device, given=given: decided(*given, device)
    for sampler in SAMPLERS:
        yield f"sampler, {sampler}", lambda device, sampler=sampler: sampled(sampler, device)
    for chunking in CHUNKINGS:
        yield f"chunking, {chunking}", lambda device, chunking=chunking: delayed(chunking, device)


def sampled(sampler: str, device: str) -> list[dict[str, Any]]:
    """Let a sampler take the place of a policy's own, for the kinds that it is for."""
    decisions: list[dict[str, Any]] = []
    for kind in ("diffusion", "flow"):
        with suppress(ConfigError):
            decisions.append(decided("lean", kind, DenoiserKind.MLP, device, sampler))
    assert decisions, f"{sampler} is for no kind of policy"
    return decisions


def delayed(chunking: str, device: str) -> list[dict[str, Any]]:
    """Let a policy act twice with a delay, one trained for it where a chunking asks for that."""
    make, delay = CHUNKINGS.load(chunking), Delay(0 if chunking == SYNCHRONOUS else 1)
    try:
        policy = make(made("flow", device, {"prediction_steps": 8}), delay)
    except ConfigError:
        policy = make(made("flow", device, {"prediction_steps": 8, "prefix_steps": 2}), delay)
    policy.reset()
    return [played(policy, device), played(policy, device)]
