"""What a process imports before it is needed: modules are counted, not seconds.

Who draws a plot, computes a quantile or reads a LeRobot checkpoint pays for the import; who starts a verb, loads a
policy or plays a native task does not.
"""

import json
import subprocess
import sys

import pytest

HEAVY = (
    *("av", "cv2", "datasets", "diffusers", "imageio", "jinja2", "lerobot", "matplotlib", "pandas", "peft"),
    *("pyarrow", "scipy", "sympy", "torch._dynamo", "torchvision", "transformers", "triton"),
)
"""Packages that take from .1 to 5 seconds each, beyond torch."""

SCRIPT = f"""
import importlib, json, sys, tempfile
from pathlib import Path

import torch

brought = set(sys.modules)
found = {{}}

def note(name):
    found[name] = sorted(set({HEAVY!r}) & (set(sys.modules) - brought))
    brought.update(sys.modules)

from robopolicy.verbs.verb import VERBS
for verb in VERBS:
    importlib.import_module(VERBS.path(verb).partition(":")[0])
    note(verb)

import robopolicy
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.denoising import DenoisingPolicy

world = robopolicy.make_world("reach_planar", 2)
spec = world.spec
for kind in PolicyKind:
    config = DenoisingPolicyConfig(kind=kind, width=16, depth=1, sampling_steps=2)
    made = DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "policy")
        policy = robopolicy.load_policy(Path(folder) / "policy")
    robopolicy.evaluate(policy, world, 2)
    note(f"a {{kind.value}} policy loaded and played")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """Return which heavy packages each step of a fresh process imported."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_verb_imports_nothing_heavy_before_it_runs(imported: dict[str, list[str]]):
    verbs = {name: packages for name, packages in imported.items() if " " not in name}
    assert {"train", "collect", "finetune", "evaluate", "serve", "offline", "imagine"} <= set(verbs)
    assert not any(verbs.values()), verbs


def test_loading_and_playing_a_native_policy_imports_nothing_heavy(imported: dict[str, list[str]]):
    played = {name: packages for name, packages in imported.items() if " " in name}
    assert len(played) == 2
    assert not any(played.values()), played
