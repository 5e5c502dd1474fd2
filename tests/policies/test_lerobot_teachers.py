"""LeRobot's policies as teachers: where they score a student's steps, they are made ready for it as the student is."""

import shutil
from pathlib import Path

import pytest
import torch
from lerobot_models import FRONT, smolvla_config, tiny_smolvlm
from safetensors.torch import load_file, save_file
from test_lerobot_policies import features, save
from test_lerobot_training import lerobots_own, observed

from robopolicy.building.guidance import load_guidance
from robopolicy.building.policies import load_trainable
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.core.machine import in_bytes
from robopolicy.core.policy import ScoredPolicy
from robopolicy.core.structured import narrowed
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.lerobot.acting import LeRobotPolicy, load_lerobot_policy
from robopolicy.policies.loading import weights_bytes
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.verbs import job
from robopolicy.verbs.finetune import print_memory
from sims.registry import make_world

pytestmark = pytest.mark.long

SMALL = ["finetune.iterations=1", "finetune.groups=1", "finetune.group_size=2", "finetune.minibatch=4"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A student, and a teacher of the same shape with other weights."""
    root = tmp_path_factory.mktemp("teachers")
    inputs, outputs = features(state=6, environment=None, cameras=(FRONT,))
    config = smolvla_config(tiny_smolvlm(root / "vlm"), inputs, outputs, num_steps=3, max_action_dim=4)
    student = save(config, root / "student")
    teacher = root / "teacher"
    shutil.copytree(student, teacher)
    draws, weights = torch.Generator().manual_seed(1), load_file(student / "model.safetensors")
    for name, value in weights.items():
        if "expert" in name and value.is_floating_point():
            value += 0.1 * torch.randn(value.shape, generator=draws)
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})
    return {"student": student, "teacher": teacher}


def test_a_smolvla_teaches_a_smolvla_from_the_command_line(folders):
    settings = [
        f"finetune.teacher={folders['teacher']}",
        "finetune.algorithm=distillation",
        "lerobot.flow_noise_level=0.2",
    ]
    config = compose([*SMALL, *settings, "run.device=cpu"])
    policy = load_trainable(folders["student"], config.lerobot)
    policy.prepare_finetuning()
    world = make_world("push_cube", 2, cameras=("front",), image_size=32)
    guidance = load_guidance(config, world, policy=policy)
    teacher = guidance.teacher
    assert isinstance(teacher, ScoredPolicy)

    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    chain = decision.latents["chain"]
    theirs, batch, _ = lerobots_own(folders["teacher"], observation)
    scores = teacher.log_prob(observation, {"chain": chain})
    for step in range(3):  # one step of LeRobot's own Euler: x - v / 3, with the student's noise around it
        time = 1 - step / 3
        mean = chain[:, step] - velocity(theirs, batch, chain[:, step], time) / 3
        density = torch.distributions.Normal(mean, 0.2).log_prob(chain[:, step + 1])[:, :4, :2]
        torch.testing.assert_close(scores.logp[:, step], density.clamp(-5, 2.3026).mean((1, 2)), atol=1e-4, rtol=1e-4)

    before = [weight.clone() for weight in policy.trainable_parameters()]
    assert finetune(policy, None, world, narrowed(FinetuneConfig, config.finetune), guidance=guidance).iterations == 1
    world.close()
    assert any(not torch.equal(one, other) for one, other in zip(before, policy.trainable_parameters(), strict=True))


def velocity(theirs, batch, x, time):
    """What LeRobot's own network predicts of latents x at a time, read from the observation anew."""
    from lerobot.policies.common.vla_utils import make_att_2d_masks

    images, masks = theirs.prepare_images(batch)
    tokens = batch["observation.language.tokens"], batch["observation.language.attention_mask"].bool()
    embedded, mask, order = theirs.model.embed_prefix(images, masks, *tokens, state=theirs.prepare_state(batch))
    _, cache = theirs.model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(mask, order),
        position_ids=mask.cumsum(1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    with torch.no_grad():
        return theirs.model.denoise_step(mask, cache, x, torch.full((len(x),), time))


def test_a_teacher_that_is_only_imitated_stays_lerobots(folders):
    asked = ["finetune.advantage=grpo", "finetune.coefficient=none", "finetune.auxiliaries=[dagger]"]
    config = compose([f"finetune.teacher={folders['teacher']}", *asked])
    world = make_world("push_cube", 2, cameras=("front",), image_size=32)
    teacher = load_guidance(config, world).teacher
    world.close()
    assert isinstance(teacher, LeRobotPolicy)


def test_what_only_acts_cannot_score_and_the_way_out_is_named(folders):
    policy = load_trainable(folders["student"], compose([]).lerobot)
    policy.prepare_finetuning()
    teacher = load_guidance(compose([f"finetune.teacher={folders['teacher']}"]), make_world("push_cube", 1)).teacher
    with pytest.raises(
        ConfigError,
        match=r"LeRobotPolicy has no log-probabilities in this form; the policy returned by its to_trainable",
    ):
        finetune(
            policy,
            None,
            make_world("push_cube", 2),
            FinetuneConfig(algorithm="distillation"),
            guidance=Guidance(teacher),
        )


def test_a_pretrained_teacher_is_prepared_for_the_steps_of_the_student(tmp_path: Path):
    spec = make_world("reach_planar", 1).spec
    config = DenoisingPolicyConfig(width=8, depth=1, sampling_steps=4, denoising_steps=20)
    made = [
        DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions, seed=seed)
        for seed in (0, 1)
    ]
    made[1].save(tmp_path / "teacher")
    made[0].prepare_finetuning(3)
    asked = [*SMALL, f"finetune.teacher={tmp_path / 'teacher'}", "finetune.algorithm=distillation"]
    settings, world = compose([*asked, "run.device=cpu"]), make_world("reach_planar", 2)
    guidance = load_guidance(settings, world, policy=made[0])
    assert guidance.teacher is not None and guidance.teacher.spec.scored_steps == 3
    assert (
        finetune(made[0], None, world, narrowed(FinetuneConfig, settings.finetune), guidance=guidance).iterations == 1
    )


def test_memory_is_planned_with_the_teacher(folders, tmp_path, capsys):
    """It is loaded last, when little is left."""
    weights = (folders["teacher"] / "model.safetensors").stat().st_size
    assert weights_bytes(folders["teacher"]) == pytest.approx(weights, rel=0.1)
    outputs = []
    for told in ([], [f"finetune.teacher={folders['teacher']}"]):
        command = [*SMALL, "finetune.algorithm=distillation", f"finetune.policy={folders['student']}", *told]
        command += ["world=push_cube", "world.cameras=[front]", "world.image_size=32", "finetune.dry_run=true"]
        assert main(["finetune", *command, f"run.root={tmp_path}"]) == 0
        outputs.append(capsys.readouterr().out)
    taught = f"those of its teacher {in_bytes(weights_bytes(folders['teacher']))}"
    assert taught in " ".join(outputs[1].split()) and "teacher" not in outputs[0]


def test_a_large_teacher_of_a_small_policy_is_said_and_refused_where_it_does_not_fit(folders, monkeypatch, capsys):
    config = compose([*SMALL, f"finetune.teacher={folders['teacher']}"])
    world = make_world("push_cube", 2, cameras=("front",), image_size=32)
    spec = world.spec
    policy = DenoisingPolicy(DenoisingPolicyConfig(width=8, depth=1), spec.observation, spec.action, fps=spec.fps)
    policy.prepare_finetuning()
    print_memory(config, policy, policy, world)
    assert "those of its teacher" in capsys.readouterr().out
    monkeypatch.setattr("robopolicy.verbs.finetune.free_memory", lambda device: weights_bytes(folders["teacher"]))
    with pytest.raises(ConfigError, match="more memory"):
        print_memory(config, policy, policy, world)
    world.close()


@pytest.mark.parametrize(
    "given",
    [pytest.param((), marks=pytest.mark.slow), ("teach.cache_encoder_outputs=true",), ("teach.micro_batch=3",)],
)
def test_a_smolvla_is_taught_by_the_script_and_stays_lerobots(folders, tmp_path, capsys, given):
    student = ["policy.kind=lerobot", "policy.trainable=expert", f"policy.path={folders['student']}"]
    short = [
        "teach.rounds=2",
        "teach.episodes=3",
        "teach.fit.steps=2",
        "teach.last_round_steps=2",
        "teach.batch_size=8",
    ]
    scene = ["world=push_cube", "world.cameras=[front]", "world.image_size=32", "teach.evaluate_episodes=3"]
    command = ["teach", "expert", *student, *short, *scene, f"run.root={tmp_path}", "run.threads=1", *given]
    assert main(command) == 0
    held = 3 if "teach.micro_batch=3" in given else 8
    told = " ".join(capsys.readouterr().out.split())
    assert f"activations of {held} chunks" in told
    assert ("Encoder outputs of about" in told) == ("teach.cache_encoder_outputs=true" in given)
    made = load_lerobot_policy(tmp_path / "teach/push_cube/0/checkpoint")
    before, after = load_lerobot_policy(folders["student"]).policy.state_dict(), made.policy.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("expert" in name or name.startswith("model.action") for name in changed), changed


def test_a_student_that_does_not_fit_is_refused_before_the_teacher_plays_for_it(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(job, "free_memory", lambda device: 3_000_000)
    student = ["policy.kind=lerobot", "policy.trainable=expert", f"policy.path={folders['student']}"]
    scene = ["world=push_cube", "world.cameras=[front]", "world.image_size=32", "teach.batch_size=512"]
    assert main(["teach", "expert", *student, *scene, f"run.root={tmp_path}", "run.threads=1"]) == 2
    assert "micro_batch=" in capsys.readouterr().err
    assert not (tmp_path / "teach/push_cube/0/rounds").exists()
