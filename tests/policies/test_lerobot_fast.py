"""LeRobot's pi0_fast acts and learns here: its own sampler's tokens, exact scores, its loss, its checkpoints."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lerobot_models import FRONT, fast_folders, pi0_fast_config, tiny_pi, without_code
from test_bf16_transformers import scored_again
from test_lerobot_policies import features, save
from test_lerobot_training import ROWS, edited, learn_a_little, lerobots_own, noise_free, observed
from transformers import AutoTokenizer

from robopolicy.building.policies import load_trainable
from robopolicy.core.errors import CheckpointError, ConfigError, SpecError
from robopolicy.core.examples import example_batch
from robopolicy.core.policy import require_trainable
from robopolicy.core.spec import TASK
from robopolicy.nn import shapes
from robopolicy.nn.precision import tolerance_in
from robopolicy.policies.lerobot.acting import load_lerobot_policy
from robopolicy.policies.lerobot.configuration import LeRobotTuning, TrainableWeights
from robopolicy.policies.lerobot.reading import FastTokenizer
from robopolicy.policies.loading import load_policy
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.memory import plan_memory

pytestmark = pytest.mark.long

MOST, END = 12, 27


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fast")
    words, fast = fast_folders(root)
    config = pi0_fast_config(words, fast, *features(environment=None, cameras=(FRONT,)))
    tokenizer = AutoTokenizer.from_pretrained(words)
    assert tokenizer.convert_tokens_to_ids("|") == END
    with tiny_pi(len(tokenizer)):
        with without_code():
            save(config, root / "policy")
        teach(loaded(root / "policy", trainable=TrainableWeights.ALL), root / "taught")
        yield root / "taught"


def teach(policy: Any, folder: Path) -> None:
    """Let a policy imitate random actions until it says such, and save it."""
    optimiser = torch.optim.Adam(policy.trainable_parameters(), 3e-3)
    losses = []
    for _ in range(60):
        batch = example_batch(policy.spec, observed(policy))
        loss = policy.loss(batch, torch.Generator())["tokens"].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.4 * losses[0]
    policy.save(folder)


def loaded(folder: Path, **tuning: Any) -> Any:
    return load_trainable(folder, LeRobotTuning(**tuning))


@contextmanager
def lerobots(folder: Path, observation: dict, **more: Any) -> Iterator[tuple[Any, dict, Any]]:
    """Yield what `lerobots_own` does, LeRobot's preprocessor made to find its tokenizer of texts."""
    words = json.loads((folder / "config.json").read_text())["text_tokenizer_name"]
    make = AutoTokenizer.from_pretrained
    known = lambda name, **options: make(words if name.startswith("google/") else name, **options)  # noqa: E731
    with without_code(), patch.object(AutoTokenizer, "from_pretrained", known):
        yield lerobots_own(folder, observation, **more)


def lerobots_chunk(folder: Path, observation: dict) -> torch.Tensor:
    with lerobots(folder, observation) as (policy, batch, postprocess):
        actions = policy.predict_action_chunk(batch)
    return postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])


def test_it_acts_as_lerobots_own_and_runs_no_code(folder):
    policy = load_policy(folder)
    observation = observed(policy)
    ours = policy.act(observation, torch.Generator()).actions
    assert ours.shape == (ROWS, 4, 2) and ours.std() > 1e-2
    torch.testing.assert_close(ours, lerobots_chunk(folder, observation), atol=1e-6, rtol=0)
    torch.testing.assert_close(noise_free(loaded(folder), observation), ours, atol=1e-6, rtol=0)
    assert check_policy(policy).level is Level.ACTS


def test_tokens_of_actions_are_fasts(folder):
    from lerobot.policies.molmoact2.molmoact2_hf_model.action_tokenizer import UniversalActionProcessor

    fast = FastTokenizer.from_pretrained(json.loads((folder / "config.json").read_text())["action_tokenizer_name"])
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 4, 2)) * np.linspace(0, 1, 5)[:, None, None]
    theirs = UniversalActionProcessor(fast.bpe_tokenizer, fast.scale, 82, fast.min_token)
    assert fast(actions) == theirs(actions) and len({len(row) for row in fast(actions)}) > 1
    policy = loaded(folder)
    batch = example_batch(policy.spec, observed(policy))
    actions_read = policy._actions(policy.steps_of(batch["actions"], torch.Generator())["tokens"])
    normalised = [policy.normalised(each) for each in (actions_read, batch["actions"])]
    assert (normalised[0] - normalised[1]).square().mean().sqrt() < 0.05  # of levels 0.1 apart


def test_what_is_drawn_and_scored_is_lerobots_samplers(folder):
    policy = loaded(folder, temperature=0.7)
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    tokens = decision.latents["tokens"]
    drawn = iter(tokens.unbind(1))
    probabilities: list[torch.Tensor] = []

    def multinomial(given: torch.Tensor, num_samples: int) -> torch.Tensor:
        probabilities.append(given)
        return next(drawn)[:, None]

    with lerobots(folder, observation) as (theirs, batch, _), patch.object(torch, "multinomial", multinomial):
        theirs.config.use_kv_cache, theirs.config.temperature = False, 0.7  # which reads all again for each token
        theirs.predict_action_chunk(batch)
    every = torch.stack(probabilities, 1).log()
    live = decision.mask
    expected = every.gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(decision.logp[live], expected[live], atol=1e-5, rtol=0)
    scores = policy.log_prob(observation, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-6, rtol=0)
    entropy = torch.distributions.Categorical(logits=every).entropy()
    torch.testing.assert_close(scores.entropy[live], entropy[live], atol=1e-5, rtol=0)


def test_what_comes_after_the_end_is_no_part_of_a_decision(folder):
    policy = loaded(folder)
    observation = observed(policy)
    token_rows = torch.randint(28, 200, (ROWS, MOST), generator=torch.Generator().manual_seed(0))
    token_rows[0, 3], token_rows[0, 7], token_rows[1, 0] = END, END, END
    live = policy._live(token_rows)
    assert live.sum(1).tolist() == [4, 1, MOST]
    tokens = torch.where(live, token_rows, 0)
    scores = policy.log_prob(observation, {"tokens": tokens})
    assert torch.equal(scores.logp != 0, live) and torch.equal(scores.entropy != 0, live)
    short = policy.log_prob(
        {key: value[:2] for key, value in observation.items()}, {"tokens": tokens[:2]}
    )  # whose pass is as long as its longest answer
    torch.testing.assert_close(short.logp, scores.logp[:2], atol=1e-5, rtol=0)
    chosen = torch.tensor([[0, 5]]).expand(ROWS, 2)
    some = policy.log_prob(observation, {"tokens": tokens, "chosen": chosen})
    torch.testing.assert_close(some.logp, scores.logp.gather(1, chosen))
    assert torch.equal(policy._actions(tokens), policy._actions(token_rows))


def test_the_loss_is_lerobots_own(folder):
    policy = loaded(folder)
    observation = observed(policy)
    batch = example_batch(policy.spec, observation)
    ours = policy.loss(batch, torch.Generator())["tokens"]
    for row in range(ROWS):
        one = {key: value[row : row + 1] for key, value in observation.items()}
        with lerobots(folder, one, action=batch["actions"][row : row + 1]) as (theirs, known, _):
            expected, _ = theirs.forward(known)
        torch.testing.assert_close(ours[row], expected, atol=1e-5, rtol=1e-5)


def test_keeps_the_promises_of_a_policy_that_learns(folder):
    assert check_policy(loaded(folder), load=loaded, batch=3).level is Level.TRAINS


def test_what_is_seen_and_said_decides(folder):
    policy = loaded(folder)
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    latents = {"tokens": decision.latents["tokens"]}
    for other in ({FRONT: torch.zeros_like(observation[FRONT])}, {TASK: ["stack"] * ROWS}):
        moved = policy.log_prob({**observation, **other}, latents).logp - decision.logp
        assert moved.abs().amax(1).min() > 1e-7


def test_images_are_embedded_once_a_decision_while_what_sees_is_frozen(folder):
    policy = loaded(folder)
    policy.prepare_finetuning()
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    blind = {key: value for key, value in observation.items() if key != FRONT}
    scores = policy.log_prob(blind, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-6, rtol=0)
    scores.logp.sum().backward()
    graded = {name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert any("lm_head" in name for name in graded)
    assert all("language_model" in name or "lm_head" in name for name in graded)
    whole = loaded(folder, trainable=TrainableWeights.ALL)
    decision = whole.act(observation, torch.Generator().manual_seed(1))
    assert set(decision.latents) == {"tokens"}
    whole.log_prob(observation, decision.latents).logp.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in whole.encoder_parameters())


@pytest.mark.parametrize("rank", [0, 2])
def test_what_is_saved_is_lerobots_again(folder, tmp_path, rank):
    policy = loaded(folder)
    policy.prepare_finetuning()
    observation = observed(policy)
    before = policy.log_prob(observation, policy.act(observation, torch.Generator().manual_seed(1)).latents).logp
    if rank:
        policy.add_lora(rank)
        learning = [name for name, weight in policy.named_parameters() if weight.requires_grad]
        assert learning and all("lora_" in name for name in learning)
        assert not any("vision" in name or "projector" in name for name in learning)
        assert policy.caches_condition, "what reads rests, with adapters too"
        learn_a_little(policy, observation)  # the second factor begins at zero
    learn_a_little(policy, observation)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    assert (decision.logp - before).abs().max() > 1e-4
    policy.save(tmp_path / "tuned")
    chunk = lerobots_chunk(tmp_path / "tuned", observation)
    torch.testing.assert_close(chunk, noise_free(policy, observation), atol=1e-5, rtol=0)
    restored = loaded(tmp_path / "tuned").log_prob(observation, {"tokens": decision.latents["tokens"]}).logp
    torch.testing.assert_close(restored, decision.logp, atol=1e-5 if rank else 0, rtol=0)
    first, second = (
        json.loads((each / "policy_preprocessor.json").read_text()) for each in (folder, tmp_path / "tuned")
    )
    assert first["steps"] == second["steps"]


def test_what_cannot_be_says_why(folder, tmp_path, monkeypatch):
    policy = loaded(folder)
    with pytest.raises(ConfigError, match="all of its 12 tokens, not in 3"):
        policy.prepare_finetuning(3)
    with pytest.raises(SpecError, match=r"this policy's tokens have \[N, 12\]"):
        policy.log_prob(observed(policy), {"tokens": torch.zeros(ROWS, 5, dtype=torch.int64)})
    with pytest.raises(ConfigError, match="pi0_fast has none: set it to false"):
        loaded(folder, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="temperature=0 must be positive"):
        LeRobotTuning(temperature=0.0)
    with pytest.raises(ConfigError, match=r"chunks of 4 steps, but LeRobot decodes 2 .*n_action_steps to chunk_size"):
        require_trainable(load_policy(edited(folder, tmp_path / "short", n_action_steps=2)))
    strict = load_policy(edited(folder.parent / "policy", tmp_path / "strict", validate_action_token_prefix=True))
    with pytest.raises(
        CheckpointError, match=r"generated tokens that do not decode to an action .*validate_action_token_prefix=false"
    ):
        strict.act(observed(strict), torch.Generator())
    with pytest.raises(CheckpointError, match=r"needs action_tokenizer_name=lerobot/fast-action-tokenizer on this"):
        load_policy(edited(folder, tmp_path / "absent", action_tokenizer_name="lerobot/fast-action-tokenizer"))
    monkeypatch.setattr(shapes, "LARGE", 64)
    with shapes.shapes_only(), pytest.raises(ConfigError, match="dry_run is not supported for pi0_fast"):
        plan_memory(require_trainable(load_lerobot_policy(folder, weights=False)), 8, 4, device=torch.device("cpu"))


@pytest.mark.skipif(not bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="no bfloat16 on this CPU")
def test_a_run_in_bfloat16_scores_it_as_it_acted(folder):
    policy = load_trainable(folder, LeRobotTuning())
    policy.prepare_finetuning()
    _, apart, moved = scored_again(policy, observed(policy))
    assert float(apart) <= tolerance_in("bf16", 1e-5) and 0 < float(moved) < 0.1
