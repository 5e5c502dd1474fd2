"""The register of mechanisms: small functions with a slot, a name and a source, chosen and composed by name.

A mechanism's options are the keyword-only parameters of its function, so that its signature is its configuration.
What it needs of steps or rollouts is declared beside its name; `require` turns a wrong combination into a clear error.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any

from robopolicy.core.errors import ConfigError, did_you_mean


class Slot(Enum):
    """Where in an iteration a mechanism plugs in; the values are the configuration keys."""

    SAMPLER = "sampler"
    HINT = "hint"
    ALLOCATOR = "allocator"
    SELECTION = "selection"
    MODEL = "models"
    REWARD = "rewards"
    ADVANTAGE = "advantage"
    CREDIT = "credit"
    REPLAY = "replay"
    COEFFICIENT = "coefficient"
    WEIGHT = "weight"
    AUXILIARY = "auxiliaries"
    CONTROLLER = "controllers"


class Need(Enum):
    """What a mechanism cannot do without."""

    GROUPS = "several whole episodes from the same start (a group advantage, group_size >= 2)"
    EPISODES = "rollouts of whole episodes"
    WHOLE_EPISODES = "minibatches of whole episodes"
    WHOLE_GROUPS = "minibatches of whole groups (group_size >= 2)"
    CATEGORICAL = "steps drawn from categorical distributions (a token policy)"
    GAUSSIAN = "steps drawn from Gaussians (a denoising policy)"
    MEANS = "the means of the behaviour's steps (a denoising policy, which then keeps them)"
    CRITIC = "a critic"
    STATE_KEY = "keys of visited states"
    TREE = "episodes that branch off one another"
    IMAGES = "camera images in the observation"
    INSTRUCTIONS = "a world with several instructions"
    TEACHER = "a teacher (finetune.teacher=CHECKPOINT)"
    SAME_STEPS = "a teacher of the policy's kind, with the same steps (auxiliaries=[dagger] learns from any teacher)"
    FINISHED = "a critic that learns from finished episodes alone"
    PREFERENCE = "a model that prefers the teacher's actions (finetune.models=[discriminator])"
    BASE = "the base policy, frozen"
    IMPLICIT = "a model that rewards every step (finetune.models=[prime] or [oprl])"
    VALUES = "a model of action values (finetune.models=[q_ensemble])"
    EXPERTS = "recorded episodes of experts (finetune.experts=[DATASET])"
    DEMONSTRATIONS = "demonstrated states to begin from (finetune.starts=N and a world with an expert and snapshots)"


@dataclass(frozen=True)
class Mechanism:
    """One entry. function: as its slot says; source: paper or project; needs, gives: what it cannot do without and what
    others need that it provides.
    """

    slot: Slot
    name: str
    function: Callable[..., Any]
    source: str
    needs: frozenset[Need]
    gives: frozenset[Need] = frozenset()

    @property
    def line(self) -> str:
        """The first sentence of its docstring."""
        return " ".join((self.function.__doc__ or "").strip().split("\n\n")[0].split())

    @property
    def options(self) -> dict[str, Any]:
        """Its options with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {item.name: item.default for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}


_MECHANISMS: dict[tuple[Slot, str], Mechanism] = {}


def mechanism[F: Callable[..., Any]](
    slot: Slot, name: str, *, source: str = "", needs: tuple[Need, ...] = (), gives: tuple[Need, ...] = ()
) -> Callable[[F], F]:
    """Register a function (or a class, whose instances have state) in a slot."""

    def register(function: F) -> F:
        if (slot, name) in _MECHANISMS:
            raise ValueError(f"Two mechanisms are called {slot.value} '{name}'.")
        _MECHANISMS[slot, name] = Mechanism(slot, name, function, source, frozenset(needs), frozenset(gives))
        return function

    return register


@cache
def discover() -> None:
    """Import every module of `robopolicy.rl`, so that the mechanisms in them register."""
    package = importlib.import_module("robopolicy.rl")
    for module in pkgutil.walk_packages(package.__path__, "robopolicy.rl."):
        importlib.import_module(module.name)


def mechanisms(slot: Slot | None = None) -> list[Mechanism]:
    """Return all mechanisms, or those of one slot, by slot and name."""
    discover()
    order = list(Slot)
    chosen = [entry for entry in _MECHANISMS.values() if slot in (None, entry.slot)]
    return sorted(chosen, key=lambda entry: (order.index(entry.slot), entry.name))


def find(slot: Slot, name: str) -> Mechanism:
    """Return the mechanism, or raise ConfigError with the nearest name."""
    known = [entry.name for entry in mechanisms(slot)]
    if name not in known:
        raise ConfigError(
            f"finetune.{slot.value}: there is no mechanism '{name}'.{did_you_mean(name, known)} "
            "'robopolicy algorithms' lists them."
        )
    return _MECHANISMS[slot, name]


def choose(slot: Slot, name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the mechanism's function with its options bound; a class is bound too, not yet constructed.

    Raises ConfigError for an unknown name or option.
    """
    entry = find(slot, name)
    for option in options or {}:
        if option not in entry.options:
            raise ConfigError(
                f"finetune.options.{name}.{option}: '{name}' has no such option.{did_you_mean(option, entry.options)}"
            )
    return partial(entry.function, **(options or {}))


def require(entries: list[Mechanism], have: frozenset[Need]) -> None:
    """Raise ConfigError naming the first mechanism that needs what this combination does not have or give."""
    have = have.union(*(entry.gives for entry in entries))
    for entry in entries:
        for need in sorted(entry.needs - have, key=lambda item: item.name):
            raise ConfigError(
                f"finetune.{entry.slot.value}={entry.name} needs {need.value}; this combination has none."
            )
