"""openpi's wire format: msgpack with arrays as {b"__ndarray__", b"data", b"dtype", b"shape"}; never pickle.

One binary message per observation and per answer; an error is a text message, then close code 1011 (1013 if the server
is overloaded). The first message of a connection is the server's metadata. Keys that start with `robopolicy.` are this
project's extensions. Two related array encodings are read too: openpi's with text keys, as clients in Java or C++ write
them, and that of PyPI's msgpack-numpy, {b"nd", b"type", b"kind", b"shape", b"data"}.

Requests of one client are limited, so that none can block the others; most limits follow from the policy. Megabytes of
text, lists of ten million numbers or a gigabyte of history of one client would delay every other robot. Valid requests
are far below these limits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import numpy as np

from .errors import SpecError
from .keys import IMAGE_PREFIX

IMAGE_BYTES = 3 * 1280 * 720
"""Maximum bytes of an image that is sent to be resized."""

NUMBER_BYTES = 8
"""Maximum bytes of one vector element, as float64."""


class PolicyInputs(Protocol):
    """What the limits of a policy's clients follow from, such as a `PolicySpec`."""

    @property
    def observation(self) -> Mapping[str, Any]:
        """Fields that the policy reads: key -> object with its `size`."""
        ...

    @property
    def history(self) -> int:
        """Number of frames that the policy reads."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits on what a client may send, and on how much of it is stored.

    message: bytes per message; text: characters of an instruction; names: fields per mapping; name: characters of a
    field's or a session's name; length: elements per list; elements: total elements of all lists and mappings in a
    message; depth: of nested mappings; image: bytes of one camera frame; sessions, address_sessions, all_sessions:
    robots per connection, per address, and in total; connections, address_connections: open sockets in total, and per
    address; pipelined: concurrent requests per connection; reading: messages of one address that are decoded at once;
    pings: per second and connection; wrong_keys: per address within `lockout` seconds, after which further wrong keys
    are rejected unread for that time.
    """

    message: int = 64 * 2**20
    text: int = 10_000
    names: int = 100
    name: int = 128
    length: int = 1000
    elements: int = 10_000
    depth: int = 8
    image: int = IMAGE_BYTES
    sessions: int = 256
    address_sessions: int = 768
    all_sessions: int = 1024
    connections: int = 512
    address_connections: int = 128
    pipelined: int = 16
    reading: int = 2
    pings: int = 50
    wrong_keys: int = 10
    lockout: float = 10.0

    @classmethod
    def of(cls, spec: PolicyInputs) -> Limits:
        """Return the limits for clients of a policy: twice the largest legitimate message, lists as long as its
        vectors.
        """
        vectors = [field.size for key, field in spec.observation.items() if not key.startswith(IMAGE_PREFIX)]
        images = [field.size for key, field in spec.observation.items() if key.startswith(IMAGE_PREFIX)]
        frames = sum(vectors) * NUMBER_BYTES + sum(max(size, IMAGE_BYTES) for size in images)
        longest = max([spec.history, 16, *vectors])
        return cls(
            message=2 * spec.history * frames + 64 * 1024,
            length=longest,
            elements=2 * spec.history * (sum(vectors) + 100) + 1000,
            image=max([IMAGE_BYTES, *images]),
        )


RESET = "robopolicy.reset"
"""True in a request: clear this session's history first; a request with nothing else is answered without actions."""

SESSION = "robopolicy.session"
"""Text in a request: which of several robots on one connection it belongs to (each has its own history)."""

SEED = "robopolicy.seed"
"""Integer in a request: from now on this session uses its own noise generator with this seed, so that the same
observations get the same answers, whoever else is connected.
"""

REQUEST = "robopolicy.request"
"""Integer in a request, different every time: the answer then contains under it the `checksum` of the request as it
arrived, and is `pack_with_checksum`. Only this identifies an answer to another request, or a damaged one.
"""

PLAN = "robopolicy.plan"
"""Array [n, A] in a request to a server whose metadata names a `chunking`: the robot's remaining actions, the first for
the step of this observation, none ([0, A]) at the start of an episode. The answer is then a full prediction [P, A] that
continues them.
"""

DELAY = "robopolicy.delay"
"""Integer next to the remaining actions, 0 to n: how many of them will have been executed when the answer arrives."""

EXECUTED = "robopolicy.executed"
"""Mapping in a request to a server whose metadata says `records`: the control steps since the last report; see
`executed_report`. A request with nothing else is answered without actions. {} next to an observation says that this
robot reports its steps.
"""

POLICY = "robopolicy.policy"
"""Text in an answer: name and version of the policy that gave it."""

FAILURE = "robopolicy.failure"
"""Mapping in an answer of a server with failure detectors: "index", number by detector, and "alarms", list of the
detectors that have alarmed in this episode.
"""

POLICIES = "/policies/"
"""Prefix of the path of a connection that asks for a policy by name; others get the default one."""

OURS = (RESET, SESSION, SEED, REQUEST, PLAN, DELAY, EXECUTED)
"""Extension keys of a request; a request with a similar but unknown key is refused, not partly read."""

CHECK = "robopolicy.check"
"""Last key of a sealed message: the CRC-32 of all bytes before the value, which has four bytes."""

_KINDS = "biuf"

_ARRAYS = "send arrays, as packed by openpi_client.msgpack_numpy"

_WAYS_OUT = {
    "max_array_len": f" Its lists are too long (an image as lists of numbers?): {_ARRAYS}.",
    "max_ext_len": f" It contains a msgpack extension type, which is not supported: {_ARRAYS}.",
}
"""Remedies for some of msgpack's errors, by a word in the error."""

_OF_ARRAYS = {"__ndarray__", "__npgeneric__", "nd", "data", "dtype", "type", "kind", "shape"}
"""Keys of an array in the supported encodings."""

_DTYPE_LENGTH = 16
"""Maximum characters of a dtype; numpy would parse a list of a million of them."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Encode nested mappings, lists, numbers, text, numpy arrays and scalars (bool, integer and float ones).

    Raises SpecError on anything else.
    """
    data = msgpack.packb(message, default=_encode)
    assert data is not None
    return data


def checksum(data: bytes) -> int:
    """Return the CRC-32 of a message."""
    return zlib.crc32(data)


def pack_with_checksum(message: Mapping[str, Any]) -> bytes:
    """Encode `message` as `pack` does, with a checksum at its end: TCP's own checksum misses one damaged packet in
    65,536.

    Raises SpecError on unsupported types.
    """
    data = pack({**message, CHECK: bytes(4)})[:-4]
    return data + zlib.crc32(data).to_bytes(4, "big")


def unpack_with_checksum(data: bytes) -> dict[str, Any]:
    """Decode a mapping that `pack_with_checksum` wrote, without its checksum.

    Raises SpecError on anything else, and when a byte differs from what was sent.
    """
    message = unpack(data)
    if not isinstance(message, dict) or message.pop(CHECK, None) != zlib.crc32(data[:-4]).to_bytes(4, "big"):
        raise SpecError("The message was damaged in transit: its checksum is wrong.")
    return message


def unpack(data: bytes, limits: Limits | None = None) -> Any:
    """Decode what `pack` or openpi's client wrote; arrays are read-only views.

    limits: of the message contents (None: message size only). Raises SpecError on anything else, and beyond a limit.
    """
    limits = limits or Limits(length=2**20, elements=2**22, names=10_000, text=2**20)
    if len(data) > limits.message:
        raise SpecError(f"The message has {len(data)} bytes; at most {limits.message} are accepted.")
    count = 0

    def counted(part: Any) -> Any:
        nonlocal count
        count += len(part)
        if count > limits.elements:
            raise SpecError(f"The message contains more than {limits.elements} list values: {_ARRAYS}.")
        return part

    try:
        return msgpack.unpackb(
            data,
            object_hook=lambda part: _decode(counted(part)),
            list_hook=counted,
            max_str_len=limits.text,
            max_bin_len=limits.message,
            max_array_len=limits.length,
            max_map_len=limits.names,
            max_ext_len=0,
        )
    except SpecError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.exceptions.UnpackException) as error:
        text = str(error)[:200]
        way_out = next((advice for mark, advice in _WAYS_OUT.items() if mark in text), "")
        raise SpecError(
            f"The message is not msgpack in openpi's form ({type(error).__name__}: {text}).{way_out}"
        ) from error


def _encode(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in _KINDS:
            raise SpecError(f"Arrays of dtype {value.dtype} cannot be sent; use bool, integers or floats.")
        if isinstance(value, np.ndarray):
            array = {b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
            return {b"__ndarray__": True, **array}
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise SpecError(
        f"Values of type {type(value).__name__} cannot be sent; use numbers, text, lists, dicts and arrays."
    )


def _decode(value: dict[Any, Any]) -> Any:
    """Return the array or number that a mapping encodes; other mappings unchanged. Raises SpecError."""
    if b"data" not in value and "data" not in value:
        return value
    entries = {key.decode("utf-8", "replace") if isinstance(key, bytes) else key: item for key, item in value.items()}
    kind = entries.get("dtype", entries.get("type"))
    marked = not entries.keys().isdisjoint(("__ndarray__", "__npgeneric__", "nd"))
    if kind is None or not (marked or "shape" in entries):
        return value
    if entries.get("kind", b"") not in (b"", "") or not entries.keys() <= _OF_ARRAYS:
        raise SpecError(
            f"An array with the keys {', '.join(map(str, entries))[:100]} has an unknown format: {_ARRAYS}. Objects "
            "and structures are never unpacked."
        )
    dtype, data = _dtype(kind), entries["data"]
    if "__npgeneric__" in entries and not isinstance(data, bytes):
        return dtype.type(data)
    shape = entries.get("shape", ())
    if not isinstance(data, bytes) or not isinstance(shape, (list, tuple)):
        raise SpecError(
            f"An array's data must be bytes and its shape a list, not {type(data).__name__} and {shape!r:.40}."
        )
    is_shape = len(shape) <= 8 and all(isinstance(size, int) and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) * dtype.itemsize != len(data):
        raise SpecError(f"An array of shape {shape[:8]} and dtype {dtype} does not match its {len(data)} bytes.")
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if "shape" in entries else array[()]


def _dtype(text: Any) -> np.dtype:
    name = text.decode("ascii", "replace") if isinstance(text, bytes) and len(text) <= _DTYPE_LENGTH else text
    try:
        dtype = np.dtype(name) if isinstance(name, str) and len(name) <= _DTYPE_LENGTH else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in _KINDS:
        raise SpecError(f"Arrays of dtype {str(text)[:40]!r} are refused; use bool, integers or floats.")
    return dtype
