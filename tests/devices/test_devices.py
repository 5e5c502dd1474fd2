"""Everything that computes runs on a GPU: no tensor is made on, drawn on or left on the wrong device.

There is no GPU here. `pretended` stands for one: a tensor of it holds its numbers on the CPU and says that it lies on
"cuda:0", and what CUDA would refuse is refused. Each exercise runs on the CPU and there, and comes to the same numbers.
What is not covered is said in `pretended`. The exercises are made of the registries, so that the next kind of policy,
world model, agent, improver, engine or sampler is tried without a change here.
"""

import itertools
from typing import Any

import device_engines
import device_learning
import device_lerobots
import device_models
import device_policies
import numpy as np
import pytest
import torch
from pretended import PretendedGenerator, WrongDevice, pretended_cuda
from torch import Tensor, nn

pytestmark = pytest.mark.long

TOLERANCE = 2e-3
"""Attention and the gradients of convolutions are summed in another order, and an optimiser's first steps say so."""
EVERY = dict(
    itertools.chain(
        device_policies.exercises(),
        device_models.kinds(),
        device_learning.others(),
        device_learning.agents(),
        device_learning.improvers(),
        device_learning.tunings(),
        device_engines.engines(),
        device_lerobots.kinds(),
    )
)
"""Name -> exercise: device -> what came of it."""
QUICK = {
    *(f"diffusion, {name}" for name in ("mlp", "transformer", "unet", "images", "words", "advantage")),
    *(f"flow, {name}" for name in ("mlp", "noise learned", "few noisy steps", "student")),
    "lerobot, diffusion",
    "token, bins",
    "token, masked",
    "joint, as it is",
    "ensemble, as it is",
    "rssm, as it is",
    "trajectories",
    "guided",
    "distilled",
    "steered",
    "judged",
    "agent, iql",
    "improver, chain_ppo",
    "improver, dsrl",
    "finetune, dppo",
    "engine, lean, diffusion, mlp",
    "chunking, rtc",
}
"""One of every sort; the others are slow tests."""


def on_cpu(value: Any) -> Any:
    """Return nested values with tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_cpu(item) for item in value]
    return value


def same(first: Any, second: Any, where: str = "") -> None:
    """Compare nested values, up to rounding."""
    if isinstance(first, Tensor):
        assert first.shape == second.shape and first.dtype == second.dtype, where
        near = torch.allclose(first.double(), second.double(), TOLERANCE, TOLERANCE, equal_nan=True)
        assert near, f"{where}: differs by {(first.double() - second.double()).abs().max()}"
    elif isinstance(first, (dict, list)):
        assert len(first) == len(second), where
        for key in first if isinstance(first, dict) else range(len(first)):
            same(first[key], second[key], f"{where}/{key}")
    elif isinstance(first, float):
        assert first == pytest.approx(second, rel=1e-2, abs=1e-3, nan_ok=True), where
    else:
        assert first == second, where


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
)
def test_it_runs_on_a_gpu_as_on_the_cpu(name: str):
    expected = on_cpu(EVERY[name]("cpu"))
    with pretended_cuda():
        outputs = on_cpu(EVERY[name]("cuda"))
    same(expected, outputs)


def test_the_quick_ones_are_there():
    assert set(EVERY) >= QUICK


class Careless(nn.Module):
    """A network with one mistake."""

    def __init__(self, mistake: str):
        super().__init__()
        self.layer, self.mistake = nn.Linear(3, 3), mistake
        self.shift = torch.zeros(3)  # no buffer, so it stays behind

    def forward(self, x: Tensor, generator: torch.Generator) -> Any:
        outputs = self.layer(x)
        mistakes = {
            "made on the cpu": lambda: outputs + torch.zeros(3),
            "left behind": lambda: outputs * self.shift,
            "joined": lambda: torch.cat([outputs, torch.zeros(2, 3)]),
            "stacked numbers": lambda: torch.stack([outputs.sum(), torch.zeros(())]),
            "drawn there, made here": lambda: torch.randn(3, generator=generator),
            "drawn here, made there": lambda: torch.randn(3, generator=PretendedGenerator(), device=x.device),
            "filled by the wrong generator": lambda: torch.empty(3, device=x.device).normal_(
                generator=PretendedGenerator()
            ),
            "index into the cpu": lambda: torch.arange(3)[outputs[:, 0].argsort()],
            "gathered": lambda: outputs.gather(1, torch.zeros(2, 1, dtype=torch.int64)),
            "written": lambda: outputs.clone().scatter_(0, torch.zeros(1, 3, dtype=torch.int64), 1.0),
            "masked": lambda: torch.where(torch.ones(2, 1, dtype=torch.bool), outputs, 0.0),
            "clamped": lambda: outputs.clamp(min=torch.zeros(())),
            "numpy": lambda: outputs.detach().numpy(),
            "asarray": lambda: np.asarray(outputs.detach()),
            "compared": lambda: torch.equal(outputs, torch.zeros(2, 3)),
            "loss": lambda: nn.functional.mse_loss(outputs, torch.zeros(2, 3)),
            "in place": lambda: torch.zeros(2, 3).add_(outputs.detach()),
        }
        return mistakes[self.mistake]() if self.mistake else outputs


MISTAKES = [
    "made on the cpu",
    "left behind",
    "joined",
    "stacked numbers",
    "drawn there, made here",
    "drawn here, made there",
    "filled by the wrong generator",
    "index into the cpu",
    "gathered",
    "written",
    "masked",
    "clamped",
    "numpy",
    "asarray",
    "compared",
    "loss",
    "in place",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_tensor_on_the_wrong_device_is_caught(mistake: str):
    with pretended_cuda():
        network, draws = Careless(mistake).to("cuda"), torch.Generator("cuda")
        with pytest.raises(WrongDevice):
            network(torch.ones(2, 3, device="cuda"), draws)


def test_what_cuda_allows_is_allowed_and_what_waits_is_counted():
    with pretended_cuda() as log:
        x = torch.arange(6.0, device="cuda").reshape(2, 3)
        assert x.device == torch.device("cuda", 0) and x.is_cuda and not x.is_meta
        assert torch.equal((x + torch.tensor(1.0)).cpu(), torch.arange(1.0, 7.0).reshape(2, 3))
        assert torch.equal(x[:, [2, 0]].cpu(), torch.tensor([[2.0, 0.0], [5.0, 3.0]]))
        assert torch.equal(x[torch.tensor([1])].cpu(), torch.tensor([[3.0, 4.0, 5.0]]))
        x[0] = torch.tensor(9.0)
        assert x.tolist() == [[9.0, 9.0, 9.0], [3.0, 4.0, 5.0]] and float(x.max()) == 9.0
        where = Careless("").to("cuda")
        where(x, torch.Generator("cuda")).sum().backward()
        assert where.layer.weight.grad is not None and where.layer.weight.grad.is_cuda
    kinds = {what for what, _ in log.counts}
    assert {"read", "to the CPU", "to the GPU"} <= kinds
    assert not torch.zeros(1).is_cuda
