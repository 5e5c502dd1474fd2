"""Every setting that is a number refuses what it cannot be, and says which setting it is."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from robopolicy.configuration import Config, compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import image_sizes
from robopolicy.core.structured import Tagged, from_plain

FREE = {
    "log_mean",
    "logp_clamp",
    "target_entropy",
    "margin",
    "relative_margin",
    "threshold",
    "enough",
    "plan.uncertainty",
    "drive.rate",
    "scale",
    "bounds",
    "hold_values",
}
"""Settings that may have any sign."""


def numbers(kind: Any = Config, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, str], Any]]:
    """Yield path, kinds to choose and type of every setting of ours that is a number or may be one."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        place = (*path, name)
        if isinstance(hint, type) and issubclass(hint, Tagged):
            inside = place if hint.beside else (*place, "config")
            for each in hint.kinds.ours:
                for setting_path, kinds, inner in numbers(hint.kinds.configuration(each), inside):
                    yield setting_path, {**kinds, ".".join(place): each}, inner
        if dataclasses.is_dataclass(hint):
            yield from numbers(hint, place)
        elif plain := [part for part in parts(hint) if part in (int, float)]:
            yield place, {}, (plain[0], hint)


def parts(hint: Any) -> Iterator[Any]:
    """Yield the types that a type is made of; of literals none."""
    if typing.get_origin(hint) is typing.Literal:
        return
    inner = typing.get_args(hint)
    yield hint
    for each in inner[:1] if typing.get_origin(hint) is Annotated else inner:
        yield from parts(each)


def with_value(path: tuple[str, ...], kinds: dict[str, str], hint: Any, value: Any) -> dict[str, Any]:
    """Return plain values of a configuration in which the setting at `path` is `value`, in the form that it takes."""
    listed = next((part for part in parts(hint) if typing.get_origin(part) in (tuple, dict)), None)
    if listed is not None and not any(part in (int, float) for part in typing.get_args(hint)):
        item = typing.get_args(listed)
        value = {"x": value} if typing.get_origin(listed) is dict else [value] * (1 if item[-1] is ... else len(item))
    tree: Any = value
    for depth in reversed(range(len(path))):
        tree = {path[depth]: tree}
        if (kind := kinds.get(".".join(path[:depth]))) is not None:
            tree["kind"] = kind
    return tree


EVERY = list(numbers())
SECTIONS = typing.get_type_hints(Config)


def refused(path: tuple[str, ...], kinds: dict[str, str], hint: Any, value: Any) -> str:
    """Return what is said of a value, "" where it is taken."""
    try:
        from_plain(SECTIONS[path[0]], with_value(path, kinds, hint, value)[path[0]], path[0])
    except ConfigError as error:
        return str(error)
    return ""


def test_no_number_of_any_setting_is_nan_infinite_or_endless():
    assert len(EVERY) > 600
    for path, kinds, (kind, hint) in EVERY:
        for value in (float("nan"), float("-inf"), 1e308 if kind is float else 2.0**70):
            message = refused(path, kinds, hint, value)
            assert ".".join(path) in message, (path, value, message)
            assert len(message) < 300


def test_every_setting_declares_its_range_or_is_free():
    for path, kinds, (kind, hint) in EVERY:
        if FREE & {path[-1], ".".join(path)}:
            continue
        message = refused(path, kinds, hint, kind(-1))
        assert ".".join(path) in message, (path, message)


@pytest.mark.parametrize("size", [0, -1, 100_000, (64, 0), True, "64", 6.4])
def test_images_have_a_size_that_is_drawn(size):
    for cameras in ((), ("top",)):
        with pytest.raises(ConfigError, match=r"world\.image_size=.* is not a size from 1 to 4096 pixels"):
            image_sizes(cameras, size)


def test_shares_and_counts_of_our_own_choice():
    for setting, text in {
        "collect.noise=[nan]": "collect.noise",
        "collect.noise=[-1]": "collect.noise",
        "collect.noise=[]": "collect.noise is .*at least one",
        "worldmodel.noise=[inf]": "worldmodel.noise",
        "bench.seeds=[]": "bench.seeds is .*at least one",
        "run.seed=-1": "run.seed is -1",
        "run.seed=1e30": "run.seed is 1e.30",
        "doctor.episodes=0": "doctor.episodes is 0: it must be at least 1",
        "collect.episodes=-5": "collect.episodes is -5",
        "finetune.target_success=2": "finetune.target_success is 2: it must lie between 0 and 1",
        "finetune.learning_rate=0": "finetune.learning_rate is 0: it must be above 0",
        "train.fit.learning_rate=nan": "train.fit.learning_rate is nan",
        "finetune.clip=nan": "finetune.clip is nan",
        "worldmodel.config.positive_fraction=7": "worldmodel.config.positive_fraction is 7",
        "optimize.max_action_error=nan": "optimize.max_action_error is nan",
        "collect.episodes=5000000000": "collect.episodes is 5000000000: it must be at most 2147483648",
    }.items():
        with pytest.raises(ConfigError, match=text):
            compose([setting])
