"""`Driver`: connects a robot to a policy server, and returns an action for the robot at every control step.

    with PolicyClient(host, api_key=KEY) as client, Driver(client, limits=ActionLimits(change=0.05)) as driver:
        driver.reset()                                  # at the beginning of every episode
        while running:                                  # at driver.fps, by the robot's own clock
            robot.send(driver.step(robot.observe()))    # {field: frame} -> action [A]

Network delays never make the robot miss a step: it waits at most half a control step for an answer. Chunks can be
requested ahead. An answer is shortened by the steps that the robot has acted since its observation (steps held still do
not count). If no action is left that is recent enough, the robot holds still. A server with a chunking other than
synchronous (real-time chunking) receives the robot's remaining actions. A policy trained with inference latency (it
reads `observation.action_queue`, see `core.delayed`) is called when exactly that many steps are left, and its answer
continues them: if the server is faster than that, the robot never waits and never jumps. All actions are clipped to the
policy's and the robot's bounds, and clipping is counted. A failing server is retried at increasing intervals; `error`
and `away` report the problem and its duration, and `require_server` raises it once that is too long. Axes: C chunk
step, P predicted step, A action dimension (any shape).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .errors import ConfigError, NonFiniteError, ServingError, SpecError
from .executed import ActingAgent, ExecutedSteps, Segment
from .holding import Hold, HoldAction
from .keys import QUEUE, TASK
from .notices import Notices, far_from_training_data
from .policy_client import RefusedError
from .policy_description import ActionLimits, described_policy
from .protocol import DELAY, EXECUTED, FAILURE, PLAN, POLICY, RESET, SESSION
from .training_ranges import TrainingRanges

BACK_OFF = 0.1, 5.0
"""Seconds before a failing server is retried: initial and maximum, doubling in between."""

LONG = 1.0
"""Seconds without an answer after which the user is notified that the robot is holding still."""

ENDS_WITHIN = 1.0
"""Seconds that `Driver.close` waits for its last report."""

REMEMBERED_DELAYS = 10
"""Number of recent answers whose maximum delay is the estimate for the next one."""


class Server(Protocol):
    """Interface of the client that a driver needs: `PolicyClient`, or a substitute."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the policy that the server sent on connection."""
        ...

    def infer(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return {"actions": [C, A], ...} for one robot's observation."""
        ...


class Requests:
    """Requests to a server in a separate thread, from one or several drivers, in order.

    latencies: seconds of every answered request; answers: session -> its last answer and the seconds that it took.
    """

    def __init__(self, client: Server):
        self.client = client
        self.latencies: list[float] = []
        self.answers: dict[str, tuple[Mapping[str, Any], float]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="requests")
        self._sent: deque[Future[np.ndarray]] = deque()

    def ask(self, message: Mapping[str, Any]) -> Future[np.ndarray]:
        """Send an observation; the future returns the actions [C, A] or raises the error."""
        while self._sent and self._sent[0].done():
            self._sent.popleft()
        future = self._thread.submit(self._ask, message)
        self._sent.append(future)
        return future

    def _ask(self, message: Mapping[str, Any]) -> np.ndarray:
        start = time.perf_counter()
        answer = self.client.infer(message)
        self.latencies.append(time.perf_counter() - start)
        self.answers[str(message.get(SESSION, ""))] = answer, self.latencies[-1]
        actions = np.asarray(answer.get("actions"))
        if actions.dtype.kind not in "fiu" or actions.ndim < 2 or not len(actions):
            raise ServingError(f"The server's answer is not an action chunk but {str(answer.get('actions'))[:80]!r}.")
        if not np.isfinite(actions).all():
            raise NonFiniteError("The server answered with NaN or infinity; no action was executed.")
        return actions

    def send(self, message: Mapping[str, Any]) -> Future[Mapping[str, Any]]:
        """Send a message without an observation; the future returns the answer or raises the error."""
        return self._thread.submit(self.client.infer, message)

    @property
    def trouble(self) -> str:
        """Reason why the client cannot connect while it keeps retrying, "" if unknown or none."""
        return str(getattr(self.client, "trouble", None) or "")

    def close(self) -> None:
        """Cancel requests that have not been sent yet."""
        for future in self._sent:
            future.cancel()
        self._thread.shutdown(wait=False)


class Driver:
    """Computes the next action of one robot at every control step; see the module.

    hold: the action that keeps the robot still, [A], or a function (newest frames by field, last action or None) that
    returns it (for position-controlled robots: `lambda frames, last: frames["observation.state"]`); None: velocities
    and forces go to zero and positions stay, according to the names and units of the policy's actions (see `holding`).
    start: position of the robot before its first action [A], from which `limits.change` counts, NaN if unknown;
    defaults to hold. limits: the robot's own, which must bound whatever the policy does not. prefetch: request the next
    chunk when this many steps are left. The policy then acts on an observation this many steps old, which reduces
    success: use it only if the server is slower than `grace`. With a server that offers chunking, requests are sent as
    soon as a chunk of the longer prediction has been executed; with a policy trained for latency, when that many steps
    are left. grace: seconds that a step may wait for its action, None for half a control step. latency_steps: control
    steps by which answers are delayed after their observation, to simulate a slow server; an episode's first answer is
    not delayed. blend: number of steps over which a new chunk is blended with the old one: periodic angles along the
    shorter way, grippers and toggles without blending, according to their names and units, or to turns and switches
    (see `periodicity_of`). max_age: seconds after which an observation is too old to act on (None: duration of two
    chunks). patience: seconds to wait for an episode's first chunk, and after which an unresponsive server counts as
    away (`require_server`). wait: wait for every chunk, for a simulator that pauses meanwhile. requests: shared with
    other drivers of the same connection; each then needs its own `session` so that the server can distinguish them.
    counts: numbers of steps ("steps"), held steps ("held"), clipped actions ("clipped"), observations far outside of
    the training data ("outside"), late answers that were discarded ("stale"), actions of somebody else ("overridden"),
    and failures ("failures"). late: number
    of steps by which the present chunk is executed late because the robot held still unexpectedly. error: the server's
    last error, including timeouts, None once it answers again. Raises ServingError when the server does not describe
    its policy. Raises ConfigError on a prefetch beyond the chunk, for a policy whose latency exceeds its chunk, on a
    latency that makes every answer useless, and when hold or limits do not fit its actions. `act` raises NonFiniteError
    when hold or limits give a non-finite action, ConfigError when its shape does not fit.
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
        self._ranges = TrainingRanges(described.known, described.elements)
        self.hold = HoldAction(hold, described)
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
        self._executed = ExecutedSteps(client.metadata, 2 * (described.chunk + described.overlap))
        self._reporting: Future[Mapping[str, Any]] | None = None
        self._knows_episodes = client.metadata.get("server") == "robopolicy"
        self.reset()

    def _require_possible(self) -> None:
        """Raise ConfigError for settings that this policy cannot be driven with."""
        policy, steps = self.policy, self.latency_steps
        for name in ("prefetch", "latency_steps", "blend"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ConfigError(f"{name}={value!r} must be an integer number of control steps.")
        for name in ("grace", "max_age", "patience"):
            value = getattr(self, name)
            number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            if not number or not value >= 0 or (name == "max_age" and not value > 0):
                raise ConfigError(
                    f"{name}={value!r} must be a number of seconds, "
                    f"{'more than 0' if name == 'max_age' else 'at least 0'}."
                )
        if not 0 <= self.prefetch < policy.chunk:
            raise ConfigError(f"prefetch must be between 0 and {policy.chunk - 1}: chunks have {policy.chunk} steps.")
        if steps < 0 or self.blend < 0:
            raise ConfigError(f"latency_steps={steps} and blend={self.blend} must be at least 0 control steps.")
        if policy.ahead > policy.chunk:
            raise ConfigError(
                f"The policy was trained with a latency of {policy.ahead} steps, but its chunks have {policy.chunk}: "
                "a request would be sent before the last answer arrives. Train it with a longer chunk."
            )
        if policy.overlap and steps > min(policy.overlap, policy.chunk):
            raise ConfigError(
                f"latency_steps={steps} is too large: this server is called every {policy.chunk} steps (chunk) and "
                f"predicts {policy.overlap} further steps, so the latency can be at most "
                f"{min(policy.overlap, policy.chunk)} steps. Reduce it, or use a server with chunking=synchronous, "
                "whose robots hold still meanwhile."
            )
        if steps and not self.wait and steps / policy.fps >= self.max_age:
            raise ConfigError(
                f"latency_steps={steps}: an answer that is delayed by {steps / policy.fps:g} s is older than max_age "
                f"({self.max_age:g} s), so none would be executed. Reduce it, or increase max_observation_age."
            )
        self.limits.require_fit(policy)

    def reset(self) -> None:
        """Start an episode: clear the history; a pending answer is not used."""
        self._report()
        self._is_new = True
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
        """Report the last steps to a server that records, and stop sending requests; the client stays open."""
        self._report()
        if self._reporting is not None:
            wait_for([self._reporting], timeout=ENDS_WITHIN)
        if self._owned:
            self._requests.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fps(self) -> float:
        """Control steps per second that the policy was trained for."""
        return self.policy.fps

    @property
    def away(self) -> float:
        """Seconds since the oldest unanswered request, whether the server fails or does not respond; 0 if there is
        none.
        """
        is_answered = self.error is None and self._request is not None and self._request.done()  # but held back
        return 0.0 if self._unanswered is None or is_answered else self._clock() - self._unanswered

    def step(self, frames: Mapping[str, Any]) -> np.ndarray:
        """Take the robot's present observation and return its action [A]: `look`, then `act`."""
        self.look(frames)
        return self.act()

    def look(self, frames: Mapping[str, Any], ask: bool = True) -> None:
        """Take the robot's present observation: field -> frame [*shape], and its instruction under `task`.

        Requests the next chunk if it is time. ask: whether the policy acts; False before `override`. Raises
        ServingError when a field is missing that the policy reads, SpecError when a frame's shape differs from the
        policy's field or from earlier frames, or the instruction is not text, NonFiniteError on NaN or infinity.
        """
        observation = self.policy.frames(frames, self._frames)
        if self.policy.ahead:
            observation[QUEUE] = self._queue()
        for key, frame in observation.items():
            newest, history = frame[None, None], self._frames.get(key)
            frames_before = np.repeat(newest, self.policy.history, axis=1) if history is None else history
            self._frames[key] = np.concatenate([frames_before[:, 1:], newest], axis=1)
        self._task = None if frames.get(TASK) is None else _instruction(frames[TASK])
        if far := far_from_training_data(self._ranges, observation):
            self.counts["outside"] += 1
            self._notices.say(
                "outside",
                f"{'Before the first movement: ' if self._first else ''}the robot's state is far outside of the "
                f"training data: {far}. Move the robot back, or check that units and calibration match the data.",
            )
        if not ask:
            return
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
        on_hold = action is None
        if action is None:
            self.counts["held"] += 1
            self._held += not self._foreseen
            if self.away > LONG:
                reason = str(self.error or self._requests.trouble or "it does not answer")
                self._notices.say("away", f"No answer for {self.away:.1f} s; the robot holds still: {reason}")
            action = self._still(self._last)
        return self._execute(action, on_hold, plan_step=-1 if on_hold else self._step - self._begins)

    def override(
        self,
        action: np.ndarray | None,
        *,
        actor: int = ActingAgent.NOBODY,
        segment: int = Segment.AUTONOMOUS,
        operator: str = "",
    ) -> np.ndarray:
        """Execute an action [A] of somebody else in this control step instead: return it within all limits.

        None holds the robot still. The policy's remaining actions are dropped; it decides from a new observation when
        it acts again. actor, segment, operator: who acts, as in `ExecutedSteps.add`; by default nobody.
        """
        self._chunk, self._begins = self._chunk[:0], self._step
        self._request, self._unanswered = None, None
        on_hold = action is None
        wanted = self._still(self._last) if action is None else action
        action = self._execute(wanted, on_hold, actor=actor, segment=segment, operator=operator)
        self.counts["steps"] += 1
        self.counts["held" if on_hold else "overridden"] += 1
        return action

    def _execute(self, action: np.ndarray, on_hold: bool, **entries: Any) -> np.ndarray:
        """Complete a control step with an action [A] within all limits, which is returned; entries: of the step, see
        `ExecutedSteps.add`.
        """
        action = self._limited(np.asarray(action, dtype=np.float64), on_hold)
        frames = {key: frame for key, frame in self._newest.items() if key != QUEUE}
        self._executed.add(frames, action, self._step, held=on_hold, **entries)
        self._step, self._first = self._step + 1, False
        self._last = action
        return action

    @property
    def plan(self) -> np.ndarray:
        """Remaining actions of the policy, [P, A]."""
        return self._chunk[max(self._step - self._begins, 0) :]

    @property
    def task(self) -> str:
        """The robot's instruction, "" for none."""
        return self._task or ""

    @property
    def answer(self) -> tuple[Mapping[str, Any], float | None]:
        """The server's last answer to this robot and the seconds that it took; ({}, None) before the first."""
        return self._requests.answers.get(self.session, ({}, None))

    @property
    def executed(self) -> dict[str, Any]:
        """The last control step, as `ExecutedSteps.add` describes it, and the answer that it rests on: entries of a
        `RecordedStep`; {} before the first.
        """
        step = dict(self._executed.last)
        if not step:
            return {}
        del step["step"]
        answer, seconds = self.answer
        failure = answer.get(FAILURE) or {}
        return {
            **step,
            "plan": answer.get("actions"),
            "latency": seconds or 0.0,
            "policy": str(answer.get(POLICY, "")),
            "index": next(iter(dict(failure.get("index", {})).values()), 0.0),
            "alarm": bool(failure.get("alarms")),
        }

    def _still(self, last: np.ndarray | None) -> np.ndarray:
        """Return the action that holds the robot still [A] after its `last` one."""
        return self.hold(self._newest, last)

    @property
    def _newest(self) -> dict[str, np.ndarray]:
        """Newest frames by field, [*shape]."""
        return {key: value[0, -1] for key, value in self._frames.items()}

    def _queue(self) -> np.ndarray:
        """Return the action queue [d * A]: decided but not yet executed actions, as in `DelayedWorld`; initially hold
        actions.
        """
        policy, queue = self.policy, self._chunk[max(self._step - self._begins, 0) :][: self.policy.ahead]
        at_first = np.clip(np.zeros(policy.shape), policy.low, policy.high)
        still_action = at_first if self._last is None else self._still(self._last)
        self._shown = len(queue)
        filler = np.broadcast_to(still_action, (policy.ahead - len(queue), *policy.shape))
        return np.concatenate([queue, filler]).astype(np.float32).reshape(-1)

    @property
    def _foreseen(self) -> bool:
        """Whether a held step was already in the action queue that the policy received: the answer then does not count
        as late.
        """
        since = self._step - self._asked.step
        return self._request is not None and self._asked.shown <= since < self.policy.ahead

    def _after_queue(self, chunk: np.ndarray, begins: int) -> tuple[np.ndarray, int]:
        """Return a chunk that starts at a later step, preceded by the actions executed until then, and the step at
        which it starts.

        In an episode's first steps, before any action is decided, the robot holds still.
        """
        before = self._chunk[max(self._step - self._begins, 0) :][: max(begins - self._step, 0)]
        waits = max(begins - self._step - len(before), 0)
        still_actions = np.broadcast_to(
            self._still(chunk[0] if self._last is None else self._last), (waits, *chunk.shape[1:])
        )
        return np.concatenate([before, still_actions, chunk]), min(begins, self._step)

    def _ask(self) -> None:
        if self._request is None and self._clock() >= self._ask_after:
            message: dict[str, Any] = {key: value[0] for key, value in self._frames.items()}
            if self.session:
                message[SESSION] = self.session
            if self._task is not None:
                message[TASK] = self._task
            if self.policy.overlap:
                remaining = self._chunk[max(self._step - self._begins, 0) :]
                remaining = remaining[:0] if self._too_old(self._seen) else remaining
                message[PLAN] = remaining.astype(np.float32)
                message[DELAY] = min(max(self._delays), len(remaining))
            if self._is_new and self._knows_episodes:
                message[RESET] = True
            if self._executed.wanted:
                message[EXECUTED] = {}
            self._request = self._requests.ask(message)
            self._unanswered = self._clock() if self._unanswered is None else self._unanswered
            self._asked = _Asked(self._step, self._clock(), self._held, self._shown)

    def _report(self) -> None:
        """Send the executed steps to a server that records, once the last report is answered; a failed one is sent
        again.
        """
        if self._reporting is not None:
            if not self._reporting.done():
                return
            if self._reporting.exception() is None:
                self._executed.answered()
            self._reporting = None
        if report := self._executed.report():
            self._reporting = self._requests.send({**report, **({SESSION: self.session} if self.session else {})})

    def _take_answer(self) -> None:
        """Replace the present chunk by an answer that has arrived."""
        if self._request is None or self._comes_later():
            return
        if self.wait:
            wait_for([self._request], timeout=self.patience)
        if not self._request.done():
            trouble = self._requests.trouble
            if (self.error is None or trouble) and self.away > self.patience:
                reason = trouble or (
                    "does it hang, is its machine overloaded, or is the network interrupted? If the policy is this "
                    "slow, increase drive.server_timeout (in Python: patience)."
                )
                self.error = ServingError(
                    f"The server has not answered for more than {self.patience:g} s (drive.server_timeout): {reason}"
                )
            return
        request, self._request = self._request, None
        request_state = self._asked
        delay = self._held - request_state.held
        begins, observed_at = request_state.step + delay + self.policy.ahead, request_state.seen
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
        self._is_new = False
        self._report()
        self._delays.append(self._step - request_state.step)
        took = self._clock() - observed_at
        if begins + len(chunk) <= self._step or self._too_old(observed_at):
            self.counts["stale"] += 1
            self._notices.say(
                "late",
                f"An answer arrived {took:.2g} s after its observation, too late to be executed (max_age is "
                f"{self.max_age:.2g} s): {self.counts['stale']} so far. The robot holds still meanwhile. Use a "
                "faster policy, request earlier (drive.prefetch), or allow older answers (drive.max_observation_age).",
            )
            if self._late:  # the one before was too late, too: what is asked at once again only adds to the load
                self._later()
            self._late = True
            return
        lasts = self.policy.chunk / self.policy.fps
        if self._first and not self.wait and took > lasts:
            self._notices.say(
                "slow",
                f"Before the first movement: the first answer took {took:.2g} s, but a chunk of actions lasts "
                f"{lasts:.2g} s: the robot will hold still most of the time. Use a faster policy, or request earlier "
                "(drive.prefetch).",
            )
        self._back_off, self._late = BACK_OFF[0], False
        chunk = self._blended(chunk, begins)
        if self.policy.ahead:
            chunk, begins = self._after_queue(chunk, begins)
        self._chunk = chunk
        self._begins = begins
        self._seen = observed_at
        self.late = delay

    def _later(self) -> None:
        """Delay the next request, each time for longer."""
        self._ask_after = self._clock() + self._back_off
        self._back_off = min(2 * self._back_off, BACK_OFF[1])

    def _blended(self, chunk: np.ndarray, begins: int) -> np.ndarray:
        """Return a new chunk whose first steps from now on are blended with the old one's: periodic angles along the
        shorter way, grippers and toggles without blending.
        """
        chunk, turns = chunk.astype(np.float64), self.policy.turns
        for index in range(self.blend):
            new, old = self._step - begins + index, self._step - self._begins + index
            if 0 <= new < len(chunk) and old < len(self._chunk):  # what is decided ahead has not begun yet
                old_weight = np.where(turns.at_once, 0.0, 1 - (index + 1) / (self.blend + 1))
                chunk[new] = turns.within(chunk[new] - old_weight * turns.shortest(chunk[new] - self._chunk[old]))
        return chunk

    def _planned(self) -> np.ndarray | None:
        """Return this step's action of the present chunk [A], None if there is none or it is too old."""
        place = self._step - self._begins
        return self._chunk[place] if place < len(self._chunk) and not self._too_old(self._seen) else None

    def _comes_later(self) -> bool:
        """Whether an available answer is still delayed, to simulate a slower server."""
        return not self._first and self._step < self._asked.step + self.latency_steps

    def _too_old(self, seen: float) -> bool:
        return not self.wait and self._clock() - seen > self.max_age

    def _waited(self, seconds: float) -> np.ndarray | None:
        """Return this step's action [A] once it is available; None after `seconds`, or after a fatal error."""
        start = self._asked.seen if self._request is not None and self.wait else self._clock()  # `look` waits too
        until = start + seconds
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
        """Whether the error is fatal: the server rejects this robot's requests, or returns actions that must not be
        executed.
        """
        return isinstance(self.error, (RefusedError, NonFiniteError))

    def require_server(self) -> None:
        """Raise the server's error once it is fatal, or has lasted longer than patience: the caller should stop."""
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
    """Return the robot's instruction. Raises SpecError if it is not text."""
    if not isinstance(task, str):
        raise SpecError(f"The robot's instruction, '{TASK}', must be text, not {type(task).__name__}.")
    return str(task)


@dataclass(frozen=True)
class _Asked:
    """Time of a request: the control step, the seconds, and the number of unexpectedly held steps before it.

    shown: number of decided actions in the queue of a policy trained for latency; the rest of its queue were hold
    actions.
    """

    step: int
    seen: float
    held: int
    shown: int


class Clock:
    """Paces control steps; a late step is counted and shifts the following ones.

    rate: steps per second, 0 for as fast as possible; misses: steps that came more than a tenth of a period late.
    """

    def __init__(self, rate: float):
        self.period = 1.0 / rate if rate > 0 else 0.0
        self.misses = 0
        self._next: float | None = None

    def start(self) -> None:
        """Start an episode: its first control step is due immediately."""
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
    """Return {p50, p90, p99, max} of the answer latencies in milliseconds; {} if there were none."""
    if not seconds:
        return {}
    latency = np.array(seconds) * 1e3
    return {
        **{f"p{level}": float(np.percentile(latency, level)) for level in (50, 90, 99)},
        "max": float(latency.max()),
    }
