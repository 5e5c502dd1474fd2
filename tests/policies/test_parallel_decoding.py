"""Parallel decoding (OpenVLA-OFT): all tokens of a chunk in one pass, distributions given the observation alone."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from token_toys import STATE, TOKEN, disturb, generator, make_tokens, observe
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.nn.configuration import ActionTokens
from robopolicy.policies import TokenPolicy, load_policy
from robopolicy.policies.token.configuration import TokenDecoding
from robopolicy.policies.token.decoding import ParallelDecoding
from robopolicy.testing.policy import check_policy
from robopolicy.training.memory import plan_memory

pytestmark = pytest.mark.long

PARALLEL = replace(TOKEN, decoding=TokenDecoding.PARALLEL)


def make(chunk: int = 3, **changes: Any) -> TokenPolicy:
    return make_tokens(replace(PARALLEL, **changes), chunk)


def empty(policy: TokenPolicy) -> torch.nn.Parameter:
    assert isinstance(policy.decoding, ParallelDecoding)
    return policy.decoding.empty


@pytest.mark.parametrize(
    "changes", [{}, {"actions": ActionTokens.FREQUENCIES, "resolution": 4.0}, {"temperature": 2.0}]
)
def test_they_keep_the_promises_of_policies(changes: dict[str, Any]):
    check_policy(make(**changes), load_policy)


def test_what_fine_tuning_takes_of_memory_can_be_counted():
    budget = plan_memory(make(), 4, 2)
    assert budget.activations > 0
    assert min(budget.deciding, budget.scoring) > 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_scores_are_those_of_one_plain_pass_without_a_cache(temperature: float):
    """Row by row, with the attention written out: the prompt causal, the empty places seeing all of one another."""
    policy, observation = disturb(make(temperature=temperature)), observe()
    decision = policy.act(observation, generator())
    scores = policy.log_prob(observation, decision.latents)
    assert (scores.logp - decision.logp).abs().max() <= 1e-4
    embedded = policy.observation_tokens(observation)
    for row in range(7):
        words, _ = policy.text_tokens([observation["task"][row]])
        text = policy.language.backbone.get_input_embeddings()(words)
        whole = torch.cat([text, embedded[row : row + 1], empty(policy)[None]], 1)
        prefix = whole.shape[1] - 6
        allowed = torch.ones(whole.shape[1], whole.shape[1]).tril().bool()
        allowed[prefix:, prefix:] = True
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
        hidden = policy.language.backbone(inputs_embeds=whole, attention_mask=mask).last_hidden_state[0, prefix:]
        expected = torch.distributions.Categorical(logits=policy.head(hidden) / temperature)
        assert torch.allclose(decision.logp[row], expected.log_prob(decision.latents["tokens"][row]), atol=1e-4)
        assert torch.allclose(scores.entropy[row], expected.entropy(), atol=1e-4)


def test_the_scores_of_a_chunk_are_a_distribution_over_chunks_and_each_token_is_free():
    policy = disturb(make(chunk=1, bins=3))
    tokens = torch.tensor(list(product(range(3), repeat=2)))
    observation = {STATE: torch.zeros(9, 1, 3), "task": ["stop"] * 9}
    logp = policy.log_prob(observation, {"tokens": tokens}).logp
    assert logp.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    free = logp.reshape(3, 3, 2)
    assert torch.allclose(free[:, :1, 0].expand(3, 3), free[..., 0]), "the first token listens to the second"
    assert torch.allclose(free[:1, :, 1].expand(3, 3), free[..., 1]), "the second token listens to the first"


def test_places_see_one_another_in_both_directions():
    policy, observation = disturb(make()), observe(2)
    latents = policy.act(observation, generator()).latents
    before = policy.log_prob(observation, latents).extras["log_probabilities"]
    for moved in (0, 5):
        with torch.no_grad():
            kept = empty(policy)[moved].clone()
            empty(policy)[moved] += 1
            after = policy.log_prob(observation, latents).extras["log_probabilities"]
            empty(policy)[moved] = kept
        assert ((after - before).abs().amax((0, 2)) > 1e-4).all(), f"not all places see place {moved}"


def test_tokens_are_drawn_from_the_stated_distribution_each_on_its_own():
    policy = disturb(make(chunk=1))
    observation = {STATE: torch.zeros(4000, 1, 3), "task": ["stop"] * 4000}
    decision = policy.act(observation, generator())
    likely = policy.log_prob(observation, decision.latents).extras["log_probabilities"][0].exp()
    tokens = decision.latents["tokens"]
    both = torch.bincount(tokens[:, 0] * 5 + tokens[:, 1], minlength=25).reshape(5, 5) / 4000
    assert (both - likely[0][:, None] * likely[1]).abs().max() < 0.03


def test_a_chunk_is_one_pass(monkeypatch: pytest.MonkeyPatch):
    policy, passes = make(chunk=8), []
    attend: Callable[..., Tensor] = policy.language.attend
    extend: Callable[..., Tensor] = policy.language.extend
    monkeypatch.setattr(policy.language, "attend", lambda *given: (passes.append(1), attend(*given))[1])
    monkeypatch.setattr(policy.language, "extend", lambda *given: (passes.append(2), extend(*given))[1])
    policy.act(observe(), generator())
    assert passes == [2, 1], "the observation is read, then all 16 tokens are said"


def test_a_decision_can_be_resumed():
    policy, observation = disturb(make()), observe(3)
    first = policy.act(observation, generator()).latents
    resumed = policy.resume(observation, first, torch.tensor([0, 4, 6]), generator(9))
    assert resumed.mask.sum(-1).tolist() == [6, 2, 0]
    assert torch.equal(resumed.latents["tokens"][1, :4], first["tokens"][1, :4])
    assert torch.equal(resumed.latents["tokens"][2], first["tokens"][2])
    scored = policy.log_prob(observation, resumed.latents).logp
    assert torch.allclose(resumed.logp, torch.where(resumed.mask, scored, 0.0), atol=1e-5)


def learned(actions: Tensor, states: Tensor) -> TokenPolicy:
    policy = make(chunk=2)
    batch = {
        "observation": {STATE: states[:, None], "task": ["stop"] * len(states)},
        "actions": actions,
        "action_valid": torch.ones(actions.shape[:2], dtype=torch.bool),
    }
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        policy.loss(batch, generator())["tokens"].mean().backward()
        optimiser.step()
    return policy


def test_it_learns_what_the_observation_decides_and_mixes_what_it_does_not():
    """Chunks that follow from the state are said as they are; of two chunks that do not, the tokens are mixed."""
    signs = torch.tensor([-1.0, 1.0]).repeat(16)
    actions = (signs[:, None, None] * torch.tensor([[1.0, -1.0], [-1.0, 0.5]])).expand(32, 2, 2)
    states = signs[:, None].expand(32, 3)
    observation = {STATE: states[:, None], "task": ["stop"] * 32}
    assert torch.allclose(learned(actions, states).act(observation, generator(), deterministic=True).actions, actions)
    blind = learned(actions, torch.zeros(32, 3))
    actions_decided = blind.act({**observation, STATE: torch.zeros(32, 1, 3)}, generator()).actions
    known = (actions_decided[:, None] == actions[None, :2]).flatten(2).all(-1).any(-1)
    assert known.float().mean() < 0.5


def test_policy_gradients_on_its_scores_raise_reward():
    policy = make(chunk=2)
    observation = {STATE: torch.zeros(64, 1, 3), "task": ["stop"] * 64}
    optimiser = torch.optim.Adam(policy.parameters(), lr=2e-3)
    draws, rewards = generator(1), []
    for _ in range(60):
        latents = policy.act(observation, draws).latents
        reward = latents["tokens"].float().mean(-1) / 4
        rewards.append(reward.mean().item())
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        optimiser.zero_grad()
        (-(policy.log_prob(observation, latents).logp * advantage[:, None]).sum(-1).mean()).backward()
        optimiser.step()
    assert rewards[-1] > 0.9 > 0.6 > rewards[0]


def test_checkpoints_and_backbones(tmp_path: Path):
    policy, observation = disturb(make()), observe()
    policy.save(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert torch.equal(loaded.act(observation, generator()).logp, policy.act(observation, generator()).logp)
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "stop": 1}, unk_token="<pad>"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    words.save_pretrained(tmp_path / "bloom")
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 8}
    transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)).save_pretrained(tmp_path / "bloom")
    with pytest.raises(ConfigError, match=r"decoding=parallel needs bidirectional attention.*BloomModel"):
        make(model=str(tmp_path / "bloom"))
