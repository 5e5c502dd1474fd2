"""Whether a value of unknown type is a mapping or a sequence: `isinstance`, told to the type checker with contents.

After `isinstance(value, Mapping)` a strict checker takes keys and values for unknown; after `is_mapping(value)` they
are `Any`, as in what was declared.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_mapping(value: object) -> "TypeIs[Mapping[Any, Any]]":
    """Whether `value` is a mapping."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> "TypeIs[list[Any] | tuple[Any, ...]]":
    """Whether `value` is a list or a tuple, as settings and JSON have them; texts are not."""
    return isinstance(value, (list, tuple))
