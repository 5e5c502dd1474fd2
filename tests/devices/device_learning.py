"""Everything that learns by reward on a device: fine-tuning, agents, improvers, judges, and what they leave behind."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_policies import IMAGE, LANGUAGE, TOKEN, VARIANTS, generator, made, played, small
from random_world import IMAGES, STATES, RandomWorld, recorded

from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import WorldSpec
from robopolicy.evaluation.deployment import MixedPolicy
from robopolicy.policies.configuration import Likelihood
from robopolicy.policies.loading import load_policy
from robopolicy.rl.critic import state_critic
from robopolicy.rl.offline.configuration import AGENTS
from robopolicy.rl.offline.decisions import actions_at, recorded_decisions, value_bound
from robopolicy.rl.offline.fqe import FqeConfig, fit_q
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.presets import PRESETS
from robopolicy.training.configuration import DistillConfig, FinetuneConfig, FitConfig, OnlineConfig
from robopolicy.training.critics import AgentPolicy, BestOfPolicy, fit_agent, steer
from robopolicy.training.distill import distill
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.offline.configuration import IMPROVERS
from robopolicy.training.offline.improvers import Imagination, OfflineContext
from robopolicy.training.online import learn_online, plays_noise, plays_policy

SMALL_LEARNING = {
    "width": 16,
    "depth": 1,
    "critics": 2,
    "steps": 2,
    "batch_size": 8,
    "decisions": 8,
    "minibatch": 8,
    "epochs": 1,
    "candidates": 2,
}
TUNING = FinetuneConfig(
    rollout_length=2,
    groups=2,
    group_size=2,
    epochs=1,
    minibatch=12,
    evaluate_every=0,
    iterations=2,
    critic_warmup=1,
    branch_at=(1,),
    checkpoint_every=1,
)
BY_MATCHING = {"ac_flow", "afd", "fpo"}
NEED_TEACHER = {"distillation", "afd"}


def tuned(
    algorithm: str,
    device: str,
    kind: str = "diffusion",
    changes: dict[str, Any] | None = None,
    spec: WorldSpec = STATES,
) -> dict[str, Any]:
    """Fine-tune a policy for two iterations, saving after each; return its weights."""
    matching = {"likelihood": Likelihood.MATCHING, "matching_samples": 2} if algorithm in BY_MATCHING else {}
    policy, teacher = (made(kind, device, {**(changes or {}), **matching}, spec) for _ in range(2))
    policy.prepare_finetuning(None)
    teacher.prepare_finetuning(None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        critic = state_critic(spec.observation, policy.spec.history, 16, 1, spec.instructions).to(device)
        for weight in teacher.trainable_parameters():
            weight.add_(0.05 * torch.randn(weight.shape).to(device))
    guidance = Guidance(teacher) if algorithm in NEED_TEACHER else Guidance()
    world = RandomWorld(4, spec, policy.spec.history)
    config = FinetuneConfig(**{**vars(TUNING), "algorithm": algorithm})
    with tempfile.TemporaryDirectory() as folder:
        finetune(policy, critic, world, config, RunFolder(Path(folder)), seed=0, guidance=guidance)
        again = FinetuneConfig(**{**vars(config), "iterations": 3})
        finetune(policy, critic, world, again, RunFolder(Path(folder)), seed=0, guidance=guidance)
    return {"weights": list(policy.parameters()), "critic": list(critic.parameters())}


def tunings() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every algorithm, and some with other policies: name, device -> what comes of it."""
    for algorithm in PRESETS:
        yield f"finetune, {algorithm}", lambda device, algorithm=algorithm: tuned(algorithm, device)
    frozen = {"image": IMAGE.__class__(features=8, channels=(8, 8, 8), frozen=True)}
    yield "finetune, frozen images", lambda device: tuned("dppo", device, "flow", frozen, IMAGES)
    yield "finetune, images", lambda device: tuned("grpo", device, "flow", {"image": IMAGE, "history": 2}, IMAGES)
    yield "finetune, tokens", lambda device: tuned("ppo", device, "token", {"token": TOKEN}, LANGUAGE)
    words = VARIANTS["flow"]["words"][0]
    yield "finetune, words", lambda device: tuned("grpo", device, "flow", words, LANGUAGE)


def agent_of(kind: str, device: str, interface: Interface) -> Any:
    """Return a small untrained agent of a registered kind."""
    config = AGENTS.configuration(kind)(**small(AGENTS.configuration(kind), SMALL_LEARNING))
    return AGENTS.builds(kind)(config, interface.size, interface.actions, 0).to(device)


def agent(kind: str, device: str) -> dict[str, Any]:
    """Fit an agent to recorded decisions with a kill in between, let it act, learn on in the world, and load it."""
    episodes, interface = recorded().to(device), Interface.of(STATES, 2)
    data = recorded_decisions(episodes, interface, 0.9).transitions
    learner = agent_of(kind, device, interface)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        for steps in (2, 3):
            fit_agent(learner, data, steps, 8, Generators(0, device), run=folder)
        policy = AgentPolicy(learner, interface, STATES.fps)
        config = OnlineConfig(steps=24, warmup=8, batch_size=8, offline_ratio=0.5, evaluate_at=(), evaluate_every=0)
        base = plays_policy(made("flow", device), policy)
        learn_online(policy, RandomWorld(4), base, config, recorded=data, begins="already", run=folder)
        loaded = load_policy(folder.checkpoint, device)
    with torch.no_grad():
        values = learner.value(data.state), learner.action_values(data.state, data.action)
    return {"weights": list(learner.parameters()), "values": values, **played(loaded, device)}


def agents() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every registered kind: name, device -> what comes of it."""
    for kind in AGENTS:
        yield f"agent, {kind}", lambda device, kind=kind: agent(kind, device)


def improved(kind: str, device: str) -> dict[str, Any]:
    """Let an improver make a candidate of a policy and a critic."""
    episodes, interface = recorded().to(device), Interface.of(STATES, 2)
    critic, data = agent_of("iql", device, interface), recorded_decisions(episodes, interface, 0.9)
    fit_agent(critic, data.transitions, 1, 8, Generators(0, device))

    def new_critic(seed: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return state_critic(STATES.observation, 1, 16).to(device)

    lesson = OfflineContext(critic, data, interface, Imagination(RandomWorld(4), TUNING, new_critic))
    settings = IMPROVERS.configuration(kind)
    improver = IMPROVERS.builds(kind)(settings(**small(settings, SMALL_LEARNING)))
    policy = made("flow" if kind == "adjoint_matching" else "diffusion", device)
    if hasattr(improver, "wrap"):
        policy = improver.wrap(policy, lesson, 0).to(device)
    improver.prepare(policy)
    figures = improver.improve(policy, lesson, Generators(0, device), 1.0, "round 1")
    return {"weights": list(policy.parameters()), "figures": figures, **played(policy, device)}


def improvers() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every registered kind: name, device -> what comes of it."""
    for kind in IMPROVERS:
        yield f"improver, {kind}", lambda device, kind=kind: improved(kind, device)


def distilled(device: str) -> dict[str, Any]:
    """Distil a policy on episodes of the CPU."""
    config = DistillConfig(steps=1, batch_size=8, fit=FitConfig(steps=2, warmup=1))
    student, _ = distill(made("diffusion", device), recorded(), config)
    return {"weights": list(student.parameters()), **played(student, device)}


def steering(device: str) -> dict[str, Any]:
    """Steer a flow by its noise and learn that in the world."""
    config = AGENTS.configuration("rlpd")(**small(AGENTS.configuration("rlpd"), SMALL_LEARNING))
    policy = steer(
        made("flow", device), config, STATES.observation, ("",), bound=2.0, seed=0, kind="rlpd", steers=False
    )
    policy.to(device)
    online = OnlineConfig(steps=24, warmup=8, batch_size=8, evaluate_at=(), evaluate_every=0)
    with tempfile.TemporaryDirectory() as name:
        learn_online(policy, RandomWorld(4), plays_noise(policy), online, run=RunFolder(Path(name)))
        loaded = load_policy(RunFolder(Path(name)).checkpoint, device)
    return {"weights": list(policy.parameters()), **played(loaded, device)}


def judged(device: str) -> dict[str, Any]:
    """Evaluate a policy by fitted Q evaluation, choose by a critic, and let two take turns."""
    episodes, interface = recorded().to(device), Interface.of(STATES, 2)
    data, policy = recorded_decisions(episodes, interface, 0.9), made("flow", device)
    drawn = actions_at(policy, episodes, data.next_frame, generator(device), samples=2)
    flat = interface.to_agent(drawn.flatten(0, 1)).reshape(len(data), 2, -1)
    bounds = value_bound(data.transitions.reward, 0.9)
    config = FqeConfig(steps=2, batch_size=8, width=16, depth=1)
    fitted = fit_q(data.transitions, flat, bounds, config, generator(device))
    best = BestOfPolicy(policy, agent_of("iql", device, interface), interface, 3)
    values: dict[str, Any] = {"fqe": fitted.values(data.transitions.state, flat), **played(best, device)}
    for coin in ("step", "episode"):
        mixed = MixedPolicy(policy, made("diffusion", device), 0.5, 4, coin)
        mixed.reset()
        mixed.reset(np.array([0]))
        values[coin] = played(mixed, device)
    return values


def others() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield what is in no registry."""
    yield "distilled", distilled
    yield "steered", steering
    yield "judged", judged
