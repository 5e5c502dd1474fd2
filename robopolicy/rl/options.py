"""What mechanisms say about an option's value that they do not know."""

from collections.abc import Iterable

from robopolicy.core.errors import ConfigError, did_you_mean


def unknown_option(option: str, value: str, known: Iterable[str]) -> ConfigError:
    """Return the error for `value` of a mechanism's `option` (mechanism.name), with the nearest of `known`."""
    names = tuple(known)
    return ConfigError(
        f"options.{option}={value} is not known.{did_you_mean(value, names)} There are {', '.join(names)}."
    )
