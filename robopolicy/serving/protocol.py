"""openpi's wire form: msgpack whose arrays are {b"__ndarray__", b"data", b"dtype", b"shape"}; never pickle.

One binary message per observation and per answer; an error is a text message, then close code 1011. The first message
of a connection is the server's metadata. Keys that begin with `robopolicy.` are this project's extensions.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from robopolicy.core.errors import SpecError

RESET = "robopolicy.reset"
"""True in a request: forget the history of this session first; alone in a request it is answered without actions."""

SESSION = "robopolicy.session"
"""Text in a request: which of several robots behind one connection this is (each has its own history)."""

MAXIMUM_MESSAGE = 64 * 2**20
"""Largest message a server accepts, bytes."""

_KINDS = "biuf"


def pack(message: Mapping[str, Any]) -> bytes:
    """Encode nested mappings, lists, numbers, text, numpy arrays and scalars (bool, integer and float ones)."""
    data = msgpack.packb(message, default=_encode)
    assert data is not None
    return data


def unpack(data: bytes) -> Any:
    """Decode what `pack` or openpi's client wrote; arrays are read-only views. Raises SpecError on anything else."""
    try:
        return msgpack.unpackb(data, object_hook=_decode)
    except SpecError:
        raise
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise SpecError(f"The message is not msgpack in openpi's form ({type(error).__name__}: {error}).") from error


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
    if b"__ndarray__" in value:
        dtype, data, shape = _dtype(value[b"dtype"]), value[b"data"], value[b"shape"]
        whole = all(isinstance(size, int) and size >= 0 for size in shape)
        if not whole or not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
            raise SpecError(f"An array of shape {shape} and dtype {dtype} does not fit its {len(data)} bytes.")
        return np.frombuffer(data, dtype).reshape(shape)
    if b"__npgeneric__" in value:
        return _dtype(value[b"dtype"]).type(value[b"data"])
    return value


def _dtype(text: Any) -> np.dtype:
    dtype = np.dtype(text) if isinstance(text, str) else None
    if dtype is None or dtype.kind not in _KINDS:
        raise SpecError(f"Arrays of dtype {text!r} are refused; use bool, integers or floats.")
    return dtype
