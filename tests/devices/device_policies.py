"""Every policy at work on a device: it acts, scores, learns and is saved; new kinds come by themselves."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_world import IMAGES, STATES, TEXTS, RandomWorld, recorded

from robopolicy.building.policies import load_policy
from robopolicy.core.errors import ConfigError
from robopolicy.core.examples import example_batch, example_observation
from robopolicy.core.player import PolicyActor
from robopolicy.core.policy import DecidesFromNoise, FinishesChain, Policy, ResumesDecision, ScoredPolicy
from robopolicy.core.randomness import EpisodeGenerator, Generators
from robopolicy.core.regression import Staged
from robopolicy.core.spec import WorldSpec
from robopolicy.nn.configuration import ActionTokens, DenoiserKind, FlowNoise, ImageEncoderConfig, Prediction
from robopolicy.policies.advantage_conditioned import condition_on_advantage
from robopolicy.policies.configuration import Likelihood, PolicyKind, TextEncoder
from robopolicy.policies.loading import build_policy
from robopolicy.policies.registry import POLICIES
from robopolicy.policies.token.configuration import DecodeSchedule, TokenConfig, TokenDecoding
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.distill import few_step_student
from robopolicy.training.fit import fit_stages
from robopolicy.training.pretrain import pretrain
from worldmodels.configuration import VideoConfig

SMALL = {"width": 16, "depth": 1, "heads": 2, "batch_size": 8, "sampling_steps": 3, "prediction_steps": 4, "chunk": 2}
"""What is made small wherever a configuration has it."""
TOKEN = TokenConfig(width=16, depth=1, heads=2, feed_forward=16, bins=9, patch=8)
IMAGE = ImageEncoderConfig(features=8, channels=(8, 8, 8), random_shift=2)
VIDEO = VideoConfig(
    size="tiny", channels=(8, 16, 16), width=32, depth=1, heads=2, recent=1, memory=0, chunk=2, bootstrap_fraction=0.0
)
FIT = FitConfig(steps=2, learning_rate=5e-4, warmup=1)
LANGUAGE = replace(STATES, instructions=TEXTS)
DENOISING: dict[str, tuple[dict[str, Any], WorldSpec]] = {
    **{kind.value: ({"denoiser": kind}, STATES) for kind in DenoiserKind},
    "images": ({"image": IMAGE, "history": 2}, IMAGES),
    "frozen images": ({"image": replace(IMAGE, frozen=True)}, IMAGES),
    "words": ({"text_encoder": TextEncoder.WORDS, "text_features": 8}, LANGUAGE),
    "matching": ({"likelihood": Likelihood.MATCHING, "matching_samples": 2}, STATES),
    "few noisy steps": ({"noisy_steps": 1}, STATES),
}
VARIANTS: dict[str, dict[str, tuple[dict[str, Any], WorldSpec]]] = {
    "diffusion": {
        **DENOISING,
        **{f"predicts {kind.value}": ({"prediction": kind, "denoising_steps": 20}, STATES) for kind in Prediction},
    },
    "flow": {**DENOISING, **{f"noise {kind.value}": ({"flow_noise": kind}, STATES) for kind in FlowNoise}},
    "joint_video": {"images": ({"video": VIDEO, "futures": 1, "values": 1}, IMAGES)},
    "token": {
        **{kind.value: ({"token": replace(TOKEN, actions=kind)}, LANGUAGE) for kind in ActionTokens},
        **{kind.value: ({"token": replace(TOKEN, decoding=kind)}, STATES) for kind in TokenDecoding},
        "ascending": (
            {
                "token": replace(
                    TOKEN, decoding=TokenDecoding.MASKED, decode_schedule=DecodeSchedule.ASCENDING, temperature=1.5
                )
            },
            STATES,
        ),
        "images": ({"token": TOKEN, "image": IMAGE, "history": 2}, IMAGES),
    },
}
"""Kind -> name -> (what differs from a small one, the world it learns in); other kinds are tried as they are."""


def made(kind: str, device: str, changes: dict[str, Any] | None = None, spec: WorldSpec = STATES) -> Any:
    """Return a small untrained policy of a registered kind."""
    config = POLICIES.configuration(kind)
    known = small(config, SMALL)
    if "kind" in {field.name for field in fields(config)}:
        known["kind"] = PolicyKind(kind)
    if "token" in {field.name for field in fields(config)}:
        known["token"] = TOKEN
    return build_policy(kind, config(**{**known, **(changes or {})}), spec, recorded(spec), 0, device)


def small(config: type, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what of `sizes` a configuration has, in the type that it has it in."""
    defaults = {field.name: field.default for field in fields(config)}
    return {name: value for name, value in sizes.items() if name in defaults and _alike(value, defaults[name])}


def _alike(value: Any, default: Any) -> bool:
    return default is MISSING or isinstance(value, type(default))


def kinds() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every registered kind in every variant: name, device -> policy."""
    for kind in POLICIES.names():
        if kind == "lerobot":  # begins with a checkpoint: see device_lerobots
            continue
        for name, (changes, spec) in VARIANTS.get(kind, {"as it is": ({}, STATES)}).items():
            yield f"{kind}, {name}", lambda device, kind=kind, given=(changes, spec): made(kind, device, *given)
    for kind in ("diffusion", "flow"):
        yield f"{kind}, student", lambda device, kind=kind: few_step_student(made(kind, device), 1)
        yield f"{kind}, advantage", lambda device, kind=kind: _told(made(kind, device))


def _told(policy: Any) -> Any:
    condition_on_advantage(policy)
    policy.network.guidance.fill_(1.5)
    return policy


def generator(device: str, seed: int = 0) -> torch.Generator:
    """Return a generator on a device."""
    return torch.Generator(device).manual_seed(seed)


def exercises() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield what every kind can do: name, device -> what comes of it."""
    for name, make in kinds():
        yield name, lambda device, make=make: at_work(make(device), device)
        yield f"{name}, trained", lambda device, make=make: trained(make(device), device)


def require_on(device: str, value: Any) -> None:
    """Raise AssertionError unless all tensors in nested values are on a device."""
    if isinstance(value, torch.Tensor):
        assert value.device.type == device, f"a tensor {list(value.shape)} is on {value.device}"
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            require_on(device, item)


def at_work(policy: Any, device: str) -> dict[str, Any]:
    """Let a policy do all that it can, prepared for fine-tuning where it can be; return what came of it."""
    if hasattr(policy, "prepare_finetuning"):
        with suppress(ConfigError):  # without noise nothing is scored
            policy.prepare_finetuning()
    observation = example_observation(policy.spec, 3, generator("cpu", 1), device)
    outputs: dict[str, Any] = {}
    for deterministic in (True, False):
        decision = policy.act(observation, generator(device), deterministic=deterministic)
        outputs[f"act {deterministic}"] = (decision.actions, decision.logp, decision.mask, decision.latents)
    if policy.spec.scored_steps and isinstance(policy, ScoredPolicy):
        outputs |= _scored(policy, decision, observation, device)
    if isinstance(policy, DecidesFromNoise):
        noise = torch.randn((3, *policy.noise_shape), generator=generator(device), device=device)
        path = policy.trajectory(observation, noise, through=1)
        outputs["trajectory"] = (path, policy.to_actions(path[:, -1]))
    if hasattr(policy, "loss") and not isinstance(policy, Staged):
        outputs["loss"] = policy.loss(example_batch(policy.spec, observation, device), generator(device))
        outputs["loss gradient"] = _gradient(policy, torch.cat(list(outputs["loss"].values())).mean())
    require_on(device, outputs)
    return outputs


def _scored(policy: Any, decision: Any, seen: Any, device: str) -> dict[str, Any]:
    scores = policy.log_prob(seen, decision.latents)
    chosen = torch.zeros(3, 1, dtype=torch.int64, device=device)
    outputs = {"log_prob": (scores.logp, scores.entropy, scores.extras)}
    outputs["gradient"] = _gradient(policy, scores.logp.sum() + scores.entropy.sum())
    if policy.spec.scored_steps > 1 and not policy.spec.categorical and "chain" in decision.latents:
        outputs["chosen"] = policy.log_prob(seen, {**decision.latents, "chosen": chosen}).logp
    executed = torch.tensor([[True, False]] * 3, device=device)
    outputs["executed"] = policy.log_prob(seen, {**decision.latents, "executed": executed}).logp
    count = torch.tensor([-1, 0, 1], device=device)
    if isinstance(policy, ResumesDecision):
        with suppress(ConfigError):  # some kinds of decisions cannot be gone on from
            resumed = policy.resume(seen, decision.latents, count, generator(device, 2))
            outputs["resume"] = (resumed.actions, resumed.logp, resumed.mask)
    if isinstance(policy, FinishesChain) and "chain" in decision.latents:
        outputs["finish"] = policy.finish_chain(seen, decision.latents["chain"][:, 1], count.clamp(min=0))
    return outputs


def _gradient(policy: Any, value: torch.Tensor) -> list[Any]:
    learning = [weight for weight in policy.parameters() if weight.requires_grad]
    return [each for each in torch.autograd.grad(value, learning, allow_unused=True) if each is not None]


def trained(policy: Any, device: str) -> dict[str, Any]:
    """Pre-train a policy on episodes of the CPU, save it, load it to the device and let it act in a world."""
    spec = replace(IMAGES if policy.spec.cameras else STATES, instructions=policy.spec.instructions)
    episodes = recorded(spec)
    if isinstance(policy, Staged):
        fit_stages(policy, episodes, FIT, Generators(0, device))
    else:
        pretrain(policy, episodes, PretrainConfig(fit=FIT, batch_size=8))
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "checkpoint")
        loaded = load_policy(Path(folder) / "checkpoint", device)
    return {"weights": list(policy.parameters()), **played(loaded, device, spec)}


def played(policy: Policy, device: str, spec: WorldSpec = STATES) -> dict[str, Any]:
    """Let a policy act in a world as it is evaluated, recorded and served."""
    world = RandomWorld(3, spec, policy.spec.history)
    observation = world.reset(seeds=[1, 2, 3])
    chunk, decided = PolicyActor(policy, generator(device), scored=True).choose(observation)
    world.step(chunk)
    require_on(device, (decided.seen, decided.decision.actions, decided.decision.logp, decided.decision.latents))
    evaluated = PolicyActor(policy, EpisodeGenerator(0, device))
    evaluated.begin(np.array([1, 2, 3]))
    return {"chunk": torch.from_numpy(chunk), "evaluated": torch.from_numpy(evaluated.choose(observation)[0])}
