"""A server's first decisions: code is made for all that may ask together, however long that takes."""

import asyncio
import threading

import pytest
import torch
from served_policies import Echo, ahead

from robopolicy.inference.compiled import compiled
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.serving.batching import BusyError, InferenceQueue
from robopolicy.serving.server import warmed_up


class Compiling(Echo):
    """Takes as long as it is let to, for every new number of rows."""

    def __init__(self, go: threading.Event):
        super().__init__()
        self.go, self.rows = go, list[int]()

    def sizes(self, most):
        return tuple(size for size in (1, 4, 16) if size < 4 * most)

    def act(self, observation, generator, *, deterministic=False):
        rows = len(next(iter(observation.values())))
        if rows not in self.rows:
            assert self.go.wait(20)
        self.rows.append(rows)
        return super().act(observation, generator, deterministic=deterministic)


def _run(policy, meanwhile, **settings):
    """Return what warming up says, what was logged, and do something else at the same time."""
    logged: list[dict] = []

    async def main():
        queue, stop = InferenceQueue(policy, torch.Generator(), **settings), asyncio.Event()
        queue.start()
        doing = asyncio.create_task(meanwhile(stop))
        try:
            return await warmed_up(queue, lambda event, **fields: logged.append({event: fields}), stop)
        finally:
            await doing
            await queue.stop(0.1)

    return asyncio.run(main()), logged


def test_code_is_made_for_every_number_of_rows_longer_than_a_request_may_take():
    go = threading.Event()
    policy = Compiling(go)

    async def let(stop):
        await asyncio.sleep(0.3)
        go.set()

    done, logged = _run(policy, let, deadline=0.1, max_batch_size=4)
    assert done and policy.rows == [1, 4, 1]
    assert logged == [{"compiling": {"rows": 1}}, {"compiling": {"rows": 4}}]


class Around(Echo):
    """Decides by means of a policy, of which it asks `times` decisions for every row."""

    def __init__(self, inner, times):
        super().__init__()
        self.inner, self.times = inner, times

    def around(self, inner):
        return Around(inner, self.times)

    def act(self, observation, generator, *, deterministic=False):
        several = {
            key: value * self.times if isinstance(value, list) else torch.cat([value] * self.times)
            for key, value in observation.items()
        }
        self.inner.act(several, generator, deterministic=deterministic)
        return super().act(observation, generator, deterministic=deterministic)


def test_code_is_made_for_what_a_policy_decides_by_means_of():
    go = threading.Event()
    inner = Compiling(go)

    async def let(stop):
        await asyncio.sleep(0.3)
        go.set()

    done, _ = _run(Around(Around(inner, 2), 3), let, deadline=0.1, max_batch_size=4)
    assert done and inner.rows == [6, 24, 6]


def test_a_server_that_is_stopped_meanwhile_does_not_wait_for_it():
    go = threading.Event()
    policy = Compiling(go)

    async def end(stop):
        await asyncio.sleep(0.1)
        stop.set()

    done, _ = _run(policy, end)
    go.set()
    assert not done


def test_what_makes_no_code_may_take_as_long_as_a_request():
    class Slow(Echo):
        def act(self, observation, generator, *, deterministic=False):
            assert go.wait(20)
            return super().act(observation, generator, deterministic=deterministic)

    go = threading.Event()

    async def nothing(stop):
        pass

    with pytest.raises(BusyError, match="No answer within"):
        _run(Slow(), nothing, deadline=0.1)
    go.set()


def test_the_compiled_engine_says_which_code_it_makes():
    made = compiled(ahead(), InferenceConfig("compiled"))
    assert made.sizes(1) == (1,) and made.sizes(3) == (1, 4) and made.sizes(16) == (1, 4, 16)


def test_plans_that_follow_on_from_others_are_made_before_a_robot_waits_for_one():
    made = []

    async def nothing(stop):
        pass

    def plans(policy, observation, generator, now, *, deterministic):
        made.append(tuple(now.rest.shape))
        return torch.zeros(1, 8, 2)

    done, _ = _run(ahead(), nothing, plans=plans)
    assert done and made == [(1, 0, 2), (1, 4, 2)]
