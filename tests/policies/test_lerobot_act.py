"""LeRobot's ACT learns here: a Gaussian around its chunk, exact scores, its own loss, its own checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_models import FRONT
from test_bf16_transformers import scored_again
from test_lerobot_policies import SIZE, act_config, lerobots_chunk, save
from test_lerobot_training import ROWS, data_spec, edited, learn_a_little, lerobots_own, noise_free, observed

from robopolicy.building.policies import load_trainable
from robopolicy.core.errors import CheckpointError, ConfigError, SpecError
from robopolicy.core.examples import example_batch
from robopolicy.data.record import record
from robopolicy.nn.precision import tolerance_in, training_precision
from robopolicy.policies.lerobot.configuration import LeRobotStart, LeRobotTuning, TrainableWeights
from robopolicy.policies.loading import build_policy, load_policy
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import ExpertMixer, Guidance
from sims.registry import load_task, make_world

pytestmark = pytest.mark.long

SEEN: dict[str, dict[str, Any]] = {"state": {}, "camera": {"environment": None, "cameras": (FRONT,)}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("act")
    return {kind: save(act_config(**config_values), root / kind) for kind, config_values in SEEN.items()}


def loaded(folder: Path, **tuning: Any) -> Any:
    return load_trainable(folder, LeRobotTuning(**tuning))


@pytest.mark.parametrize("kind", ["state", "camera"])
def test_without_noise_it_is_lerobots_own(folders, kind):
    policy = loaded(folders[kind])
    observation = observed(policy)
    theirs = lerobots_chunk(folders[kind], observation, 4, None, 0)
    assert theirs.std() > 1e-3
    torch.testing.assert_close(noise_free(policy, observation), theirs, atol=1e-6, rtol=0)
    whole = policy.predict(observation, torch.Generator(), deterministic=True)
    assert whole.shape == (ROWS, 6, 2)
    torch.testing.assert_close(whole[:, :4], theirs, atol=1e-6, rtol=0)


def test_log_probabilities_are_a_gaussians(folders):
    policy = loaded(folders["state"], exploration_std=0.2)
    with torch.no_grad():
        policy.log_std[1] = torch.tensor(0.05).log()
    policy.record_means = True
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    drawn, mean = decision.latents["actions"], decision.latents["mean"][:, 0]
    assert drawn.shape == mean.shape == (ROWS, 4, 2) and decision.mask.all()
    element = torch.distributions.Normal(mean, torch.tensor([0.2, 0.05])).log_prob(drawn)
    torch.testing.assert_close(decision.logp[:, 0], element.mean((1, 2)), atol=1e-5, rtol=0)
    seeds = [torch.Generator().manual_seed(seed) for seed in range(99)]
    spread = torch.stack([policy.act(observation, seed).latents["actions"] for seed in seeds])
    assert spread.std(0).mean((0, 1)).tolist() == pytest.approx([0.2, 0.05], rel=0.1)
    counted = torch.tensor([[True, True, False, False]]).expand(ROWS, 4)
    chosen = torch.zeros((ROWS, 1), dtype=torch.int64)
    scores = policy.log_prob(observation, {**decision.latents, "executed": counted, "chosen": chosen})
    torch.testing.assert_close(scores.logp[:, 0], element[:, :2].mean((1, 2)), atol=1e-5, rtol=0)
    entropy = torch.distributions.Normal(torch.zeros(2), torch.tensor([0.2, 0.05])).entropy().mean()
    torch.testing.assert_close(scores.entropy, entropy.expand(ROWS, 1))
    steps = policy.steps_of(decision.actions, torch.Generator())
    torch.testing.assert_close(steps["actions"], drawn, atol=1e-5, rtol=0)
    ahead = policy.predict(observation, torch.Generator().manual_seed(1))
    torch.testing.assert_close(ahead[:, :4], decision.actions, atol=1e-6, rtol=0)


def test_the_deviation_learns_by_its_score(folders):
    policy = loaded(folders["state"], exploration_std=0.2)
    policy.record_means = True
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    policy.log_prob(observation, decision.latents).logp.sum().backward()
    deviation = (decision.latents["actions"] - decision.latents["mean"][:, 0]) / 0.2
    # d/d log std of the log-density is z^2 - 1; half of the elements averaged over are of either
    expected = (deviation.square() - 1).mean(1).sum(0) / 2
    torch.testing.assert_close(policy.log_std.grad, expected, atol=1e-4, rtol=1e-4)
    fixed = loaded(folders["state"], learn_std=False)
    assert all(weight is not fixed.log_std for weight in fixed.trainable_parameters())
    assert any(weight is policy.log_std for weight in policy.trainable_parameters())


@pytest.mark.parametrize("kind", ["state", "camera"])
def test_keeps_the_promises_of_a_policy_that_learns(folders, kind):
    assert check_policy(loaded(folders[kind]), load=loaded).level is Level.TRAINS


@pytest.mark.parametrize("kind", ["state", "camera"])
@pytest.mark.parametrize("vae", [True, False])
def test_the_loss_is_lerobots_own_dropout_and_all(folders, tmp_path, kind, vae):
    folder = folders[kind] if vae else save(replace(act_config(**SEEN[kind]), use_vae=False), tmp_path / "plain")
    policy = loaded(folder)
    observation = observed(policy)
    batch = example_batch(policy.spec, observation)
    batch["action_valid"][:, 4:] = False
    batch["action_valid"][-1, 1:4] = True  # as much of every row, whose steps LeRobot counts alike
    terms = policy.loss(batch, torch.Generator().manual_seed(3))
    assert set(terms) == ({"l1", "kl"} if vae else {"l1"})
    theirs, known, _ = lerobots_own(folder, observation, action=batch["actions"])
    known["action_is_pad"] = ~batch["action_valid"]
    seed = int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(seed)
    expected, parts = theirs.train().forward(known)
    torch.testing.assert_close(sum(terms.values()).mean(), expected, atol=1e-5, rtol=1e-5)
    assert terms["l1"].mean().item() == pytest.approx(parts["l1_loss"], abs=1e-5)
    torch.manual_seed(seed + 1)
    assert theirs.forward(known)[0] != expected  # dropout is at work
    assert not any(module.training for module in policy.policy.modules())


def test_demonstrations_are_imitated(folders):
    policy = loaded(folders["state"], trainable=TrainableWeights.LEROBOT)
    observation = observed(policy)
    batch = example_batch(policy.spec, observation)
    batch["action_valid"][:] = True
    optimiser = torch.optim.Adam(policy.trainable_parameters(), 3e-3)
    losses = []
    for step in range(60):
        terms = policy.loss(batch, torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        torch.stack([*terms.values()]).sum(0).mean().backward()
        optimiser.step()
        losses.append(float(terms["l1"].detach().mean()))
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert policy.log_std.exp().tolist() == pytest.approx([0.1, 0.1])  # which the loss says nothing about


def test_noise_that_was_not_learned_can_still_be_chosen(folders, tmp_path):
    loaded(folders["state"], learn_std=False).save(tmp_path / "saved")
    assert loaded(tmp_path / "saved", exploration_std=0.3).std.tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("rank", [0, 2])
def test_what_is_saved_is_lerobots_again_and_keeps_its_noise(folders, tmp_path, rank):
    policy = loaded(folders["camera"], exploration_std=0.3)
    policy.prepare_finetuning()
    observation = observed(policy)
    before = noise_free(policy, observation)
    if rank:
        policy.add_lora(rank)
        learning = [name for name, weight in policy.named_parameters() if weight.requires_grad]
        assert "log_std" in learning and all("lora_" in name for name in learning if name != "log_std")
        assert not any("vae_encoder" in name or "backbone" in name or "attn" in name for name in learning)
        learn_a_little(policy, observation)  # the second factor begins at zero
    learn_a_little(policy, observation)
    learned, std = noise_free(policy, observation), policy.std.detach()
    assert (learned - before).abs().max() > 1e-4 and (std - 0.3).abs().max() > 1e-4
    policy.save(tmp_path / "tuned")
    theirs = lerobots_chunk(tmp_path / "tuned", observation, 4, None, 0)
    torch.testing.assert_close(theirs, learned, atol=1e-5, rtol=0)
    with pytest.raises(
        ConfigError, match=r"lerobot.exploration_std=0.7 is the initial exploration noise of an act .*remove log_std"
    ):
        loaded(tmp_path / "tuned", exploration_std=0.7)
    restored = loaded(tmp_path / "tuned", exploration_std=0.3)  # as it began
    assert torch.equal(restored.std, std)
    restored.save(tmp_path / "again")
    settings = json.loads((tmp_path / "again" / "robopolicy.json").read_text())
    assert settings["log_std"] == policy.log_std.tolist()


def test_a_frozen_backbone_is_run_once_a_decision(folders):
    policy = loaded(folders["camera"])
    policy.prepare_finetuning()
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    blind = {key: value for key, value in observation.items() if key != FRONT}
    scores = policy.log_prob(blind, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-5, rtol=0)
    scores.logp.sum().backward()
    graded = {name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {"log_std", "policy.model.action_head.weight"} <= graded and not any("backbone" in name for name in graded)
    whole = loaded(folders["camera"], trainable=TrainableWeights.ALL)
    decision = whole.act(observation, torch.Generator().manual_seed(1))
    assert set(decision.latents) == {"actions"}
    whole.log_prob(observation, decision.latents).logp.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in whole.policy.model.backbone.parameters())
    whole.prepare_finetuning(train_encoder=False)
    assert whole.caches_condition
    dark = {**observation, FRONT: torch.zeros_like(observation[FRONT])}
    assert (noise_free(policy, dark) - noise_free(policy, observation)).abs().max() > 1e-6


def test_experts_rows_are_seen_by_the_frozen_backbone_too(tmp_path):
    folder = save(act_config(state=6, environment=None, cameras=(FRONT,)), tmp_path / "act")
    (folder / "robopolicy.json").write_text(json.dumps({"features": {FRONT: "observation.images.top"}}))
    policy = loaded(folder)
    policy.prepare_finetuning()
    assert policy.caches_condition
    options = {"cameras": ("top",), "image_size": SIZE}
    shown = record(make_world("push_cube", 4, **options), load_task("push_cube").expert(), list(range(4)))
    config = FinetuneConfig(
        algorithm="grpo", expert_episode_fraction=0.5, iterations=1,
        groups=2, group_size=2, epochs=1, minibatch_episodes=2,
        evaluate_every=0, target_kl=None,
    )  # fmt: skip
    calls: list[Any] = []
    plain = ExpertMixer.beside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertMixer, "beside", lambda *given: calls.append(plain(*given)) or calls[-1])
        finetune(policy, None, make_world("push_cube", 4, **options), config, guidance=Guidance(experts=shown))
    (rows,) = calls
    assert any(name.startswith("condition") for name in rows.latents) and len(rows.group) == 6


@pytest.mark.skipif(not bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="no bfloat16 on this CPU")
def test_it_multiplies_in_the_precision_of_the_run(folders):
    policy = loaded(folders["state"])
    observation = observed(policy)
    plain = noise_free(policy, observation)
    with training_precision("bf16"):
        lowered = noise_free(policy, observation)
    assert 0 < (lowered - plain).abs().max() < 0.1
    _, apart, moved = scored_again(policy, observation)
    assert float(apart) <= tolerance_in("bf16", 1e-5) and 0 < float(moved) < 0.1


def test_training_begins_with_lerobots_weights(folders):
    spec = data_spec()
    policy: Any = build_policy("lerobot", LeRobotStart(folders["state"]), spec, None, 0)  # type: ignore[arg-type]
    learning = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert any("vae_encoder" in name for name in learning)
    assert (policy.spec.fps, policy.spec.prediction, policy.spec.chunk) == (spec.fps, 6, 4)


def test_what_cannot_be_says_why(folders, tmp_path):
    for std in (0.0, 1e-4):
        with pytest.raises(ConfigError, match=r"at least 0\.001: with less noise"):
            LeRobotTuning(exploration_std=std)
    with pytest.raises(ConfigError, match="act has none: set it to false"):
        loaded(folders["state"], gradient_checkpointing=True)
    policy = loaded(folders["state"])
    with pytest.raises(ConfigError, match="has no denoising steps, so 2"):
        policy.prepare_finetuning(2)
    with pytest.raises(SpecError, match=r"this policy's actions have \[N, 4, 2\]"):
        policy.log_prob(observed(policy), {"actions": torch.zeros(ROWS, 6, 2)})
    wrong = edited(folders["state"], tmp_path / "wrong")
    (wrong / "robopolicy.json").write_text(json.dumps({"log_std": [-1.0]}))
    with pytest.raises((ConfigError, CheckpointError), match="log_std has 1 elements, but the policy's action has 2"):
        loaded(wrong)
    assert load_policy(wrong).spec.scored_steps == 0
