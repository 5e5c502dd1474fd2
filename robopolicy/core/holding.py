"""Which elements of an action keep their value while a robot holds still. Axes: A action element."""

from collections.abc import Sequence

from robopolicy.core.errors import ConfigError, did_you_mean

POSITIONS = ("gripper",)
"""Elements of an action whose zero is a movement: they keep their value while a robot holds still, where it has any."""


def keeps_value(hold: str, positions: Sequence[str], names: Sequence[str], size: int) -> list[bool]:
    """Return which of the `size` elements of an action keep their last value while a robot holds still, [A].

    hold: last, all of them; zero, those named in positions, such as a gripper's, which zero would half open. names: of
    the elements, () where they have none. Raises ConfigError where positions, if not `POSITIONS`, name others.
    """
    unknown = [name for name in positions if name not in names]
    if unknown and tuple(positions) != POSITIONS:
        known = did_you_mean(unknown[0], names) or " Its elements have no names, so none can be named here."
        raise ConfigError(f"positions names '{unknown[0]}', which is no element of the action.{known}")
    return [hold == "last" or name in positions for name in names or [""] * size]
