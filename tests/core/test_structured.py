from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.structured import from_plain, to_plain


class Kind(Enum):
    DIFFUSION = "diffusion"
    FLOW = "flow"


@dataclass(frozen=True)
class Inner:
    rate: float = 1e-3
    widths: tuple[int, ...] = (256, 256)
    kind: Kind = Kind.FLOW

    def __post_init__(self):
        if self.rate <= 0:
            raise ValueError("rate must be positive")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    path: Path | None = None
    flag: bool = False
    rewards: dict[str, float] = field(default_factory=dict)


def test_round_trip_is_exact():
    value = Outer("a", Inner(0.5, (1,), Kind.DIFFUSION), Path("x/y"), True, {"progress": 2.0})
    plain = to_plain(value)
    assert plain["inner"] == {"rate": 0.5, "widths": [1], "kind": "diffusion"}
    assert from_plain(Outer, plain) == value


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"name": "a", "iner": {}}, "Did you mean 'inner'"),
        ({"name": "a", "inner": {"rte": 1}}, "inner.rte"),
        ({"inner": {}}, "'name' is required"),
        ({"name": "a", "inner": {"rate": "fast"}}, "inner.rate"),
        ({"name": "a", "inner": {"kind": "flo"}}, "Did you mean 'flow'"),
        ({"name": "a", "inner": {"rate": -1.0}}, "rate must be positive"),
        ({"name": "a", "inner": {"widths": 3}}, "must be a list"),
        ({"name": "a", "flag": 3}, "flag"),
        ({"name": "a", "inner": {"rate": True}}, "inner.rate"),
    ],
)
def test_bad_values_name_the_key_and_the_way_out(data, text):
    with pytest.raises(ConfigError, match=text):
        from_plain(Outer, data)


def test_numbers_convert_only_when_nothing_is_lost():
    assert from_plain(Outer, {"name": "a", "inner": {"rate": 1, "widths": [64.0]}}).inner == Inner(1.0, (64,))
    with pytest.raises(ConfigError):
        from_plain(Outer, {"name": "a", "inner": {"widths": [64.5]}})
