"""Several denoising steps of one decision, taken under one copy of what was read, are those taken one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lerobot_training import ROWS, language_folders, observed, trained

from robopolicy.policies.lerobot.training import BatchedSteps
from robopolicy.policies.network import IndependentSteps, steps_of

pytestmark = pytest.mark.long

STEPS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Iterator[dict[str, Path]]:
    with language_folders(tmp_path_factory.mktemp("language")) as made:
        yield made


def prepared(folder: Path) -> tuple[Any, torch.Tensor, Any]:
    """Return a policy's network, latents of `STEPS` steps and the condition of texts of different lengths."""
    policy = trained(folder)
    policy.prepare_finetuning()
    condition = policy.encode(observed(policy))
    counts = condition["condition.mask"].sum(1)
    assert len(set(counts.tolist())) > 1, "what is padded has to be left out"
    x = torch.randn((ROWS, STEPS, 6, 5), generator=torch.Generator().manual_seed(3))
    return policy.network, x, condition


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
@pytest.mark.parametrize("chosen", [None, [[0, 3], [1, 2], [3, 0]]])
def test_predictions_and_gradients_are_those_of_single_steps(folders, kind, chosen):
    network, x, condition = prepared(folders[kind])
    times = torch.tensor([0.9, 0.6] if chosen is None else [0.9, 0.6, 0.3, 0.1])
    order = None if chosen is None else torch.tensor(chosen)
    steps = steps_of(network, times, condition)
    assert isinstance(steps, BatchedSteps) and network.family.is_faster(x, condition)
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))

    def graded(found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((found * direction).sum(), weights, allow_unused=True, materialize_grads=True)

    together = steps.several(x, order)
    when = (times if order is None else times[order]).expand(ROWS, STEPS)
    apart = torch.stack([network.denoise(x[:, step], when[:, step], condition) for step in range(STEPS)], 1)
    assert apart.std() > 1e-2
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(graded(together), graded(apart), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_a_step_sees_nothing_of_the_others(folders, kind):
    network, x, condition = prepared(folders[kind])
    steps = steps_of(network, torch.tensor([0.9, 0.6]), condition)
    assert network.family.is_faster(x, condition)
    other = x.clone()
    other[:, 1] += 1
    with torch.no_grad():
        before, after = steps.several(x, None), steps.several(other, None)
    assert torch.equal(before[:, 0], after[:, 0]) and not torch.equal(before[:, 1], after[:, 1])


def test_steps_longer_than_the_prefix_take_copies_of_it(folders, monkeypatch):
    network, x, condition = prepared(folders["smolvla"])
    steps, twice = steps_of(network, torch.tensor([0.9, 0.6, 0.3, 0.1]), condition), torch.cat([x, x], 1)
    assert not network.family.is_faster(twice, condition)
    monkeypatch.delattr(type(network.family), "denoise_several")
    assert steps.several(twice, None).shape == twice.shape


def test_pi05s_times_scale_a_whole_suffix_so_its_steps_stay_apart(folders):
    network, _, condition = prepared(folders["pi05"])
    assert isinstance(steps_of(network, torch.tensor([0.9, 0.6, 0.3]), condition), IndependentSteps)
