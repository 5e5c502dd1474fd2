"""Action chunking under inference latency: simulate the delay in any world, and connect consecutive chunks.

A policy call takes d control steps: the observation at step t leads to a plan that is available at t + d. A chunking
decides what the robot does meanwhile. Each is a function that wraps a `core.policy.Policy`, so players, worlds and
imagination need not know of the delay. The policy predicts P steps and is called every s steps (its spec's chunk); the
previous plan continues during a call, so plans need s + d steps. At the start of an episode there is no previous plan:
the robot holds still for d steps. The chunkings here only use predictions: switch, average, choose the most coherent of
several samples; real-time chunking is in `rtc`.
Axes: B row, N sample, P predicted step, A action dimension; s chunk, d delay.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.client.element_kinds import keeps_value
from robopolicy.client.periodicity import periodicity_of
from robopolicy.core.candidates import repeat_observation
from robopolicy.core.delayed import steps_ahead
from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.registry import named_arguments
from robopolicy.core.spec import LATENCY, QUEUE, Field, PolicySpec
from robopolicy.core.world import Rows
from robopolicy.inference.configuration import CHUNKINGS, SYNCHRONOUS

REACH = (
    "train it with more prediction_steps, or execute fewer of the predicted steps (for LeRobot policies: lower "
    "n_action_steps in config.json, or train with a larger chunk_size or horizon)"
)
"""Remedy for plans that are too short."""


@dataclass(frozen=True)
class Delay:
    """Inference latency in control steps, and the hold action: see `RobotSettings.hold` of serving, without "auto".

    hold: for elements whose kind follows from neither name nor unit: zero (no motion) for velocities or differences;
    last (the last action) for positions. positions: names of action elements that are positions even if the others are
    not, such as a gripper's. Raises ConfigError below 0.
    """

    steps: int = 0
    hold: Literal["zero", "last"] = "zero"
    positions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"latency_steps is {self.steps}: it must be a whole number of control steps, 0 or more.")

    def still(self, action: Field, plan: Tensor, last: Tensor | None = None) -> Tensor:
        """Return the hold actions [B, d, A] of robots waiting for `plan` [B, P, A].

        action: field whose names and unit identify positions and velocities, if declared; last: last actions [B, A]. At
        the start of an episode there are none, and the plan's first action is used as the current position.
        """
        position = plan[:, 0] if last is None else last
        keeps = keeps_value(self.hold, self.positions, action.names, position.shape[-1], action.unit)
        still_action = torch.where(torch.tensor(keeps, device=position.device), position, 0.0)
        return still_action[:, None].expand(-1, self.steps, -1)


@runtime_checkable
class PredictsAhead(Policy, Protocol):
    """A policy that can return all P predicted steps, beyond the C that it executes."""

    def predict(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Tensor:
        """Return all predicted steps [B, P, A] in world units and bounds; with equal random draws `act` returns the
        first C of them.
        """
        ...


class Chunking(Protocol):
    """Signature of chunking functions; additional arguments are its options, by name."""

    def __call__(self, policy: Policy, delay: Delay, **options: Any) -> Policy:
        """Wrap `policy` so that it acts with inference latency `delay`.

        Raises ConfigError when it is not supported.
        """
        ...


@runtime_checkable
class HasSeams(Protocol):
    """A policy with known positions in its chunks at which another plan takes over."""

    @property
    def seams(self) -> tuple[int, ...]:
        """Positions in every chunk whose action belongs to another plan than the previous one."""
        ...


def with_chunking(policy: Policy, kind: str, delay: Delay, options: Mapping[str, Any] | None = None) -> Policy:
    """Wrap `policy` with a chunking under latency; returned unchanged for synchronous execution without latency.

    kind: a name in `CHUNKINGS` or an import path; options: options of that chunking. Raises ConfigError, also for a
    policy that predicts ahead, whose delay is part of its world.
    """
    if kind == SYNCHRONOUS and not delay.steps and not options:
        return policy
    _refuse_lookahead(policy, kind, delay.steps)
    make: Chunking = CHUNKINGS.load(kind)
    names = [name for name in named_arguments(make) if name not in ("policy", "delay")]
    for name, value in (options or {}).items():
        if name not in names and not _takes_anything(make):
            raise ConfigError(f"The chunking '{kind}' has no option '{name}'.{did_you_mean(name, names)}")
        _require_option(make, kind, name, value)
    wrapped_policy = make(policy, delay, **(options or {}))
    remember_origin(wrapped_policy, origin_of(policy))
    return wrapped_policy


def planner_of(policy: Policy, kind: str, options: Mapping[str, Any] | None = None) -> "Plans | None":
    """Return the function by which `policy` plans given the plan in execution; None for synchronous chunking.

    For callers that track the executed plan themselves, such as robots that query a server: they pass their delay with
    each `RunningPlan`. Only an `OverlappingPolicy` can be served. Raises ConfigError, also when the policy predicts no
    more than it executes, so that no remaining actions exist.
    """
    if kind == SYNCHRONOUS:
        return None
    wrapped_policy = with_chunking(policy, kind, Delay(), options)
    if not isinstance(wrapped_policy, OverlappingPolicy):
        raise ConfigError(
            f"The chunking '{kind}' returns a {type(wrapped_policy).__name__}, which keeps state per robot and "
            "cannot be served."
        )
    if policy.spec.prediction == policy.spec.chunk:
        raise ConfigError(
            f"chunking={kind} executes the remaining actions of the last plan, but this policy predicts only the "
            f"{policy.spec.chunk} steps that it executes (chunk): {REACH}."
        )
    return wrapped_policy.plans


def synchronous(policy: Policy, delay: Delay) -> Policy:
    """Hold position for d steps, then execute a whole chunk: no options, works with any policy, slowest robot."""
    return WaitingPolicy(policy, delay)


def prefetch(policy: Policy, delay: Delay) -> Policy:
    """Continue the previous plan for d steps, then switch abruptly to the new one."""
    return OverlappingPolicy(policy, delay, fresh_plan)


class WaitingPolicy:
    """A `Policy` that holds position during inference; its chunks have d + s steps."""

    def __init__(self, policy: Policy, delay: Delay):
        self.policy, self.delay = policy, delay
        self._last: Tensor | None = None
        self._known = torch.zeros(0, dtype=torch.bool)

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy with longer chunks and no log-probabilities."""
        spec, steps = self.policy.spec, self.delay.steps
        chunk = spec.chunk + steps
        return replace(spec, chunk=chunk, prediction=max(chunk, spec.prediction), scored_steps=0, steps_per_action=0)

    @property
    def seams(self) -> tuple[int, ...]:
        """Positions in a chunk at which the robot stops and continues."""
        return (0, self.delay.steps) if self.delay.steps else (0,)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return d hold actions followed by the policy's chunk, [B, d + s, A]; raises as the policy does."""
        chunk = self.policy.act(observation, generator, deterministic=deterministic).actions
        if self._last is None:
            self._last, self._known = chunk[:, 0], torch.zeros(len(chunk), dtype=torch.bool, device=chunk.device)
        last = torch.where(self._known[:, None], self._last, chunk[:, 0])
        self._last, self._known = chunk[:, -1], torch.ones_like(self._known)
        return Decision(torch.cat([self.delay.still(self.policy.spec.action, chunk, last), chunk], 1))

    def reset(self, rows: Rows = None) -> None:
        """Clear the last actions of `rows` [R] (None: all) and the policy's memory of them."""
        self.policy.reset(rows)
        if rows is None:
            self._last = None
        elif self._last is not None:
            self._known[torch.as_tensor(rows)] = False


@dataclass(frozen=True)
class RunningPlan:
    """Plan in execution while the next plan is computed.

    rest: remaining actions of the last plan from now on [B, n, A] in world units (n = P - s in simulation, any n <= P
    on a server), of which the first d steps will be executed in any case; decisions: number of plans in each row's
    episode so far [B] int64, 0 means no remaining actions; delay: d; chunk: s.
    """

    rest: Tensor
    decisions: Tensor
    delay: int
    chunk: int

    @property
    def known(self) -> Tensor:
        """Rows [B] bool that have a plan in execution."""
        return self.decisions > 0


class Plans(Protocol):
    """Function that computes the next plan."""

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: RunningPlan,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the next plan [B, P, A] in world units, starting at the step of the observation.

        Its first d steps will have passed when it becomes available.
        """
        ...


def fresh_plan(
    policy: PredictsAhead,
    observation: TensorObservation,
    generator: torch.Generator,
    underway: RunningPlan,
    *,
    deterministic: bool,
) -> Tensor:
    """Return the policy's prediction [B, P, A], independent of the plan in execution; see `Plans`."""
    return policy.predict(observation, generator, deterministic=deterministic)


class OverlappingPolicy:
    """A `Policy` that executes its last plan while the next one is computed.

    plans: computes the next plan. Raises ConfigError when d > s (the next query would come before the answer), or the
    policy predicts fewer than s + d steps or does not provide `predict`.
    """

    def __init__(self, policy: Policy, delay: Delay, plans: Plans):
        spec, steps = policy.spec, delay.steps
        if steps > spec.chunk:
            raise ConfigError(
                f"latency_steps={steps} exceeds the chunk of {spec.chunk} steps: the policy would be called again "
                "before it answers. Use chunking=synchronous, or a longer chunk."
            )
        if spec.prediction < spec.chunk + steps:
            raise ConfigError(
                f"The policy predicts {spec.prediction} steps (prediction_steps) and executes {spec.chunk} (chunk). "
                f"With latency_steps={steps} it must predict prediction_steps={spec.chunk + steps}: {REACH}, or use "
                "chunking=synchronous."
            )
        if not isinstance(policy, PredictsAhead):
            raise ConfigError(
                f"{type(policy).__name__} has no predict() and returns only the executed steps, so nothing is left "
                "to execute during inference. Use chunking=synchronous, engine=reference if an engine computes it, "
                "or implement predict() (see robopolicy.inference.chunking)."
            )
        self.policy = policy
        self.delay = delay
        self.plans = plans
        self._rest: Tensor | None = None
        self._decisions = torch.zeros(0, dtype=torch.int64)

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy without log-probabilities, because executed chunks combine two plans."""
        return replace(self.policy.spec, scored_steps=0, steps_per_action=0)

    @property
    def seams(self) -> tuple[int, ...]:
        """Position at which the next plan takes over."""
        return (self.delay.steps % self.policy.spec.chunk,)

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the remaining d steps of the last plan and s - d steps of the next one, [B, s, A].

        Raises the errors of the policy, and SpecError when the number of rows changes without a reset.
        """
        chunk, steps = self.policy.spec.chunk, self.delay.steps
        underway = self._underway(observation, generator.device)
        plan = self.plans(self.policy, observation, generator, underway, deterministic=deterministic)
        # At the start of an episode, hold still for d steps, then execute the plan from its first step.
        new_plan = torch.cat([self.delay.still(self.policy.spec.action, plan), plan], 1)[:, : plan.shape[1]]
        going_on = torch.cat([underway.rest[:, :steps], plan[:, steps:]], 1)
        plan = torch.where(underway.known[:, None, None], going_on, new_plan)
        self._rest, self._decisions = plan[:, chunk:], underway.decisions + 1
        return Decision(plan[:, :chunk])

    def reset(self, rows: Rows = None) -> None:
        """Clear the plans of `rows` [R] (None: all) and the policy's memory of them."""
        self.policy.reset(rows)
        if rows is None:
            self._rest = None
        elif self._rest is not None:
            self._decisions[torch.as_tensor(rows)] = 0

    def _underway(self, observation: TensorObservation, device: torch.device) -> RunningPlan:
        spec = self.policy.spec
        rows = len(observation[next(iter(spec.observation))])
        if self._rest is None:
            shape = (rows, spec.prediction - spec.chunk, *spec.action.shape)
            self._rest = torch.zeros(shape, device=device)
            self._decisions = torch.zeros(rows, dtype=torch.int64, device=device)
        if len(self._rest) != rows:
            raise SpecError(
                f"{rows} rows act, but {len(self._rest)} rows acted before: reset the policy before the number "
                "of rows changes."
            )
        return RunningPlan(self._rest, self._decisions, self.delay.steps, spec.chunk)


def _refuse_lookahead(policy: Policy, kind: str, steps: int) -> None:
    """Raise ConfigError for a policy trained with its delay, which predicts ahead by itself."""
    delay_steps = steps_ahead(policy.spec.observation, policy.spec.action)
    if delay_steps:
        raise ConfigError(
            f"chunking={kind}, latency_steps={steps}: this policy was trained with a latency of {delay_steps} steps "
            f"and reads the action queue ({QUEUE}). Use chunking=synchronous and latency_steps=0, and set its "
            f"latency in the world's options ({LATENCY}); any other latency would be added."
        )


def ensembling(policy: Policy, delay: Delay, decay: float = 0.01) -> Policy:
    """Average all plans that predict a step, with weights exp(-decay i), i = 0 the oldest; grippers and toggles follow
    the newest plan.

    Temporal ensembling of ACT (arXiv:2304.13705), whose policy is called in every step; here in every chunk. decay: a
    large one favours old plans, a negative one new ones.
    """
    return OverlappingPolicy(policy, delay, EnsembledPlans(decay))


def bidirectional(policy: Policy, delay: Delay, samples: int = 16, decay: float = 0.5) -> Policy:
    """Sample several plans and take the one closest to the previous plan.

    Backward coherence of bidirectional decoding (arXiv:2408.17355): the sum over the overlap of decay^step times the
    distance. The paper also contrasts the samples with those of a weaker policy (forward contrast), which requires
    another checkpoint and is omitted. Samples differ only by their noise, so a deterministic policy returns equal ones.
    Raises ConfigError for fewer than one sample, or a decay outside (0, 1].
    """
    if samples < 1 or not 0 < decay <= 1:
        raise ConfigError(f"samples={samples} must be at least 1, and decay={decay} in (0, 1].")
    return OverlappingPolicy(policy, delay, BidirectionalPlans(samples, decay))


@dataclass(frozen=True)
class EnsembledPlans:
    """`Plans` that average the next prediction with the running average of earlier ones; see `ensembling`."""

    decay: float

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: RunningPlan,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return the averaged plan [B, P, A]; see `Plans`."""
        plan = policy.predict(observation, generator, deterministic=deterministic)
        overlap = underway.rest.shape[1]
        if not overlap:
            return plan
        # The plan made i calls ago reaches to step P - 1 - i s, which gives the number of plans in each average.
        reach = torch.arange(overlap, 0, -1, device=plan.device)  # overlap - step
        count = torch.minimum(underway.decisions[:, None], (reach + underway.chunk - 1) // underway.chunk)
        # The weight of the newest of `count` + 1, exp(-decay count) / sum_i exp(-decay i), divided by the numerator: if
        # the sum overflows, it is 0 and not NaN.
        sums = torch.exp(self.decay * torch.arange(int(count.max()) + 1, device=plan.device)).cumsum(0)
        share = (1 / sums[count])[..., None]
        # Angles that go round are averaged the short way round, near what the newest plan says; of what switches the
        # newest plan is taken: halfway between an open and a closed gripper lies neither.
        turns, newest = periodicity_of(policy.spec.action).like(plan), plan[:, :overlap]
        before = torch.where(turns.period > 0, newest - turns.shortest(newest - underway.rest), underway.rest)
        averaged = torch.where(turns.at_once > 0, newest, turns.within(share * newest + (1 - share) * before))
        return torch.cat([averaged, plan[:, overlap:]], 1)


@dataclass(frozen=True)
class BidirectionalPlans:
    """`Plans` that select one of several samples; see `bidirectional`."""

    samples: int
    decay: float

    def __call__(
        self,
        policy: PredictsAhead,
        observation: TensorObservation,
        generator: torch.Generator,
        underway: RunningPlan,
        *,
        deterministic: bool,
    ) -> Tensor:
        """Return each row's most coherent plan [B, P, A], the first sample if there is no previous plan; see
        `Plans`.
        """
        many = repeat_observation(observation, self.samples)
        candidates = policy.predict(many, generator, deterministic=deterministic).unflatten(0, (-1, self.samples))
        overlap = underway.rest.shape[1]
        differences = (
            periodicity_of(policy.spec.action)
            .like(candidates)
            .shortest(candidates[:, :, :overlap] - underway.rest[:, None])
        )
        distance = differences.norm(dim=-1)
        weights = self.decay ** torch.arange(overlap, device=distance.device)
        best = torch.where(underway.known, (weights * distance).sum(-1).argmin(1), 0)
        return candidates[torch.arange(len(candidates), device=best.device), best]


def _require_option(make: Chunking, kind: str, name: str, value: Any) -> None:
    """Raise ConfigError if an option does not have the type of its parameter: a finite number, a string."""
    parameter = inspect.signature(make).parameters.get(name)
    annotation = None if parameter is None else parameter.annotation
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = {int: type(value) is int, float: number, str: isinstance(value, str), bool: isinstance(value, bool)}
    if not fits.get(annotation, True):
        words = {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}
        raise ConfigError(f"The chunking '{kind}' takes {words[annotation]} as {name}, not {value!r}.")


def _takes_anything(make: Chunking) -> bool:
    return any(item.kind is item.VAR_KEYWORD for item in inspect.signature(make).parameters.values())


keep_former_names(
    __name__,
    {
        "Underway": "RunningPlan",
        "Averaged": "EnsembledPlans",
        "Coherent": "BidirectionalPlans",
        "plans_of": "planner_of",
    },
)
