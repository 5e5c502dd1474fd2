"""The wire form against openpi's bytes, and what it refuses."""

import msgpack
import numpy as np
import pytest

from robopolicy.client.protocol import CHECK, Limits, pack, pack_with_checksum, unpack, unpack_with_checksum
from robopolicy.core.errors import SpecError
from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.serving.inputs import Session


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


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"state": STATES + 1}, "'observation/state' and 'state' both mean 'observation.state' but differ"),
        ({"images/base": WRIST}, "'images/base' and 'observation/image' both mean"),
        ({"observation.state": STATES}, "contains 'observation/state' twice"),
        ({"observation": {"image": BASE}}, "contains 'observation/image' twice"),
        ({"task": "stop"}, "'task' and 'prompt' differ"),
    ],
)
def test_what_is_sent_twice_says_the_same(more, text):
    """Else nobody knows which of the two the robot was driven by."""
    sent = {"observation/image": BASE, "observation/wrist_image": WRIST, "observation/state": STATES, "prompt": "go"}
    session = Session(PolicySpec(FIELDS, Field((1,)), 1, 1, 1, 1, 10.0))
    with pytest.raises(SpecError, match=text):
        session.observe(unpack(pack({**sent, **more})))
    session.observe(unpack(pack({**sent, "state": STATES, "images/base": BASE, "task": "go"})))


def test_a_refused_frame_leaves_the_history_alone():
    spec = PolicySpec({STATE: Field((1,))}, Field((1,)), 3, 1, 1, 1, 10.0)
    session = Session(spec)
    session.observe({STATE: [1.0]})
    with pytest.raises(SpecError, match="must be text"):
        session.observe({STATE: [2.0], "task": 5})
    session = Session(spec)
    session.observe({STATE: [1.0]})
    with pytest.raises(SpecError, match="needs"):
        session.observe({STATE: [2.0, 3.0]})
    assert session.observe({STATE: [4.0]})[STATE].ravel().tolist() == [1.0, 1.0, 4.0]


def test_a_sealed_message_that_is_damaged_anywhere_is_refused():
    message = {"actions": np.arange(6.0).reshape(3, 2), "server_timing": {"infer_ms": 1.5}}
    data = pack_with_checksum(message)
    assert unpack_with_checksum(data)["actions"].tolist() == message["actions"].tolist()
    assert CHECK in unpack(data), "other clients read it as well"
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(SpecError):
            unpack_with_checksum(bytes(damaged))
    for wrong in (data[:-1], data + b"\0", pack(message), pack({CHECK: 1}), b""):
        with pytest.raises(SpecError):
            unpack_with_checksum(wrong)


def openpi_in_java(array):
    """An array as a client in Java or C++ writes openpi's form: the keys are text."""
    return {"__ndarray__": True, "data": array.tobytes(), "dtype": array.dtype.str, "shape": list(array.shape)}


def msgpack_numpy(array):
    """An array as PyPI's msgpack-numpy 0.4.8 writes it."""
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}


def in_text(array):
    return {key.decode(): value for key, value in msgpack_numpy(array).items()}


def old_msgpack_numpy(array):
    """Before kinds; by Packer(use_bin_type=False) texts may be bytes too."""
    return {b"nd": True, b"type": array.dtype.str.encode(), b"shape": array.shape, b"data": array.tobytes()}


def unmarked(array):
    return {"data": array.tobytes(), "dtype": str(array.dtype), "shape": array.shape}


DIALECTS = [openpi_in_java, msgpack_numpy, in_text, old_msgpack_numpy, unmarked]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_arrays_of_other_dialects_are_read(dialect):
    spec = PolicySpec(FIELDS, Field((1,)), 1, 1, 1, 1, 10.0)
    for state in (STATES, STATES.astype(np.float32), STATES.astype(">f4"), STATES.astype(np.int64)):
        message = {"observation/state": dialect(state), "images": {"base": dialect(BASE), "wrist": dialect(WRIST)}}
        observation = Session(spec).observe(unpack(msgpack.packb(message)))
        assert observation[STATE].tolist() == [[STATES.tolist()]]
        assert np.array_equal(observation["observation.images.wrist"][0, 0], WRIST)


def test_numbers_of_other_dialects_are_read():
    number = np.float32(2.5)
    for sent in (
        {b"nd": False, b"type": "<f4", b"data": number.tobytes()},
        {"nd": False, "type": "<f4", "data": number.tobytes()},
        {"__npgeneric__": True, "data": 2.5, "dtype": "<f4"},
    ):
        assert unpack(msgpack.packb({"a": sent}))["a"] == number


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "|O"},
        {"dtype": "V8"},
        {"dtype": [["a", "<f4"]]},
        {"dtype": "<f4," * 9},
        {"kind": b"O"},
        {"kind": b"V"},
        {"shape": [7]},
        {"shape": [-8]},
        {"shape": "8"},
        {"shape": [8.0]},
        {"data": "text of eight"},
        {"data": [1.0] * 8},
        {"data": b"\x80\x04K\x05."},
        {"order": "F"},
    ],
    ids=str,
)
def test_no_dialect_brings_objects_or_lies_about_sizes(dialect, change):
    array = dialect(STATES)
    name, value = next(iter(change.items()))
    if name == "dtype":
        name = next(key for key in array if key in ("dtype", "type", b"type"))
    elif name in {key.decode() if isinstance(key, bytes) else key for key in array}:
        name = next(key for key in array if key in (name, name.encode()))
    if name in ("kind", "order") and dialect is unmarked:
        return
    with pytest.raises(SpecError, match=r"refused|fit|bytes|form"):
        unpack(msgpack.packb({"observation/state": {**array, name: value}}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([[[0] * 3] * 40] * 40, r"an image as lists of numbers\?\): send arrays, as packed by openpi_client"),
        (msgpack.ExtType(42, b"1234"), "msgpack extension type.*send arrays"),
        (b"\xff\xd8\xff\xe0" * 9, "is 36 bytes without a shape and a dtype.*JPEG"),
        ("aGVsbG8=", "is 8 characters without a shape"),
    ],
    ids=["lists", "extension", "jpeg", "base64"],
)
def test_what_is_no_array_is_told_how_arrays_are_sent(value, text):
    spec = PolicySpec(FIELDS, Field((1,)), 1, 1, 1, 1, 10.0)
    message = {"state": STATES.tolist(), "images": {"base": value, "wrist": openpi_in_java(WRIST)}}
    with pytest.raises(SpecError, match=text):
        Session(spec).observe(unpack(msgpack.packb(message), Limits.of(spec)))
    small = message | {"images": {"base": BASE.tolist(), "wrist": WRIST.tolist()}}
    assert np.array_equal(Session(spec).observe(unpack(msgpack.packb(small)))["observation.images.base"][0, 0], BASE)
