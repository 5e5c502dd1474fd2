"""Edge of reach: values diverge with short imagined rollouts even in a perfect model; critic ensembles prevent it.

Arms: `base` (soft actor-critic with two critics on truncated rollouts, as in MBPO), `penalty` (MOPO's penalty on model
uncertainty, which true dynamics do not have), `patched` (bootstraps from the true value where imagination stops; it
must be known), `RAVL` (minimum of ten critics with a diversity loss) and `long` (rollouts to the end of the episode).
Source: Sims et al. 2024, arXiv:2402.12527.

The smallest such problem is a point in space whose dynamics are known exactly. State: its position in AXES dimensions;
action: a step of at most STEP along each axis; reward: -COST times the distance from the origin before the step. All
values are at most 0, and moving straight to the origin is optimal. The source has two dimensions; with eight there is
always a direction in which critics extrapolate upwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.benchmarks.runs import chosen_from
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.player import Player
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds, uniforms
from robopolicy.core.spec import STATE, Field, WorldSpec
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.transitions import Transitions
from robopolicy.core.world import Snapshot, World
from robopolicy.evaluation.plots import value_curves
from robopolicy.evaluation.report import Section
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.rl.offline.configuration import SacConfig
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.offline.sac import Sac
from robopolicy.training.imagined_values import (
    AgentController,
    EdgeValue,
    Explorer,
    ImaginedValuesConfig,
    learn_in_imagination,
)
from robopolicy.verbs.bench import Benchmark, Table
from sims.engine import MujocoWorld
from sims.registry import load_task, make_world
from worldmodels.env import ImaginedWorld, Truncation
from worldmodels.oracle import OracleModel
from worldmodels.protocol import Context, Imagined, Latent, Starts

AXES = 8
STEP = 1.0
COST = 0.02
REACH = 2.0

SPEC = WorldSpec(
    name="point",
    observation={STATE: Field((AXES,))},
    action=Field((AXES,), low=-1.0, high=1.0),
    fps=10,
    horizon=50,
    rewards=("cost",),
    success="It never ends.",
)


class PointModel:
    """The true dynamics as a `WorldModel`."""

    spec = SPEC

    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent of the newest frame, {"state": [N, AXES]}."""
        return {"state": torch.from_numpy(np.asarray(context.last(STATE), dtype=np.float32))}

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Move by actions [N, AXES] at most STEP along each axis; nothing is uncertain."""
        state = latent["state"]
        after = state + STEP * actions.float().clamp(-1, 1)
        never = torch.zeros(len(state), dtype=torch.bool)
        rewards = {"cost": -COST * state.norm(dim=1)}
        return {"state": after}, Imagined({STATE: after}, rewards, never, never, torch.zeros(len(state)))


def starts(seeds: np.ndarray) -> Context:
    """Return initial contexts within REACH of the origin along every axis, one for each of `seeds` [N]."""
    place = (2 * uniforms(np.asarray(seeds, dtype=np.int64), AXES) - 1) * REACH
    return Context({STATE: place.astype(np.float32)[:, None]})


def best_value(state: Tensor, discount: float, steps: int = 400) -> Tensor:
    """Return the optimal value [N] of states [N, AXES]: moving straight to the origin in steps of at most STEP along
    each axis.
    """
    total, factor = torch.zeros(len(state)), 1.0
    for _ in range(steps):
        total, factor = total - factor * COST * state.norm(dim=1), factor * discount
        state = state - state.clamp(-STEP, STEP)
        if not bool(state.any()):
            break
    return total


ROWS = 500
EPISODES = 200
RECORDED = 5000


@dataclass(frozen=True)
class Problem:
    """A world with exactly known dynamics, and recorded transitions from which imagination starts.

    imagined: (truncation, penalty) -> the world for rollouts; real: the world for evaluation; recorded: transitions
    with actions in [-1, 1]; agent: settings of the agent; steps: length of imagined rollouts; diversity: weight of
    RAVL's diversity loss (too much makes critics too pessimistic, too little lets values diverge); edge_value: the true
    value of states, if it is known.
    """

    imagined: Callable[[Truncation, float], World]
    real: World
    recorded: Transitions
    agent: SacConfig
    steps: int
    diversity: float
    edge_value: EdgeValue | None = None


@dataclass(frozen=True)
class Arm:
    """Settings of an arm.

    critics: number of critics, with a diversity loss if there are more than two; penalty: weight of the penalty on
    uncertainty; patched: bootstrap from the true value where imagination stops; whole: rollouts to the end of the
    episode.
    """

    critics: int = 2
    penalty: float = 0.0
    patched: bool = False
    whole: bool = False


ARMS = {
    "base": Arm(),
    "penalty": Arm(penalty=5.0),
    "patched": Arm(patched=True),
    "RAVL": Arm(critics=10),
    "long": Arm(whole=True),
}


PROBLEMS = {
    "point": tuple(ARMS),
    "push_cube": tuple(arm for arm in ARMS if arm != "patched"),
}
"""Problem -> its arms; true values are known for the point alone."""

LENGTH = ImaginedValuesConfig(epochs=16, rollouts=1000, updates=250)


def point_problem(seed: int) -> Problem:
    """Return the problem of the point that moves to the origin."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "point"))
    state = torch.from_numpy(starts(episode_seeds(seed, "recorded", RECORDED)).last(STATE))
    action = 2 * torch.rand(RECORDED, AXES, generator=generator) - 1
    never = torch.zeros(RECORDED, dtype=torch.bool)
    transitions = Transitions(state, action, -COST * state.norm(dim=1), state + STEP * action, never)
    agent = SacConfig(width=64, depth=2, learning_rate=3e-3, tau=0.1, temperature=1e-4, learn_temperature=False)

    def imagined(truncation: Truncation, penalty: float) -> World:
        return ImaginedWorld(PointModel(), starts, ROWS, truncation=truncation, penalty=penalty)

    return Problem(
        imagined,
        ImaginedWorld(PointModel(), starts, EPISODES),
        transitions,
        agent,
        5,
        0.01,
        lambda state: agent.discount * best_value(state, agent.discount),
    )


def task_problem(task: str, seed: int) -> Problem:
    """Return the problem of a MuJoCo task whose own simulator is the model; rollouts start in states from random
    actions.

    They last two steps: joint limits leave less room for extrapolation than open space, so the edge must be near.
    """
    transitions, starts = random_play(MujocoWorld(load_task(task), ROWS, seed=seed), seed)
    agent = SacConfig(width=64, depth=2, learning_rate=3e-3, tau=0.1, temperature=1e-4, learn_temperature=False)

    def imagined(truncation: Truncation, penalty: float) -> World:
        simulator = MujocoWorld(load_task(task), ROWS, seed=seed)
        return ImaginedWorld(OracleModel(simulator), starts, ROWS, truncation=truncation, penalty=penalty)

    return Problem(imagined, make_world(task, EPISODES, seed=seed), transitions, agent, 2, 1.0)


def build_problem(name: str, seed: int) -> Problem:
    """Return the problem `point`, or that of a MuJoCo task."""
    return point_problem(seed) if name == "point" else task_problem(name, seed)


def random_play(world: MujocoWorld, seed: int) -> tuple[Transitions, Starts]:
    """Return transitions of random actions, and a function that returns initial states among theirs, one per seed."""
    interface = Interface.of(world.spec)
    generator = torch.Generator().manual_seed(derive_seed(seed, "random play"))

    def at_random(state: Tensor) -> Tensor:
        return 2 * torch.rand(len(state), interface.actions, generator=generator) - 1

    player = Player(world, Explorer(interface, at_random))
    player.start(episode_seeds(seed, "random play", world.batch_size))
    parts = []
    frames = []
    snapshots = []

    def present() -> tuple[dict[str, np.ndarray], Snapshot]:
        newest = {key: player.observation[key][:, -1:].copy() for key in world.spec.observation}
        return newest, world.snapshot(np.arange(world.batch_size))

    before, snapshot = present()
    for part in player:
        state, action = part.info
        step = part.step
        rows = np.flatnonzero(part.running)
        reward, following = torch.from_numpy(step.reward[:, 0]).float(), interface.state(step.observation)
        transitions = Transitions(state, action, reward, following, torch.from_numpy(step.terminated))
        parts.append(transitions.take(torch.from_numpy(rows)))
        frames.append({key: value[rows] for key, value in before.items()})
        snapshots.append(snapshot.take(rows).arrays)
        if sum(map(len, parts)) >= RECORDED:
            break
        before, snapshot = present()
    frames_of = {key: np.concatenate([frame[key] for frame in frames]) for key in frames[0]}
    states = {name: np.concatenate([arrays[name] for arrays in snapshots]) for name in snapshots[0]}

    def starts(seeds: np.ndarray) -> Context:
        index = np.asarray(seeds) % len(next(iter(frames_of.values())))
        simulator_states = Snapshot(states).take(index).arrays
        return Context({key: value[index] for key, value in frames_of.items()}, state=simulator_states)

    return Transitions.join(parts), starts


def measure(problem: Problem, name: str, seed: int, config: ImaginedValuesConfig) -> dict[str, Any]:
    """Return the records of one arm, and the real return and success of its agent without noise.

    Raises ConfigError for an unknown arm, or one that needs true values when they are not known.
    """
    if name not in ARMS:
        raise ConfigError(f"There is no arm '{name}'.{did_you_mean(name, ARMS)}")
    arm = ARMS[name]
    if arm.patched and problem.edge_value is None:
        raise ConfigError("The true values of this world are unknown: the arm 'patched' cannot compute its penalty.")
    diversity = problem.diversity if arm.critics > 2 else 0.0
    settings = {**problem.agent.__dict__, "critics": arm.critics, "diversity": diversity}
    interface = Interface.of(problem.real.spec)
    agent = Sac(SacConfig(**settings), interface.size, interface.actions, derive_seed(seed, "agent"))
    agent.fit_statistics(problem.recorded.state)
    world = problem.imagined(Truncation(steps=None if arm.whole else problem.steps), arm.penalty)
    edge_value, data = problem.edge_value if arm.patched else None, problem.recorded
    if edge_value is not None:
        rewards = data.reward + edge_value(data.next_state)
        data = replace(data, reward=rewards, terminated=torch.ones_like(data.terminated))
    records = learn_in_imagination(agent, world, data, config, Generators(seed), seed=seed, edge_value=edge_value)
    seeds = episode_seeds(seed, "judge", EPISODES)
    evaluation = evaluate_policy(problem.real, AgentController(agent, interface), seeds, label=name)
    last = records[-1]
    return {
        "arm": name,
        "seed": seed,
        "value": last["value"],
        "beyond_bound": last["beyond_bound"],
        "edge_share": last["edge_share"],
        "return": float(evaluation.returns.mean()),
        "success": evaluation.success_rate,
        "records": records,
    }


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"problems": {problem: {arm: {seed: results}}}}, running what is missing."""
    arms_to_run = chosen_from(config, ARMS)
    results: dict[str, Any] = {}
    for problem, arms in PROBLEMS.items():
        results[problem] = {arm: {} for arm in arms if arm in arms_to_run}
        for seed in config.bench.seeds:
            for arm in results[problem]:
                path = root / problem / arm / f"{seed}.json"
                if not path.exists():
                    write_json(path, measure(build_problem(problem, seed), arm, seed, LENGTH))
                results[problem][arm][str(seed)] = read_json(path)
    return {"problems": results}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per problem."""
    return [table_of(problem, arms) for problem, arms in figures["problems"].items()]


def table_of(problem: str, arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of a problem: values and returns over seeds, and the fraction of impossible values."""
    header = [
        "arm",
        "seeds",
        "mean value",
        "times beyond what rewards allow",
        "seeds beyond it",
        "return in the real world",
    ]
    lines = []
    for arm, seeds in arms.items():
        runs: Sequence[Mapping[str, Any]] = list(seeds.values())
        value, beyond, real_return = (
            median_of([run[key] for run in runs]) for key in ("value", "beyond_bound", "return")
        )
        impossible = sum(run["beyond_bound"] > 0 for run in runs)
        lines.append([arm, str(len(runs)), value, beyond, f"{impossible} of {len(runs)}", real_return])
    return Table(f"{problem}: median over seeds (lowest to highest), after learning", header, lines)


def median_of(values: Sequence[float]) -> str:
    """Return the median with the range."""
    low, high = min(values), max(values)
    return f"{number(float(np.median(values)))} ({number(low)} to {number(high)})"


def number(value: float) -> str:
    """Format a number of any size: no decimals from a thousand on, else three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def sections(figures: Mapping[str, Any], root: Path) -> list[Section]:
    """Return plots of the growth of learned values."""
    caption = "Mean value where rollouts begin, one line a seed, on a logarithmic scale."
    return [
        Section(
            problem,
            caption,
            svg=value_curves({arm: [run["records"] for run in seeds.values()] for arm, seeds in arms.items()}),
        )
        for problem, arms in figures["problems"].items()
    ]


BENCHMARK = Benchmark(
    "Do short imagined rollouts make values diverge even in a perfect model, and which methods keep them bounded?",
    ("seeds", "only"),
    benchmark,
    tables,
    sections,
    frozenset({"records"}),
)
