"""Settings with which weights cannot be divided; the division itself is tested in `test_replicas.py`."""

from typing import Any

import pytest
from bandit_toys import BanditWorld, ChainPolicy

from robopolicy.core import replicas
from robopolicy.core.errors import ConfigError
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune


def tune(**changes: Any) -> None:
    policy: Any = ChainPolicy()
    finetune(policy, None, BanditWorld(2), FinetuneConfig(algorithm="grpo", fsdp=True, **changes))


def test_one_process_has_nothing_to_divide():
    with pytest.raises(ConfigError, match="start several with torchrun"):
        tune()


@pytest.mark.parametrize(
    ("name", "value"), [("staleness", 1), ("policy_lag", 1), ("props_parts", 2), ("proximal_policy", "average")]
)
def test_copies_of_the_policy_exclude_divided_weights(monkeypatch, name, value):
    monkeypatch.setattr(replicas, "count", lambda: 2)
    with pytest.raises(ConfigError, match=f"{name}.* needs copies"):
        tune(**{name: value})
