"""The sessions of all connections: each is one robot's history, kept as long as it is used, and its plan underway.

A robot says what is left of the plan that it is executing, so that the next one follows on from it. Axes: B row, n
steps left of the plan, A action dimension.
"""

import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from robopolicy.core.errors import NonFiniteError, SpecError
from robopolicy.core.spec import PolicySpec
from robopolicy.inference.chunking import Underway
from robopolicy.serving.inputs import Session
from robopolicy.serving.protocol import DELAY, PLAN, SEED, SESSION, Limits


@dataclass(frozen=True, eq=False)
class Left:
    """What is left of a robot's plan.

    actions: [n, A] in the world's units, the first for the observation that comes with it; delay: how many of them will
    have been executed when the next plan is there; decisions: how many plans its episode has had.
    """

    actions: np.ndarray
    delay: int
    decisions: int

    @property
    def shape(self) -> tuple[int, int]:
        """What requests must have in common to be answered together."""
        return len(self.actions), self.delay


def taken(request: MutableMapping[Any, Any], spec: PolicySpec, decisions: int) -> Left | None:
    """Take what a request says of its robot's plan out of it, None where it says nothing.

    Raises SpecError on other than [n <= P, A] numbers and an integer from 0 to n, NonFiniteError on NaN or infinity.
    """
    if PLAN not in request:
        if request.pop(DELAY, None) is not None:
            raise SpecError(f"'{DELAY}' belongs to '{PLAN}', the actions that are left, and that is missing.")
        return None
    actions, delay = request.pop(PLAN), request.pop(DELAY, 0)
    kind = isinstance(actions, np.ndarray) and actions.dtype.kind in "fiu"
    if not kind or actions.shape[1:] != spec.action.shape or len(actions) > spec.prediction:
        shown = list(actions.shape) if isinstance(actions, np.ndarray) else type(actions).__name__
        raise SpecError(
            f"'{PLAN}' holds the actions that are left, [n, {str(list(spec.action.shape))[1:-1]}] numbers with at most "
            f"{spec.prediction} steps, not {shown}."
        )
    if not np.isfinite(actions).all():
        raise NonFiniteError(f"'{PLAN}' holds NaN or infinity.")
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay <= len(actions):
        raise SpecError(f"'{DELAY}' is an integer from 0 to {len(actions)}, the number of actions left, not {delay!r}.")
    return Left(actions.astype(np.float32), delay, decisions if len(actions) else 0)


def underway(parts: Sequence[Left], chunk: int, device: torch.device) -> Underway:
    """Return what is left of B robots' plans of one `shape`, for `robopolicy.inference.chunking.Plans`."""
    rest = torch.from_numpy(np.stack([part.actions for part in parts])).to(device)
    # A robot may know a plan of which this server has not heard: it has had one then.
    decisions = torch.tensor([max(part.decisions, int(len(part.actions) > 0)) for part in parts], device=device)
    return Underway(rest, decisions, parts[0].delay, chunk)


class RobotSession(Session):
    """One robot's history; generator: its own noise where it asked for a seed, else None; used: when it asked last;
    address: where it asks from; plans: how many plans its episode has had.
    """

    generator: torch.Generator | None = None
    used: float = 0.0
    address: str = ""
    plans: int = 0

    def reset(self) -> None:
        """Forget the history and the plans: the next frame begins an episode."""
        super().reset()
        self.plans = 0

    def take_left(self, request: dict[Any, Any], offered: bool) -> Left | None:
        """Take out of a request what is left of the robot's plan, None where it says nothing of it.

        offered: whether plans follow on from others here. Raises SpecError where they do not, and as `taken`.
        """
        left = taken(request, self.spec, self.plans)
        if left is None:
            return None
        if not offered:
            raise SpecError(
                f"'{PLAN}' is for servers that offer a chunking, and this one does not: start it with "
                "serve.chunking=rtc, or send observations alone."
            )
        self.plans = left.decisions + 1
        return left

    def seed(self, value: Any, device: torch.device) -> None:
        """Draw noise from a generator of its own from here on. Raises SpecError unless `value` is an integer."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise SpecError(f"'{SEED}' is an integer from 0 to 2**63 - 1.")
        self.generator = torch.Generator(device).manual_seed(value)


class Sessions:
    """The sessions of all connections, bounded in number.

    expiry: seconds after which a session that asked for nothing is forgotten; its next request begins an episode.
    """

    def __init__(self, spec: PolicySpec, limits: Limits, rename: Mapping[str, str], expiry: float):
        self.spec = spec
        self.limits = limits
        self.rename = dict(rename)
        self.expiry = expiry
        RobotSession(spec, self.rename, limits)  # wrong names are refused when the server starts
        self._known: dict[tuple[int, str], RobotSession] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._known)

    def take(self, connection: int, request: dict[Any, Any], address: str = "") -> RobotSession:
        """Return the session that `request` of a connection names, begun where it is new; the name is taken out.

        address: where the connection comes from. Raises SpecError where the name is no short text, and where there are
        too many.
        """
        name = request.pop(SESSION, "")
        if not isinstance(name, str) or len(name) > self.limits.name:
            raise SpecError(f"'{SESSION}' is text of at most {self.limits.name} characters.")
        now = time.monotonic()
        session = self._known.get((connection, name))
        if session is None or now - session.used > self.expiry:
            self._forget_idle(now)
            if sum(owner == connection for owner, _ in self._known) >= self.limits.sessions:
                raise SpecError(f"One connection serves at most {self.limits.sessions} sessions: open another.")
            most = self.limits.address_sessions
            if sum(session.address == address for session in self._known.values()) >= most:
                raise SpecError(f"One address has at most {most} sessions: close connections that are not needed.")
            if len(self._known) >= self.limits.all_sessions:
                raise SpecError(f"The server keeps {self.limits.all_sessions} sessions, and all are in use: try later.")
            session = self._known[connection, name] = RobotSession(self.spec, self.rename, self.limits)
            session.address = address
        session.used = now
        return session

    def drop(self, connection: int) -> None:
        """Forget the sessions of a connection that closed."""
        self._known = {key: value for key, value in self._known.items() if key[0] != connection}

    def _forget_idle(self, now: float) -> None:
        self._known = {key: value for key, value in self._known.items() if now - value.used <= self.expiry}
