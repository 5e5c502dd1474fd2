"""Every file that is read may be damaged in any way: what its reader raises is one of our errors, and soon.

The files of a run, a checkpoint and a dataset are damaged one after the other, in values and as files, and read.
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.configuration import compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import RobopolicyError
from robopolicy.core.origin import WorldOrigin, remember_origin
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE, Field, WorldSpec
from robopolicy.data.lerobot_format import recorded_origin, write_dataset
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.data.quality import read_quality
from robopolicy.doctor.data import check_statistics
from robopolicy.evaluation import plots
from robopolicy.evaluation.episode_batches import SavedBatches
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.scores import known_anchors
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.plan import InferencePlan, load_plan, save_plan, weights_hash
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.loading import load_policy, saved_origin
from robopolicy.runs import finished, open_run
from robopolicy.training.state import load_trainer, save_trainer
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig
from worldmodels.ensemble import EnsembleModel

pytestmark = pytest.mark.long

CAMERA = "observation.images.top"
FIELDS = {STATE: Field((2,), names=("x", "y")), CAMERA: Field((8, 8, 3), "uint8", 0, 255)}
ACTION = Field((2,), low=-1.0, high=1.0)
LENGTHS = (3, 2)
RATE = {"success_rate": 0.5, "low": 0.3, "high": 0.7, "reports_success": True, "episodes": 8, "return_mean": 1.0}
RESULT = {
    "policy": {"deterministic": RATE, "stochastic": RATE, "smoothness": {}},
    "difference": {"difference": 0.1, "low": 0.0, "high": 0.2},
    "seconds": 3.5,
    "conditions": {"latency_steps": "3"},
    "validation": {"success": {"precision": 0.5, "recall": 0.5}, "reward_error": 0.1, "steps": 3, "open_loop": {}},
}


def a_dataset() -> Episodes:
    steps, count = sum(LENGTHS), len(LENGTHS)
    return Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={
            STATE: torch.rand(steps + count, 2),
            CAMERA: torch.zeros(steps + count, 8, 8, 3, dtype=torch.uint8),
        },
        actions=torch.rand(steps, 2),
        lengths=torch.tensor(LENGTHS),
        tasks=("go",) * count,
        step_success=torch.ones(steps, dtype=torch.bool),
        rewards={"progress": torch.rand(steps)},
        terminated=torch.ones(count, dtype=torch.bool),
        final_known=torch.ones(count, dtype=torch.bool),
    )


def a_config(root: Path):
    return compose(["world=reach_planar", f"run.root={root}", "run.name=x"])


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    run = open_run(a_config(root), "train", ("run", "world", "train"))
    run.log({"iteration": 1, "step": 1, "loss": 0.5, "deterministic_success": 0.5})
    run.clock().keep()
    (run.path / "result.json").write_text(json.dumps(RESULT))
    SavedBatches(run.path / "waves.jsonl", {"settings": 1})
    save_trainer(run.resume_point, {"step": 3, "optimiser": {"state": torch.ones(2)}})
    config = DenoisingPolicyConfig(chunk=2, prediction_steps=2, width=8, depth=1, sampling_steps=2, denoising_steps=4)
    policy = DenoisingPolicy(config, {STATE: FIELDS[STATE]}, ACTION, fps=10.0)
    remember_origin(policy, WorldOrigin("reach_planar", {"latency_steps": 1}))
    policy.save(root / "policy")
    save_plan(root / "policy", InferencePlan(InferenceConfig(), weights_hash(root / "policy")))
    quality = {"name": "a", "quality": "medium", "anchors": {}}
    for name in ("png", "video"):
        write_dataset(a_dataset(), root / name, images=name, origin=WorldOrigin("reach_planar"), quality=quality)
    spec = WorldSpec("theirs", {STATE: FIELDS[STATE]}, ACTION, 10.0, 6, rewards=("progress",))
    model = EnsembleModel.build(EnsembleConfig(members=2, width=8, head_width=8), spec, a_dataset(), 0)
    save_world_model(model, root / "model")
    return root


def read_run(root: Path) -> None:
    run = RunFolder(root / "train" / "x" / "0")
    for read in (
        lambda: report_for_run(run.path),
        lambda: finished(run),
        lambda: open_run(a_config(root), "train", ("run", "world", "train")),
        lambda: SavedBatches(run.path / "waves.jsonl", {"settings": 1}),
        lambda: load_trainer(run.resume_point),
        lambda: run.describe_resumption(),
        lambda: run.rewind("step", 1),
        lambda: RunFolder(run.path).clock(),
    ):
        attempt(read)


def attempt(read: Callable[[], object]) -> None:
    """Read; what one reader says of a file does not keep the next one from it."""
    try:
        read()
    except RobopolicyError as error:
        assert "\n" not in str(error).strip(), error
        assert len(str(error)) < 2000


def read_policy(root: Path) -> None:
    for read in (load_policy, saved_origin, load_plan):
        attempt(lambda read=read: read(root / "policy"))


def read_data(name: str) -> Callable[[Path], None]:
    def read(root: Path) -> None:
        attempt(lambda: read_dataset(root / name))
        attempt(lambda: recorded_origin(root / name))
        attempt(lambda: read_quality(root / name))
        attempt(lambda: check_statistics(a_dataset(), root / name))

    return read


READERS: dict[str, Callable[[Path], None]] = {
    "train": read_run,
    "policy": read_policy,
    "png": read_data("png"),
    "video": read_data("video"),
    "model": lambda root: attempt(lambda: load_world_model(root / "model")),
}
MOST = int(os.environ.get("ROBOPOLICY_DAMAGES", "10"))
"""Values that are exchanged in a file, of all that it holds; the suite has no time for more."""
VALUES = (None, [], {}, "x", -1, float("nan"), 1e308, 10**30, True, [[[[[]]]]], [3, 2], 0, "1" * 300, {"a": {"b": []}})
"""What may stand where something else is expected."""


def changed(tree: Any, values: Iterator[Any]) -> Iterator[Any]:
    """Yield `tree` with one value after the other exchanged or gone, in every place."""
    places = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, inside in places[:30]:
        for new in (next(values), next(values), *changed(inside, values)):
            copy = tree.copy()
            copy[key] = new
            yield copy
        copy = tree.copy()
        del copy[key]
        yield copy


def texts(text: str, values: Iterator[Any]) -> Iterator[bytes]:
    """Yield a JSON or YAML file's text, damaged."""
    for other in (
        "",
        "[]",
        "3",
        "null",
        '"text"',
        "[" * 100_000,
        '{"a": ' * 50_000,
        "1" * 5000,
        text[: len(text) // 2],
    ):
        yield other.encode()
    yield b"\xff\xfe\0" + text.encode()
    try:
        tree = json.loads(text)
    except ValueError:
        yield (text + "\n  !!python/name:os.system\n").encode()
        yield text.replace(":", ": [", 1).encode()
    else:
        every = [json.dumps(each).encode() for each in changed(tree, values)]
        yield from every[:: max(1, len(every) // MOST)]


def binaries(data: bytes) -> Iterator[bytes]:
    """Yield another kind of file, damaged."""
    yield from (b"", data[: len(data) // 2], data[:-9])
    for share in (0.01, 0.5, 0.9):
        place = int(len(data) * share)
        yield data[:place] + bytes(255 - each for each in data[place : place + 8]) + data[place + 8 :]


def damages(path: Path, values: Iterator[Any]) -> Iterator[Callable[[], object]]:
    """Yield functions that put something else in the place of the file `path`, which is not there."""
    data = path.read_bytes()
    textual = path.suffix in (".json", ".jsonl", ".yaml")
    for other in texts(data.decode(), values) if textual else binaries(data):
        yield lambda other=other: path.write_bytes(other)
    yield path.mkdir
    yield lambda: os.mkfifo(path)
    yield lambda: path.symlink_to(path)
    yield lambda: None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", READERS)
@pytest.mark.filterwarnings("ignore")
def test_no_damage_is_more_than_a_sentence(sound: Path, tmp_path: Path, part: str, monkeypatch):
    for plot in ("success_bars", "learning_curve", "loss_curves"):  # nine tenths of the time, and drawn elsewhere
        monkeypatch.setattr(plots, plot, lambda *_: "")
    root = tmp_path / "root"
    shutil.copytree(sound, root)
    values = itertools.cycle(VALUES)
    READERS[part](root)
    shutil.rmtree(root)
    shutil.copytree(sound, root)
    wrong: list[str] = []
    files = (path for path in (root / part).rglob("*") if path.is_file())
    for name in sorted(path.relative_to(root) for path in files if part != "video" or "meta" not in path.parts[-2]):
        path = root / name
        for damage in list(damages(path, values)):
            path.unlink()
            damage()
            try:
                READERS[part](root)
            except Exception as error:
                held = path.read_bytes()[:200] if path.is_file() else os.path.lexists(path) and path.lstat().st_mode
                wrong.append(f"{name} with {held!r}: {error!r}")
            shutil.rmtree(root / part)
            shutil.copytree(sound / part, root / part)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:40])


OPTIONAL: dict[str, Callable[[Path], object]] = {
    "png/meta/robopolicy/episodes.json": lambda root: read_dataset(root / "png"),
    "png/meta/robopolicy/world.json": lambda root: recorded_origin(root / "png"),
    "png/meta/robopolicy/quality.json": lambda root: known_anchors(root / "png", "reach_planar"),
    "policy/inference.json": lambda root: load_plan(root / "policy"),
}


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("odd", ["folder", "link that leads nowhere"])
def test_what_may_be_missing_and_is_no_file_is_not_passed_over(sound: Path, tmp_path: Path, name: str, odd: str):
    """Without its side table a dataset would lose its rewards and successes, and nobody would know."""
    part = name.partition("/")[0]
    shutil.copytree(sound / part, tmp_path / part)
    place = tmp_path / name
    assert place.is_file()
    place.unlink()
    OPTIONAL[name](tmp_path)  # it may be missing
    place.mkdir() if odd == "folder" else place.symlink_to("nowhere")
    with pytest.raises(RobopolicyError, match=place.name):
        OPTIONAL[name](tmp_path)
