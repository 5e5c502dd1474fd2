"""The tutorials run as they are written, on tiny sizes: every shell command, every file and every block of Python.

A block of shell is run line by line, `robopolicy` commands in this process with the sizes of SMALL added; one that ends
with `&` runs in a process of its own until the tutorial ends. A block of Python with a caption is written to the file
of that name; one without is executed, all of a page in one namespace. Blocks of text show output and are not run.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from robopolicy.cli import main

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::robopolicy.core.errors.RobopolicyWarning")]

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.glob("tutorials/*.md")) if page.stem != "index"]
BLOCK = re.compile(r"^```(?:\{code-block\} )?(\w+)\n((?:^:\w[\w-]*:[^\n]*\n)*)\n?(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = {
    "collect": ("collect.episodes=16",),
    "train": ("policy.width=32", "policy.depth=1", "train.fit.steps=20", "train.evaluate_episodes=8"),
    "finetune": (
        *("finetune.iterations=2", "finetune.num_envs=8", "finetune.rollout_length=4", "finetune.minibatch=32"),
        *("finetune.evaluate_every=1", "finetune.evaluate_episodes=8", "finetune.critic_width=16", "finetune.videos=1"),
    ),
    "worldmodel": (
        *("worldmodel.transitions=600", "worldmodel.config.members=2", "worldmodel.config.width=32"),
        *("worldmodel.fit.steps=40", "worldmodel.validation_episodes=16", "worldmodel.validation_steps=200"),
    ),
    "imagine": ("imagine.real_eval_episodes=8",),
    "offline": (
        *("offline.rounds=1", "offline.critic.steps=20", "offline.evaluate_episodes=8"),
        *("gate.steps=20", "gate.num_states=8"),
    ),
    "evaluate": ("evaluate.episodes=8", "evaluate.videos=1"),
    "rank": ("rank.episodes=8",),
    "bakeoff": ("bakeoff.episodes=8", "gate.num_states=8"),
    "success": ("success.fit.steps=10", "success.batch_size=16", "success.config.width=16"),
    "drive": ("drive.episodes=1",),
    "doctor": ("doctor.episodes=4",),
}
ACCEPTED = {"doctor": {0, 1}, "gate": {0, 1}}
"""Exit statuses of verbs that find something, which a tiny run gives them reason to."""
SMALL["imagine"] += SMALL["finetune"]


def blocks(page: Path) -> Iterator[tuple[str, str | None, str]]:
    """Yield language, caption and text of every block of code, in order."""
    for language, options, text in BLOCK.findall(page.read_text()):
        caption = re.search(r"^:caption: (.+)$", options, re.MULTILINE)
        yield language, caption and caption[1], text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Reader:
    """Runs the blocks of one page in one folder."""

    def __init__(self) -> None:
        self.port = free_port()
        self.names: dict[str, object] = {"__name__": "tutorial", "port": self.port}
        self.processes: list[subprocess.Popen[bytes]] = []

    def shell(self, text: str) -> None:
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["robopolicy"]:
                assert not words or words[0] in ("pip", "make", "source", "cd"), f"not run by this test: {line}"
                continue
            command = self.small(words[1:])
            if command[-1] == "&":
                self.background(command[:-1])
            else:
                assert main(command) in ACCEPTED.get(command[0], {0}), line

    def small(self, words: list[str]) -> list[str]:
        verb, *rest = words
        given = {word.partition("=")[0] for word in rest}
        sizes = [each for each in ("run.threads=1", *SMALL.get(verb, ())) if each.partition("=")[0] not in given]
        if "policy.kind=lerobot" in rest:  # its network is what the folder says
            sizes = [each for each in sizes if not each.startswith("policy.")]
        ports = {
            "serve": [f"serve.port={self.port}", "serve.exit_with_parent=true"],
            "drive": [f"drive.port={self.port}"],
        }
        end = ["&"] if rest[-1:] == ["&"] else []
        if verb in ("serve", "check", "algorithms", "report", "convert"):
            sizes = []
        return [verb, *(word for word in rest if word != "&"), *sizes, *ports.get(verb, []), *end]

    def background(self, command: list[str]) -> None:
        process = subprocess.Popen([sys.executable, "-m", "robopolicy.cli", *command])
        self.processes.append(process)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert process.poll() is None, "the server ended before it listened"
            time.sleep(0.1)
        raise AssertionError("the server did not listen within a minute")

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    made = Reader()
    yield made
    made.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_is_written(page, reader):
    ran = 0
    for language, caption, text in blocks(page):
        if caption is not None:
            Path(caption).write_text(text)
        elif language == "sh":
            reader.shell(text)
        elif language == "python":
            exec(compile(text, str(page), "exec"), reader.names)
        else:
            assert language in ("text", "yaml", "json", "xml"), f"{page.name}: a block of {language}"
            continue
        ran += 1
    assert ran >= 2, "a tutorial shows something to do"
