"""openpi's wire form: msgpack whose arrays are {b"__ndarray__", b"data", b"dtype", b"shape"}; never pickle.

One binary message per observation and per answer; an error is a text message, then close code 1011 (1013 where the
server is busy). The first message of a connection is the server's metadata. Keys that begin with `robopolicy.` are this
project's extensions. Arrays of two relatives are read too: openpi's with text keys, as clients in Java or C++ write
them, and those of PyPI's msgpack-numpy, {b"nd", b"type", b"kind", b"shape", b"data"}.

What one client may ask for has limits, so that none can stall or starve the others; most follow from the policy. A
server that reads megabytes of text, counts ten million numbers or keeps a gigabyte of history for one client makes
every other robot wait. Nothing honest comes near these limits.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from robopolicy.core.errors import SpecError
from robopolicy.core.spec import IMAGE_PREFIX, PolicySpec

IMAGE_BYTES = 3 * 1280 * 720
"""Most bytes of one image that is sent to be resized."""

NUMBER_BYTES = 8
"""Most bytes of one number of a vector, as float64."""


@dataclass(frozen=True)
class Limits:
    """Of what a client may send, and of how much of it is kept.

    message: bytes of one message; text: characters of an instruction; names: fields of one mapping; name: characters of
    a field's or a session's name; length: elements of one list; elements: of all lists and mappings of a message
    together; depth: of nested mappings; image: bytes of one frame of a camera; sessions, address_sessions,
    all_sessions: robots behind one connection, behind one address, and in all; connections, address_connections: open
    sockets in all, and from one address; pipelined: requests of one connection that are under way at once; reading:
    messages of one address that are decoded at once; pings: a second and connection; wrong_keys: from one address
    within `lockout` seconds, after which its other ones are not looked at for as long.
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
    def of(cls, spec: PolicySpec) -> "Limits":
        """Return the limits for clients of a policy: twice the largest honest message, lists as long as its vectors."""
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
"""True in a request: forget the history of this session first; alone in a request it is answered without actions."""

SESSION = "robopolicy.session"
"""Text in a request: which of several robots behind one connection this is (each has its own history)."""

SEED = "robopolicy.seed"
"""Integer in a request: from here on this session draws its noise from a generator of its own with this seed, so that
the same observations are answered the same way again, whoever else is connected."""

REQUEST = "robopolicy.request"
"""Integer in a request, another one every time: the answer then holds under it the `fingerprint` of the request as it
arrived, and is `sealed`. Nothing else tells an answer to this request from one to another, or from a damaged one."""

PLAN = "robopolicy.plan"
"""Array [n, A] in a request to a server whose metadata names a `chunking`: the actions that this robot goes on with,
the first in the step of this observation, none of them ([0, A]) as an episode begins. The answer is then a whole plan
[P, A] that follows on from them."""

DELAY = "robopolicy.delay"
"""Integer beside a plan, 0 to n: how many of its actions will have been executed when the answer is there."""

OURS = (RESET, SESSION, SEED, REQUEST, PLAN, DELAY)
"""What a request may say beside an observation; one that says something else like it is refused, not half read."""

CHECK = "robopolicy.check"
"""Last key of a sealed message: the CRC-32 of all bytes before the value, which has four."""

_KINDS = "biuf"

_ARRAYS = "send arrays, as openpi_client.msgpack_numpy packs them"

_WAYS_OUT = {
    "max_array_len": f" Its lists are too long, a picture as lists of numbers perhaps: {_ARRAYS}.",
    "max_ext_len": f" It holds an extension type of msgpack, which says nothing here: {_ARRAYS}.",
}
"""What to do about some of msgpack's errors, by a word in them."""

_OF_ARRAYS = {"__ndarray__", "__npgeneric__", "nd", "data", "dtype", "type", "kind", "shape"}
"""Keys of an array in the dialects that are read."""

_DTYPE_LENGTH = 16
"""Characters of the longest dtype that is read; numpy would parse a list of a million of them."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Encode nested mappings, lists, numbers, text, numpy arrays and scalars (bool, integer and float ones).

    Raises SpecError on anything else.
    """
    data = msgpack.packb(message, default=_encode)
    assert data is not None
    return data


def fingerprint(data: bytes) -> int:
    """Return the CRC-32 of a message."""
    return zlib.crc32(data)


def sealed(message: Mapping[str, Any]) -> bytes:
    """Encode `message` as `pack` does, with a checksum at its end: TCP's own lets one damaged packet in 65,536 pass.

    Raises SpecError on what cannot be sent.
    """
    data = pack({**message, CHECK: bytes(4)})[:-4]
    return data + zlib.crc32(data).to_bytes(4, "big")


def unsealed(data: bytes) -> dict[str, Any]:
    """Decode a mapping that `sealed` wrote, its checksum taken out.

    Raises SpecError on anything else, and where a byte differs from what was sent.
    """
    message = unpack(data)
    if not isinstance(message, dict) or message.pop(CHECK, None) != zlib.crc32(data[:-4]).to_bytes(4, "big"):
        raise SpecError("The message was damaged on its way: its checksum is wrong.")
    return message


def unpack(data: bytes, limits: Limits | None = None) -> Any:
    """Decode what `pack` or openpi's client wrote; arrays are read-only views.

    limits: of what is read (None: of a message's size alone). Raises SpecError on anything else, and past a limit.
    """
    limits = limits or Limits(length=2**20, elements=2**22, names=10_000, text=2**20)
    if len(data) > limits.message:
        raise SpecError(f"The message has {len(data)} bytes; at most {limits.message} are read.")
    count = 0

    def counted(part: Any) -> Any:
        nonlocal count
        count += len(part)
        if count > limits.elements:
            raise SpecError(f"The message lists more than {limits.elements} values: {_ARRAYS}.")
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
        way_out = next((said for mark, said in _WAYS_OUT.items() if mark in text), "")
        raise SpecError(
            f"The message is not msgpack in openpi's form ({type(error).__name__}: {text}).{way_out}"
        ) from error


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
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
    """Return the array or number that a mapping stands for, and every other one as it is. Raises SpecError."""
    if b"data" not in value and "data" not in value:
        return value
    said = {key.decode("utf-8", "replace") if isinstance(key, bytes) else key: item for key, item in value.items()}
    kind = said.get("dtype", said.get("type"))
    marked = not said.keys().isdisjoint(("__ndarray__", "__npgeneric__", "nd"))
    if kind is None or not (marked or "shape" in said):
        return value
    if said.get("kind", b"") not in (b"", "") or not said.keys() <= _OF_ARRAYS:
        raise SpecError(
            f"An array with the keys {', '.join(map(str, said))[:100]} is read in no form: {_ARRAYS}. Objects and "
            "structures are never unpacked."
        )
    dtype, data = _dtype(kind), said["data"]
    if "__npgeneric__" in said and not isinstance(data, bytes):
        return dtype.type(data)
    shape = said.get("shape", ())
    if not isinstance(data, bytes) or not isinstance(shape, list | tuple):
        raise SpecError(
            f"An array's data are bytes and its shape is a list, not {type(data).__name__} and {shape!r:.40}."
        )
    whole = len(shape) <= 8 and all(isinstance(size, int) and size >= 0 for size in shape)
    if not whole or math.prod(shape) * dtype.itemsize != len(data):
        raise SpecError(f"An array of shape {shape[:8]} and dtype {dtype} does not fit its {len(data)} bytes.")
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if "shape" in said else array[()]


def _dtype(text: Any) -> np.dtype:
    name = text.decode("ascii", "replace") if isinstance(text, bytes) and len(text) <= _DTYPE_LENGTH else text
    try:
        dtype = np.dtype(name) if isinstance(name, str) and len(name) <= _DTYPE_LENGTH else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in _KINDS:
        raise SpecError(f"Arrays of dtype {str(text)[:40]!r} are refused; use bool, integers or floats.")
    return dtype
