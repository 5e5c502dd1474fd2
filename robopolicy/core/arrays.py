"""Types that a strict checker does not find by itself: numpy arrays, integers of tensors, mappings and sequences.

After `isinstance(value, Mapping)` it takes keys and values for unknown; after `is_mapping(value)` they are `Any`, as in
what was declared.
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
"""A numpy array of any shape and element type; docstrings say its shape."""


def integers(tensor: "Tensor") -> list[int]:
    """Return the elements of an integer tensor [N] as Python's; torch does not say what its `tolist` holds."""
    return cast(list[int], tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


def is_mapping(value: object) -> "TypeIs[Mapping[Any, Any]]":
    """Whether `value` is a mapping."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> "TypeIs[list[Any] | tuple[Any, ...]]":
    """Whether `value` is a list or a tuple, as settings and JSON have them; texts are not."""
    return isinstance(value, (list, tuple))
