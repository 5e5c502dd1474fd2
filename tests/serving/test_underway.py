"""Plans that follow on from the one underway: what robots say of it, what servers make of that, what is executed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from served_policies import Echo, ahead

from robopolicy.client.protocol import DELAY, PLAN
from robopolicy.core.delayed import QUEUE, queue_field
from robopolicy.core.errors import ConfigError, NonFiniteError, SpecError
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec, WorldSpec
from robopolicy.core.world import Step
from robopolicy.inference.chunking import Delay, with_chunking
from robopolicy.serving.batching import InferenceQueue
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.drive import drive
from robopolicy.serving.server import PolicyServer, ServerSettings
from robopolicy.serving.sessions import RemainingActions, pop_remaining_actions

SPEC = PolicySpec({STATE: Field((1,))}, Field((2,)), 1, 4, 8, 0, 10.0)


class Counting:
    """Its state counts control steps, 20 an episode; keeps the actions that were executed."""

    def __init__(self):
        self.spec = WorldSpec("counting", {STATE: Field((1,))}, Field((1,), low=-1e4, high=1e4), 10.0, 20)
        self.batch_size, self.count = 1, 0
        self.executed: list[float] = []

    def _observe(self):
        return {STATE: np.full((1, 1, 1), self.count, np.float32), TASK: np.array(["count"])}

    def reset(self, rows=None, seeds=None, options=None):
        self.count = 0
        return self._observe()

    def step(self, actions):
        self.executed.append(float(actions[0, 0, 0]))
        self.count += 1
        over = np.array([self.count >= 20])
        return Step(self._observe(), {}, {}, np.ones((1, 1), bool), over, np.zeros(1, bool), over)

    def close(self):
        pass


class Planner:
    """Plans 100 n + step in the n-th answer, chunk 4, predicts 8; keeps what it was asked."""

    def __init__(self, chunking: str):
        action = Field((1,), low=-1e4, high=1e4).to_json()
        self.metadata = {"observation": {STATE: Field((1,)).to_json()}, "history": 1, "chunk": 4, "prediction": 8}
        self.metadata |= {"chunking": chunking, "fps": 10.0, "action": action}
        self.asked: list[tuple[int, list[float] | None, int | None]] = []

    def infer(self, observation):
        place = int(observation[STATE][-1, 0])
        plan = observation.get(PLAN)
        self.asked.append((place, None if plan is None else plan[:, 0].tolist(), observation.get(DELAY)))
        steps = 4 if plan is None else 8
        return {"actions": (100.0 * len(self.asked) + place + np.arange(steps))[:, None]}


def test_a_robot_says_what_is_left_of_its_plan_and_when_it_expects_the_next():
    world, server = Counting(), Planner("rtc")
    result = drive(world, server, [0], robot=RobotSettings(latency_steps=2))
    # Asked when a chunk of the plan has passed; the answer counts two steps later, and goes on in the same place.
    assert world.executed == [
        *range(100, 106), *range(206, 210), *range(310, 314), *range(414, 418), *range(518, 520)
    ]  # fmt: skip
    assert server.asked[0] == (0, [], 0)
    assert server.asked[1] == (4, [104.0, 105.0, 106.0, 107.0], 2)
    assert server.asked[2] == (8, [208.0, 209.0, 210.0, 211.0], 2)
    assert result["held"] == 0 and result["latency_steps"] == 2


def test_without_a_plan_to_go_on_with_it_holds_still_and_then_executes_the_whole_chunk():
    world, server = Counting(), Planner("")
    result = drive(world, server, [0], robot=RobotSettings(latency_steps=2))
    # It stood still while the second answer came: nothing of that has been used up.
    assert world.executed[:12] == [100, 101, 102, 103, 0, 0, 204, 205, 206, 207, 0, 0]
    assert result["held"] == 6
    assert all(plan is None and delay is None for _, plan, delay in server.asked)


def test_a_delay_is_measured_where_it_is_not_simulated():
    world, server = Counting(), Planner("rtc")
    answer, server.infer = server.infer, lambda message: (__import__("time").sleep(0.08), answer(message))[1]
    drive(world, server, [0], rate=20.0)
    assert server.asked[0][2] == 0
    assert max(delay for _, _, delay in server.asked[1:]) in (2, 3)  # .08 s at 20 control steps a second


def test_the_server_answers_the_plan_that_the_chunking_makes():
    policy = ahead()
    server = PolicyServer(policy, ServerSettings(port=0, chunking="rtc"))
    assert server.metadata()["chunking"] == "rtc" and server.metadata()["prediction"] == 8
    offline = with_chunking(policy, "rtc", Delay(2))
    first_observation = {STATE: torch.tensor([[[0.3, -0.2]]])}
    draws = torch.Generator().manual_seed(3)
    offline.reset()
    offline.act(first_observation, draws, deterministic=True)
    rest, state = offline._rest, draws.get_state()
    expected = offline.plans(
        policy, first_observation, draws, offline._underway(first_observation, draws.device), deterministic=True
    )

    async def ask():
        server.queue.start()
        own = torch.Generator()
        own.set_state(state)
        observation = {STATE: np.array([[[0.3, -0.2]]], np.float32), TASK: np.array([""])}
        answer = await server.queue.infer(observation, own, RemainingActions(rest[0].numpy(), 2, 1))
        free = await server.queue.infer(observation, torch.Generator().manual_seed(0))
        await server.queue.stop()
        return answer.actions, free.actions

    plan, chunk = asyncio.run(ask())
    assert plan.shape == (8, 2) and chunk.shape == (4, 2)
    assert np.array_equal(plan, expected[0].numpy())


def test_only_robots_in_the_same_place_of_their_plans_are_answered_together():
    sizes: list[int] = []

    async def ask():
        policy = ahead()
        server = PolicyServer(policy, ServerSettings(port=0, chunking="prefetch"))
        queue = InferenceQueue(policy, torch.Generator(), on_batch=sizes.append, plans=server.plans)
        observation = {STATE: np.zeros((1, 1, 2), np.float32), TASK: np.array([""])}
        rest = np.zeros((4, 2), np.float32)
        several = [
            None,
            RemainingActions(rest, 1, 1),
            RemainingActions(rest, 1, 5),
            RemainingActions(rest, 2, 1),
            None,
            RemainingActions(rest[:2], 1, 1),
        ]
        waiting = [asyncio.create_task(queue.infer(observation, None, left)) for left in several]
        queue._task = asyncio.create_task(asyncio.sleep(60))  # who would take them one by one
        await asyncio.sleep(0)
        queue._task.cancel()
        queue.start()
        answers = await asyncio.gather(*waiting)
        await queue.stop()
        return [len(answer.actions) for answer in answers]

    assert asyncio.run(ask()) == [4, 8, 8, 8, 4, 8]
    assert sorted(sizes) == [1, 1, 2, 2]


def test_what_is_wrong_about_a_plan_is_said():
    plan = np.zeros((4, 2))
    assert pop_remaining_actions({STATE: 0}, SPEC, 3) is None
    left = pop_remaining_actions(request := {PLAN: plan, DELAY: 3, STATE: 0}, SPEC, 3)
    assert left.shape == (4, 3) and left.decisions == 3 and request == {STATE: 0}
    assert pop_remaining_actions({PLAN: plan[:0]}, SPEC, 3).decisions == 0  # an episode begins
    for wrong in (plan[:, :1], np.zeros((9, 2)), [[0.0, 0.0]], plan[0], plan.astype(str)):
        with pytest.raises(SpecError, match=r"\[n, 2\] numbers with at most 8 steps"):
            pop_remaining_actions({PLAN: wrong, DELAY: 0}, SPEC, 0)
    for wrong in (-1, 5, 1.0, True, "2"):
        with pytest.raises(SpecError, match="from 0 to 4"):
            pop_remaining_actions({PLAN: plan, DELAY: wrong}, SPEC, 0)
    with pytest.raises(NonFiniteError):
        pop_remaining_actions({PLAN: plan * np.nan, DELAY: 0}, SPEC, 0)
    with pytest.raises(SpecError, match="which is missing"):
        pop_remaining_actions({DELAY: 0}, SPEC, 0)


def test_what_cannot_be_served_so_is_refused_when_the_server_starts():
    with pytest.raises(ConfigError, match="guides the denoising"):
        PolicyServer(Echo(), ServerSettings(port=0, chunking="rtc"))
    short = ahead()
    short.config = replace(short.config, prediction_steps=4)
    with pytest.raises(ConfigError, match="train it with more prediction_steps"):
        PolicyServer(short, ServerSettings(port=0, chunking="prefetch"))
    with pytest.raises(ConfigError, match="has no option 'weight'"):
        PolicyServer(ahead(), ServerSettings(port=0, chunking="rtc", chunking_options={"weight": 1}))
    late = ahead()
    late.fields = {**late.fields, QUEUE: queue_field(late.action, 2)}
    with pytest.raises(ConfigError, match="trained with a latency"):
        PolicyServer(late, ServerSettings(port=0, chunking="prefetch"))
