"""Offline model-based RL: an agent with critics learns from short imagined rollouts that begin in recorded states.

The loop of MBPO, MOPO and RAVL: every epoch rolls the agent out in the imagined world (its truncation says how far),
keeps the transitions of the last epochs, and updates on batches of them with a share of recorded ones. What makes it
MOPO is the world's penalty, what makes it RAVL the agent's many critics. The end of imagination is no end of the task.

Watched: whether values leave what the rewards allow (`alarm`), and how many transitions lead to where none begins.
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
    """What learns from transitions; actions are in [-1, 1]."""

    @property
    def discount(self) -> float:
        """What a reward is worth one step later."""
        ...

    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step and return figures."""
        ...

    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [B, A], without noise where there is no generator."""
        ...

    def value(self, state: Tensor) -> Tensor:
        """Return what the agent expects to earn, [B]."""
        ...


@dataclass(frozen=True)
class ImaginedValuesConfig:
    """epochs of `rollouts` imagined rollouts and `updates` batches; keep: how many epochs' transitions stay;
    real_share: of a batch, recorded transitions; alarm: stop when values exceed the rewards' bound so many times, 0 for
    never.
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
            raise ConfigError(f"real_share {self.real_share} must be in [0, 1].")


class AgentController:
    """An agent as a controller of a world, noise-free or drawing from `generator`."""

    def __init__(self, agent: Agent, interface: Interface, generator: torch.Generator | None = None):
        self.agent = agent
        self.interface = interface
        self.generator = generator

    def reset(self, rows: Rows = None) -> None:
        """It remembers nothing."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] in the world's units."""
        return self.interface.to_world(self.agent.act(self.interface.state(observation), self.generator))[:, 0]


class Explorer:
    """An actor that also tells states [B, S] and actions [B, A] as an agent has them; act: states -> actions."""

    def __init__(self, interface: Interface, act: Callable[[Tensor], Tensor]):
        self.interface, self.act = interface, act

    def reset(self, rows: Rows = None) -> None:
        """It remembers nothing."""

    def choose(self, observation: Observation) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        """Return one control step [B, 1, A] in the world's units, and what was seen and done."""
        state = self.interface.state(observation)
        action = self.act(state)
        return self.interface.to_world(action), (state, action)


EdgeValue = Callable[[Tensor], Tensor]
"""What states [N, S] are worth where imagination stops: knowing it is the oracle's cure for the edge of reach."""


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
    """Play at least `rollouts` episodes (or what imagination leaves of them) and return their transitions.

    edge_value: what it says (discounted) is paid where imagination stops, and the transition ends there.
    """
    player = Player(world, Explorer(interface, lambda state: agent.act(state, generator)))
    parts = []
    begun = 0
    turn = 0
    while begun < rollouts:
        player.start(episode_seeds(seed, f"{name}/{turn}", world.batch_size))
        begun, turn = begun + world.batch_size, turn + 1
        for played in player:
            (state, action), step = played.info, played.step
            following = interface.state(step.observation)
            reward = np.stack(list(step.rewards.values())).sum(0)[:, 0]
            # Only a terminated task ends the backup: where imagination or time stops, the next state's value counts.
            paid, over = torch.from_numpy(reward).float(), torch.from_numpy(step.terminated)
            if edge_value is not None and step.horizon_end is not None:
                stopped = torch.from_numpy(step.horizon_end)
                paid, over = torch.where(stopped, paid + edge_value(following), paid), over | stopped
            found = Transitions(state, action, paid, following, over, torch.from_numpy(step.success))
            # `running` is of before the step, so the transition that ends an episode is kept and no later one.
            parts.append(found.take(torch.from_numpy(played.running & step.valid[:, 0])))
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
    """Improve `agent` in the imagined `world`; returns one record an epoch.

    world: its resets are where imagination begins, its truncation how far it goes; recorded: transitions with actions
    in [-1, 1]. evaluate: called with the epoch's number, its figures join the record. The record has the mean value
    where rollouts begin, the bound that rewards allow, how far values are beyond it, and the share of transitions at
    the edge of reach.
    """
    interface, records = Interface.of(world.spec), []
    kept: list[Transitions] = []
    # Rounded on the recorded side, so both parts always add up to the batch.
    imagined_count = config.batch_size - round(config.real_share * config.batch_size)
    with progress("Learning in imagination", config.epochs) as advance:
        for epoch in range(1, config.epochs + 1):
            name, draws = f"rollout/{epoch}", generators["act"]
            fresh = roll_out(world, agent, interface, config.rollouts, seed, name, draws, edge_value)
            # Old transitions are of an agent that acts differently by now, and of states that it no longer visits.
            kept = [*kept, fresh.check()][-config.keep :]
            imagined = Transitions.join(kept)
            figures: dict[str, Tensor] = {}
            for _ in range(config.updates):
                batch = Transitions.join(
                    [
                        imagined.draw(imagined_count, generators["batches"]),
                        recorded.draw(config.batch_size - imagined_count, generators["batches"]),
                    ]
                )
                figures = agent.update(batch, generators["update"])
            lowest, highest = value_bound(torch.cat([imagined.reward, recorded.reward]), agent.discount)
            value = float(agent.value(recorded.state[:2048]).mean())
            record = {
                "epoch": epoch,
                "value": value,
                "value_bound": highest,
                "beyond_bound": max(value - highest, lowest - value, 0.0) / max(abs(lowest), abs(highest), 1e-9),
                "edge_share": float(edge_of_reach(imagined).float().mean()),
                **{name: float(figure) for name, figure in figures.items()},
                **({} if evaluate is None else evaluate(epoch)),
            }
            records.append(record)
            if run is not None:
                run.log(record)
            advance(note=f"value {value:.2f}")
            if config.alarm and record["beyond_bound"] > config.alarm:
                break
    return records
