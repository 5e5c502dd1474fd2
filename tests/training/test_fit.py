"""The regression loop: what it learns, what it refuses, and that a kill changes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, NonFiniteError
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import ema_decay_at, fit, learning_rate_at

CONFIG = FitConfig(steps=60, learning_rate=0.2, warmup=5, ema_decay=0.8, log_every=10, checkpoint_every=20)


class Line(nn.Module):
    """Fits y = w x + b under noisy inputs, so that the loss uses its generator."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        self.seen += 1
        noise = 0.01 * torch.randn(batch.shape, generator=generator)
        error = (self.weight * (batch + noise) + self.bias - (2 * batch + 1)).square()
        return {"error": error, "size": 1e-6 * self.weight.square().expand(len(batch))}


def _batches(generators: Generators, fail_at: int = -1, kind: str = "kill"):
    count = 0
    while True:
        count += 1
        batch = torch.randn(32, generator=generators["batches"])
        if count == fail_at:
            if kind == "kill":
                raise KeyboardInterrupt
            batch = batch * torch.nan
        yield batch


def _run(folder: Path | None, fail_at: int = -1, kind: str = "kill", config: FitConfig = CONFIG) -> Line:
    model, generators = Line(), Generators(3)
    fit(
        model,
        _batches(generators, fail_at, kind),
        config,
        generators,
        run=None if folder is None else RunFolder(folder),
    )
    return model


def test_it_learns_and_logs(tmp_path: Path):
    model = _run(tmp_path)
    assert float(model.weight.detach()) == pytest.approx(2.0, abs=0.1)
    assert float(model.bias.detach()) == pytest.approx(1.0, abs=0.1)
    records = RunFolder(tmp_path).metrics()
    assert [record["step"] for record in records] == [10, 20, 30, 40, 50, 60]
    assert records[-1]["error"] < records[0]["error"]
    assert not model.training


@pytest.mark.parametrize("killed_at", [5, 31, 59])
def test_a_killed_run_ends_bit_for_bit_where_an_unbroken_one_does(tmp_path: Path, killed_at: int):
    whole = _run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "broken", fail_at=killed_at)
    resumed = _run(tmp_path / "broken")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    for file in ("trainer.safetensors", "trainer.json"):
        assert (tmp_path / "whole/resume" / file).read_bytes() == (tmp_path / "broken/resume" / file).read_bytes()
    assert RunFolder(tmp_path / "whole").metrics()[-1] == RunFolder(tmp_path / "broken").metrics()[-1]
    assert len(RunFolder(tmp_path / "broken").metrics()) == 6


@pytest.mark.parametrize("killed_at", [12, 26, 38, 51])
def test_what_a_killed_run_logged_is_what_an_unbroken_one_logs(tmp_path: Path, killed_at: int):
    """Before the first checkpoint, and between a checkpoint and the log that covers it."""
    config = replace(CONFIG, checkpoint_every=24)
    _run(tmp_path / "whole", config=config)
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "broken", fail_at=killed_at, config=config)
    _run(tmp_path / "broken", config=config)
    files = ("metrics.jsonl", "resume/trainer.json", "resume/trainer.safetensors")
    for file in files:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "broken" / file).read_bytes(), file


def test_a_finished_run_does_nothing_more(tmp_path: Path):
    first, again = _run(tmp_path), _run(tmp_path, fail_at=1)
    assert torch.equal(first.weight, again.weight)


def test_the_result_is_the_moving_average(tmp_path: Path):
    averaged, plain = _run(None), _run(None, config=FitConfig(**{**CONFIG.__dict__, "ema_decay": 0.0}))
    assert not torch.equal(averaged.weight, plain.weight)
    weight, average, model = 0.0, 0.0, Line()
    values = []

    def recorded(generators: Generators):
        for batch in _batches(generators):
            values.append(float(model.weight.detach()))
            yield batch

    generators = Generators(3)
    fit(model, recorded(generators), FitConfig(**{**CONFIG.__dict__, "ema_decay": 0.0}), generators)
    for step, weight in enumerate([*values[1:], float(model.weight.detach())]):
        decay = ema_decay_at(step, CONFIG)
        average = decay * average + (1 - decay) * weight
    assert float(averaged.weight.detach()) == pytest.approx(average, abs=1e-5)


def test_schedules_by_hand():
    assert [ema_decay_at(step, FitConfig(ema_power=1.0, ema_decay=0.7)) for step in (0, 1, 3, 99)] == [0, 0.5, 0.7, 0.7]
    config = FitConfig(steps=110, warmup=10, learning_rate=1.0, final_rate=0.1)
    assert learning_rate_at(0, config) == pytest.approx(0.1)
    assert learning_rate_at(9, config) == pytest.approx(1.0)
    assert learning_rate_at(60, config) == pytest.approx(0.55)
    assert learning_rate_at(110, config) == pytest.approx(0.1)


def test_a_non_finite_loss_names_the_step_and_leaves_the_weights_alone(tmp_path: Path):
    with pytest.raises(NonFiniteError, match="loss is not finite at training step 6"):
        _run(tmp_path, fail_at=7, kind="nan")


def test_resuming_with_another_configuration_is_refused(tmp_path: Path):
    _run(tmp_path)
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.2, now 0\.1"):
        _run(tmp_path, config=FitConfig(**{**CONFIG.__dict__, "learning_rate": 0.1}))


def test_bad_configurations_are_refused():
    with pytest.raises(ConfigError, match="ema_decay"):
        FitConfig(ema_decay=1.0)
    with pytest.raises(ConfigError, match="at least 1"):
        FitConfig(steps=0)
    frozen = Line().requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        fit(frozen, iter([]), CONFIG, Generators(0))


def test_evaluation_sees_the_averaged_weights(tmp_path: Path):
    model, generators, averaged_weights = Line(), Generators(3), []

    def evaluate() -> dict[str, float]:
        assert not model.training
        averaged_weights.append(float(model.weight.detach()))
        return {"validation": averaged_weights[-1]}

    fit(model, _batches(generators), CONFIG, generators, run=RunFolder(tmp_path), evaluate=evaluate)
    assert averaged_weights[-1] == float(model.weight.detach())
    assert RunFolder(tmp_path).metrics()[-1]["validation"] == averaged_weights[-1]
