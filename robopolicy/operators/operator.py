"""Interface of operators (`Operator`), how they are made, and scripted experts as operators.

An operator acts for robots that have asked for help, each a row of a batch. A custom operator is named by import path
or by the entry point robopolicy.operators. Axes: B row, R rows that are operated now, A action dimension, H history.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from robopolicy.client.executed import ActingAgent
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import named_arguments
from robopolicy.core.spec import Field, Observation
from robopolicy.core.world import Controller, Rows, begin_episodes
from robopolicy.operators import OPERATORS


@dataclass(frozen=True)
class Site:
    """Where an operator works. action: of the robots; fps: control steps per second; rows: number of robots B; expert:
    makes the scripted expert of the world, None where there is none.
    """

    action: Field
    fps: float
    rows: int
    expert: Callable[[], Controller] | None = None


@runtime_checkable
class Operator(Protocol):
    """Acts for one robot or, if scripted, for several. agent: who is recorded for its actions."""

    agent: ActingAgent

    def start(self, seeds: Array, rows: Rows = None) -> None:
        """New episodes with `seeds` [R] begin in `rows` [R] (None: all)."""
        ...

    def begin(self, rows: Array) -> None:
        """Take over the robots of `rows` [R]."""
        ...

    def act(self, observation: Observation, rows: Array, last: Array) -> Array:
        """Return the next control step of `rows` [R] as [R, A]; a row of NaN, for want of input, holds the robot still.

        observation: of all rows [B, H, ...]; last: previous actions of `rows`, [R, A].
        """
        ...

    def finished(self, rows: Array) -> Array:
        """Return the mask of `rows` that are to be handed back now, [R] bool."""
        ...

    def close(self) -> None:
        """Release devices."""
        ...


def make_operator(name: str, site: Site, options: Mapping[str, Any] | None = None) -> Operator:
    """Return the operator `name`, a registered one or an import path, with its own options.

    Raises ConfigError for an unknown name or option, and what the operator raises.
    """
    kind, options = OPERATORS.load(name), dict(options or {})
    arguments = named_arguments(kind)
    if unknown_names := [each for each in options if each not in arguments]:
        option_names = ", ".join(list(arguments)[1:]) or "none"
        raise ConfigError(f"The operator '{name}' has no option '{unknown_names[0]}'; it has: {option_names}.")
    operator = kind(site, **options)
    if not isinstance(operator, Operator):
        raise ConfigError(
            f"'{name}' is not an operator: it lacks methods of robopolicy.operators.operator.Operator (agent, start, "
            "begin, act, finished, close)."
        )
    return operator


class ScriptedOperator:
    """The scripted expert of the world, which can operate all robots at once and never hands one back by itself."""

    agent = ActingAgent.SCRIPT

    def __init__(self, site: Site):
        if site.expert is None:
            raise ConfigError(
                "No scripted expert is known here, so another operator must act: lerobot, browser, or the import path "
                "of your own."
            )
        self._controller = site.expert()
        self._seeds = np.zeros(site.rows, dtype=np.int64)

    def start(self, seeds: Array, rows: Rows = None) -> None:
        """Implement `Operator.start`."""
        self._seeds[slice(None) if rows is None else np.asarray(rows)] = seeds
        self._controller.reset(rows)
        begin_episodes(self._controller, seeds, rows)

    def begin(self, rows: Array) -> None:
        """Implement `Operator.begin`: with cleared memory, because until now the expert acted for other rows alone."""
        self._controller.reset(rows)
        begin_episodes(self._controller, self._seeds[rows], rows)

    def act(self, observation: Observation, rows: Array, last: Array) -> Array:
        """Implement `Operator.act`."""
        return np.asarray(self._controller.act(observation), dtype=np.float64)[rows]

    def finished(self, rows: Array) -> Array:
        """Implement `Operator.finished`."""
        return np.zeros(len(rows), dtype=bool)

    def close(self) -> None:
        """Implement `Operator.close`."""
