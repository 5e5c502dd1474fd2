"""Which files does one command lead a reader through? Prints those whose functions run, in the order of the walk.

    python tests/walk.py FOLDER                                            # finetune, from the shell to the first loss
    python tests/walk.py FOLDER --until load_policy evaluate ... recipe=push_t world.batch_size=4

A file counts once a function of it is entered; what only its import runs (decorators, classes) does not, for nobody
reads that on the way. A jump is a call from one file into another, counted once however often it is made: as often does
a reader come to the file. FOLDER holds the runs; the walk of finetune collects and trains a tiny base there first.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MUJOCO_GL", "egl")

OURS = ("robopolicy", "worldmodels", "sims")
TINY = (
    *("recipe=push_t", "run.threads=1", "policy.width=32", "policy.depth=1", "world.batch_size=4"),
    *("collect.episodes=8", "train.fit.steps=5", "train.evaluate_episodes=0"),
    *("finetune.iterations=2", "finetune.num_envs=4", "finetune.rollout_length=2", "finetune.minibatch=8"),
    *("finetune.critic_warmup=0", "finetune.evaluate_episodes=4", "finetune.videos=0", "finetune.target_success=null"),
    "finetune.evaluate_every=0",  # the evaluation before the first iteration is not on the way to the loss
)
CO_OPTIMIZED = 1
"""Flag of the code of functions; that of modules and classes lacks it."""


class Arrived(BaseException):
    """The walk is at its end."""


class Walk:
    """What is entered from now on until a function of the name `until` is: the file of every call, in order."""

    def __init__(self, root: Path, until: str):
        self.root, self.until = root, until
        self.files: list[str] = []
        self.jumps: list[tuple[str, str, str] | None] = []
        self.functions: dict[str, list[str]] = {}
        self.milestones: dict[str, int] = {}
        self._known: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take down a call, as a profile function."""
        if event not in ("call", "return"):
            return
        code = frame.f_code
        file = self._file(code.co_filename)
        if file is None or not code.co_flags & CO_OPTIMIZED or _importing(frame):
            return
        if event == "return":
            if code.co_name == "load_policy":
                self.milestones.setdefault("loaded", len(self.files))
            return
        if code.co_name == "run" and file.startswith("robopolicy/verbs/"):
            self.milestones.setdefault("run", len(self.files))
        self.files.append(file)
        self.jumps.append(self._jump(frame, file, code.co_qualname))
        self.functions.setdefault(file, [])
        if code.co_qualname not in self.functions[file]:
            self.functions[file].append(code.co_qualname)
        if code.co_name == self.until:
            sys.setprofile(None)
            raise Arrived

    def _jump(self, frame: FrameType, file: str, name: str) -> tuple[str, str, str] | None:
        """Return from where and where to a call leads into another file, None for one within a file."""
        caller = frame.f_back
        while caller is not None and self._file(caller.f_code.co_filename) is None:
            caller = caller.f_back
        where = "" if caller is None else self._file(caller.f_code.co_filename)
        return None if caller is None or where == file else (f"{where}:{caller.f_code.co_qualname}", file, name)

    def _file(self, name: str) -> str | None:
        """Return a file's path below the root, None for one that is not ours."""
        if name not in self._known:
            path = Path(name)
            ours = path.is_relative_to(self.root) and path.relative_to(self.root).parts[0] in OURS
            self._known[name] = str(path.relative_to(self.root)) if ours else None
        return self._known[name]


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported below a frame."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def walk(command: list[str], until: str = "policy_loss") -> Walk:
    """Run a command until a function of the name `until` is entered, and return the way there."""
    import robopolicy
    from robopolicy.cli import main

    profile = Walk(Path(robopolicy.__file__).parents[1], until)
    sys.setprofile(profile)
    try:
        main(command)
    except Arrived:
        pass
    finally:
        sys.setprofile(None)
    return profile


def report(found: Walk) -> str:
    """Return the files in order, with the jumps to them and the functions entered, and the counts of every part."""
    times = Counter(file for _, file, _ in filter(None, dict.fromkeys(found.jumps)))
    lines = [
        f"{place:4d} {times[file]:4d} jumps  {file}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
        for place, (file, names) in enumerate(found.functions.items(), 1)
    ]
    begins, loaded = found.milestones.get("run", 0), found.milestones.get("loaded", len(found.files))
    parts = {
        "the whole walk": slice(None),
        "shell to the verb": slice(begins),
        "verb to a loaded policy": slice(begins, loaded),
        "loaded policy to the end": slice(loaded, None),
    }
    for name, part in parts.items():
        jumps = set(found.jumps[part]) - {None}
        lines.append(f"{name}: {len(set(found.files[part]))} files, {len(jumps)} jumps")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Walk a command, by default a tiny finetune, whose base is made first."""
    folder, rest = Path(arguments[0]), arguments[1:]
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    until = "policy_loss"
    if rest[:1] == ["--until"]:
        until, rest = rest[1], rest[2:]
    if not rest:
        from robopolicy.cli import main as robopolicy

        for verb in ("collect", "train"):
            if status := robopolicy([verb, *TINY]):
                return status
        # A process of its own: what collect and train have read and remembered is not part of the walk
        return os.spawnv(
            os.P_WAIT,
            sys.executable,
            [sys.executable, str(Path(__file__).resolve()), ".", "--until", until, "finetune", *TINY],
        )
    print(report(walk(rest, until)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
