"""Offline model-based RL: an agent with critics learns from short imagined rollouts that start in recorded states.

The loop of MBPO, MOPO and RAVL. Every epoch rolls out the agent in the imagined world, up to its truncation, stores the
transitions of the last epochs, and updates on batches mixed with a fraction of recorded ones. The world's penalty makes
it MOPO, the agent's many critics make it RAVL. The end of imagination is not treated as the end of the task.

Monitored: whether values exceed the range that the rewards allow (`alarm`), and the number of transitions into states
from which none starts. The benchmark edge_of_reach runs this loop; no command does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.player import Player
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import Observation
from robopolicy.core.transitions import Transitions
from robopolicy.core.world import Rows, World
from robopolicy.rl.offline.decisions import edge_of_reach, value_bound
from robopolicy.rl.offline.interface import Interface


class Agent(Protocol):
    """Agent that learns from transitions; actions are in [-1, 1]."""

    @property
    def discount(self) -> float:
        """Discount factor per step."""
        ...

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step and return metrics."""
        ...

    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [B, A], without noise when `generator` is None."""
        ...

    def value(self, state: Tensor) -> Tensor:
        """Return the agent's estimated value, [B]."""
        ...


@dataclass(frozen=True)
class ImaginedValuesConfig:
    """Settings of learning values in imagination. epochs: number of epochs, each with `rollouts` imagined rollouts and
    `updates` batches; keep: number of past epochs whose transitions are stored; real_share: fraction of recorded
    transitions per batch; alarm: largest allowed `beyond_bound` (see `learn_in_imagination`); training stops above
    it; 0 disables it.
    """

    epochs: int = 20
    rollouts: int = 2000
    updates: int = 250
    batch_size: int = 256
    real_share: float = 0.05
    keep: int = 5
    alarm: float = 0.0

    def __post_init__(self):
        if min(self.epochs, self.rollouts, self.updates, self.batch_size, self.keep) < 1:
            raise ConfigError("epochs, rollouts, updates, batch_size and keep must be at least 1.")
        if not 0 <= self.real_share <= 1:
            raise ConfigError(f"real_share={self.real_share} must be in [0, 1].")
        if not self.alarm >= 0:
            raise ConfigError(f"alarm {self.alarm} must be 0 (disabled) or more.")


class AgentController:
    """An agent as a world controller, deterministic or sampling from `generator`."""

    def __init__(self, agent: Agent, interface: Interface, generator: torch.Generator | None = None):
        self.agent = agent
        self.interface = interface
        self.generator = generator

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] in the world's units."""
        return self.interface.to_world(self.agent.act(self.interface.state(observation), self.generator))[:, 0]


class Explorer:
    """Actor that also returns the agent's states [B, S] and actions [B, A]; act: states -> actions."""

    def __init__(self, interface: Interface, act: Callable[[Tensor], Tensor]):
        self.interface, self.act = interface, act

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; there is no state."""

    def choose(self, observation: Observation) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """Return one control step [B, 1, A] in the world's units, and the agent's states and actions."""
        state = self.interface.state(observation)
        action = self.act(state)
        return self.interface.to_world(action), (state, action)


EdgeValue = Callable[[Tensor], Tensor]
"""Discounted values (discount * V) of states [N, S] where imagination stops; true values are the oracle remedy for the
edge-of-reach problem.
"""


def roll_out(
    world: World,
    agent: Agent,
    interface: Interface,
    rollouts: int,
    seed: int,
    name: str,
    generator: torch.Generator,
    edge_value: EdgeValue | None = None,
) -> Transitions:
    """Play `rollouts` episodes, rounded up to full batches, and return their transitions.

    edge_value: added to the reward where imagination stops, and the transition ends there.
    """
    player = Player(world, Explorer(interface, lambda state: agent.act(state, generator)))
    parts = []
    episode_count = 0
    turn = 0
    while episode_count < rollouts:
        player.start(episode_seeds(seed, f"{name}/{turn}", world.batch_size))
        episode_count, turn = episode_count + world.batch_size, turn + 1
        for part in player:
            (state, action), step = part.info, part.step
            following = interface.state(step.observation)
            reward = np.stack(list(step.rewards.values())).sum(0)[:, 0]
            # Only a terminated task ends the backup: where imagination or time stops, the next state's value counts.
            rewards, is_over = torch.from_numpy(reward).float(), torch.from_numpy(step.terminated)
            if edge_value is not None and step.horizon_end is not None:
                is_truncated = torch.from_numpy(step.horizon_end)
                rewards, is_over = (
                    torch.where(is_truncated, rewards + edge_value(following), rewards),
                    is_over | is_truncated,
                )
            transitions = Transitions(state, action, rewards, following, is_over, torch.from_numpy(step.success))
            # `running` is of before the step, so the transition that ends an episode is kept and no later one.
            parts.append(transitions.take(torch.from_numpy(part.running & step.valid[:, 0])))
    return Transitions.join(parts)


def learn_in_imagination(
    agent: Agent,
    world: World,
    recorded: Transitions,
    config: ImaginedValuesConfig,
    generators: Generators,
    *,
    seed: int = 0,
    run: RunFolder | None = None,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
    edge_value: EdgeValue | None = None,
) -> list[dict[str, Any]]:
    """Improve `agent` in the imagined `world`; returns one record per epoch.

    world: its resets give the initial states, its truncation the horizon; recorded: transitions with actions in [-1,
    1]. evaluate: called with the epoch number; its metrics are added to the record. Each record contains the mean
    value of the first 2048 recorded states, the bound that rewards allow (looser with `edge_value`, which is part of
    them), `beyond_bound` (the relative excess over it), the fraction of transitions at the edge of reach, and the
    metrics of the last update.
    """
    interface, records = Interface.of(world.spec), []
    history: list[Transitions] = []
    # Rounded on the recorded side, so both parts always add up to the batch.
    imagined_count = config.batch_size - round(config.real_share * config.batch_size)
    with progress("Training in imagination", config.epochs) as advance:
        for epoch in range(1, config.epochs + 1):
            name, draws = f"rollout/{epoch}", generators["act"]
            new_transitions = roll_out(world, agent, interface, config.rollouts, seed, name, draws, edge_value)
            # Old transitions are of an agent that acts differently by now, and of states that it no longer visits.
            history = [*history, new_transitions.check()][-config.keep :]
            imagined_data = Transitions.join(history)
            figures: dict[str, Tensor] = {}
            for _ in range(config.updates):
                batch = Transitions.join(
                    [
                        imagined_data.draw(imagined_count, generators["batches"]),
                        recorded.draw(config.batch_size - imagined_count, generators["batches"]),
                    ]
                )
                figures = agent.update(batch, generators["update"])
            lowest, highest = value_bound(torch.cat([imagined_data.reward, recorded.reward]), agent.discount)
            value = float(agent.value(recorded.state[:2048]).mean())
            record = {
                "epoch": epoch,
                "value": value,
                "value_bound": highest,
                "beyond_bound": max(value - highest, lowest - value, 0.0) / max(abs(lowest), abs(highest), 1e-9),
                "edge_share": float(edge_of_reach(imagined_data).float().mean()),
                **{key: float(figure) for key, figure in figures.items()},
                **({} if evaluate is None else evaluate(epoch)),
            }
            records.append(record)
            if run is not None:
                run.log(record)
            advance(note=f"value {value:.2f}")
            if config.alarm and not record["beyond_bound"] <= config.alarm:  # NaN stops too
                break
    return records
