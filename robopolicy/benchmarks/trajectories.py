"""Policy-guided diffusion on push_cube: are its trajectories on-policy, are they true, and do they teach?

Truth is asked of the simulator, by replaying trajectories from their own first states with their own actions.
Source: Jackson et al. 2024, arXiv:2404.06356; the ensemble beside it rolls the target policy out step by step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from robopolicy.benchmarks.replay import TASK, replay
from robopolicy.core.episodes import Episodes
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, derive, episode_seeds
from robopolicy.data.record import record
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.rl.offline.batches import Batch
from robopolicy.rl.offline.td3_bc import Td3Bc, Td3BcConfig
from robopolicy.training.fit import FitConfig
from robopolicy.training.imagined_values import AgentController, Interface
from robopolicy.training.stages import fit_stages
from sims.experts import Noise, NoisyController
from sims.registry import load_task, make_world
from worldmodels.ensemble import EnsembleConfig, EnsembleModel
from worldmodels.trajectory_diffusion import TrajectoryConfig, TrajectoryDiffusion
from worldmodels.transitions import TransitionData

EPISODES = 200


@dataclass(frozen=True)
class Scale:
    """recorded: control steps of data; fit: training steps of the generator and of the ensemble; synthetic: stretches
    generated at a time; updates: of an agent; refresh: updates between generations; share: of a batch, synthetic steps;
    guidance: strengths compared, the last but one also teaches.
    """

    recorded: int = 5000
    fit: int = 3000
    synthetic: int = 1024
    updates: int = 15_000
    refresh: int = 5000
    share: float = 240 / 256
    batch_size: int = 256
    guidance: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    taught_by: float = 1.0
    agent: Td3BcConfig = field(default_factory=lambda: Td3BcConfig(rate=1e-3, tau=0.01))
    trajectories: TrajectoryConfig = field(default_factory=TrajectoryConfig)


def collect(seed: int, steps: int) -> Episodes:
    """Return episodes of a noisy expert, half of them nearly random: some succeed, most wander."""
    world, parts, turn = make_world(TASK, 64, seed=seed), [], 0
    while sum(part.step_count for part in parts) < steps:
        for level in (0.5, 1.5):
            actor = NoisyController(
                load_task(TASK).expert(), Noise(gaussian=level), derive(seed, f"{level}/{turn}"), world.spec.action
            )
            parts.append(record(world, actor, episode_seeds(seed, f"recorded/{level}/{turn}", 16)))
        turn += 1
    world.close()
    return Episodes.concatenate(parts)


def batch_of(data: TransitionData, interface: Interface, bonus: Tensor | None = None) -> Batch:
    """Return transitions as agents take them: actions in [-1, 1]."""
    reward = data.reward if bonus is None else data.reward + bonus
    return Batch(data.state, interface.to_agent(data.action), reward, data.next_state, data.terminated).check()


def train_agent(
    scale: Scale,
    recorded: Batch,
    seed: int,
    synthesise: Callable[[Any, int], Batch] | None = None,
) -> Td3Bc:
    """Return TD3+BC on recorded transitions, or on mostly synthetic ones, drawn anew every so many updates.

    synthesise: (agent, how often it was asked before) -> synthetic transitions for this agent.
    """
    agent = Td3Bc(scale.agent, recorded.state.shape[1], recorded.action.shape[1], derive(seed, "agent"))
    agent.fit_statistics(recorded.state)
    draws = Generators(seed)
    synthetic, count = None, round(scale.share * scale.batch_size)
    with progress("TD3+BC", scale.updates) as advance:
        for update in range(scale.updates):
            if synthesise is not None and update % scale.refresh == 0:
                synthetic = synthesise(agent, update // scale.refresh)
            if synthetic is None:
                batch = recorded.draw(scale.batch_size, draws["batches"])
            else:
                parts = [synthetic.draw(count, draws["batches"])]
                batch = Batch.join([*parts, recorded.draw(scale.batch_size - count, draws["batches"])])
            agent.update(batch, draws["update"])
            if update % 500 == 499:
                advance(500)
    return agent


def measure(seed: int, scale: Scale) -> dict[str, Any]:
    """Return likelihood and truth by guidance beside the ensemble's, and the success of agents on real and on both."""
    episodes = collect(seed, scale.recorded)
    world = make_world(TASK, EPISODES, seed=seed)
    interface = Interface(world.spec)
    generators = Generators(seed)
    settings = FitConfig(steps=scale.fit, learning_rate=2e-3, checkpoint_every=10**9)
    model = TrajectoryDiffusion.build(scale.trajectories, world.spec, episodes, derive(seed, "trajectories"))
    fit_stages(model, episodes, settings, generators)
    ensemble = EnsembleModel.build(EnsembleConfig(), world.spec, episodes, derive(seed, "ensemble"))
    fit_stages(ensemble, episodes, FitConfig(steps=scale.fit, learning_rate=3e-3, checkpoint_every=10**9), generators)
    data = TransitionData.of(episodes)
    assert episodes.reward is not None
    recorded = batch_of(data, interface, episodes.reward - data.reward)
    spread = data.state.std(0, correction=0).clamp_min(1e-6)
    alone = train_agent(scale, recorded, seed)

    def likelihood(agent: Td3Bc) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda state, action: agent.log_prob(state, interface.to_agent(action))

    found: dict[str, Any] = {"guidance": {}, "ensemble": _ensemble_error(ensemble, alone, interface, data, spread)}
    for strength in scale.guidance:
        steps = model.generate(256, generators["generate"], likelihood(alone), strength)
        state, action = steps[..., : model.states], steps[..., model.states : model.states + model.actions]
        action = action.clamp(interface.low, interface.high)
        flat = likelihood(alone)(state.flatten(0, 1), action.flatten(0, 1)).detach()
        true = replay(state[:, 0], action[:, :-1])
        error = ((state[:, 1:] - true) / spread).square().mean((0, 2)).sqrt()
        found["guidance"][str(strength)] = {"log_likelihood": float(flat.mean()), "error": error.tolist()}

    def synthesise(agent: Any, turn: int) -> Batch:
        steps = model.generate(scale.synthetic, generators["synthesise"], likelihood(agent), scale.taught_by)
        made = model.transitions(steps)
        return batch_of(made, interface)

    both = train_agent(scale, recorded, seed, synthesise)
    for name, agent in (("real data", alone), ("real and guided", both)):
        seeds = episode_seeds(seed, "judge", EPISODES)
        judged = evaluate_policy(world, AgentController(agent, interface), seeds, label=name)
        found[name] = {"success": judged.success_rate, "return": float(judged.returns.mean()), **_interval(judged)}
    found["data_success"] = float(episodes.success.float().mean()) if episodes.success is not None else None
    world.close()
    return found


def _interval(judged: Any) -> dict[str, float]:
    return {"low": judged.interval[0], "high": judged.interval[1]}


def _ensemble_error(
    model: EnsembleModel, agent: Td3Bc, interface: Interface, data: TransitionData, spread: Tensor, length: int = 31
) -> dict[str, Any]:
    """Return the error, by step, of rolling the agent out in the ensemble from recorded states."""
    rows = torch.linspace(0, len(data) - 1, 256).long()
    state = data.state[rows]
    latent = {"state": state, "seed": rows.clone(), "step": torch.zeros(len(rows), dtype=torch.int64)}
    states, actions = [], []
    for _ in range(length):
        action = torch.from_numpy(interface.to_world(agent.act(latent["state"]))).float()
        latent, _ = model.imagine(latent, action)
        states.append(latent["state"])
        actions.append(action)
    true = replay(state, torch.stack(actions, 1))
    error = ((torch.stack(states, 1) - true) / spread).square().mean((0, 2)).sqrt()
    return {"error": error.tolist()}
