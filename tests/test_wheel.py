"""A wheel, installed into an empty environment with the packages that it declares, works without the checkout."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # thirty processes, each of which imports torch

ROOT = Path(__file__).parents[1]
UV = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
TINY = (
    *("world=push_t", "run.threads=1", "world.batch_size=8", "policy.width=16", "policy.depth=1"),
    *("policy.sampling_steps=2", "collect.episodes=12", "train.fit.steps=20", "train.evaluate_episodes=4"),
    *("finetune.iterations=1", "finetune.num_envs=8", "finetune.rollout_length=4", "finetune.critic_width=16"),
    *("finetune.evaluate_every=1", "finetune.evaluate_episodes=4", "finetune.videos=1"),
    *("worldmodel.transitions=300", "worldmodel.config.members=2", "worldmodel.config.width=16"),
    *("worldmodel.fit.steps=20", "evaluate.episodes=4", "evaluate.videos=1"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist of this checkout, and a wheel that was built from the sdist."""
    if UV is None:
        pytest.skip("uv builds the wheel")
    folder = tmp_path_factory.mktemp("dist")
    for source, kind, out in ((ROOT, "--wheel", "direct"), (ROOT, "--sdist", "."), (None, "--wheel", "again")):
        source = source or next(folder.glob("*.tar.gz"))
        subprocess.run([UV, "build", "--quiet", kind, str(source), "--out-dir", str(folder / out)], check=True)
    return (
        next((folder / "direct").glob("*.whl")),
        next(folder.glob("*.tar.gz")),
        next((folder / "again").glob("*.whl")),
    )


@pytest.fixture(scope="module")
def run(built, tmp_path_factory):
    """Run a command of the installed wheel in an empty folder with an empty home; no extra is installed."""
    folder = tmp_path_factory.mktemp("empty")
    environment, home, work = folder / "environment", folder / "home", folder / "work"
    home.mkdir(), work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    binaries = environment / "bin"
    quiet = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(binaries / "python")]
    subprocess.run([*quiet, str(built[0])], check=True)
    link_declared(next((environment / "lib").glob("python*/site-packages")), built[0])
    clean = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(home), "MUJOCO_GL": "egl", "OMP_NUM_THREADS": "1"}

    def command(*words: str, status: int = 0, **more) -> str:
        given = {"cwd": work, "env": clean, "text": True, "stdin": subprocess.DEVNULL, **more}
        done = subprocess.run([binaries / words[0], *words[1:]], capture_output=True, timeout=240, **given)
        text = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == status and "Traceback" not in text, f"{words}: {done.returncode}\n{text[-3000:]}"
        return text

    command.work, command.binaries, command.environment = work, binaries, clean
    return command


def link_declared(target: Path, wheel: Path) -> None:
    """Link the packages that the wheel's requirements install, with what those need, into site-packages `target`."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    waiting = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    pairs: set[tuple[str, str]] = set()
    waiting = [(text, "") for text in waiting]
    while waiting:
        text, extra = waiting.pop()
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
            continue
        for each in ("", *needed.extras):
            if (needed.name, each) not in pairs:
                pairs.add((needed.name, each))
                package = distribution(needed.name)
                waiting += [(text, each) for text in package.requires or ()]
                for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                    if not top.endswith(".pth") and not (target / top).exists():
                        (target / top).symlink_to(Path(package.locate_file(top)).absolute())


def test_wheel_and_sdist_hold_what_is_needed(built):
    direct, sdist, again = built
    with zipfile.ZipFile(direct) as one, zipfile.ZipFile(again) as two, tarfile.open(sdist) as source:
        names = set(one.namelist())
        assert names == set(two.namelist())
        sources = {name.partition("/")[2] for name in source.getnames()}
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    files = [name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()]
    assert not [name for name in files if name not in sources and name != ".gitignore"]
    packed = [name for name in files if re.match(r"(robopolicy|sims|worldmodels)/(?!benchmarks/)", name)]
    packed += [f"robopolicy/resources/{name}" for name in files if name.startswith(("configs/", "assets/"))]
    assert not [name for name in packed if name not in names and not name.endswith(".gitignore")]
    assert not [name for name in names if name.startswith(("tests", "docs", "robopolicy/benchmarks"))]


def test_the_installed_package_is_the_one_that_runs(run):
    text = run("python", "-c", "import robopolicy, sims, worldmodels, sys\nfor each in (robopolicy, sims, worldmodels):"
               " print(each.__file__)\nprint(sys.path)")  # fmt: skip
    assert str(ROOT) not in text and text.count("site-packages/") >= 3


def test_the_whole_job_without_the_checkout(run):
    assert "train" in run("robopolicy") and "0.2" in run("robopolicy", "--version")
    collected = run("robopolicy", "collect", *TINY)
    assert "12" in collected
    base, tuned = "runs/train/push_t/0/checkpoint", "runs/finetune/push_t/0/checkpoint"
    run("robopolicy", "train", *TINY)
    run("robopolicy", "worldmodel", *TINY)
    run("robopolicy", "finetune", *TINY)
    run("robopolicy", "evaluate", tuned, *TINY)
    run("robopolicy", "evaluate", base, *TINY, "world=worldmodel", "world.model=runs/worldmodel/push_t/0/checkpoint")
    assert "report.html" in run("robopolicy", "report", "runs/finetune/push_t/0")
    report = (run.work / "runs/finetune/push_t/0/report.html").read_text()
    assert "<svg" in report or "data:image" in report
    run("robopolicy", "check", tuned)
    run("robopolicy", "doctor", "runs/collect/push_t/0/dataset", "world=push_t", "run.name=no_policy")
    assert serve_and_drive(run, tuned)


def serve_and_drive(run, checkpoint: str) -> str:
    """Serve a checkpoint, drive one simulated episode with it, and return what the driver says."""
    words = [run.binaries / "robopolicy", "serve", checkpoint, "serve.port=0"]
    server = subprocess.Popen(
        words, cwd=run.work, env=run.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        port = next(match[1] for line in server.stdout if (match := re.search(r"ws://[^:]+:(\d+)", line)))
        return run("robopolicy", "drive", f"drive.port={port}", "drive.episodes=1", "drive.rate=-1")
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_every_recipe_composes_and_every_verb_explains_itself(run):
    from robopolicy.verbs.verb import VERBS

    for name in VERBS.ours:
        output = run("robopolicy", name, "--help")
        assert f"robopolicy {name}" in output and "KEY=VALUE" in output
    for path in (ROOT / "configs/recipe").glob("*.yaml"):
        run("robopolicy", "finetune", f"recipe={path.stem}", "--help")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["algorithms"], ["ppo"]),
        (["algorithms", "papers"], ["arXiv"]),
        (["check", "push_cube"], ["contract check passed"]),
        (["bench", "sims"], ["only in a checkout of robopolicy's repository"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_other_verbs(run, words, texts):
    status = 2 if words[0] == "bench" else 0
    output = run("robopolicy", *words, status=status)
    assert all(text in output for text in texts)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["check", "metaworld/push-v3"], "metaworld"),
        (["check", "robosuite/Lift"], "robosuite"),
        (["check", "ogbench/cube-single-v0"], "ogbench"),
        (["check", "gymnasium:FetchReach-v4"], "robotics"),
        (["check", "pusht"], "pusht"),
        (["check", "gymnasium:gym_aloha/AlohaInsertion-v0"], "aloha"),
        (["check", "gymnasium:dm_control/reacher-easy-v0"], "dmcontrol"),
        (["check", "gymnasium:gym_hil/PandaPickCube-v0"], "hil"),
        (["check", "gymnasium:lerobot_env_so101/SO101PickPlace-v0"], "so101"),
        (["convert", "demo.hdf5", "out"], "convert"),
        (["convert", "demo.zarr", "out"], "convert"),
        (["check", "demo.hdf5"], "convert"),
        (["evaluate", "checkpoint", "workers.pool=ray"], "ray"),
        (["evaluate", "checkpoint", "workers.pool=slurm"], "slurm"),
        (["train", *TINY, "run.name=tracked", "run.tracker=tensorboard"], "track"),
        (["train", *TINY, "run.name=tracked", "run.tracker=wandb"], "track"),
        (["train", *TINY, "run.name=tracked", "run.tracker=trackio"], "track"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(run, words, extra):
    (run.work / "demo.hdf5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    (run.work / "demo.zarr").mkdir(exist_ok=True)
    (run.work / "demo.zarr/.zgroup").write_text('{"zarr_format": 2}')
    assert f"pip install 'robopolicy[{extra}]'" in run("robopolicy", *words, status=2)
