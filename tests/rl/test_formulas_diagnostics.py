"""What moves, and whether a teacher pulls where returns would: hand tables."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts
from torch import nn

from robopolicy.core.checkpoints import write_checkpoint
from robopolicy.core.errors import ConfigError
from robopolicy.core.segments import Segments
from robopolicy.rl.context import Context, HoldsWeights
from robopolicy.rl.experimental import diagnostics


def context() -> Context:
    return Context(torch.Generator(), figures={})


@pytest.mark.checks("models/distillation_angle", "OPD-unmasked")
@pytest.mark.parametrize(("teacher", "cosine"), [((0.8, 0.1, 0.1), 0.9882), ((0.2, 0.6, 0.2), -0.9641)])
def test_the_angle_between_distillation_and_the_ideal_gradient(teacher, cosine: float):
    """Candidates with probabilities .5, .3, .2, of which the first succeeds."""
    weight, told = (torch.tensor(each, dtype=torch.float64) for each in ((0.5, 0.3, 0.2), teacher))
    nodes = Segments.of(torch.zeros(3))
    found, known = diagnostics.angle(weight, torch.tensor([1.0, 0, 0]).double(), (told / weight).log(), nodes)
    assert float(found) == pytest.approx(cosine, abs=1e-4) and bool(known)
    assert not bool(diagnostics.angle(weight, torch.ones(3).double(), (told / weight).log(), nodes)[1])


@pytest.mark.checks("models/distillation_angle")
def test_forks_of_branching_episodes_are_compared():
    """A fork at the second chunk with returns 1 and 0, which the teacher prefers the other way round."""
    rollouts = make_rollouts([2, 2], [0, 0], [1.0, 0.0], steps=1, parent=[-1, 0], branch_decision=[-1, 1])
    rollouts.mask[1, 0] = False
    gap = torch.tensor([[[0.3], [-0.2]], [[9.0], [0.4]]], dtype=torch.float64)
    rollouts = rollouts.with_extras(teacher_logp=rollouts.logp_behaviour + gap)
    model, here = diagnostics.DistillationAngle(None), context()  # type: ignore[arg-type]
    model.annotate(rollouts, here)
    expected = {"distillation_angle": -1.0, "distillation_angle_won": -1.0, "distillation_angle_negative": 1.0}
    assert here.figures == pytest.approx(expected)
    alike = replace(rollouts, rewards={"reward": torch.zeros_like(rollouts.rewards["reward"])})
    none = context()
    model.annotate(alike, none)
    assert not none.figures, "where nothing is better there is nothing to say"
    with pytest.raises(ConfigError, match="branch_sampling_step=null"):
        model.annotate(replace(rollouts, branch_sampling_step=torch.tensor([0, 1])), context())


class Weights(nn.Module):
    def __init__(self, values: list[float]):
        super().__init__()
        self.layer = nn.Parameter(torch.tensor(values))

    def trainable_parameters(self):
        return [self.layer]


@pytest.mark.checks("models/subnetwork", "RL-subnetworks")
def test_the_share_that_moved_is_logged_and_the_rest_stays_bit_equal(tmp_path: Path):
    first = [1.0, 1.0, 1.0, 1.0]
    moved = [1.0, 1.0 + 1e-6, 1.0 + 2e-5, 1.0 - 1e-3]
    for name, values in (("base", first), ("checkpoint", moved)):
        write_checkpoint(tmp_path / name, {"kind": "weights"}, Weights(values))
    policy, base = Weights(first), Weights(first)
    tools = SimpleNamespace(policy=policy, base=base)
    model = diagnostics.Subnetwork(tools, run=str(tmp_path))  # type: ignore[arg-type]
    optimiser = torch.optim.AdamW(policy.parameters(), lr=0.1, weight_decay=0.5)
    policy.layer.square().sum().backward()
    optimiser.step()
    assert isinstance(model, HoldsWeights)
    model.hold_weights()
    here = context()
    model.annotate(make_rollouts([1], [0]), here)
    assert policy.layer[:2].tolist() == first[:2] and bool((policy.layer[2:] < 0.95).all())
    assert here.figures == {"moved": 0.5, "moved_bf16": 0.5}
    with torch.no_grad():
        policy.layer.copy_(torch.tensor(moved))
    free = context()
    diagnostics.Subnetwork(tools).annotate(make_rollouts([1], [0]), free)  # type: ignore[arg-type]
    assert free.figures == {"moved": 0.5, "moved_bf16": 0.0}, "1e-3 is less than half a step of bfloat16 at 1"
    assert json.loads(json.dumps(model.tree())) == {}
    other = SimpleNamespace(policy=nn.Linear(1, 1), base=nn.Linear(1, 1))
    other.policy.trainable_parameters = other.policy.parameters
    with pytest.raises(ConfigError, match="no weights of this policy"):
        diagnostics.Subnetwork(other, run=str(tmp_path))  # type: ignore[arg-type]
