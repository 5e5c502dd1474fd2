"""Policy-guided diffusion: whether its trajectories are on-policy and accurate, and whether agents learn from them.

Accuracy: push_cube's simulator replays trajectories from their own first states with their own actions. The data are
narrow, nearly clean demonstrations, and step-by-step rollouts leave the region that an ensemble knows. Learning:
reach_planar with few, nearly random recorded actions, where a better policy visits states with few data. Source:
Jackson et al. 2024, arXiv:2404.06356; the baseline is an ensemble in which the target policy is rolled out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.benchmarks.rates import rate_of, rate_text, spread_text
from robopolicy.benchmarks.replay import TASK, replay
from robopolicy.benchmarks.runs import each_seed, expert
from robopolicy.core.episodes import Episodes
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.spec import WorldSpec
from robopolicy.core.transitions import Transitions
from robopolicy.data.record import record, record_until
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.rl.offline.configuration import Td3BcConfig
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.offline.td3 import Td3Bc
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from robopolicy.training.imagined_values import AgentController
from robopolicy.verbs.bench import Benchmark, Table
from sims.registry import make_world
from worldmodels.configuration import EnsembleConfig, TrajectoryConfig
from worldmodels.data import recorded_transitions
from worldmodels.ensemble import EnsembleModel
from worldmodels.trajectory_diffusion import TrajectoryDiffusion

TAUGHT_TASK = "reach_planar"
EPISODES = 200
SHOWN = (1, 8, 16, 31)
"""Steps after which the error of a trajectory is kept."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement.

    recorded, noise: control steps of data and noise of the expert, for accuracy; taught_recorded, taught_noise: for
    learning; fit, taught_fit: training steps of the generators (and of the ensemble); synthetic: number of subsequences
    per generation, of taught_length steps; updates: of an agent; refresh: updates between generations; share: fraction
    of synthetic steps in a batch; guidance: guidance strengths that are compared; taught_by: strengths for learning.
    """

    recorded: int = 3000
    noise: float = 0.2
    fit: int = 2500
    guidance: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    taught_recorded: int = 1000
    taught_noise: float = 8.0
    taught_fit: int = 2500
    taught_length: int = 16
    taught_by: tuple[float, ...] = (0.0, 1.0)
    synthetic: int = 1024
    updates: int = 6000
    refresh: int = 2000
    share: float = 0.8
    batch_size: int = 256
    agent: Td3BcConfig = field(default_factory=lambda: Td3BcConfig(learning_rate=1e-3, tau=0.01, discount=0.9))
    trajectories: TrajectoryConfig = field(default_factory=TrajectoryConfig)


def collect(task: str, seed: int, steps: int, noise: float) -> Episodes:
    """Return at least this many control steps of a noisy expert, in complete episodes."""
    world = make_world(task, 64, seed=seed)

    def play(turn: int) -> Episodes:
        actor = expert(world, noise, derive_seed(seed, f"{noise}/{turn}"))
        return record(world, actor, episode_seeds(seed, f"recorded/{noise}/{turn}", 8))

    episodes = record_until(steps, play)
    world.close()
    return episodes


def batch_of(data: Transitions, interface: Interface, bonus: Tensor | None = None) -> Transitions:
    """Return transitions for agents: actions in [-1, 1]."""
    reward = data.reward if bonus is None else data.reward + bonus
    return replace(data, action=interface.to_agent(data.action), reward=reward).check()


def recorded_batch(episodes: Episodes, interface: Interface) -> Transitions:
    """Return recorded transitions with the world's rewards for success."""
    data = recorded_transitions(episodes)
    assert episodes.reward is not None
    return batch_of(data, interface, episodes.reward - data.reward)


def train_agent(
    scale: Scale,
    recorded: Transitions,
    seed: int,
    synthesise: Callable[[Td3Bc], Transitions] | None = None,
) -> Td3Bc:
    """Return TD3+BC on recorded transitions, or on mostly synthetic ones, sampled again at a fixed interval of updates.

    synthesise: agent -> synthetic transitions for this agent.
    """
    agent = Td3Bc(scale.agent, recorded.state.shape[1], recorded.action.shape[1], derive_seed(seed, "agent"))
    agent.fit_statistics(recorded.state)
    draws = Generators(seed)
    synthetic, count = None, round(scale.share * scale.batch_size)
    with progress("TD3+BC", scale.updates) as advance:
        for update in range(scale.updates):
            if synthesise is not None and update % scale.refresh == 0:
                synthetic = synthesise(agent)
            if synthetic is None:
                batch = recorded.draw(scale.batch_size, draws["batches"])
            else:
                parts = [synthetic.draw(count, draws["batches"])]
                batch = Transitions.join([*parts, recorded.draw(scale.batch_size - count, draws["batches"])])
            agent.update(batch, draws["update"])
            if update % 500 == 499:
                advance(500)
    return agent


def generator_of(
    config: TrajectoryConfig, spec: WorldSpec, episodes: Episodes, steps: int, seed: int, generators: Generators
) -> TrajectoryDiffusion:
    """Return a trained generator of subsequences."""
    model = TrajectoryDiffusion.build(config, spec, episodes, derive_seed(seed, "trajectories"))
    fit_stages(model, episodes, FitConfig(steps=steps, learning_rate=2e-3, checkpoint_every=10**9), generators)
    model.calibrate(episodes)
    return model.eval()


def likelihood(agent: Td3Bc, interface: Interface) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (states, actions in the world's units) -> log-probability under the agent."""
    return lambda state, action: agent.log_prob(state, interface.to_agent(action))


def measure(seed: int, scale: Scale) -> dict[str, Any]:
    """Return likelihood and error by guidance strength, the ensemble's error, and the success of agents."""
    return {**truth_by_guidance(seed, scale), "agents": agents_trained(seed, scale)}


def truth_by_guidance(seed: int, scale: Scale) -> dict[str, Any]:
    """Return {"guidance": {strength: {"log_likelihood", "error_after_steps"}}, "ensemble":
    {"error_after_steps"}}, errors in standard deviations of the data.
    """
    episodes, world = collect(TASK, seed, scale.recorded, scale.noise), make_world(TASK, 1, seed=seed)
    interface, generators = Interface.of(world.spec), Generators(seed)
    model = generator_of(scale.trajectories, world.spec, episodes, scale.fit, seed, generators)
    ensemble = EnsembleModel.build(EnsembleConfig(), world.spec, episodes, derive_seed(seed, "ensemble"))
    fit_stages(ensemble, episodes, FitConfig(steps=scale.fit, learning_rate=3e-3, checkpoint_every=10**9), generators)
    data = recorded_transitions(episodes)
    spread = data.state.std(0, correction=0).clamp_min(1e-6)
    target = train_agent(scale, recorded_batch(episodes, interface), seed)
    results: dict[str, Any] = {"guidance": {}, "ensemble": _ensemble_error(ensemble, target, interface, data, spread)}
    for strength in scale.guidance:
        steps = model.generate(256, generators["generate"], likelihood(target, interface), strength)
        state, action = steps[..., : model.states], steps[..., model.states : model.states + model.actions]
        action = action.clamp(interface.low, interface.high)
        flat = likelihood(target, interface)(state.flatten(0, 1), action.flatten(0, 1)).detach()
        true_states = replay(state[:, 0], action[:, :-1])
        error = ((state[:, 1:] - true_states) / spread).square().mean((0, 2)).sqrt()
        results["guidance"][str(strength)] = {"log_likelihood": float(flat.mean()), "error_after_steps": by_step(error)}
    world.close()
    return results


def agents_trained(seed: int, scale: Scale) -> dict[str, Any]:
    """Return the success of agents by training data: real data, and real with generated data."""
    episodes = collect(TAUGHT_TASK, seed, scale.taught_recorded, scale.taught_noise)
    world, generators = make_world(TAUGHT_TASK, EPISODES, seed=seed), Generators(seed)
    interface, config = Interface.of(world.spec), replace(scale.trajectories, length=scale.taught_length)
    model = generator_of(config, world.spec, episodes, scale.taught_fit, seed, generators)
    data = recorded_batch(episodes, interface)

    def generated(strength: float) -> Callable[[Td3Bc], Transitions]:
        def synthesise(agent: Td3Bc) -> Transitions:
            subsequences = model.generate(
                scale.synthetic, generators["synthesise"], likelihood(agent, interface), strength
            )
            return batch_of(model.transitions(subsequences), interface)

        return synthesise

    lessons = {"real data": None} | {f"and generated, guidance {each:g}": generated(each) for each in scale.taught_by}
    results: dict[str, Any] = {}
    for name, synthesise in lessons.items():
        controller = AgentController(train_agent(scale, data, seed, synthesise), interface)
        evaluation = evaluate_policy(world, controller, episode_seeds(seed, "judge", EPISODES), label=name)
        low, high = evaluation.interval
        results[name] = {
            "success": evaluation.success_rate,
            "low": low,
            "high": high,
            "return": float(evaluation.returns.mean()),
        }
    assert episodes.success is not None
    results["recorded episodes"] = {"success": float(episodes.success.float().mean())}
    world.close()
    return results


def _ensemble_error(
    model: EnsembleModel, agent: Td3Bc, interface: Interface, data: Transitions, spread: Tensor, length: int = 31
) -> dict[str, Any]:
    """Return the error, by step, of rolling the agent out in the ensemble from recorded states."""
    rows = torch.linspace(0, len(data) - 1, 256).long()
    state = data.state[rows]
    latent = {"state": state, "seed": rows.clone(), "step": torch.zeros(len(rows), dtype=torch.int64)}
    states, actions = [], []
    for _ in range(length):
        action = torch.from_numpy(interface.to_world(agent.act(latent["state"]))[:, 0]).float()
        latent, _ = model.imagine(latent, action)
        states.append(latent["state"])
        actions.append(action)
    true_states = replay(state, torch.stack(actions, 1))
    error = ((torch.stack(states, 1) - true_states) / spread).square().mean((0, 2)).sqrt()
    return {"error_after_steps": by_step(error)}


def by_step(error: Tensor) -> dict[str, float]:
    """Return {number of steps: error} of errors [L], for the numbers of steps in the tables."""
    return {str(step): float(error[step - 1]) for step in SHOWN if step <= len(error)}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the effect of guidance on trajectories and the success of agents trained on them; means over the seeds."""
    runs = list(figures["seeds"].values())
    steps = list(next(iter(runs[0]["guidance"].values()))["error_after_steps"])
    header = ["guidance", "log-likelihood of the target policy", *(f"error after {step} steps" for step in steps)]
    lines = []
    for strength in runs[0]["guidance"]:
        seed_results = [run["guidance"][strength] for run in runs]
        errors = [f"{np.mean([each['error_after_steps'][step] for each in seed_results]):.3f}" for step in steps]
        lines.append([strength, f"{np.mean([each['log_likelihood'] for each in seed_results]):.3f}", *errors])
    ensemble = [f"{np.mean([run['ensemble']['error_after_steps'][step] for run in runs]):.3f}" for step in steps]
    lines.append(["ensemble, step by step", "", *ensemble])
    agents = []
    for name in runs[0]["agents"]:
        seed_results = [run["agents"][name] for run in runs]
        each = ", ".join(rate_text(rate_of(round(run["success"] * EPISODES), EPISODES)) for run in seed_results)
        returns = f"{np.mean([run['return'] for run in seed_results]):.2f}" if "return" in seed_results[0] else ""
        agents.append([name, spread_text(run["success"] for run in seed_results), each if returns else "", returns])
    header_agents = ["learns from", "success: mean over seeds (range)", "each seed (Wilson 95 %)", "mean return"]
    return [
        Table(f"{TASK}: on-policy, and true? Errors in standard deviations of the data, means of seeds", header, lines),
        Table(f"{TAUGHT_TASK}: TD3+BC judged in the simulator", header_agents, agents),
    ]


BENCHMARK = Benchmark(
    "Are guided trajectories more on-policy and more accurate than step-by-step rollouts, and good training data?",
    ("seeds",),
    each_seed(lambda seed, folder: measure(seed, Scale())),
    tables,
)
