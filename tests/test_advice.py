"""What is said where fine-tuning did not help."""

from types import SimpleNamespace
from typing import Any

import pytest

from robopolicy.verbs.finetune import print_advice


def judged(success_rate: float) -> Any:
    return SimpleNamespace(deterministic=SimpleNamespace(score=success_rate, reports_success=True))


@pytest.mark.parametrize(("tuned", "said"), [(0.2, True), (0.4, True), (0.9, False)])
def test_advice_comes_where_success_did_not_rise(tuned, said, capsys):
    print_advice({"base": judged(0.4), "tuned": judged(tuned)})
    assert ("finetune.learning_rate=1e-4" in capsys.readouterr().out) is said
