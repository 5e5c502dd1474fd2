"""Runs in which a policy learns from itself with a better view, in a world whose camera goes black, or from a teacher
as far as they agree.
"""

from dataclasses import replace

import pytest
import torch
from seeing_toys import CAMERA, SeeingWorld, denoising_policy, token_policy

from robopolicy.core.faulty import with_faults_of
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance

CONFIG = FinetuneConfig(
    algorithm="grpo", iterations=2, groups=3, group_size=4, epochs=1, minibatch=64, evaluate_every=0,
    learning_rate=1e-3,
)  # fmt: skip
DISTILLED = replace(CONFIG, models=("own_teacher",), auxiliaries=("distill_own",), coefficient="none")
JUDGED = replace(
    CONFIG, models=("learning_teacher",), advantage="process_gap", options={"learning_teacher": {"privileged": True}}
)


@pytest.mark.long
@pytest.mark.checks("Vision-OPD", "VPD")
@pytest.mark.parametrize("config", [DISTILLED, JUDGED], ids=["distilled", "judged"])
@pytest.mark.parametrize("make", [denoising_policy, token_policy])
def test_a_policy_learns_from_itself_with_a_better_view(make, config: FinetuneConfig):
    """A policy that sees, in episodes that all go dark; with its own view it would not differ from its average."""
    plain = SeeingWorld(8, horizon=20)
    world = with_faults_of({"faults": ["blackout"], "fault_rate": 1.0, "undisturbed": True}, plain)
    assert {CAMERA, CAMERA + "_undisturbed"} <= set(world.spec.observation)
    policy = make(plain, cameras=True)
    policy.prepare_finetuning()
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    finetune(policy, None, world, config)
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.checks("allocator/until_parting", "Prune-OPD")
def test_episodes_end_where_teacher_and_student_part():
    """Two policies that were never trained part at once: four chunks, and two after an iteration without agreement."""
    world = SeeingWorld(8, horizon=20)
    policy, teacher = token_policy(world), token_policy(world, seed=1)
    for each in (policy, teacher):
        each.prepare_finetuning()
    options = {"until_parting": {"patience": 1, "agree": 1.1, "drop": 1.0}}
    config = replace(
        CONFIG, allocator="until_parting", advantage="teacher_gap", credit=("prune",), options=options,
        weight="step_mean",
    )  # fmt: skip
    result = finetune(policy, None, world, config, guidance=Guidance(teacher))
    assert result.env_steps == 12 * (4 + 2)
