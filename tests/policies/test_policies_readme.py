"""The policy of the guide keeps every promise, is found by its dotted path, saved and loaded."""

import re
from pathlib import Path

from robopolicy.core.registry import import_plugins
from robopolicy.core.spec import STATE, Field
from robopolicy.policies import load_policy
from robopolicy.policies.registry import POLICIES
from robopolicy.testing.policy import Level, check_policy

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "extend.md"


def test_the_policy_of_the_guide_can_be_fine_tuned(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "class MyPolicy" in block]
    (tmp_path / "readme_policy.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import_plugins(["readme_policy"])
    kind = "readme_policy:MyPolicy"
    config = POLICIES.configuration(kind)()
    policy = POLICIES.builds(kind)(config, {STATE: Field((3,))}, Field((2,), low=-1.0, high=1.0), fps=10.0)
    assert check_policy(policy, load_policy).level is Level.TRAINS
