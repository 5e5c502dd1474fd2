"""Sessions of all connections: each has one robot's history, kept while in use, and its remaining actions.

A robot sends its remaining actions so that the next prediction continues them. Axes: B row, n remaining steps, A action
dimension.
"""

import itertools
import time
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from robopolicy.client.executed import BEFORE
from robopolicy.client.protocol import DELAY, PLAN, SEED, SESSION, Limits
from robopolicy.core.errors import NonFiniteError, SpecError
from robopolicy.core.former_names import FormerName, keep_former_names
from robopolicy.core.spec import TASK, Observation, PolicySpec
from robopolicy.inference.chunking import RunningPlan
from robopolicy.serving.inputs import Session


@dataclass(frozen=True, eq=False)
class RemainingActions:
    """Remaining actions of a robot.

    actions: [n, A] in the world's units, the first for the accompanying observation; delay: number of them that will
    have been executed when the next prediction arrives; decisions: number of predictions so far in the episode.
    """

    actions: np.ndarray
    delay: int
    decisions: int

    @property
    def shape(self) -> tuple[int, int]:
        """Key that requests must share to be answered in one batch."""
        return len(self.actions), self.delay


def pop_remaining_actions(
    request: MutableMapping[Any, Any], spec: PolicySpec, decisions: int
) -> RemainingActions | None:
    """Remove the remaining actions from a request and return them, None if there are none.

    Raises SpecError on other than [n <= P, A] numbers and an integer from 0 to n, NonFiniteError on NaN or infinity.
    """
    if PLAN not in request:
        if request.pop(DELAY, None) is not None:
            raise SpecError(f"'{DELAY}' needs '{PLAN}', the remaining actions, which is missing.")
        return None
    actions, delay = request.pop(PLAN), request.pop(DELAY, 0)
    kind = isinstance(actions, np.ndarray) and actions.dtype.kind in "fiu"
    if not kind or actions.shape[1:] != spec.action.shape or len(actions) > spec.prediction:
        label = list(actions.shape) if isinstance(actions, np.ndarray) else type(actions).__name__
        raise SpecError(
            f"'{PLAN}' must contain the remaining actions, [n, {str(list(spec.action.shape))[1:-1]}] numbers with at "
            f"most {spec.prediction} steps, not {label}."
        )
    if not np.isfinite(actions).all():
        raise NonFiniteError(f"'{PLAN}' contains NaN or infinity.")
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay <= len(actions):
        raise SpecError(
            f"'{DELAY}' must be an integer from 0 to {len(actions)}, the number of remaining actions, not {delay!r}."
        )
    return RemainingActions(actions.astype(np.float32), delay, decisions if len(actions) else 0)


def batch_remaining_actions(parts: Sequence[RemainingActions], chunk: int, device: torch.device) -> RunningPlan:
    """Return the batched remaining actions of B robots with one `shape`, for `robopolicy.inference.chunking.Plans`."""
    remaining_actions = torch.from_numpy(np.stack([part.actions for part in parts])).to(device)
    # A robot may know a plan of which this server has not heard: it has had one then.
    decisions = torch.tensor([max(part.decisions, int(len(part.actions) > 0)) for part in parts], device=device)
    return RunningPlan(remaining_actions, decisions, parts[0].delay, chunk)


@dataclass(frozen=True)
class Failure:
    """Index of every detector after a decision, by name, and the names of those that have alarmed in this episode."""

    index: dict[str, float]
    alarms: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """Answer to one request. actions: [C, A], or the full prediction [P, A]; seconds: inference time, shared by the
    batch; failure: what the failure detectors say, None without.
    """

    actions: np.ndarray
    seconds: float
    failure: Failure | None = None


class RobotSession(Session):
    """History of one robot, and what the server knows of it.

    name: connection and the client's name for it; key: unique; lot: number in [0, 1) that decides whether it is among
    those that try a new version; policy_name: policy that it asked for; generator: its own noise generator if it set a
    seed, else None; used: time of its last request; address: sender; plans: number of predictions so far in the
    episode; episode: number of its episode; version: of the policy that answers it; decided, alarmed: whether this
    episode has begun on it, and whether a detector has alarmed; reports: whether it reports executed steps; last_step,
    reported_until: number and time of the last one; acting: who
    acts, as it reported last; outside: elements far outside of the training data now -> description; logged: those that
    the log has named.
    """

    _numbers = itertools.count()

    def __init__(self, name: str, policy_name: str, spec: PolicySpec, rename: Mapping[str, str], limits: Limits):
        super().__init__(spec, rename, limits)
        self.name, self.policy_name = name, policy_name
        self.key = f"{name} {next(self._numbers)}"
        self.lot = zlib.crc32(self.key.encode()) / 2**32
        self.generator: torch.Generator | None = None
        self.used, self.address = 0.0, ""
        self.plans = self.episode = 0
        self.version = ""
        self.decided = self.alarmed = self.reports = False
        self.last_step, self.reported_until = -1, 0.0
        self.acting = dict(BEFORE)
        self.outside: dict[str, str] = {}
        self.logged: set[str] = set()
        self.task = self.policy = ""
        self.seconds = 0.0
        self.answer: Answer | None = None

    def reset(self) -> None:
        """Clear history and predictions: the next frame starts an episode."""
        super().reset()
        self.plans, self.last_step = 0, -1
        self.episode += 1
        self.decided = self.alarmed = False

    def observe(self, message: Mapping[Any, Any]) -> Observation:
        """Add the message to the history; see `Session.observe`."""
        observation = super().observe(message)
        self.task = str(observation[TASK][0])
        return observation

    def answered(self, policy: str, answer: Answer, seconds: float) -> None:
        """Remember the last answer: by which policy, and after how many seconds."""
        self.policy, self.answer = policy, answer
        self.seconds = seconds

    def decision(self) -> dict[str, Any]:
        """Return the last decision as entries of a `RecordedStep`."""
        if self.answer is None:
            return {}
        failure = self.answer.failure
        return {
            "plan": self.answer.actions,
            "latency": self.seconds,
            "policy": self.policy,
            "index": 0.0 if failure is None else next(iter(failure.index.values()), 0.0),
            "alarm": failure is not None and bool(failure.alarms),
        }

    def state(self) -> dict[str, Any]:
        """Return the state that readers of events see, JSON-ready."""
        failure = None if self.answer is None else self.answer.failure
        return {
            "session": self.name,
            "address": self.address,
            "task": self.task,
            "policy": self.policy,
            "episode": self.episode,
            "latency_ms": 1e3 * self.seconds,
            "failure": None if failure is None else {"index": failure.index, "alarms": list(failure.alarms)},
            "outside": list(self.outside.values()),
            **self.acting,
        }

    take_left = FormerName("pop_remaining")

    def pop_remaining(self, request: dict[Any, Any], offered: bool) -> RemainingActions | None:
        """Remove the robot's remaining actions from a request and return them, None if there are none.

        offered: whether this server continues remaining actions. Raises SpecError if it does not, and as
        `pop_remaining_actions`.
        """
        remaining = pop_remaining_actions(request, self.spec, self.plans)
        if remaining is None:
            return None
        if not offered:
            raise SpecError(
                f"'{PLAN}' needs a server with chunking, and this server has none: start it with serve.chunking=rtc, "
                "or send observations only."
            )
        self.plans = remaining.decisions + 1
        return remaining

    def seed(self, value: Any, device: torch.device) -> None:
        """Use a separate noise generator with this seed from now on. Raises SpecError unless `value` is an integer."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise SpecError(f"'{SEED}' must be an integer from 0 to 2**63 - 1.")
        self.generator = torch.Generator(device).manual_seed(value)


class Sessions:
    """Sessions of all connections, limited in number.

    expiry: seconds without a request after which a session is deleted; its next request starts an episode; policy: name
    of the policy that they ask for.
    """

    def __init__(self, spec: PolicySpec, limits: Limits, rename: Mapping[str, str], expiry: float, policy: str = ""):
        self.spec, self.policy = spec, policy
        self.limits = limits
        self.rename = dict(rename)
        self.expiry = expiry
        Session(spec, self.rename, limits)  # wrong names are refused when the server starts
        self._known: dict[tuple[int, str], RobotSession] = {}

    def __len__(self) -> int:
        """Number of sessions."""
        return len(self._known)

    def take(self, connection: int, request: dict[Any, Any], address: str = "") -> RobotSession:
        """Return the session that `request` of a connection names, creating it if new; the name is removed from the
        request.

        address: address of the connection. Raises SpecError when the name is not a short text, and when there are too
        many sessions.
        """
        name = request.pop(SESSION, "")
        if not isinstance(name, str) or len(name) > self.limits.name:
            raise SpecError(f"'{SESSION}' must be text of at most {self.limits.name} characters.")
        now = time.monotonic()
        session = self._known.get((connection, name))
        if session is None or now - session.used > self.expiry:
            self._forget_idle(now)
            if sum(owner == connection for owner, _ in self._known) >= self.limits.sessions:
                raise SpecError(
                    f"One connection serves at most {self.limits.sessions} sessions: open another connection."
                )
            session_limit = self.limits.address_sessions
            if sum(session.address == address for session in self._known.values()) >= session_limit:
                raise SpecError(
                    f"One address has at most {session_limit} sessions: close connections that are not needed."
                )
            if len(self._known) >= self.limits.all_sessions:
                raise SpecError(
                    f"The server has at most {self.limits.all_sessions} sessions, and all are in use: try again later."
                )
            session = RobotSession(f"{connection}/{name}", self.policy, self.spec, self.rename, self.limits)
            self._known[connection, name] = session
            session.address = address
        session.used = now
        return session

    def all(self) -> list[RobotSession]:
        """Return the sessions of all connections."""
        return list(self._known.values())

    def drop(self, connection: int) -> list[RobotSession]:
        """Delete the sessions of a closed connection, and return them."""
        dropped = [value for key, value in self._known.items() if key[0] == connection]
        self._known = {key: value for key, value in self._known.items() if key[0] != connection}
        return dropped

    def _forget_idle(self, now: float) -> None:
        self._known = {key: value for key, value in self._known.items() if now - value.used <= self.expiry}


keep_former_names(
    __name__, {"Left": "RemainingActions", "taken": "pop_remaining_actions", "underway": "batch_remaining_actions"}
)
