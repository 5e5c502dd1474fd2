"""LeRobot's policies distilled to few steps: what is saved says so, and LeRobot itself decides as the student does."""

import json
from pathlib import Path
from typing import Any

import pytest
import test_lerobot_xvla as xvla
import torch
from lerobot_models import FRONT
from test_lerobot_policies import diffusion_config, dit_config, save, tiny_clip
from test_lerobot_policies import lerobots_chunk as lerobots_steps
from test_lerobot_policies import observed as observed_history
from test_lerobot_training import ROWS, language_folders, lerobots_chunk, noise_free, observed, trained

from robopolicy.building.policies import load_trainable
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import TASK
from robopolicy.nn.precision import is_lowered
from robopolicy.policies.lerobot.configuration import LeRobotTuning
from robopolicy.policies.loading import load_policy
from robopolicy.training.configuration import DistillConfig, FitConfig
from robopolicy.training.distill import Distillation, clean_actions, distill, few_step_student

pytestmark = pytest.mark.long

SETTINGS = {
    "smolvla": "num_steps",
    "pi0": "num_inference_steps",
    "pi05": "num_inference_steps",
    "xvla": "num_denoising_steps",
    "multi_task_dit": "num_integration_steps",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("few")
    with language_folders(root) as made:
        yield {
            **made,
            "xvla": xvla.made(root / "xvla", root / "words"),
            "multi_task_dit": save(dit_config(tiny_clip(root / "clip")), root / "dit"),
            "diffusion": save(diffusion_config(cameras=(FRONT,)), root / "diffusion"),
        }


def lerobots(kind: str, folder: Path, policy: Any, observation: dict) -> torch.Tensor:
    """What LeRobot's own class decides, loaded from `folder`, from the noise of `noise_free`."""
    noise = torch.randn((ROWS, *policy.noise_shape), generator=torch.Generator().manual_seed(7))
    if kind == "xvla":
        return xvla.lerobots_chunk(folder, policy, observation)[:, : policy.spec.chunk]
    if kind != "multi_task_dit":
        return lerobots_chunk(folder, observation, noise)[:, : policy.spec.chunk]
    torch.manual_seed(11)
    return lerobots_steps(folder, observation, policy.spec.chunk, None, 11)


def decided(kind: str, policy: Any, observation: dict) -> torch.Tensor:
    if kind != "multi_task_dit":
        return noise_free(policy, observation)
    torch.manual_seed(11)
    return policy.to_actions(policy.trajectory(observation, torch.randn((ROWS, *policy.noise_shape)))[:, -1]).detach()


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("steps", [1, 2])
def test_lerobot_decides_as_the_student_that_was_saved(folders, tmp_path, kind, steps):
    teacher = trained(folders[kind])
    observation = (observed_history if kind == "multi_task_dit" else observed)(teacher)
    before = decided(kind, teacher, observation)
    student = few_step_student(teacher, steps)
    learning = [weight for weight in student.network.parameters() if weight.requires_grad]
    assert learning and len(learning) == len(teacher.trainable_parameters())
    with torch.no_grad():  # as if it had learned
        for weight in learning:
            weight.mul_(1.05)
    wanted = decided(kind, student, observation)
    assert torch.equal(decided(kind, teacher, observation), before)  # which has weights of its own
    frozen = {id(weight) for weight in teacher.network.parameters() if not weight.requires_grad}
    assert frozen == {id(weight) for weight in student.network.parameters() if not weight.requires_grad}

    student.save(tmp_path / "student")
    assert json.loads((tmp_path / "student" / "config.json").read_text())[SETTINGS[kind]] == steps
    torch.testing.assert_close(lerobots(kind, tmp_path / "student", teacher, observation), wanted, atol=1e-5, rtol=0)
    again = trained(tmp_path / "student")
    assert again.schedule.steps == again.spec.scored_steps == steps
    assert torch.equal(decided(kind, again, observation), wanted)
    assert (wanted - before).abs().max() > 1e-4


def test_what_pads_an_action_is_not_learned(folders):
    teacher = trained(folders["smolvla"])
    lesson = Distillation(teacher, DistillConfig(teacher_chain_fraction=0.0))
    observation = observed(teacher)
    distance = lesson.loss({"observation": observation}, torch.Generator().manual_seed(3))["distance"]
    noise = torch.randn(ROWS, 6, 5, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        end = teacher.trajectory(observation, noise)[:, -1]
        prediction = lesson.student.network.denoise(noise, torch.ones(ROWS), lesson.student.encode(observation))
    clean = clean_actions(lesson.student, noise, prediction, torch.ones(ROWS))
    torch.testing.assert_close(distance, (clean - end)[..., :2].square().mean((1, 2)))


@pytest.mark.parametrize("kind", ["smolvla", "xvla"])
def test_a_student_of_one_step_comes_nearer_to_lerobots_policy(folders, kind, tmp_path):
    policy = load_policy(folders[kind])
    teacher = trained(folders[kind])
    observation = observed(teacher)
    episodes = recorded(teacher)
    config = DistillConfig(batch_size=8, fit=FitConfig(steps=30, warmup=2, learning_rate=1e-3))
    student, report = distill(policy, episodes, config)
    assert report.steps == 30
    student.save(tmp_path / "student")
    torch.manual_seed(0)
    noise = torch.randn(ROWS, *teacher.noise_shape)

    def errors(each: Any) -> float:
        ends = [one.trajectory(observation, noise)[:, -1, :, :2].detach() for one in (each, teacher)]
        return float((ends[0] - ends[1]).square().mean())

    assert errors(trained(tmp_path / "student")) < 0.5 * errors(few_step_student(teacher, 1))


def recorded(teacher: Any) -> Episodes:
    """Episodes of two steps that show what `observed` does."""
    observation, spec = observed(teacher), teacher.spec
    shown = {key: value[:, 0].repeat_interleave(3, 0) for key, value in observation.items() if key != TASK}
    lengths = torch.full((ROWS,), 2)
    return Episodes(
        dict(spec.observation), spec.action, 10.0, shown, torch.zeros(2 * ROWS, 2), lengths, tuple(observation[TASK])
    )


@pytest.mark.skipif(not bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="no bfloat16 on this CPU")
def test_its_pieces_and_precision_are_those_that_were_asked_for(folders, monkeypatch):
    """What is held at once, and in which precision the losses are computed."""
    computed, loss = [], Distillation.loss

    def watched(lesson: Distillation, batch: Any, generator: torch.Generator) -> Any:
        computed.append((len(batch["actions"]), is_lowered()))
        return loss(lesson, batch, generator)

    monkeypatch.setattr(Distillation, "loss", watched)
    config = DistillConfig(batch_size=8, fit=FitConfig(steps=2, warmup=1), precision="bf16", micro_batch=3)
    student, report = distill(load_policy(folders["smolvla"]), recorded(trained(folders["smolvla"])), config)
    assert computed == [(3, True), (3, True), (2, True)] * 2
    assert report.losses["distance"] > 0 and all(weight.isfinite().all() for weight in student.parameters())


def test_what_it_takes_of_memory_is_said_and_refused_before_it_plays(folders, tmp_path, monkeypatch, capsys):
    from robopolicy.cli import main
    from robopolicy.verbs import distill as verb
    from robopolicy.verbs import job

    monkeypatch.setattr(verb, "distillation_observations", lambda *asked: pytest.fail("it played"))
    scene = ["world=push_cube", "world.cameras=[front]", "world.image_size=32", f"run.root={tmp_path}"]
    monkeypatch.setattr(job, "free_memory", lambda device: 3_000_000)
    assert main(["distill", str(folders["smolvla"]), *scene]) == 2
    assert "the activations of 512 chunks at once" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(
        verb, "distillation_observations", lambda *asked: (_ for _ in ()).throw(ConfigError("it would play"))
    )
    monkeypatch.setattr(job, "free_memory", lambda device: None)
    assert main(["distill", str(folders["smolvla"]), *scene, "distill.micro_batch=3", "run.name=small"]) == 2
    told = capsys.readouterr()
    assert "activations of 3 chunks" in " ".join(told.out.split()) and "it would play" in told.err


def test_a_teacher_of_few_noisy_steps_leaves_none_of_them_to_its_student(folders, tmp_path):
    teacher: Any = load_trainable(folders["smolvla"], LeRobotTuning(noisy_steps=3))
    few_step_student(teacher, 1).save(tmp_path / "student")
    assert trained(tmp_path / "student").config.noisy_steps is None
    assert teacher.network.reader.settings.tuning.noisy_steps == 3


def test_diffusions_are_refused_with_the_true_reason(folders):
    with pytest.raises(ConfigError, match=r"'diffusion' has no setting for that: its sampler uses leading"):
        distill(load_policy(folders["diffusion"]), None, DistillConfig())  # type: ignore[arg-type]


def test_what_cannot_take_fewer_steps_is_refused_before_it_plays(folders, tmp_path, monkeypatch):
    from robopolicy.cli import main
    from robopolicy.verbs import distill as verb

    monkeypatch.setattr(verb, "distillation_observations", lambda *asked: pytest.fail("it played"))
    assert main(["distill", str(folders["diffusion"]), "world=push_t", f"run.root={tmp_path}"]) != 0
