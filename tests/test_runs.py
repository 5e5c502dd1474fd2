"""A run folder belongs to one process at a time."""

import subprocess
import sys

import pytest

from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.runs import claim, open_run

HOLD = """
import sys
from pathlib import Path
from robopolicy.runs import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
input()
"""
COLLECT = "collect", "world=reach_planar", "collect.episodes=2"


def test_a_folder_in_use_by_another_process_is_refused_until_that_ends(tmp_path, capsys):
    folder = tmp_path / "collect" / "reach_planar" / "0"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert main([*COLLECT, f"run.root={tmp_path}"]) == 2
        assert "in use by another process" in " ".join(capsys.readouterr().err.split())
        assert not folder.exists()
        other.kill()
    assert main([*COLLECT, f"run.root={tmp_path}"]) == 0


def test_a_process_comes_back_to_its_own_folder(tmp_path):
    claim(tmp_path / "0")
    claim(tmp_path / "0")


def test_a_run_of_another_kind_than_the_default_goes_on_and_a_changed_setting_of_it_is_named(tmp_path):
    def opened(*settings):
        return open_run(compose([f"run.root={tmp_path}", "policy.kind=token", *settings]), "train", ("run", "policy"))

    (opened().path / "metrics.jsonl").write_text("")
    opened()
    with pytest.raises(ConfigError, match=r"policy\.token\.bins was 33, now 17"):
        opened("policy.token.bins=17")
    written = opened().path / "config.yaml"
    written.write_text("\n".join(line for line in written.read_text().splitlines() if "decode_steps" not in line))
    opened()
    written.write_text(written.read_text() + "\n  unheard_of: 3\n")
    with pytest.raises(ConfigError, match=r"another version.*unheard_of"):
        opened()
