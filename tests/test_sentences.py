"""What ends a verb and the user can mend is one sentence and status 2; Ctrl-C is status 130 wherever it arrives."""

import ctypes
import errno
import os

import numpy as np
import pytest
import torch

import robopolicy.cli
from robopolicy.cli import INTERRUPTED, main
from robopolicy.configuration import compose, read_yaml
from robopolicy.core.errors import ConfigError, StorageError
from robopolicy.runs import run_name


def ends_with(monkeypatch, error):
    def run(*_):
        raise error

    monkeypatch.setattr(robopolicy.cli, "run_verb", run)
    return main(["algorithms"])


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_error_of_the_system_is_a_sentence(monkeypatch, capsys, number):
    assert ends_with(monkeypatch, OSError(number, os.strerror(number), "/somewhere/file")) == 2
    output = capsys.readouterr().err
    assert output.startswith("Error: /somewhere/file: ") and os.strerror(number) in output and "Traceback" not in output


def no_memory():
    try:
        np.empty(2**60, np.uint8)
    except MemoryError as error:
        return error
    raise AssertionError


def no_memory_in_torch():
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("make", [no_memory, no_memory_in_torch, lambda: torch.OutOfMemoryError("CUDA out of memory")])
def test_memory_that_runs_out_is_a_sentence(monkeypatch, capsys, make):
    assert ends_with(monkeypatch, make()) == 2
    output = capsys.readouterr().err
    assert "Out of memory" in output and "world.batch_size" in output


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    with pytest.raises(RuntimeError, match="shapes differ"):
        ends_with(monkeypatch, RuntimeError("shapes differ"))


def through_a_library():
    error = ConfigError("World 'x' could not be made")
    error.__cause__ = ctypes.ArgumentError("argument 1: KeyboardInterrupt: ")
    return error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ctypes.ArgumentError("argument 2: KeyboardInterrupt: "), through_a_library()]
)
def test_an_interruption_ends_with_130_wherever_it_arrives(monkeypatch, capsys, error):
    assert ends_with(monkeypatch, error) == INTERRUPTED
    assert "Interrupted." in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/proc/x.json", "/dev/null", "/proc/1/x/y.json", "a" * 300 + ".json", "folder"])
def test_figures_that_cannot_be_written_are_refused_before_the_work(monkeypatch, tmp_path, capsys, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(robopolicy.cli.VERBS, "load", lambda name: pytest.fail("it began to work"))
    assert main(["algorithms", f"json={path}"]) == 2
    assert path[:20] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


@pytest.mark.parametrize("name", ["a" * 300, "..", "a\nb", "a\0b"])
def test_a_name_that_no_folder_can_have_is_refused(name):
    from dataclasses import replace

    config = compose([])
    with pytest.raises(ConfigError, match=r"run\.name="):
        run_name(replace(config, run=replace(config.run, name=name)))


def test_a_run_below_proc_is_a_sentence():
    from robopolicy.core.run import RunFolder

    with pytest.raises(StorageError, match="/proc/x"):
        RunFolder("/proc/x/collect")


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(12)
)
DAMAGED = {
    "tag": "a: !!python/object/apply:os.system [echo]",
    "own tag": "a: !thing 3",
    "bomb": BOMB,
    "loop": "a: &a [*a]",
    "deep": "a: " + "[" * 5000,
    "half": "a: {b: ",
    "list": "[1, 2]",
    "text": "hello",
    "binary": "\0\1\2",
    "key": "? [a, b]\n: 3",
    "large": "# " + "x" * 2**19,
    "broken reference": "collect: {episodes: '${nowhere}'}",
    "wrong section": "collect: 3",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_recipe_that_is_none_is_a_sentence(tmp_path, name):
    path = tmp_path / "mine.yaml"
    path.write_text(DAMAGED[name])
    with pytest.raises(ConfigError):
        compose([f"recipe={path}"])


def test_aliases_that_expand_to_little_are_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert read_yaml(tmp_path / "mine.yaml") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
