"""LeRobot's `diffusion` and `multi_task_dit` learn here: our schedule takes their steps, and the loss is theirs."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lerobot_policies import (
    FRONT,
    ROWS,
    diffusion_config,
    dit_config,
    lerobots_chunk,
    observed,
    save,
    tiny_clip,
)

from robopolicy.building.policies import load_trainable
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.examples import example_batch
from robopolicy.core.policy import require_trainable
from robopolicy.core.randomness import use_generator
from robopolicy.core.spec import TASK
from robopolicy.policies.lerobot.configuration import LeRobotTuning, TrainableWeights
from robopolicy.policies.lerobot.families import _history
from robopolicy.policies.loading import load_policy
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.pretrain import regression_batches

pytestmark = pytest.mark.long

SEED = 11


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("denoising")
    return {
        "diffusion": save(diffusion_config(cameras=(FRONT,)), root / "diffusion"),
        "multi_task_dit": save(dit_config(tiny_clip(root / "clip")), root / "dit"),
    }


def edited(folder: Path, copy: Path, **changes: Any) -> Path:
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


def loaded(folder: Path, **tuning: Any) -> Any:
    return load_trainable(folder, LeRobotTuning(**tuning))


DIFFUSES = {"objective": "diffusion", "num_train_timesteps": 10, "num_inference_steps": 4}
DDIM = {"noise_scheduler_type": "DDIM"}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("multi_task_dit", {}),
        ("multi_task_dit", {**DIFFUSES, **DDIM}),
        ("multi_task_dit", {**DIFFUSES, **DDIM, "prediction_type": "sample", "clip_sample_range": 0.3}),
        ("diffusion", DDIM),
        ("diffusion", {**DDIM, "clip_sample_range": 0.3}),
        ("diffusion", {**DDIM, "clip_sample": False, "num_inference_steps": None}),
    ],
)
def test_a_chain_without_noise_is_lerobots_own(folders, tmp_path, kind, changes):
    folder = edited(folders[kind], tmp_path / "copy", **changes)
    policy = loaded(folder)
    observation = observed(policy)
    torch.manual_seed(SEED)
    noise = torch.randn((ROWS, 8, 2))
    theirs = lerobots_chunk(folder, observation, policy.spec.chunk, noise if kind == "diffusion" else None, SEED)
    ours = policy.to_actions(policy.trajectory(observation, noise)[:, -1])
    assert theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-6)  # an unbounded chain goes to hundreds


@pytest.mark.parametrize("kind", ["diffusion", "multi_task_dit"])
def test_a_chain_with_ddpms_noise_is_lerobots_own(folders, tmp_path, kind, monkeypatch):
    folder = edited(folders[kind], tmp_path / "copy", **({} if kind == "diffusion" else DIFFUSES))
    policy = loaded(folder, min_std=0.0)
    observation = observed(policy)
    policy.record_means = True
    decision = policy.act(observation, torch.Generator().manual_seed(SEED))
    chain, mean = decision.latents["chain"], decision.latents["mean"]
    std = policy.schedule.table[:, 4]
    drawn = [(chain[:, step + 1] - mean[:, step]) / std[step].clamp(min=1e-9) for step in range(3)]
    assert std[:3].min() > 1e-2 and std[3] == 0
    import diffusers.schedulers.scheduling_ddpm as ddpm

    supplied = itertools.cycle(drawn)  # what LeRobot decides while its queues fill draws as much
    monkeypatch.setattr(ddpm, "randn_tensor", lambda *asked, **options: next(supplied))
    if kind == "multi_task_dit":
        randn = torch.randn
        monkeypatch.setattr(torch, "randn", lambda *a, **o: chain[:, 0] if "size" in o else randn(*a, **o))
    start = chain[:, 0] if kind == "diffusion" else None
    theirs = lerobots_chunk(folder, observation, policy.spec.chunk, start, SEED)
    torch.testing.assert_close(decision.actions, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["diffusion", "multi_task_dit"])
def test_keeps_the_promises_of_a_policy_that_learns(folders, kind):
    assert check_policy(loaded(folders[kind]), load=loaded).level is Level.TRAINS


@pytest.mark.parametrize(("kind", "changes"), [("diffusion", {}), ("multi_task_dit", {}), ("multi_task_dit", DIFFUSES)])
def test_the_loss_is_lerobots_own_the_step_before_included(folders, tmp_path, kind, changes, monkeypatch):
    policy = loaded(edited(folders[kind], tmp_path / "copy", **changes))
    observation = observed(policy)
    batch = example_batch(policy.spec, observation)
    assert batch["actions"].shape == (ROWS, 7, 2)
    batch["action_valid"][:] = True
    batch |= {"past": torch.rand(ROWS, 1, 2), "past_valid": torch.ones(ROWS, 1, dtype=torch.bool)}
    ours = policy.loss(batch, torch.Generator().manual_seed(3))["denoising"]
    draws = torch.Generator().manual_seed(3)
    level = policy.network.levels(ROWS, draws)
    noise = torch.randn((ROWS, 8, 2), generator=draws)
    inner, reader = policy.network.policy, policy.network.reader
    known = frames(reader, observation)
    known["action"] = policy.network.to_latents(torch.cat([batch["past"], batch["actions"]], 1))
    known["action_is_pad"] = torch.zeros((ROWS, 8), dtype=torch.bool)
    inner.config.do_mask_loss_for_padding = True
    monkeypatch.setattr(torch, "randn", lambda *asked, **options: noise)
    monkeypatch.setattr(torch, "randn_like", lambda *asked, **options: noise)
    monkeypatch.setattr(torch, "randint", lambda *asked, **options: level)
    if kind == "multi_task_dit":
        inner.objective.do_mask_loss_for_padding = True
        inner.objective._sample_timesteps = lambda *asked: 1 - level
    expected, _ = inner.forward(known)
    torch.testing.assert_close(ours.mean(), expected, atol=1e-5, rtol=1e-5)


def test_what_was_done_before_is_learned_as_it_was_done(folders):
    """A copy of the action to come in the place of the one before would tell the network what it shall predict."""
    policy = loaded(folders["diffusion"])
    spec, count = policy.spec, 12
    actions = torch.rand(count, 2)
    episodes = Episodes(
        dict(spec.observation), spec.action, 10.0,
        {key: torch.zeros(count + 2, *field.shape) for key, field in spec.observation.items()},
        actions, torch.tensor([5, 7]), ("", ""),
    )  # fmt: skip
    batch = next(regression_batches(policy, episodes, 100, torch.Generator().manual_seed(0)))
    before = [0, *range(4), 5, *range(5, 11)]
    assert torch.equal(batch["past"][:, 0], actions[before][batch["steps"]])
    assert torch.equal(batch["past_valid"][:, 0], (batch["steps"] != 0) & (batch["steps"] != 5))
    unknown = {name: value for name, value in batch.items() if not name.startswith("past")}
    zeros = {**batch, "past": torch.zeros_like(batch["past"]), "past_valid": torch.zeros_like(batch["past_valid"])}
    losses = [policy.loss(each, torch.Generator().manual_seed(3))["denoising"] for each in (unknown, zeros, batch)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


def frames(reader: Any, observation: dict) -> dict:
    """Return a batch as LeRobot's data loader and preprocessor make it: key -> [N, H, ...], texts [N, L]."""
    history = reader.frames(observation)
    return {
        key: value if "language" in key else torch.stack([frame[key] for frame in history], 1)
        for key, value in history[-1].items()
        if key != "observation.images"
    }


@pytest.mark.parametrize("kind", ["diffusion", "multi_task_dit"])
def test_what_is_tuned_is_lerobots_again(folders, tmp_path, kind):
    folder = edited(folders[kind], tmp_path / "copy", **(DDIM if kind == "diffusion" else {}))
    policy = loaded(folder)
    policy.prepare_finetuning()
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    weights = policy.trainable_parameters()
    scores = policy.log_prob({TASK: observation[TASK]}, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-4, rtol=0)
    gradients = torch.autograd.grad(scores.logp.sum(), weights, allow_unused=True)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                weight.add_(0.02 * gradient / gradient.norm().clamp(min=1e-8))
    policy.save(tmp_path / "tuned")
    torch.manual_seed(SEED)
    noise = torch.randn((ROWS, 8, 2))
    theirs = lerobots_chunk(
        tmp_path / "tuned", observation, policy.spec.chunk, noise if kind == "diffusion" else None, SEED
    )
    before = lerobots_chunk(folder, observation, policy.spec.chunk, noise if kind == "diffusion" else None, SEED)
    learned = policy.to_actions(policy.trajectory(observation, noise)[:, -1])
    assert (learned - before).abs().max() > 1e-3
    torch.testing.assert_close(theirs, learned, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("multi_task_dit", {"integration_method": "rk4"}, "integration_method=rk4 has no density"),
        ("multi_task_dit", {"sigma_min": 0.1}, "sigma_min=0.1"),
        ("diffusion", {"beta_schedule": "linear", "beta_end": 0.5}, "beta_start and beta_end are 0.0001 and 0.5"),
    ],
)
def test_what_cannot_be_mapped_is_refused(folders, tmp_path, kind, changes, complaint):
    policy = load_policy(edited(folders[kind], tmp_path / "copy", **changes))
    with pytest.raises(ConfigError, match=complaint):
        require_trainable(policy)


@pytest.mark.parametrize("kind", ["diffusion", "multi_task_dit"])
def test_images_are_cropped_at_random_in_the_loss_alone_as_lerobot_does_in_training(folders, tmp_path, kind):
    if kind == "diffusion":
        config = diffusion_config(cameras=(FRONT,))
        # Keypoints of a feature map of one pixel are always in its middle: larger images, whose map has 3 x 3.
        config.resize_shape, config.crop_ratio, config.crop_shape = (128, 128), 0.75, (96, 96)
        config.crop_is_random = True
        folder = save(config, tmp_path / "copy")
    else:
        crop = {"image_resize_shape": [40, 40], "image_crop_shape": [32, 32], "image_crop_is_random": True}
        folder = edited(folders[kind], tmp_path / "copy", dropout=0.0, **crop)
    policy = loaded(folder, trainable=TrainableWeights.ALL)
    observation = observed(policy)
    generator = torch.Generator().manual_seed(0)
    observation[FRONT] = torch.randint(0, 256, observation[FRONT].shape, generator=generator, dtype=torch.uint8)
    frames = _history(policy.network.reader.frames(observation))
    inner = policy.network.policy
    crops = next(module for module in inner.modules() if getattr(module, "do_crop", False))
    read = inner.diffusion._prepare_global_conditioning if kind == "diffusion" else inner.observation_encoder.encode

    def theirs(seed: int | None) -> torch.Tensor:
        crops.training = seed is not None
        with torch.no_grad(), use_generator(torch.Generator().manual_seed(seed or 0), torch.device("cpu")):
            batch_read = read(frames)
        crops.training = False
        return batch_read

    with torch.no_grad():
        draws = {seed: torch.Generator().manual_seed(seed) for seed in (1, 2, 3)}
        middle = policy.encode(observation, draws[1])["condition"]
        assert torch.equal(policy.encode(observation)["condition"], middle) and torch.equal(middle, theirs(None))
        policy.train()
        ours = {seed: policy.encode(observation, each.manual_seed(seed))["condition"] for seed, each in draws.items()}
        for seed, loss in ours.items():
            assert torch.equal(loss, theirs(seed))
        assert max((ours[1] - ours[seed]).abs().max() for seed in (2, 3)) > 1e-4
        assert torch.equal(policy.encode(observation)["condition"], theirs(None))
    batch = example_batch(policy.spec, observation)
    losses = [policy.loss(batch, torch.Generator().manual_seed(5))["denoising"] for _ in range(2)]
    assert torch.equal(*losses) and not any(module.training for module in inner.modules())
    decision = policy.act(observation, torch.Generator().manual_seed(5))  # in training mode too
    scores = policy.log_prob(observation, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-4, rtol=0)


def test_a_transformers_dropout_is_at_work_in_its_loss_alone(folders, tmp_path):
    folder = edited(folders["multi_task_dit"], tmp_path / "copy", dropout=0.5)
    policy, still = loaded(folder), loaded(edited(folder, tmp_path / "still", dropout=0.0))
    observation = observed(policy)
    seeded = lambda: torch.Generator().manual_seed(5)  # noqa: E731
    batch = example_batch(policy.spec, observation)
    evaluated = [each.loss(batch, seeded())["denoising"] for each in (policy, still)]
    assert torch.equal(*evaluated)
    policy.train(), still.train()
    losses = [each.loss(batch, seeded())["denoising"] for each in (policy, policy, still)]
    assert torch.equal(losses[0], losses[1]) and not torch.allclose(losses[0], losses[2])
    x, time = torch.randn(ROWS, *policy.noise_shape, generator=seeded()), torch.full((ROWS,), 0.5)
    condition = policy.encode(observation)
    predictor = policy.network.policy.noise_predictor.train()
    with use_generator(seeded(), torch.device("cpu")):
        expected = policy.network.denoise(x, time, condition)
    predictor.eval()
    assert torch.equal(policy.network.denoise_in_loss(x, time, condition, seeded()), expected)
    assert not any(module.training for module in predictor.modules())
    one, other = (each.act(observation, seeded()) for each in (policy, still))
    assert torch.equal(one.actions, other.actions)
    scores = policy.log_prob(observation, one.latents)
    torch.testing.assert_close(scores.logp, one.logp, atol=1e-4, rtol=0)
