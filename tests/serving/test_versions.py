"""A new checkpoint replaces the served one without an error for anybody, and the old one comes back if it fails."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from served_policies import Steady

from robopolicy.client.protocol import Limits
from robopolicy.core.errors import CheckpointError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, TASK
from robopolicy.serving.detection import Detection
from robopolicy.serving.sessions import RobotSession
from robopolicy.serving.telemetry import Log, Metrics
from robopolicy.serving.versions import LoadedPolicy, PolicyVersions, ServerSettings

LONG = 1e6


class Version(Steady):
    """Answers `value`; if `broken`, raises, answers NaN or waits for an event where a state is above 1, 2 or 3."""

    def __init__(self, value: float, broken: bool = False):
        self.value, self.broken, self.waiting = value, broken, threading.Event()

    def act(self, observation, generator, *, deterministic=False):
        state = float(observation[STATE].max())
        actions = torch.full((len(observation[STATE]), 4, 2), self.value)
        if self.broken and state > 3:
            self.waiting.wait()
        elif self.broken and state > 2:
            actions[:] = torch.nan
        elif (self.broken and state > 1) or state < -1:
            raise RuntimeError("it is broken")
        return Decision(actions, {}, torch.zeros(len(actions), 1), torch.ones(len(actions), 1, dtype=torch.bool))


class Watching:
    """A watcher whose index counts the decisions of an episode; it alarms where a state is above .5."""

    def start(self, rows):
        self.count = np.zeros(rows)

    def reset(self, rows):
        self.count[rows] = 0

    def watch(self, observation, rows, generator):
        assert len(set(rows.tolist())) == len(rows)
        self.count[rows] += 1
        return {"count": (self.count[rows].copy(), observation[STATE][:, -1, 0].numpy() > 0.5)}


def session(name: str = "robot", **values) -> RobotSession:
    made = RobotSession(name, "", Steady.spec, {}, Limits.of(Steady.spec))
    vars(made).update(values)
    return made


def shown(state: float) -> dict:
    return {STATE: np.full((1, 1, 2), state, np.float32), TASK: np.array([""])}


class Served:
    """A first version, those that can be loaded after it, and the log."""

    def __init__(self, *later: LoadedPolicy | Exception, watcher=None, **settings):
        self.later, self.lines = list(later), []
        log = Log()
        log.events.add = lambda event, details: self.lines.append((event, details))
        first = LoadedPolicy(Version(0.0), "first", watcher)
        settings = ServerSettings(port=0, **{"probation": LONG, **settings})
        self.versions = PolicyVersions("", first, settings, Metrics(), log, self.load)
        self.versions.current.queue.start()

    def load(self):
        result = self.later.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def ask(self, state: float = 0.0, robot: RobotSession | None = None) -> tuple[float, str]:
        answer, served = await self.versions.infer(robot or session(), shown(state), None, ("", 0))
        return float(answer.actions[0, 0]), served.version

    async def stop(self) -> None:
        for served in (self.versions.current, self.versions.candidate):
            if served is not None:
                served.policy.waiting.set()
        await self.versions.stop(5.0)


def run(served: Served | None, test) -> None:
    async def main():
        made = served() if callable(served) else served
        try:
            await test(made)
        finally:
            await made.stop()

    asyncio.run(main())


def test_a_sound_version_answers_at_once_and_stays_after_its_probation():
    async def test(served):
        assert await served.ask() == (0.0, "first")
        assert await served.versions.reload() == ""
        assert await served.ask() == (0.5, "second")
        while served.versions.candidate is not None:
            await asyncio.sleep(0)
        assert served.versions.current.version == "second"
        assert await served.versions.reload() == ""  # the same again
        assert [event for event, _ in served.lines][-3:] == [
            "policy on probation",
            "policy promoted",
            "policy unchanged",
        ]

    again = LoadedPolicy(Version(0.5), "second")
    run(lambda: Served(again, again, probation=1e-3), test)


def test_what_cannot_serve_is_refused_and_nobody_notices():
    other = Version(0.5)
    other.spec = replace(Steady.spec, chunk=3)

    async def test(served):
        await served.ask(2.5)
        for reason in ("no such file", "differs in chunk: its chunk is 3, not 4", "NaN or infinity"):
            assert reason in await served.versions.reload()
            assert await served.ask(0.1) == (0.0, "first")
        assert served.versions.candidate is None
        assert served.versions.describe()["last_failure"] == served.versions.failure

    lost = CheckpointError("no such file")
    run(lambda: Served(lost, LoadedPolicy(other, "b"), LoadedPolicy(Version(0.5, broken=True), "c")), test)


@pytest.mark.parametrize(("state", "reason"), [(1.5, "broken"), (2.5, "NaN"), (3.5, "No answer within")])
def test_the_old_version_answers_when_the_new_one_fails(state, reason):
    async def test(served):
        robot = session()
        await served.versions.reload()
        assert await served.ask(0.0, robot) == (0.5, "second")
        candidate = served.versions.candidate
        candidate.queue.deadline = 0.05
        assert await served.ask(state, robot) == (0.0, "first")
        assert served.versions.candidate is None and reason in served.versions.failure
        assert await served.ask(0.0, robot) == (0.0, "first")
        candidate.policy.waiting.set()

    run(lambda: Served(LoadedPolicy(Version(0.5, broken=True), "second")), test)


def test_a_request_that_no_version_can_answer_is_no_failure_of_the_new_one():
    async def test(served):
        await served.versions.reload()
        with pytest.raises(RuntimeError, match="broken"):
            await served.ask(-2.0)
        assert await served.ask() == (0.5, "second")

    run(lambda: Served(LoadedPolicy(Version(0.5), "second")), test)


def test_a_chunk_that_is_being_computed_comes_from_the_old_version():
    async def test(served):
        served.versions.current.policy.broken = True
        waits = asyncio.create_task(served.ask(3.5))
        while not served.versions.current.queue.pass_age:
            await asyncio.sleep(0)
        served.versions._recent.clear()
        await served.versions.reload()
        assert await served.ask() == (0.5, "second")
        served.versions.current.policy.waiting.set()
        assert await waits == (0.0, "first")

    run(lambda: Served(LoadedPolicy(Version(0.5), "second")), test)


def test_a_share_of_the_sessions_tries_a_new_version():
    async def test(served):
        await served.versions.reload()
        assert await served.ask(0.0, session(lot=0.24)) == (0.5, "second")
        assert await served.ask(0.0, session(lot=0.26)) == (0.0, "first")
        lots = [session(f"{number}").lot for number in range(400)]
        assert 60 < sum(lot < 0.25 for lot in lots) < 140

    run(lambda: Served(LoadedPolicy(Version(0.5), "second"), canary=0.25), test)


def test_a_version_that_alarms_in_too_many_episodes_is_taken_back():
    async def test(served):
        await served.versions.reload()
        for _ in range(6):
            await served.ask(0.0)
        episodes = 0
        while served.versions.candidate is not None:
            await served.ask(0.9, session())
            episodes += 1
        assert "alarms in" in served.versions.failure
        assert 10 < episodes < 30  # the lower bound of the interval must exceed a half
        assert await served.ask(0.9) == (0.0, "first")

    run(lambda: Served(LoadedPolicy(Version(0.5), "second", Watching())), test)  # pyright: ignore[reportArgumentType]


def test_every_session_has_its_own_row_of_the_detectors():
    detection = Detection(Watching(), 2, torch.Generator())  # pyright: ignore[reportArgumentType]
    left, right = session("left"), session("right")

    def counts(*robots):
        observation = {STATE: torch.zeros(len(robots), 1, 2), TASK: [""] * len(robots)}
        return [each and each.index["count"] for each in detection.watch(observation, robots)]

    assert counts(left, right) == [1, 1]
    assert counts(left, left, None, right) == [2, 3, None, 2]
    third = session("third")
    assert counts(third) == [None]
    right.reset()
    assert counts(right, left) == [1, 4]
    del left
    assert counts(third) == [1]
