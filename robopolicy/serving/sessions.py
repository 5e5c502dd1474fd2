"""The sessions of all connections: each is one robot's history, kept as long as it is used."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from robopolicy.core.errors import SpecError
from robopolicy.core.policy import PolicySpec
from robopolicy.serving.inputs import Session
from robopolicy.serving.limits import Limits
from robopolicy.serving.protocol import PLAN, SEED, SESSION
from robopolicy.serving.underway import Left, taken


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
        self.spec, self.limits, self.rename, self.expiry = spec, limits, dict(rename), expiry
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
