"""`Array` is how annotations say "a numpy array"; docstrings say its shape. `integers` reads those of a tensor."""

from typing import TYPE_CHECKING, Any, cast

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
"""A numpy array of any shape and element type."""


def integers(tensor: "Tensor") -> list[int]:
    """Return the elements of an integer tensor [N] as Python's; torch does not say what its `tolist` holds."""
    return cast(list[int], tensor.tolist())  # pyright: ignore[reportUnknownMemberType]
