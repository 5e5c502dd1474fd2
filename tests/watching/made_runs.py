"""Run folders as verbs leave them, made by hand in a moment."""

import json
from pathlib import Path

import numpy as np

from robopolicy.core.run import RunFolder
from robopolicy.evaluation.success import EvaluationResult

CONFIG = "run:\n  seed: 0\nworld:\n  name: {world}\nfinetune:\n  learning_rate: {rate}\n"


def judged(share: float, seeds: range, world: str = "push_cube") -> dict:
    """A verdict in which the first episodes succeed."""
    success = np.arange(len(seeds)) < share * len(seeds)
    zeros = np.zeros(len(seeds))
    given = {"returns": zeros, "lengths": zeros, "cut": zeros.astype(bool), "deterministic": True}
    result = EvaluationResult(world, np.array(seeds), success, **given, seconds=1.0, steps=10)
    return {"deterministic": result.to_json(), "stochastic": result.to_json()}


def make_run(root: Path, name: str, *, rate: float = 1e-4, share: float | None = None, **options) -> RunFolder:
    """Make root/finetune/name/0, with a result where `share` of its episodes succeed."""
    world = options.get("world", "push_cube")
    folder = RunFolder(root / "finetune" / name / "0")
    (folder.path / "config.yaml").write_text(CONFIG.format(world=world, rate=rate))
    packages = {"robopolicy": "0", "torch": "2", "mujoco": "3"}
    versions = {"seed": 0, "command": ["robopolicy", "finetune"], "packages": packages, "python": "3.12"}
    (folder.path / "versions.json").write_text(json.dumps(versions))
    for iteration in range(options.get("iterations", 3)):
        log(folder, iteration, rate)
    if share is not None:
        seeds = options.get("seeds", range(50))
        result = {"base": judged(0.4, seeds, world), "tuned": judged(share, seeds, world), "seconds": 60.0}
        (folder.path / "result.json").write_text(json.dumps(result))
    return folder


def log(folder: RunFolder, iteration: int, rate: float = 1e-4) -> None:
    """Log an iteration with a validation."""
    value = min(0.2 + 0.1 * iteration, 1.0)
    known = {"deterministic_success": value, "deterministic_low": value - 0.1, "deterministic_high": value + 0.1}
    folder.log({"iteration": iteration, "env_steps": 100 * iteration, "success": value, "kl": rate, **known})
