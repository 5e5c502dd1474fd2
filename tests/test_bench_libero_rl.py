"""`bench libero_rl`: which stages it runs with which settings, and that nothing is run twice. Nothing is simulated."""

import pytest

from robopolicy.benchmarks import libero_rl
from robopolicy.configuration import compose
from robopolicy.core.storage import write_json
from robopolicy.runs import RESULT

RATE = {"successes": 3, "episodes": 4}
MODES = {"deterministic": RATE, "stochastic": RATE}


@pytest.fixture
def runs(monkeypatch):
    """Return a list that gets verb and configuration of every run; runs only write their result."""
    found = []

    def pretend(verb):
        def run(config):
            found.append((verb, config))
            path = config.run.root / verb / config.run.name / str(config.run.seed) / RESULT
            path.parent.mkdir(parents=True)
            write_json(path, {"base": MODES, "policy": MODES, "env_steps": 1000, "seconds": 60.0})

        return run

    for verb in ("collect", "train", "online", "evaluate"):
        monkeypatch.setattr(getattr(libero_rl, verb), "run", pretend(verb))
    monkeypatch.setattr(libero_rl, "is_complete", lambda folder: (folder / RESULT).exists())
    return found


def test_stages_follow_each_other_and_are_run_once(runs, tmp_path):
    config = compose(["bench.seeds=[10]", "bench.only=[demonstrations_10]", "bench.overrides=['online.steps=64000']"])
    figures = libero_rl.benchmark(config, tmp_path)
    verbs = [verb for verb, _ in runs]
    assert verbs == ["collect", "train", "online", "evaluate", "evaluate"]
    composed = dict(runs)
    assert composed["collect"].collect.episodes == 10
    assert composed["train"].train.data == tmp_path / "collect/demonstrations_10/10/dataset"
    online = composed["online"]
    assert online.online.policy == tmp_path / "train/demonstrations_10/10/checkpoint" and online.online.steps == 64_000
    learning = {"sleep": True, "horizon": 200, "reward": "progress"}
    assert learning.items() <= online.world.options.items() and online.online.method.kind == "dsrl"
    for (_, played), suite in zip(runs[3:], libero_rl.SUITES, strict=True):  # judged with exact physics
        assert played.world.name == f"libero/{suite}" and not learning.keys() & played.world.options.keys()
        assert played.evaluate.base == online.online.policy
    assert libero_rl.benchmark(config, tmp_path) == figures and len(runs) == 5

    (table,) = libero_rl.tables(figures)
    assert len(table.lines) == 4 and all(len(line) == len(table.header) for line in table.lines)
    assert table.lines[0][:4] == ["10", "libero_object", "deterministic", "75.0 % (one seed)"]
