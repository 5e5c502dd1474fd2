"""Settings that became constants: whoever names them with the value that they have is right, any other is refused.

That checkpoints of before open is in worldmodels/test_world_model_checkpoint.py.
"""

from pathlib import Path

import pytest
import yaml

from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.structured import fixed
from robopolicy.nn.configuration import EdmConfig
from robopolicy.rl.offline.configuration import ReBracConfig
from robopolicy.runs import open_run

SETTINGS = {
    "finetune.log_ratio_clamp": ("3", "2"),
    "finetune.critic_depth": ("2", "3"),
    "gate.largest_weight": ("100", "10"),
    "worldmodel.config.min_logvar": ("-10", "-5"),
    "worldmodel.kind=rssm worldmodel.config.unimix": ("0.01", "0"),
    "worldmodel.kind=video worldmodel.config.edm.rho": ("7.0", "5.0"),
    "policy.kind=joint policy.futures": ("2", "4"),
    "policy.kind=joint policy.edm.churn_noise": ("1.003", "1"),
    "offline.agent.kind=td3_bc offline.agent.policy_noise": ("0.2", "0.1"),
}
"""Settings, each with the value that it has now and another one."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_its_own_value_is_taken_with_a_note_and_no_other(setting: str):
    *kinds, key = setting.split()
    same, other = SETTINGS[setting]
    with pytest.warns(RobopolicyNote, match=f"{key} is no longer a setting"):
        assert compose([*kinds, f"{key}={same}"]) == compose(kinds)
    with pytest.raises(ConfigError, match=rf"'{key}' is .*: it is fixed at .* since 0\.2\.0"):
        compose([*kinds, f"{key}={other}"])


def test_a_recipe_may_name_it(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("finetune:\n  log_ratio_clamp: 3.0\n  epochs: 2\nworld:\n  options: {1: 2}\n")
    with pytest.warns(RobopolicyNote) as notes:
        assert compose([f"recipe={tmp_path / 'mine.yaml'}"]).finetune.epochs == 2
    assert [str(each.message).split()[0] for each in notes] == ["finetune.log_ratio_clamp"]


def test_classes_pass_theirs_on_to_those_that_derive_from_them():
    assert fixed(ReBracConfig).keys() == {"policy_noise", "noise_clip"}
    assert not fixed(EdmConfig).keys() & EdmConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize(("value", "differs"), [(3.0, False), (5.0, True)])
def test_a_run_of_before_goes_on_unless_it_had_another_value(tmp_path: Path, value: float, differs: bool):
    config, sections = compose([f"run.root={tmp_path}", "run.name=x", "world=push_t"]), ("run", "world", "finetune")
    folder = open_run(config, "finetune", sections).path
    (folder / "metrics.jsonl").write_text("")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    saved["finetune"] |= {"log_ratio_clamp": value, "critic_depth": 2}
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    if differs:
        with pytest.raises(ConfigError, match=r"another version \('finetune\.log_ratio_clamp' is 5\.0: it is fixed"):
            open_run(config, "finetune", sections)
    else:
        assert open_run(config, "finetune", sections).path == folder
