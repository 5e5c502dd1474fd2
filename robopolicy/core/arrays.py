"""`Array`: how annotations say "a numpy array"; which shape and which elements, the docstrings say."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
"""A numpy array of any shape and element type."""
