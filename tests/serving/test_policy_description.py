"""What a server says of its policy: a lie is refused in a sentence before anything of its size is made."""

import time
import tracemalloc

import numpy as np
import pytest

from robopolicy.client.driver import ActionLimits, Driver
from robopolicy.client.policy_description import described_policy
from robopolicy.core.errors import ServingError
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE, STATE, Field

TOP = IMAGE_PREFIX + "top"
TRUE = {
    "observation": {STATE: Field((2,)).to_json(), TOP: Field((48, 64, 3), "uint8", 0, 255).to_json()},
    "action": Field((2,), low=(-1.0, -np.inf), high=1.0, unit="m", names=("x", "y")).to_json(),
    "history": 2,
    "chunk": 4,
    "prediction": 8,
    "chunking": "rtc",
    "fps": 10.0,
}


def of_action(**said):
    return TRUE | {"action": TRUE["action"] | said}


def of_state(**said):
    return TRUE | {"observation": TRUE["observation"] | {STATE: TRUE["observation"][STATE] | said}}


NAN, INF = float("nan"), float("inf")
LIES = [
    *(of_action(low=bound) for bound in (NAN, [NAN, 0.0], "nan", 2.0, INF, [-1.0, "inf"], "low", [0.0] * 3, {}, [[]])),
    *(of_action(high=bound) for bound in (NAN, -INF, -2.0, [-2.0, 1.0], "-inf", 10**400, [[1.0]] * 3, 1j)),
    *(of_action(shape=shape) for shape in ([10**9], [10**5, 10**5], [-2], [0], [2.5], [True], "2", 2, None, ["2"], {})),
    *(of_action(shape=shape) for shape in ([1] * 40, [NAN], [INF], [[2]])),
    *(of_action(names=names) for names in (5, "ab", {"a": 1})),
    of_action(unit=5),
    *(TRUE | {"action": action} for action in (None, [], 5, {}, "action")),
    *(of_state(shape=shape) for shape in ([10**9], [-1], [INF], "wide")),
    *(of_state(low=bound) for bound in (NAN, INF)),
    *(TRUE | {"observation": fields} for fields in (None, [], 5, {STATE: None}, {STATE: {}}, {5: {"shape": [1]}})),
    TRUE | {"observation": {TOP: {"shape": [10**5, 10**5, 3]}}},
    TRUE | {"observation": {TOP: {"shape": [9000, 9000, 3], "low": NAN, "high": 1.0}}},
    TRUE | {"observation": {TOP: {"shape": [4000, 4000, 3], "low": [[[0.0]]] * 100, "high": [[[1.0]] * 100]}}},
    TRUE | {"observation": {STATE: {"shape": [10**4]}}, "history": 10**6},
    *(TRUE | {"observation": {QUEUE: {"shape": [size]}}} for size in (-4, 3, INF, 10**9)),
    *(
        TRUE | {name: value}
        for name in ("history", "chunk", "prediction")
        for value in (INF, -INF, NAN, -1, 10**12, 2.5, "2", None, [], True)
    ),
    TRUE | {"history": 0},
    TRUE | {"chunk": 0},
    *(TRUE | {"fps": rate} for rate in (INF, NAN, -1.0, 1e9, 1e-9, True, "fast", None, [])),
    TRUE | {"known": {STATE: {"low": [5.0, 0.0], "high": [1.0, 1.0]}}},
]


def test_what_is_true_is_read():
    policy = described_policy(TRUE)
    assert (policy.history, policy.chunk, policy.overlap, policy.ahead, policy.fps) == (2, 4, 4, 0, 10.0)
    assert policy.low.tolist() == [-1.0, -np.inf] and policy.high.tolist() == [1.0, 1.0]
    assert policy.names == ("x", "y") and policy.unit == "m"
    unbounded = described_policy(TRUE | {"action": {"shape": [2]}})
    assert unbounded.low.tolist() == [-np.inf] * 2
    assert described_policy(of_action(names=["x", "x"])).names == ()  # nobody can say which is which
    assert described_policy(TRUE | {"observation": {QUEUE: {"shape": [6]}}}).ahead == 3


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_a_lie_is_refused_in_a_sentence(lie):
    class Lying:
        metadata = lie

        def infer(self, observation): ...

    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(ServingError, match=r"description of its policy is invalid"):
        Driver(Lying(), hold=np.zeros(2), limits=ActionLimits(unbounded=True))
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
