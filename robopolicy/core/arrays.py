"""Typing helpers for strict type checkers: numpy arrays, integers from tensors, mappings and sequences.

A strict checker infers unknown key and value types after `isinstance(value, Mapping)`; after `is_mapping(value)` they
are `Any`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from typing_extensions import TypeIs

    Array = NDArray[Any]
else:  # settings are read, and help is shown, without numpy
    Array = Any
"""A numpy array of any shape and element type; docstrings give its shape."""


def integers(tensor: "Tensor") -> list[int]:
    """Return the elements of an integer tensor [N] as Python integers; torch does not type the result of `tolist`."""
    return cast(list[int], tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


def is_mapping(value: object) -> "TypeIs[Mapping[Any, Any]]":
    """Whether `value` is a mapping."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> "TypeIs[list[Any] | tuple[Any, ...]]":
    """Whether `value` is a list or a tuple, as in settings and JSON; strings do not count."""
    return isinstance(value, (list, tuple))
