"""A run folder belongs to one process at a time."""

import subprocess
import sys

from robopolicy.cli import main
from robopolicy.runs import claim

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
