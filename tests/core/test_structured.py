from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path

import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE, Field
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.lerobot.configuration import LeRobotStart, LeRobotTuning
from robopolicy.policies.token.configuration import TokenConfig, TokenPolicyConfig
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.offline.configuration import PrdcConfig
from robopolicy.training.configuration import FinetuneConfig


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


SETTINGS = (
    *(AlgorithmConfig, FinetuneConfig, DenoisingPolicyConfig, TokenConfig, TokenPolicyConfig),
    *(LeRobotTuning, LeRobotStart, PrdcConfig),
)


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_python_takes_the_texts_of_enumerations_that_recipes_do(kind):
    default = kind()
    members = {item.name: getattr(default, item.name) for item in fields(kind)}
    members = {name: value for name, value in members.items() if isinstance(value, Enum)}
    for name, value in members.items():
        assert getattr(kind(**{name: value.value}), name) is value
        assert getattr(replace(default, **{name: value.value}), name) is value
        with pytest.raises(ConfigError, match=rf"'{kind.__name__}\.{name}' cannot be 'nonsense'"):
            kind(**{name: "nonsense"})
    assert members or kind in (AlgorithmConfig, FinetuneConfig)  # their only one is null


def test_a_denoiser_by_its_text_is_that_denoiser():
    config = DenoisingPolicyConfig(denoiser="transformer")
    policy = DenoisingPolicy(config, {STATE: Field((2,))}, Field((2,), low=-1.0, high=1.0), fps=10.0)
    assert type(policy.network.denoiser).__name__ == "TransformerDenoiser"
