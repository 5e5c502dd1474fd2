"""Nobody waits for what somebody else sends too much of: turns in the queue, by address and by connection."""

import asyncio
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from served_policies import Steady

from robopolicy.client.protocol import Limits
from robopolicy.core.errors import SpecError
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec
from robopolicy.serving.batching import BusyError, InferenceQueue, PendingRequest, RoundRobin, request_to_drop
from robopolicy.serving.connections import ConnectionLimiter
from robopolicy.serving.sessions import Sessions

HOG, ROBOT = "10.0.0.1", "10.0.0.2"


def asks(address, connection, number=1):
    return [PendingRequest({}, Mock(), asker=(address, connection)) for _ in range(number)]


def flood():
    """Sixty connections of one address with sixteen requests each, as they come in."""
    rounds = [[each for connection in range(60) for each in asks(HOG, connection)] for _ in range(16)]
    return [each for some in rounds for each in some]


def test_a_request_of_another_address_is_in_the_next_batch_however_much_waits():
    turns, waiting = RoundRobin(), flood()
    for _ in range(5):
        served = turns.take(waiting, 16)
        waiting = [each for each in waiting if each not in served]
    robot = asks(ROBOT, 99)
    batch = turns.take(waiting + robot, 16)
    assert robot[0] in batch and len(batch) == 16


def test_addresses_share_batches_and_so_do_connections_of_one():
    turns = RoundRobin()
    waiting = [*asks(HOG, 0, 50), *asks(HOG, 1, 50), *asks(ROBOT, 2, 50)]
    served = [each.asker for _ in range(10) for each in turns.take(waiting, 4)]
    assert served.count((ROBOT, 2)) == 20 and served.count((HOG, 0)) == served.count((HOG, 1)) == 10


def test_requests_of_one_connection_stay_in_their_order_and_nobody_is_overtaken_for_ever():
    turns, waiting = RoundRobin(), flood()[:120]
    own = [each for each in waiting if each.asker == (HOG, 7)]
    batches, fresh = [], count(1000)
    while own[-1] in waiting:
        newcomers = [each for _ in range(8) for each in asks(ROBOT, next(fresh))]
        batch = turns.take([*waiting, *newcomers], 16)
        batches += [each for each in batch if each in own]
        waiting = [each for each in waiting if each not in batch]
        assert len(waiting) < 120
    assert batches == own


def test_requests_that_cannot_be_answered_together_take_turns_too():
    turns = RoundRobin()
    seeded = [PendingRequest({}, Mock(), torch.Generator(), asker=(HOG, 0)) for _ in range(20)]
    robot = asks(ROBOT, 1, 2)
    assert turns.take([*seeded, *robot], 16) == [seeded[0]]
    assert turns.take([*seeded[1:], *robot], 16) == robot


def test_where_no_more_may_wait_whoever_has_most_gives_way():
    waiting = flood()[:256]
    assert (
        request_to_drop(waiting, (ROBOT, 99)) is waiting[-1]
    )  # of a connection that has five, like the fifteen before it
    few = [*asks(HOG, 0, 3), *asks(HOG, 1), *asks(ROBOT, 2, 4)]
    assert request_to_drop(few, (HOG, 1)) is few[2]
    assert request_to_drop(few, (HOG, 0)) is None
    assert request_to_drop(few, (ROBOT, 2)) is None
    assert request_to_drop(few, (ROBOT, 3)) is few[-1]


def test_a_full_queue_lets_another_address_in_and_tells_the_one_that_had_most():
    observation = {STATE: np.zeros((1, 1, 2), np.float32), TASK: np.array([""])}

    async def main():
        queue = InferenceQueue(Steady(), torch.Generator(), max_queue_size=8)
        queue._task = asyncio.create_task(asyncio.sleep(60))  # nothing is answered yet
        hog = [asyncio.create_task(queue.infer(observation, asker=(HOG, each))) for each in range(10)]
        await asyncio.sleep(0)
        robot = asyncio.create_task(queue.infer(observation, asker=(ROBOT, 99)))
        await asyncio.sleep(0.01)
        assert len(queue) == 8 and not robot.done()
        assert sum(each.done() for each in hog) == 3
        with pytest.raises(BusyError, match="8 requests are waiting already"):
            await hog[7]
        queue._task.cancel()
        queue.start()
        assert (await robot).actions.shape == (4, 2)
        await asyncio.gather(*hog, return_exceptions=True)
        await queue.stop(1.0)

    asyncio.run(main())


def test_one_address_takes_neither_all_sessions_nor_all_reading():
    spec = PolicySpec({STATE: Field((1,))}, Field((1,)), 2, 1, 1, 0, fps=10.0)
    sessions = Sessions(spec, Limits(sessions=2, address_sessions=3, all_sessions=4), {}, expiry=60)
    for connection in range(3):
        sessions.take(connection, {}, HOG)
    with pytest.raises(SpecError, match="One address has at most 3 sessions"):
        sessions.take(3, {}, HOG)
    sessions.take(4, {}, ROBOT)

    async def main():
        door = ConnectionLimiter(Limits(reading=2))
        door.enter(HOG)
        lane = door.lane(HOG)
        await lane.acquire()
        await lane.acquire()
        assert door.lane(HOG).locked() and not door.lane(ROBOT).locked()
        door.leave(HOG)
        assert not door.lane(HOG).locked()

    asyncio.run(main())
