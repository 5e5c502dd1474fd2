"""Delay: what a robot does while its policy thinks, simulated in any world, and how one chunk follows another.

A decision takes d control steps: what is seen at step t leads to a plan that is at hand at t + d. A chunking is a way
of living with that. Each is a function that returns a `core.policy.Policy` around another one, so players, worlds and
imagination need not know of the delay. The policy predicts P steps and is asked every s (its spec's chunk); meanwhile
the last plan goes on, of which s + d steps are then needed. An episode begins with nothing to go on with: the robot
holds still for d steps, and its first plan begins after them. Those here need nothing of the network: one plan after
another, averages of plans, the most coherent of many; real-time chunking is in `rtc`.
Axes: B row, N sample, P predicted step, A action dimension; s chunk, d delay.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.delayed import steps_ahead
from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.holding import keeps_value
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.registry import fixed_arguments
from robopolicy.core.spec import LATENCY, QUEUE, Field, PolicySpec
from robopolicy.core.turns import turns_of
from robopolicy.core.world import Rows
from robopolicy.inference.configuration import CHUNKINGS, SYNCHRONOUS

REACH = (
    "train it with more prediction_steps, or let it execute fewer of those that it predicts (of LeRobot's policies "
    "n_action_steps in config.json, and more are chunk_size or horizon)"
)
"""What to do about plans that end too soon."""


@dataclass(frozen=True)
class Delay:
    """How long a decision takes, in control steps, and what holding still is: see `RobotSettings.hold` of serving.

    hold: of elements of which neither name nor unit says it: zero, no motion, where they are velocities or differences;
    last, the last action, where they are positions. positions: names of action elements that are positions even where
    the others are not, such as a gripper's. Raises ConfigError below 0.
    """

    steps: int = 0
    hold: Literal["zero", "last"] = "zero"
    positions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"latency_steps is {self.steps}: a decision takes 0 control steps or more.")

    def still(self, action: Field, plan: Tensor, last: Tensor | None = None) -> Tensor:
        """Return what holds robots still that wait for `plan` [B, P, A], [B, d, A].

        action: its elements' names and unit say which are positions and which velocities, where they say it; last:
        their last actions [B, A]. Where there are none, as an episode begins, the plan's first action stands for the
        position that they are in.
        """
        position = plan[:, 0] if last is None else last
        kept = keeps_value(self.hold, self.positions, action.names, position.shape[-1], action.unit)
        still = torch.where(torch.tensor(kept, device=position.device), position, 0.0)
        return still[:, None].expand(-1, self.steps, -1)


@runtime_checkable
class PredictsAhead(Policy, Protocol):
    """A policy that can say all P steps that it predicts, beyond the C that it executes."""

    def predict(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Tensor:
        """Return [B, P, A] in the world's units and bounds; with equal draws `act` returns the first C of them."""
        ...


class Chunking(Protocol):
    """What a chunking's name stands for; what else it takes are its options, by name."""

    def __call__(self, policy: Policy, delay: Delay, **options: Any) -> Policy:
        """Return a policy that acts by `policy`, whose decisions take `delay`.

        Raises ConfigError where it cannot.
        """
        ...


@runtime_checkable
class HasSeams(Protocol):
    """A policy of which it is known where in its chunks another plan takes over."""

    @property
    def seams(self) -> tuple[int, ...]:
        """Places in every chunk whose action belongs to another plan than the one before."""
        ...


def with_chunking(policy: Policy, kind: str, delay: Delay, options: Mapping[str, Any] | None = None) -> Policy:
    """Return `policy` as it acts with a delay; as it is where decisions take no time and are waited for.

    kind: a name in `CHUNKINGS` or a dotted path; options: its own settings. Raises ConfigError, also for a policy that
    decides ahead, whose delay is its world's.
    """
    if kind == SYNCHRONOUS and not delay.steps and not options:
        return policy
    _require_deciding_now(policy, kind, delay.steps)
    make: Chunking = CHUNKINGS.load(kind)
    known = [name for name in fixed_arguments(make) if name not in ("policy", "delay")]
    for name, value in (options or {}).items():
        if name not in known and not _takes_anything(make):
            raise ConfigError(f"The chunking '{kind}' has no option '{name}'.{did_you_mean(name, known)}")
        _require_option(make, kind, name, value)
    made = make(policy, delay, **(options or {}))
    remember_origin(made, origin_of(policy))
    return made


def plans_of(policy: Policy, kind: str, options: Mapping[str, Any] | None = None) -> "Plans | None":
    """Return how `policy` makes a plan that follows on from the one underway, None where it does not (synchronous).

    For those who keep account of what is underway themselves, such as robots that ask a server; see `with_chunking`.
    Raises ConfigError, also where plans end with the chunk, so that nothing is left of them to follow on from.
    """
    if kind == SYNCHRONOUS:
        return None
    made = with_chunking(policy, kind, Delay(), options)
    if not isinstance(made, OverlappingPolicy):
        raise ConfigError(
            f"The chunking '{kind}' makes a {type(made).__name__}, which remembers its robots: it cannot be served."
        )
    if policy.spec.prediction == policy.spec.chunk:
        raise ConfigError(
            f"chunking={kind} goes on with what is left of the last plan, and this policy predicts no more than the "
            f"{policy.spec.chunk} steps that it executes (chunk): {REACH}."
        )
    return made.plans


def synchronous(policy: Policy, delay: Delay) -> Policy:
    """Hold still for d steps, then execute a whole chunk: nothing to set, any policy, the slowest robot."""
    return WaitingPolicy(policy, delay)


def prefetch(policy: Policy, delay: Delay) -> Policy:
    """Go on with the last plan for d steps, then switch to the new one, wherever that is by then."""
    return OverlappingPolicy(policy, delay, fresh_plan)


class WaitingPolicy:
    """A `Policy` that holds still while it thinks; its chunks have d + s steps."""

    def __init__(self, policy: Policy, delay: Delay):
        self.policy, self.delay = policy, delay
        self._last: Tensor | None = None
        self._known = torch.zeros(0, dtype=torch.bool)

    @property
    def spec(self) -> PolicySpec:
        """The policy's, with longer chunks and no scores."""
        spec, steps = self.policy.spec, self.delay.steps
        chunk = spec.chunk + steps
        return replace(spec, chunk=chunk, prediction=max(chunk, spec.prediction), scored_steps=0, steps_per_action=0)

    @property
    def seams(self) -> tuple[int, ...]:
        """Where it stops, and where it goes on."""
        return (0, self.delay.steps) if self.delay.steps else (0,)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return d steps of holding still and the policy's chunk, [B, d + s, A]; raises as the policy does."""
        chunk = self.policy.act(observation, generator, deterministic=deterministic).actions
        if self._last is None:
            self._last, self._known = chunk[:, 0], torch.zeros(len(chunk), dtype=torch.bool, device=chunk.device)
        last = torch.where(self._known[:, None], self._last, chunk[:, 0])
        self._last, self._known = chunk[:, -1], torch.ones_like(self._known)
        return Decision(torch.cat([self.delay.still(self.policy.spec.action, chunk, last), chunk], 1))

    def reset(self, rows: Rows = None) -> None:
        """Forget the last actions of `rows` [R], all for None, and let the policy forget them."""
        self.policy.reset(rows)
        if rows is None:
            self._last = None
        elif self._last is not None:
            self._known[torch.as_tensor(rows)] = False


@dataclass(frozen=True)
class Underway:
    """What is being executed while the next plan is made.

    rest: what remains of the last plan from now on [B, P - s, A] in the world's units, of which the first d steps will
    be executed whatever the next plan says; decisions: how many plans each row's episode has had so far [B] int64,
    those with none have no rest; delay: d; chunk: s.
    """

    rest: Tensor
    decisions: Tensor
    delay: int
    chunk: int

    @property
    def known(self) -> Tensor:
        """Rows [B] bool that have a plan to go on with."""
        return self.decisions > 0


class Plans(Protocol):
    """How the next plan is made."""

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: Underway,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the next plan [B, P, A] in the world's units, its first step that of the observation.

        Its first d steps will have passed when it is at hand.
        """
        ...


def fresh_plan(
    policy: PredictsAhead,
    observation: TensorObservation,
    generator: torch.Generator,
    underway: Underway,
    *,
    deterministic: bool,
) -> Tensor:
    """Return what the policy predicts [B, P, A], whatever is underway; see `Plans`."""
    return policy.predict(observation, generator, deterministic=deterministic)


class OverlappingPolicy:
    """A `Policy` that executes its last plan while the next is made.

    plans: makes the next plan. Raises ConfigError where d > s (the next question would come before the answer), where
    the policy predicts fewer than s + d steps, or cannot say what it predicts.
    """

    def __init__(self, policy: Policy, delay: Delay, plans: Plans):
        spec, steps = policy.spec, delay.steps
        if steps > spec.chunk:
            raise ConfigError(
                f"latency_steps is {steps}, and the policy is asked every {spec.chunk} steps (chunk): it must answer "
                "before it is asked again. Wait for it (synchronous), or execute longer chunks."
            )
        if spec.prediction < spec.chunk + steps:
            raise ConfigError(
                f"The policy predicts {spec.prediction} steps (prediction_steps) and executes {spec.chunk} (chunk). "
                f"With latency_steps={steps} its plans must reach that far (prediction_steps={spec.chunk + steps}): "
                f"{REACH}, or wait for it (synchronous)."
            )
        if not isinstance(policy, PredictsAhead):
            raise ConfigError(
                f"{type(policy).__name__} returns the chunks that are executed and nothing beyond them: it cannot go "
                "on while it thinks. Wait for it (synchronous), compute it as it was trained if an engine does "
                "(engine=reference), or give it predict() (see robopolicy.inference.chunking)."
            )
        self.policy = policy
        self.delay = delay
        self.plans = plans
        self._rest: Tensor | None = None
        self._decisions = torch.zeros(0, dtype=torch.int64)

    @property
    def spec(self) -> PolicySpec:
        """The policy's, without scores: what is executed is of two plans."""
        return replace(self.policy.spec, scored_steps=0, steps_per_action=0)

    @property
    def seams(self) -> tuple[int, ...]:
        """Where the next plan takes over."""
        return (self.delay.steps % self.policy.spec.chunk,)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the d steps that are left of the last plan and s - d steps of the next one, [B, s, A].

        Raises what the policy raises, and SpecError for other rows than before without a reset.
        """
        chunk, steps = self.policy.spec.chunk, self.delay.steps
        underway = self._underway(observation, generator.device)
        plan = self.plans(self.policy, observation, generator, underway, deterministic=deterministic)
        begun = torch.cat([self.delay.still(self.policy.spec.action, plan), plan], 1)[:, : plan.shape[1]]
        going_on = torch.cat([underway.rest[:, :steps], plan[:, steps:]], 1)
        plan = torch.where(underway.known[:, None, None], going_on, begun)
        self._rest, self._decisions = plan[:, chunk:], underway.decisions + 1
        return Decision(plan[:, :chunk])

    def reset(self, rows: Rows = None) -> None:
        """Forget the plans of `rows` [R], all for None, and let the policy forget what it remembers."""
        self.policy.reset(rows)
        if rows is None:
            self._rest = None
        elif self._rest is not None:
            self._decisions[torch.as_tensor(rows)] = 0

    def _underway(self, observation: TensorObservation, device: torch.device) -> Underway:
        spec = self.policy.spec
        rows = len(observation[next(iter(spec.observation))])
        if self._rest is None:
            shape = (rows, spec.prediction - spec.chunk, *spec.action.shape)
            self._rest = torch.zeros(shape, device=device)
            self._decisions = torch.zeros(rows, dtype=torch.int64, device=device)
        if len(self._rest) != rows:
            raise SpecError(f"{rows} rows act where {len(self._rest)} did: reset the policy before other rows act.")
        return Underway(self._rest, self._decisions, self.delay.steps, spec.chunk)


def _require_deciding_now(policy: Policy, kind: str, steps: int) -> None:
    """Raise ConfigError for a policy that decides ahead."""
    ahead = steps_ahead(policy.spec.observation, policy.spec.action)
    if ahead:
        raise ConfigError(
            f"chunking={kind}, latency_steps={steps}: this policy decides ahead, for a delay of {ahead} steps that it "
            f"was trained for ({QUEUE}), and its robot need not go on with an old plan: leave chunking=synchronous and "
            f"latency_steps=0. Its delay is its world's ({LATENCY} among its options), and any other adds to it."
        )


def _require_option(make: Chunking, kind: str, name: str, value: Any) -> None:
    """Raise ConfigError where an option is not of the type that its parameter says: a finite number, a text."""
    parameter = inspect.signature(make).parameters.get(name)
    wanted = None if parameter is None else parameter.annotation
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = {int: type(value) is int, float: number, str: isinstance(value, str), bool: isinstance(value, bool)}
    if not fits.get(wanted, True):
        words = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
        raise ConfigError(f"The chunking '{kind}' takes {words[wanted]} as {name}, not {value!r}.")


def _takes_anything(make: Chunking) -> bool:
    return any(item.kind is item.VAR_KEYWORD for item in inspect.signature(make).parameters.values())


def ensembling(policy: Policy, delay: Delay, decay: float = 0.01) -> Policy:
    """Average all plans that say something of a step, with weights exp(-decay i), i = 0 the oldest; grippers and
    toggles as the newest one says.

    Temporal ensembling of ACT (arXiv:2304.13705), whose policy is asked in every step; here in every chunk. decay: a
    large one trusts old plans, a negative one new ones.
    """
    return OverlappingPolicy(policy, delay, Averaged(decay))


def bidirectional(policy: Policy, delay: Delay, samples: int = 16, decay: float = 0.5) -> Policy:
    """Draw several plans and take the one that is closest to what was planned before.

    Backward coherence of bidirectional decoding (arXiv:2408.17355): the sum over the overlap of decay^step times the
    distance. The paper also contrasts the samples with those of a weaker policy (forward contrast), which needs another
    checkpoint and is left out. Raises ConfigError for fewer than one sample, or a decay outside (0, 1].
    """
    if samples < 1 or not 0 < decay <= 1:
        raise ConfigError(f"samples is {samples} and decay {decay}: draw 1 plan or more, and decay is in (0, 1].")
    return OverlappingPolicy(policy, delay, Coherent(samples, decay))


@dataclass(frozen=True)
class Averaged:
    """`Plans` that average the next prediction with the average of those before."""

    decay: float

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: Underway,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the averaged plan [B, P, A]; see `Plans`."""
        plan = policy.predict(observation, generator, deterministic=deterministic)
        overlap = underway.rest.shape[1]
        if not overlap:
            return plan
        # The plan of i decisions ago says something of the steps up to P - 1 - i s: so many plans are in the average.
        reach = torch.arange(overlap, 0, -1, device=plan.device)  # overlap - step
        count = torch.minimum(underway.decisions[:, None], (reach + underway.chunk - 1) // underway.chunk)
        # The share of the newest of `count` + 1, exp(-decay count) / sum_i exp(-decay i), without what overflows.
        sums = torch.exp(self.decay * torch.arange(int(count.max()) + 1, device=plan.device)).cumsum(0)
        share = (1 / sums[count])[..., None]
        # Angles that go round are averaged the short way round, near what the newest plan says; of what switches the
        # newest plan is taken: halfway between an open and a closed gripper lies neither.
        turns, newest = turns_of(policy.spec.action).like(plan), plan[:, :overlap]
        before = torch.where(turns.period > 0, newest - turns.shortest(newest - underway.rest), underway.rest)
        averaged = torch.where(turns.at_once > 0, newest, turns.within(share * newest + (1 - share) * before))
        return torch.cat([averaged, plan[:, overlap:]], 1)


@dataclass(frozen=True)
class Coherent:
    """`Plans` that choose among samples; see `bidirectional`."""

    samples: int
    decay: float

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: Underway,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return each row's most coherent plan [B, P, A], the first sample where nothing was planned; see `Plans`."""
        many: TensorObservation = {
            key: [text for text in value for _ in range(self.samples)]
            if isinstance(value, list)
            else value.repeat_interleave(self.samples, 0)
            for key, value in observation.items()
        }
        drawn = policy.predict(many, generator, deterministic=deterministic).unflatten(0, (-1, self.samples))
        overlap = underway.rest.shape[1]
        apart = turns_of(policy.spec.action).like(drawn).shortest(drawn[:, :, :overlap] - underway.rest[:, None])
        distance = apart.norm(dim=-1)
        weights = self.decay ** torch.arange(overlap, device=distance.device)
        best = torch.where(underway.known, (weights * distance).sum(-1).argmin(1), 0)
        return drawn[torch.arange(len(drawn), device=best.device), best]
