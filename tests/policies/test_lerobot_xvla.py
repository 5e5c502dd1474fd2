"""LeRobot's X-VLA learns here: the chain is its own loop, the loss its action mode's, the checkpoint LeRobot's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lerobot_models import FRONT, word_tokenizer, xvla_config
from safetensors.torch import load_file, save_file
from test_bf16_transformers import scored_again
from test_lerobot_policies import features, save
from test_lerobot_training import ROWS, edited, learn_a_little, lerobots_own, noise_free, observed

from robopolicy.building.policies import load_trainable
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.examples import example_batch
from robopolicy.core.spec import STATE, TASK
from robopolicy.nn.configuration import FlowNoise
from robopolicy.nn.precision import tolerance_in
from robopolicy.policies.lerobot.configuration import LeRobotTuning, TrainableWeights
from robopolicy.policies.loading import load_policy
from robopolicy.testing.policy import Level, check_policy

pytestmark = pytest.mark.long

WRIST = "observation.images.wrist"
SIZES = {"auto": 2, "ee6d": 20, "joint": 14, "agibot_ee6d": 20, "franka_joint7": 7, "so101_bimanual": 12}
"""Elements of an action, by LeRobot's action modes."""


def made(folder: Path, words: Path, mode: str = "auto", **changes: Any) -> Path:
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature

    size = SIZES[mode]
    inputs, _ = features(environment=None, cameras=(FRONT, WRIST))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (size,))}
    if mode == "auto":  # a normalisation that shows when it is missing
        changes["normalization_mapping"] = dict.fromkeys(("STATE", "ACTION"), NormalizationMode.MEAN_STD)
    else:
        changes["max_state_dim"] = 20
    return save(xvla_config(words, inputs, outputs, action_mode=mode, **changes), folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, words) -> Path:
    return made(tmp_path_factory.mktemp("xvla") / "policy", words, num_image_views=3)


def start(policy: Any, seed: int) -> torch.Tensor:
    """Return the noise that a decision of this seed begins with, [N, P, 2L]."""
    return torch.randn((ROWS, *policy.noise_shape), generator=torch.Generator().manual_seed(seed))


@contextmanager
def drawn(**tensors: torch.Tensor) -> Iterator[None]:
    """Let torch draw the given tensors, by the name of its function."""
    with patch.multiple(torch, **{name: lambda *asked, value=value, **how: value for name, value in tensors.items()}):
        yield


def lerobots_chunk(folder: Path, policy: Any, observation: dict, seed: int = 7) -> torch.Tensor:
    """Return what LeRobot's own policy and postprocessor make of the noise of a decision of this seed."""
    theirs, batch, postprocess = lerobots_own(folder, observation)
    with drawn(randn=start(policy, seed).chunk(2, -1)[1].to(theirs.model._get_target_dtype())):
        actions = theirs.predict_action_chunk(batch)
    return postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])


@pytest.mark.parametrize("mode", SIZES)
def test_a_chain_without_noise_is_lerobots_own(tmp_path, words, mode):
    target = made(tmp_path / mode, words, mode)
    policy = load_trainable(target, LeRobotTuning())
    observation = observed(policy)
    theirs = lerobots_chunk(target, policy, observation)
    assert theirs.shape == (ROWS, 6, SIZES[mode]) and theirs.std() > 1e-2
    torch.testing.assert_close(noise_free(policy, observation), theirs[:, :4], atol=1e-5, rtol=0)
    whole = policy.predict(observation, torch.Generator().manual_seed(7), deterministic=True)
    torch.testing.assert_close(whole, theirs, atol=1e-5, rtol=0)


def test_half_precision_acts_and_scores_as_lerobots_does(tmp_path, words):
    target = made(tmp_path / "half", words, dtype="bfloat16")
    policy = load_trainable(target, LeRobotTuning())
    observation = observed(policy)
    theirs = lerobots_chunk(target, policy, observation)[:, :4]
    torch.testing.assert_close(noise_free(policy, observation), theirs.float(), atol=0.05, rtol=0)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    scores = policy.log_prob(observation, decision.latents)
    assert decision.actions.dtype == scores.logp.dtype == torch.float32
    torch.testing.assert_close(scores.logp, decision.logp, atol=0.05, rtol=0)


def test_a_step_goes_on_from_the_noise_of_the_beginning(folder):
    policy = load_trainable(folder, LeRobotTuning(flow_noise_level=0.2, min_std=0.0))
    policy.record_means = True
    decision = policy.act(observed(policy), torch.Generator().manual_seed(1))
    chain, mean = decision.latents["chain"], decision.latents["mean"]
    noise = start(policy, 1)[..., 5:]
    assert torch.equal(chain[..., 5:], noise[:, None].expand(-1, 5, -1, -1))
    assert torch.equal(mean[..., 5:], chain[:, 1:, ..., 5:])
    error = chain[:, 1:, ..., :5] - mean[..., :5]
    assert error[..., 2:].abs().max() == 0  # what pads an action explores nothing
    for step, after in enumerate((0.75, 0.5, 0.25, 0.0)):
        mixed = policy.schedule.mixed(chain[:, step + 1], torch.full((ROWS,), after))
        wanted = policy.schedule.mixed(mean[:, step], torch.full((ROWS,), after))
        assert 0.12 < (mixed - wanted)[..., :2].std() < 0.28  # 0.2, of 36 draws
        assert policy.schedule.table[step, 4] == pytest.approx(0.2 / (1 - after))


def test_scores_again_are_those_collected_without_the_images(folder):
    policy = load_trainable(folder, LeRobotTuning())
    policy.prepare_finetuning()
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    assert decision.mask.all() and decision.logp.shape == (ROWS, 4)
    blind = {key: value for key, value in observation.items() if key not in (FRONT, WRIST)}
    scores = policy.log_prob(blind, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-5, rtol=0)
    scores.logp.mean().backward()
    graded = {name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert any("soft_prompt" in name for name in graded) and all(".transformer." in name for name in graded)


def test_log_probabilities_are_those_of_the_drawn_estimates(folder):
    policy = load_trainable(folder, LeRobotTuning(flow_noise_level=0.2, min_std=0.0))
    policy.record_means = True
    decision = policy.act(observed(policy), torch.Generator().manual_seed(1))
    chain, mean = decision.latents["chain"][:, 1:, :4, :2], decision.latents["mean"][:, :, :4, :2]
    std = (0.2 / torch.tensor([0.25, 0.5, 0.75, 1.0]))[:, None, None]
    dense = torch.distributions.Normal(mean, std).log_prob(chain).clamp(-5.0, 2.0).mean((-2, -1))
    torch.testing.assert_close(decision.logp, dense, atol=1e-5, rtol=0)


def test_keeps_the_promises_of_a_policy_that_learns(folder):
    load = lambda path: load_trainable(path, LeRobotTuning())  # noqa: E731
    assert check_policy(load(folder), load=load).level is Level.TRAINS


def test_what_is_seen_said_and_driven_decides(folder, tmp_path):
    policy = load_trainable(folder, LeRobotTuning())
    observation = observed(policy)
    before = noise_free(policy, observation)
    for key in (FRONT, WRIST, STATE):
        other = noise_free(policy, {**observation, key: torch.zeros_like(observation[key])})
        assert (other - before).abs().amax((1, 2)).min() > 1e-6, key
    assert (noise_free(policy, {**observation, TASK: ["stack"] * ROWS}) - before).abs().max() > 1e-6
    copy = edited(folder, tmp_path / "copy")
    path = copy / "policy_preprocessor.json"
    path.write_text(path.read_text().replace('"domain_id": 0', '"domain_id": 2'))
    other = load_trainable(copy, LeRobotTuning())
    moved = noise_free(other, observation)
    assert (moved - before).abs().amax((1, 2)).min() > 1e-6
    torch.testing.assert_close(moved, lerobots_chunk(copy, other, observation)[:, :4], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", SIZES)
def test_the_loss_is_lerobots_own(tmp_path, words, mode, monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda count, **options: torch.arange(count))  # LeRobot's levels ascend
    target = made(tmp_path / mode, words, mode)
    policy = load_trainable(target, LeRobotTuning())
    observation = observed(policy)
    batch = example_batch(policy.spec, observation)
    batch["actions"] = batch["actions"].abs()
    batch["action_valid"][:] = True  # which LeRobot learns as well
    ours = policy.loss(batch, torch.Generator().manual_seed(3))["denoising"]
    draws = torch.Generator().manual_seed(3)
    time = policy.network.levels(ROWS, draws)
    noise = torch.randn((ROWS, *policy.noise_shape), generator=draws).chunk(2, -1)[1]
    assert time.sort().values.diff().tolist() == pytest.approx([1 / ROWS] * (ROWS - 1), abs=1e-4)
    theirs, known, _ = lerobots_own(target, observation, action=batch["actions"])
    with drawn(rand=time[:1], randn_like=noise):  # the policy is not in training mode: without its dropout
        expected, _ = theirs.forward(known)
    torch.testing.assert_close(ours.mean(), expected, atol=1e-5, rtol=1e-5)
    batch["action_valid"][:, 3:] = False
    assert not torch.equal(policy.loss(batch, torch.Generator().manual_seed(3))["denoising"], ours)


@pytest.mark.parametrize("rank", [0, 2])
def test_what_is_saved_is_lerobots_again(folder, tmp_path, rank):
    policy = load_trainable(folder, LeRobotTuning())
    policy.prepare_finetuning()
    observation = observed(policy)
    before = noise_free(policy, observation)
    if rank:
        policy.add_lora(rank)
        learning = [name for name, weight in policy.named_parameters() if weight.requires_grad]
        assert learning and all("lora_" in name and ".transformer." in name for name in learning)
        learn_a_little(policy, observation)  # the second factor begins at zero
    learn_a_little(policy, observation)
    learned = noise_free(policy, observation)
    assert (learned - before).abs().max() > 1e-4
    policy.save(tmp_path / "tuned")
    theirs = lerobots_chunk(tmp_path / "tuned", policy, observation)[:, :4]
    torch.testing.assert_close(theirs, learned, atol=1e-5, rtol=0)
    restored = noise_free(load_trainable(tmp_path / "tuned", LeRobotTuning()), observation)
    torch.testing.assert_close(restored, learned, atol=1e-5 if rank else 0, rtol=0)


def test_a_base_takes_the_first_steps_and_stays(folder):
    policy = load_trainable(folder, LeRobotTuning(trainable=TrainableWeights.ALL))
    with pytest.warns(
        RobopolicyWarning, match="a frozen base runs the first denoising steps, which LeRobot does not support"
    ):
        policy.prepare_finetuning(2)
    observation = observed(policy)
    before = policy.trajectory(observation, start(policy, 2))
    learn_a_little(policy, observation)
    after = policy.trajectory(observation, start(policy, 2))
    torch.testing.assert_close(after[:, :3], before[:, :3], atol=1e-6, rtol=0)
    assert (after[:, 3:] - before[:, 3:]).abs().max() > 1e-4


def test_what_cannot_be_used_says_why(folder, tmp_path, words):
    policy: Any = load_policy(folder)
    policy.policy.config.action_mode = "mine"
    with pytest.raises(ConfigError, match=r"action_mode=mine .*no log-probability.*auto, ee6d"):
        policy.to_trainable()
    with pytest.raises(ConfigError, match="flow_noise=sde corrects a velocity"):
        load_trainable(folder, LeRobotTuning(flow_noise=FlowNoise.SDE))
    with pytest.raises(
        CheckpointError, match=r"outputs actions of 20 elements \(action_mode=ee6d\).* config.json declares 2 "
    ):
        load_policy(edited(folder, tmp_path / "copy", action_mode="ee6d"))
    missing = edited(folder, tmp_path / "missing")
    weights = load_file(missing / "model.safetensors")
    del weights["model.transformer.pos_emb"]
    save_file(weights, missing / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks \['model.transformer.pos_emb'\]"):
        load_policy(missing)
    absent = edited(folder, tmp_path / "absent", tokenizer_name="facebook/bart-large")
    path = absent / "policy_preprocessor.json"
    path.write_text(path.read_text().replace(json.dumps(str(words)), '"facebook/bart-large"'))
    with pytest.raises(CheckpointError, match=r"needs tokenizer_name=facebook/bart-large on this machine"):
        load_policy(absent)


def test_weights_with_the_names_of_old_checkpoints_are_read(folder, tmp_path):
    copy = edited(folder, tmp_path / "old")
    known = load_file(copy / "model.safetensors")
    name = "model.vlm.multi_modal_projector.image_projection.weight"
    known["model.vlm.image_projection"] = known.pop(name).T.contiguous()
    old = {key.replace("vlm.language_model.", "vlm.language_model.model."): value for key, value in known.items()}
    old["model.vlm.language_model.final_logits_bias"] = torch.zeros(1, 64)
    save_file(old, copy / "model.safetensors")
    observation = observed(load_policy(copy))
    first, second = (noise_free(load_trainable(path, LeRobotTuning()), observation) for path in (copy, folder))
    assert torch.equal(first, second)


@pytest.mark.skipif(not bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="no bfloat16 on this CPU")
def test_a_run_in_bfloat16_scores_it_as_it_acted(folder):
    policy = load_trainable(folder, LeRobotTuning())
    policy.prepare_finetuning()
    _, apart, moved = scored_again(policy, observed(policy))
    assert float(apart) <= tolerance_in("bf16", 1e-5) and 0 < float(moved) < 0.1


def test_the_levels_of_a_sample_are_not_alike(folder):
    levels = load_trainable(folder, LeRobotTuning()).network.levels(64 * 4, torch.Generator().manual_seed(0))
    assert levels.sort().values.diff().max() < 1.01 / 256  # evenly spread, as LeRobot's
    within = levels.view(64, 4)
    assert (within.amax(1) - within.amin(1)).median() > 0.4
