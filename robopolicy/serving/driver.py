"""`Driver`: what stands between a robot and a policy server, and gives the robot an action at every control step.

    with PolicyClient(host, api_key=KEY) as client, Driver(client, limits=ActionLimits(change=0.05)) as driver:
        driver.reset()                                  # at the beginning of every episode
        while running:                                  # at driver.fps, by the robot's own clock
            robot.send(driver.step(robot.observe()))    # {field: frame} -> action [A]

The robot never misses its next step for the network: it waits for an answer for half a control step at most, chunks may
be asked for ahead, an answer is cut by the steps that the robot has acted since its observation (those that it held
still have used up nothing), and where no action is left that is young enough, the robot holds still. A server that
offers a chunking other than synchronous (real-time chunking) is told what is left of the plan underway. A policy that
decides ahead (it reads `observation.action_queue`, see `core.delayed`) is asked when just so many steps are left, and
its answer follows on from them: a robot whose server is quicker than that never waits and never jumps. Whatever comes
is clipped to the policy's bounds and to the robot's own, and counted. A server that fails is asked again, later and
later; `error` and `away` say what is wrong and for how long, and `require_server` raises it once that is too long.
Axes: C chunk step, P predicted step, A action dimension (any shape).
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError, ServingError, SpecError
from robopolicy.core.history import begin, move
from robopolicy.core.spec import QUEUE, TASK
from robopolicy.serving.client import RefusedError
from robopolicy.serving.described import ActionLimits, described_policy
from robopolicy.serving.holding import Hold, Stillness
from robopolicy.serving.notices import Notices, far_from_known
from robopolicy.serving.protocol import DELAY, PLAN, SESSION

BACK_OFF = 0.1, 5.0
"""Seconds before a server that failed is asked again: at first, and at most; doubled in between."""

LONG = 1.0
"""Seconds without an answer after which the user is told that the robot stands still for that."""

REMEMBERED_DELAYS = 10
"""Of the last answers, whose greatest delay is expected of the next one."""


class Server(Protocol):
    """What a driver needs of a client: `PolicyClient`, or a stand-in."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the server said of its policy when the connection was made."""
        ...

    def infer(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return {"actions": [C, A], ...} for one robot's observation."""
        ...


class Requests:
    """One conversation with a server, in a thread of its own: questions of one or several drivers in their order.

    latencies: seconds of every question that was answered.
    """

    def __init__(self, client: Server):
        self.client = client
        self.latencies: list[float] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="requests")

    def ask(self, message: Mapping[str, Any]) -> Future[np.ndarray]:
        """Send an observation; the future has the actions [C, A], or what went wrong."""
        return self._thread.submit(self._ask, message)

    def _ask(self, message: Mapping[str, Any]) -> np.ndarray:
        started = time.perf_counter()
        answer = self.client.infer(message)
        self.latencies.append(time.perf_counter() - started)
        actions = np.asarray(answer.get("actions"))
        if actions.dtype.kind not in "fiu" or actions.ndim < 2 or not len(actions):
            raise ServingError(f"The server answered no chunk of actions but {str(answer.get('actions'))[:80]!r}.")
        if not np.isfinite(actions).all():
            raise NonFiniteError("The server answered with NaN or infinity; no action was executed.")
        return actions

    @property
    def trouble(self) -> str:
        """Why the client cannot connect while it keeps trying, "" where it does not say or has no trouble."""
        return str(getattr(self.client, "trouble", None) or "")

    def close(self) -> None:
        """Give up what has not been asked yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class Driver:
    """The next action of one robot, at every control step; see the module.

    hold: the action that keeps the robot still, [A], or a function (newest frames by field, last action or None) that
    returns it (for robots that are told positions: `lambda frames, last: frames["observation.state"]`); None:
    velocities and forces go to zero and positions stay, by the names and units of the policy's actions (see `holding`).
    start: where the robot is before its first action [A], from which `limits.change` counts, NaN where nobody knows it;
    what holds it still unless given. limits: the robot's own, which must bound what the policy does not. prefetch: the
    next chunk is asked for when so many steps are left (a policy then acts on what was seen so many steps ago, which
    costs success: only where the server is slower than `grace`); of a server that offers chunking it is asked for as
    soon as a chunk has been executed of the plan, which reaches further, and of one that decides ahead when as many
    steps are left as it was trained for. grace: seconds that a step may wait for its action, half a control step for
    None. latency_steps: control steps that an answer is held back after its observation, to simulate a slow one; an
    episode's first is not. blend: over so many steps a new chunk takes over from the old one, angles that go round the
    short way, grippers and toggles at once, by their names and units, or by turns and switches (see `turns_of`).
    max_age: seconds after which an observation is too old to act on (None: as long as two chunks take). patience:
    seconds that an episode's first chunk is waited for, and after which a server that has not answered counts as away
    (`require_server`). wait: wait for every chunk, in a simulator that stands still meanwhile. requests: shared with
    other drivers of the same connection, each of which then has a `session` of its own, by which the server tells them
    apart. counts: how many steps were taken ("steps"), held ("held"), clipped ("clipped"), shown far outside of what
    the policy knows ("outside"), late answers thrown away ("stale"), failures ("failures"). late: by how many steps the
    present chunk is executed later than it was meant, because the robot held still meanwhile, which the policy had not
    foreseen. error: what the server did wrong last, silence included, None since it answered. Raises ServingError where
    the server does not describe its policy, ConfigError on a prefetch beyond the chunk, for a policy that decides
    further ahead than its chunks reach, on a latency that leaves no answer of use, and where hold or limits do not fit
    its actions, `act` NonFiniteError where what holds the robot still or limits it is no number, ConfigError where it
    is none for these actions.
    """

    def __init__(
        self,
        client: Server,
        *,
        hold: np.ndarray | Hold | None = None,
        start: Hold | None = None,
        limits: ActionLimits | None = None,
        prefetch: int = 0,
        grace: float | None = None,
        latency_steps: int = 0,
        blend: int = 0,
        turns: Mapping[str, float] | None = None,
        switches: Sequence[str] = (),
        max_age: float | None = None,
        patience: float = 5.0,
        wait: bool = False,
        requests: Requests | None = None,
        session: str = "",
        notices: Notices | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        described = described_policy(client.metadata).with_turns(turns or {}, switches)
        self.policy, self.limits = described, limits or ActionLimits()
        self.hold = Stillness(hold, described)
        self.start = self.hold if start is None else start
        self.prefetch = prefetch
        self.blend = blend
        self.wait = wait
        self.patience = patience
        self.latency_steps, self.session = latency_steps, session
        self.grace = 0.5 / described.fps if grace is None else grace
        self.max_age = 2 * described.chunk / described.fps if max_age is None else max_age
        self._require_possible()
        if described.overlap or described.ahead:
            self.prefetch = described.overlap or described.ahead
        self._delays = deque([latency_steps], REMEMBERED_DELAYS)
        self.counts: Counter[str] = Counter()
        self.error: Exception | None = None
        self._requests, self._owned = requests or Requests(client), requests is None
        self._clock, self._notices = clock, notices or Notices()
        self._unanswered: float | None = None
        self._back_off = BACK_OFF[0]
        self._ask_after = 0.0
        self._late = False
        self.reset()

    def _require_possible(self) -> None:
        """Raise ConfigError for what this policy cannot be driven with."""
        policy, steps = self.policy, self.latency_steps
        for name in ("prefetch", "latency_steps", "blend"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} is {value!r}: it is a whole number of control steps.")
        for name in ("grace", "max_age", "patience"):
            value = getattr(self, name)
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not number or not value >= 0 or (name == "max_age" and not value > 0):
                raise ConfigError(
                    f"{name} is {value!r}: seconds, {'more than 0' if name == 'max_age' else '0 or more'}."
                )
        if not 0 <= self.prefetch < policy.chunk:
            raise ConfigError(f"prefetch is between 0 and {policy.chunk - 1}, chunks have {policy.chunk} steps.")
        if steps < 0 or self.blend < 0:
            raise ConfigError(f"latency_steps is {steps} and blend {self.blend}: choose 0 control steps or more.")
        if policy.ahead > policy.chunk:
            raise ConfigError(
                f"The policy decides {policy.ahead} steps ahead and its chunks have {policy.chunk}: one answer would "
                "have to be asked for before the last is there. Train it with a longer chunk."
            )
        if policy.overlap and steps > min(policy.overlap, policy.chunk):
            raise ConfigError(
                f"latency_steps is {steps}, and this server is asked every {policy.chunk} steps (chunk) for plans that "
                f"reach {policy.overlap} further: an answer may take {min(policy.overlap, policy.chunk)} at most. "
                "Choose fewer, or a server whose chunking is synchronous: its robots hold still meanwhile."
            )
        if steps and not self.wait and steps / policy.fps >= self.max_age:
            raise ConfigError(
                f"latency_steps is {steps}: an answer that is held back for {steps / policy.fps:g} s is older than "
                f"max_age ({self.max_age:g} s) and none would be executed. Choose fewer, or a longer max_age."
            )
        self.limits.require_fit(policy)

    def reset(self) -> None:
        """Begin an episode: nothing is remembered, and an answer under way is not used."""
        self._frames: dict[str, np.ndarray] = {}
        self._task: str | None = None
        self._step, self._first = 0, True
        self._chunk = np.zeros((0, *self.policy.shape))
        self._begins = 0
        self._seen = 0.0
        self.late = 0
        self._request: Future[np.ndarray] | None = None
        self._unanswered = None if self.error is None else self._unanswered
        self._asked = _Asked(0, 0.0, 0, 0)
        self._held = 0
        self._shown = 0
        self._last: np.ndarray | None = None

    def close(self) -> None:
        """Ask no more; the client stays open."""
        if self._owned:
            self._requests.close()

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fps(self) -> float:
        """Control steps a second that the policy was trained for."""
        return self.policy.fps

    @property
    def away(self) -> float:
        """Seconds since the oldest question that has no answer, whether the server fails or is silent; 0 for none."""
        answered = self.error is None and self._request is not None and self._request.done()  # but held back
        return 0.0 if self._unanswered is None or answered else self._clock() - self._unanswered

    def step(self, frames: Mapping[str, Any]) -> np.ndarray:
        """Take what the robot sees now, and return its action [A]: `look`, then `act`."""
        self.look(frames)
        return self.act()

    def look(self, frames: Mapping[str, Any]) -> None:
        """Take what the robot sees now: field -> frame [*shape], and its instruction under `task`.

        Asks ahead if it is time. Raises ServingError where a field is missing that the policy reads, SpecError where a
        frame has another shape than it reads, or than the frames before, or the instruction is no text, NonFiniteError
        on NaN or infinity.
        """
        shown = self.policy.frames(frames, self._frames)
        if self.policy.ahead:
            shown[QUEUE] = self._queue()
        for key, frame in shown.items():
            newest, seen = frame[None, None], self._frames.get(key)
            self._frames[key] = begin(newest, self.policy.history) if seen is None else move(seen, newest)
        self._task = None if frames.get(TASK) is None else _instruction(frames[TASK])
        if far := far_from_known(self.policy, shown):
            self.counts["outside"] += 1
            self._notices.say(
                "outside",
                f"{'Before it moves: ' if self._first else ''}the robot is far outside of what its policy was trained "
                f"on, which only guesses there: {far}. Lead the robot back, or look whether units and calibration are "
                "those of its data.",
            )
        self._take_answer()
        if self._begins + len(self._chunk) - self._step <= self.prefetch:
            self._ask()
            if self.wait:
                self._take_answer()

    def act(self) -> np.ndarray:
        """Return the action [A] of this control step, within all limits."""
        action = self._planned()
        if action is None:
            action = self._waited(self.patience if self.wait or self._first else self.grace)
        self.counts["steps"] += 1
        held = action is None
        if action is None:
            self.counts["held"] += 1
            self._held += not self._foreseen
            if self.away > LONG:
                why = str(self.error or self._requests.trouble or "it is silent")
                self._notices.say("away", f"No answer for {self.away:.1f} s, the robot stands still: {why}")
            action = self._still(self._last)
        action = self._limited(np.asarray(action, dtype=np.float64), held)
        self._step, self._first = self._step + 1, False
        self._last = action
        return action

    def _still(self, last: np.ndarray | None) -> np.ndarray:
        """Return the action that holds the robot still [A] after its `last` one."""
        return self.hold(self._newest, last)

    @property
    def _newest(self) -> dict[str, np.ndarray]:
        """Newest frames by field, [*shape]."""
        return {key: value[0, -1] for key, value in self._frames.items()}

    def _queue(self) -> np.ndarray:
        """Return what is decided and not yet done, [d * A], as `DelayedWorld` shows it; at first all is still."""
        policy, ahead = self.policy, self._chunk[max(self._step - self._begins, 0) :][: self.policy.ahead]
        at_first = np.clip(np.zeros(policy.shape), policy.low, policy.high)
        still = at_first if self._last is None else self._still(self._last)
        self._shown = len(ahead)
        missing = np.broadcast_to(still, (policy.ahead - len(ahead), *policy.shape))
        return np.concatenate([ahead, missing]).astype(np.float32).reshape(-1)

    @property
    def _foreseen(self) -> bool:
        """Whether a step that is held still was in the queue that the policy was shown: its decision is not late."""
        since = self._step - self._asked.step
        return self._request is not None and self._asked.shown <= since < self.policy.ahead

    def _after_queue(self, chunk: np.ndarray, begins: int) -> tuple[np.ndarray, int]:
        """Return a chunk that begins at a later step behind what is done until then, and the step at which that begins.

        In an episode's first steps, in which nothing is decided yet, the robot holds still.
        """
        before = self._chunk[max(self._step - self._begins, 0) :][: max(begins - self._step, 0)]
        waits = max(begins - self._step - len(before), 0)
        still = np.broadcast_to(self._still(chunk[0] if self._last is None else self._last), (waits, *chunk.shape[1:]))
        return np.concatenate([before, still, chunk]), min(begins, self._step)

    def _ask(self) -> None:
        if self._request is None and self._clock() >= self._ask_after:
            message: dict[str, Any] = {key: value[0] for key, value in self._frames.items()}
            if self.session:
                message[SESSION] = self.session
            if self._task is not None:
                message[TASK] = self._task
            if self.policy.overlap:
                left = self._chunk[max(self._step - self._begins, 0) :]
                left = left[:0] if self._too_old(self._seen) else left
                message |= {PLAN: left.astype(np.float32), DELAY: min(max(self._delays), len(left))}
            self._request = self._requests.ask(message)
            self._unanswered = self._clock() if self._unanswered is None else self._unanswered
            self._asked = _Asked(self._step, self._clock(), self._held, self._shown)

    def _take_answer(self) -> None:
        """Put an answer that has come in the place of the chunk before."""
        if self._request is None or self._comes_later():
            return
        if self.wait:
            wait_for([self._request], timeout=self.patience)
        if not self._request.done():
            trouble = self._requests.trouble
            if (self.error is None or trouble) and self.away > self.patience:
                why = trouble or (
                    "does it hang, or is its machine overloaded, or the network to it cut? Have more patience with a "
                    "policy that is this slow."
                )
                self.error = ServingError(
                    f"The server has not answered for more than {self.patience:g} s (patience): {why}"
                )
            return
        request, self._request = self._request, None
        asked = self._asked
        late = self._held - asked.held
        begins, seen = asked.step + late + self.policy.ahead, asked.seen
        try:
            chunk = request.result()
            if chunk.shape[1:] != self.policy.shape:
                raise ServingError(
                    f"The server answered actions of shape {list(chunk.shape)}, not [C, *{list(self.policy.shape)}]."
                )
        except Exception as error:  # whatever it was: the robot must go on
            self.counts["failures"] += 1
            self.error = error
            self._later()
            return
        self.error, self._unanswered = None, None
        self._delays.append(self._step - asked.step)
        took = self._clock() - seen
        if begins + len(chunk) <= self._step or self._too_old(seen):
            self.counts["stale"] += 1
            self._notices.say(
                "late",
                f"An answer came {took:.2g} s after what it answers, too late to be executed (max_age is "
                f"{self.max_age:.2g} s): {self.counts['stale']} so far. The robot stands still meanwhile. Serve a "
                "quicker policy, ask ahead (drive.prefetch), or let older answers count (drive.max_age).",
            )
            if self._late:  # the one before was too late, too: what is asked at once again only adds to the load
                self._later()
            self._late = True
            return
        lasts = self.policy.chunk / self.policy.fps
        if self._first and not self.wait and took > lasts:
            self._notices.say(
                "slow",
                f"Before it moves: the first answer took {took:.2g} s, and a chunk of actions lasts {lasts:.2g} s: the "
                "robot will stand still for most of the time. Serve a quicker policy, or ask ahead (drive.prefetch).",
            )
        self._back_off, self._late = BACK_OFF[0], False
        chunk = self._blended(chunk, begins)
        if self.policy.ahead:
            chunk, begins = self._after_queue(chunk, begins)
        self._chunk = chunk
        self._begins = begins
        self._seen = seen
        self.late = late

    def _later(self) -> None:
        """Ask no sooner than after a while, and after a longer one the next time."""
        self._ask_after = self._clock() + self._back_off
        self._back_off = min(2 * self._back_off, BACK_OFF[1])

    def _blended(self, chunk: np.ndarray, begins: int) -> np.ndarray:
        """Return a new chunk whose first steps from now on lead over from those of the old one: angles the short way
        round, grippers and toggles at once.
        """
        chunk, turns = chunk.astype(np.float64), self.policy.turns
        for index in range(self.blend):
            new, old = self._step - begins + index, self._step - self._begins + index
            if 0 <= new < len(chunk) and old < len(self._chunk):  # what is decided ahead has not begun yet
                rest = np.where(turns.at_once, 0.0, 1 - (index + 1) / (self.blend + 1))
                chunk[new] = turns.within(chunk[new] - rest * turns.shortest(chunk[new] - self._chunk[old]))
        return chunk

    def _planned(self) -> np.ndarray | None:
        """Return this step's action of the chunk at hand [A], None where there is none or it is too old."""
        place = self._step - self._begins
        return self._chunk[place] if place < len(self._chunk) and not self._too_old(self._seen) else None

    def _comes_later(self) -> bool:
        """Whether an answer that is there is held back, because a slower one is simulated."""
        return not self._first and self._step < self._asked.step + self.latency_steps

    def _too_old(self, seen: float) -> bool:
        return not self.wait and self._clock() - seen > self.max_age

    def _waited(self, seconds: float) -> np.ndarray | None:
        """Return this step's action [A] once it is there; None after `seconds`, or where asking again is no use."""
        asked = self._asked.seen if self._request is not None and self.wait else self._clock()  # `look` waits too
        until = asked + seconds
        while (action := self._planned()) is None and self._clock() < until and not self.hopeless:
            self._ask()
            if self._comes_later():
                break
            if self._request is None:
                time.sleep(0.01)
            else:
                wait_for([self._request], timeout=min(0.1, seconds))
            self._take_answer()
        return action

    @property
    def hopeless(self) -> bool:
        """Whether the server refuses what this robot sends, or answers what must not be executed."""
        return isinstance(self.error, RefusedError | NonFiniteError)

    def require_server(self) -> None:
        """Raise what the server did wrong once it is hopeless, or away for longer than patience: time to stop."""
        if self.error is not None and (self.hopeless or self.away > self.patience):
            raise self.error

    def _limited(self, wanted: np.ndarray, held: bool = False) -> np.ndarray:
        last = self._last
        if last is None and self.limits.change is not None:  # an episode's first action is no jump either
            last = np.asarray(self.start(self._newest, None), dtype=np.float64)
        action = self.limits.limited(wanted, last, self.policy, held=held)
        self.counts["clipped"] += not np.allclose(action, wanted, rtol=1e-5, atol=1e-7)  # float32 rounds bounds
        return action


def _instruction(task: Any) -> str:
    """Return the robot's instruction. Raises SpecError where it is none: anything else as text would be one, too."""
    if not isinstance(task, str):
        raise SpecError(f"The robot's instruction, '{TASK}', is text, not {type(task).__name__}.")
    return str(task)


@dataclass(frozen=True)
class _Asked:
    """When a question was asked: the control step, the seconds, and how many steps had been held still unforeseen.

    shown: how many actions were decided already and shown to a policy that decides ahead, which then saw stillness.
    """

    step: int
    seen: float
    held: int
    shown: int


class Clock:
    """Paces control steps; a step that is late is counted and shifts the following ones.

    rate: steps a second, 0 for as fast as can be; misses: steps that came more than a tenth of a period late.
    """

    def __init__(self, rate: float):
        self.period = 1.0 / rate if rate > 0 else 0.0
        self.misses = 0
        self._next: float | None = None

    def start(self) -> None:
        """Begin an episode: its first control step is due whenever it is ready."""
        self._next = None

    def wait(self) -> None:
        """Sleep until the next control step is due, or count it as late."""
        now = time.perf_counter()
        if self._next is None:
            self._next = now
        if self.period and now > self._next + 0.1 * self.period:
            self.misses += 1
            self._next = now
        elif self._next > now:
            time.sleep(self._next - now)
        self._next += self.period


def latency_figures(seconds: Sequence[float]) -> dict[str, float]:
    """Return {p50, p90, p99, max} of how long answers took, in milliseconds; nothing where there was none."""
    if not seconds:
        return {}
    latency = np.array(seconds) * 1e3
    return {
        **{f"p{level}": float(np.percentile(latency, level)) for level in (50, 90, 99)},
        "max": float(latency.max()),
    }
