"""The wire form against openpi's bytes, and what it refuses."""

import msgpack
import numpy as np
import pytest

from robopolicy.core.errors import SpecError
from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.serving.inputs import Session
from robopolicy.serving.protocol import CHECK, pack, sealed, unpack, unsealed


def test_bytes_are_openpis():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": "<f4", b"shape": (2, 3)}
    assert pack({"a": array}) == msgpack.packb({"a": expected})
    scalar = {b"__npgeneric__": True, b"data": 2.5, b"dtype": "<f4"}
    assert pack({"a": np.float32(2.5)}) == msgpack.packb({"a": scalar})


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", ">f8"])
def test_arrays_survive(dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    back = unpack(pack({"nested": {"list": [array, "text", 3, None]}}))["nested"]["list"]
    assert back[0].dtype == array.dtype
    assert np.array_equal(back[0], array)
    assert back[1:] == ["text", 3, None]
    assert np.asfortranarray(array).tobytes("C") == unpack(pack({"a": np.asfortranarray(array)}))["a"].tobytes()
    assert unpack(pack({"a": np.int16(4)}))["a"] == 4


@pytest.mark.parametrize("array", [np.array([{}]), np.zeros(2, "c8"), np.zeros(2, "f4,i4"), np.array(["x"])])
def test_objects_and_structures_are_not_sent(array):
    with pytest.raises(SpecError, match="cannot be sent"):
        pack({"a": array})


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("|O", (1,), b"12345678"),
        ("<c8", (1,), b"12345678"),
        ("V8", (1,), b"12345678"),
        ("<f4", (3,), b"1234"),
        ("<f4", (-1,), b"1234"),
        ("<f4", (1,), "1234"),
        (["f4"], (1,), b"1234"),
        ("nonsense", (1,), b"1234"),
        ("<f4", None, b"1234"),
    ],
)
def test_forged_arrays_are_refused(dtype, shape, data):
    message = msgpack.packb({"a": {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}})
    with pytest.raises(SpecError):
        unpack(message)


def test_deep_nesting_is_refused():
    with pytest.raises(SpecError):
        unpack(b"\x91" * 100_000 + b"\x00")


FIELDS = {
    STATE: Field((8,)),
    "observation.images.base": Field((4, 6, 3), "uint8", 0, 255),
    "observation.images.wrist": Field((4, 6, 3), "uint8", 0, 255),
}
BASE, WRIST = np.full((4, 6, 3), 1, np.uint8), np.full((4, 6, 3), 2, np.uint8)
STATES = np.arange(8.0)


@pytest.mark.parametrize(
    "message",
    [
        {STATE: STATES, "observation.images.base": BASE, "observation.images.wrist": WRIST, "task": "go"},
        {"observation/image": BASE, "observation/wrist_image": WRIST, "observation/state": STATES, "prompt": "go"},
        {
            "observation/exterior_image_1_left": BASE,
            "observation/wrist_image_left": WRIST,
            "observation/joint_position": STATES[:7],
            "observation/gripper_position": STATES[7:],
            "prompt": "go",
        },
        {
            "state": STATES,
            "images": {"base": BASE.transpose(2, 0, 1), "wrist": WRIST.transpose(2, 0, 1)},
            "prompt": "go",
        },
        {"observation": {"state": STATES.tolist(), "images": {"base": BASE, "wrist": WRIST}}, "task": "go"},
    ],
    ids=["lerobot", "libero", "droid", "aloha", "nested"],
)
def test_names_of_other_clients_are_understood(message):
    spec = PolicySpec(FIELDS, Field((1,)), 1, 1, 1, 1, 10.0)
    observation = Session(spec).observe(unpack(pack(message)))
    assert observation[STATE].tolist() == [[STATES.tolist()]]
    assert np.array_equal(observation["observation.images.base"][0, 0], BASE)
    assert np.array_equal(observation["observation.images.wrist"][0, 0], WRIST)
    assert observation["task"].tolist() == ["go"]


def test_a_refused_frame_leaves_the_history_alone():
    spec = PolicySpec({STATE: Field((1,))}, Field((1,)), 3, 1, 1, 1, 10.0)
    session = Session(spec)
    session.observe({STATE: [1.0]})
    with pytest.raises(SpecError, match="is text"):
        session.observe({STATE: [2.0], "task": 5})
    session = Session(spec)
    session.observe({STATE: [1.0]})
    with pytest.raises(SpecError, match="needs"):
        session.observe({STATE: [2.0, 3.0]})
    assert session.observe({STATE: [4.0]})[STATE].ravel().tolist() == [1.0, 1.0, 4.0]


def test_a_sealed_message_that_is_damaged_anywhere_is_refused():
    message = {"actions": np.arange(6.0).reshape(3, 2), "server_timing": {"infer_ms": 1.5}}
    data = sealed(message)
    assert unsealed(data)["actions"].tolist() == message["actions"].tolist()
    assert CHECK in unpack(data), "other clients read it as well"
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(SpecError):
            unsealed(bytes(damaged))
    for wrong in (data[:-1], data + b"\0", pack(message), pack({CHECK: 1}), b""):
        with pytest.raises(SpecError):
            unsealed(wrong)
