"""Masked decoding: exact scores of what was sampled, its schedule, what it learns, and what it refuses."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from token_toys import STATE, TOKEN, disturb, generator, make_tokens, observe
from torch import Tensor

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.nn.configuration import ActionTokens
from robopolicy.nn.language import LanguageModel
from robopolicy.policies import TokenPolicy, load_policy
from robopolicy.policies.token.configuration import DecodeSchedule, TokenDecoding
from robopolicy.policies.token.decoding import MaskedDecoding, commit_schedule

MASKED = replace(TOKEN, decoding=TokenDecoding.MASKED, decode_steps=3)
CAUSAL = {"decoding": TokenDecoding.CAUSAL}


def make(chunk: int = 3, **changes: Any) -> TokenPolicy:
    return make_tokens(replace(MASKED, **changes), chunk)


def demonstrations(policy: TokenPolicy, tokens: Tensor) -> dict[str, Any]:
    """A batch of one observation whose chunks are `tokens`."""
    actions = policy.action_normalizer.inverse(policy.action_tokens.decode(tokens))
    observation = {STATE: torch.zeros(len(tokens), 1, 3), "task": ["stop"] * len(tokens)}
    return {"observation": observation, "actions": actions, "action_valid": torch.ones(actions.shape[:2]).bool()}


def decoding(policy: TokenPolicy) -> MaskedDecoding:
    assert isinstance(policy.decoding, MaskedDecoding)
    return policy.decoding


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "changes",
    [
        CAUSAL,
        {},
        {"decode_steps": 1},
        {"decode_steps": 6},
        {"decode_schedule": DecodeSchedule.ASCENDING},
        {"actions": ActionTokens.FREQUENCIES, "resolution": 4.0},
    ],
)
@pytest.mark.checks("CJ-GRPO/EOSER/ASS")
def test_scores_are_those_of_the_states_in_which_tokens_were_drawn(changes: dict[str, Any], temperature: float):
    policy, observation = disturb(make(temperature=temperature, **changes)), observe()
    decision = policy.act(observation, generator())
    scores = policy.log_prob(observation, decision.latents)
    assert (scores.logp - decision.logp).abs().max() <= 1e-4
    expected = torch.distributions.Categorical(logits=scores.extras["log_probabilities"]).entropy()
    assert torch.allclose(scores.entropy, expected, atol=1e-5)


def test_scores_are_those_of_plain_passes_without_a_cache():
    """Against one uncached pass per row and step, with the attention written out: who may see whom."""
    policy, observation = disturb(make()), observe()
    decision = policy.act(observation, generator())
    embedded = policy.observation_tokens(observation)
    for row in range(7):
        words, _ = policy.text_tokens([observation["task"][row]])
        text = policy.language.backbone.get_input_embeddings()(words)
        tokens, order = decision.latents["tokens"][row], decision.latents["order"][row]
        prefix = text.shape[1] + embedded.shape[1]
        allowed = torch.ones(prefix + 6, prefix + 6).tril().bool()
        allowed[prefix:, prefix:] = True
        additive = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
        for step in range(3):
            known_mask = (order < step)[:, None]
            states = torch.where(known_mask, policy.action_embedding(tokens), decoding(policy).mask)
            states = states + decoding(policy).position.weight
            whole = torch.cat([text, embedded[row : row + 1], states[None]], 1)
            hidden = policy.language.backbone(inputs_embeds=whole, attention_mask=additive).last_hidden_state[0]
            logp = policy.head(hidden[prefix:]).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
            now = order == step
            assert torch.allclose(decision.logp[row][now], logp[now], atol=1e-4)


@pytest.mark.parametrize(
    ("latents", "steps", "schedule", "expected"),
    [
        (8, 4, DecodeSchedule.EVEN, (2, 2, 2, 2)),
        (7, 3, DecodeSchedule.EVEN, (2, 2, 3)),
        (5, 5, DecodeSchedule.EVEN, (1, 1, 1, 1, 1)),
        (5, 1, DecodeSchedule.EVEN, (5,)),
        (1, 4, DecodeSchedule.ASCENDING, (1,)),
        (2, 4, DecodeSchedule.ASCENDING, (2,)),
        (6, 4, DecodeSchedule.ASCENDING, (1, 5)),
        (7, 4, DecodeSchedule.ASCENDING, (1, 6)),
        (8, 4, DecodeSchedule.ASCENDING, (1, 2, 5)),
        (5, 4, DecodeSchedule.ASCENDING, (1, 4)),
        (56, 4, DecodeSchedule.ASCENDING, (1, 2, 4, 8, 41)),
        (128, 4, DecodeSchedule.ASCENDING, (1, 2, 4, 8, 16, 32, 65)),
    ],
)
@pytest.mark.checks("CJ-GRPO/EOSER/ASS")
def test_schedules_by_hand(latents: int, steps: int, schedule: DecodeSchedule, expected: tuple[int, ...]):
    assert commit_schedule(latents, steps, schedule) == expected


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("schedule", DecodeSchedule)
def test_every_position_is_said_once_in_the_pass_the_schedule_gives(schedule: DecodeSchedule, deterministic: bool):
    policy = disturb(make(decode_schedule=schedule))
    order = policy.act(observe(50), generator(), deterministic=deterministic).latents["order"]
    assert order.shape == (50, 6) and order.dtype == torch.int64
    counts = torch.tensor(commit_schedule(6, 3, schedule))  # one pass less than asked for, if ascending
    assert torch.equal(torch.nn.functional.one_hot(order, len(counts)).sum(1), counts.expand(50, -1))
    assert len(order.unique(dim=0)) > 1 or deterministic


def test_the_most_confident_positions_go_first_and_ties_from_left_to_right():
    policy, observation = disturb(make(decode_steps=2)), observe()
    decision = policy.act(observation, generator(), deterministic=True)
    tokens, order = decision.latents["tokens"], decision.latents["order"]
    first = policy.log_prob(observation, {"tokens": tokens, "order": torch.zeros_like(order)})
    confidence = first.extras["log_probabilities"].max(-1).values
    for row in range(7):
        assert confidence[row, order[row] == 0].min() >= confidence[row, order[row] == 1].max()
    with torch.no_grad():
        policy.head.weight.zero_()
    order = policy.act(observation, generator(), deterministic=True).latents["order"]
    assert torch.equal(order, torch.tensor([0, 0, 0, 1, 1, 1]).expand(7, 6))


def test_deterministic_is_the_likeliest_token_and_no_choice():
    policy, observation = disturb(make()), observe()
    decision = policy.act(observation, generator(), deterministic=True)
    assert not decision.mask.any() and not decision.logp.any()
    every = policy.log_prob(observation, decision.latents).extras["log_probabilities"]
    assert torch.equal(every.argmax(-1), decision.latents["tokens"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_token_at_a_time_in_a_given_order_is_a_distribution_over_chunks(order: tuple[int, int]):
    policy = disturb(make(chunk=1, bins=3, decode_steps=2))
    tokens = torch.tensor(list(product(range(3), repeat=2)))
    observation = demonstrations(policy, tokens)["observation"]
    latents = {"tokens": tokens, "order": torch.tensor(order).expand(9, 2)}
    logp = policy.log_prob(observation, latents).logp
    assert logp.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    second = logp.reshape(3, 3, 2)[..., order.index(1)]
    other = 0 if order == (0, 1) else 1
    assert second.std(other).max() > 1e-3, "the token said second does not listen to the first"


def test_tokens_said_in_the_same_pass_do_not_hear_each_other():
    policy, observation = disturb(make()), observe(2)
    latents = policy.act(observation, generator()).latents
    changed = latents["tokens"].clone()
    together = latents["order"][0] == latents["order"][0, 0]
    changed[0, 0] = (changed[0, 0] + 1) % 5
    before = policy.log_prob(observation, latents).logp
    after = policy.log_prob(observation, {**latents, "tokens": changed}).logp
    together[0] = False
    later = latents["order"][0] > latents["order"][0, 0]
    assert torch.equal(before[0, together], after[0, together]) and torch.equal(before[1], after[1])
    assert not later.any() or (before[0, later] - after[0, later]).abs().max() > 1e-5


def test_chosen_units_and_executed_steps_are_scored_alone():
    policy, observation = disturb(make()), observe(2)
    latents = policy.act(observation, generator()).latents
    whole = policy.log_prob(observation, latents)
    chosen = torch.tensor([[5, 0], [2, 2]])
    part = policy.log_prob(observation, {**latents, "chosen": chosen})
    assert torch.equal(part.logp, whole.logp.gather(1, chosen))
    assert part.extras["log_probabilities"].shape == (2, 2, 5)
    executed = torch.tensor([[True, True, False], [True, True, True]])
    cut = policy.log_prob(observation, {**latents, "executed": executed})
    assert torch.equal(cut.logp[0, :4], whole.logp[0, :4]) and not cut.logp[0, 4:].any()
    assert torch.equal(cut.logp[1], whole.logp[1]) and torch.equal(cut.entropy[1], whole.entropy[1])


def test_loss_bounds_the_likelihood_in_random_order():
    """For K = 2 its expectation times K is -log p averaged over both orders, computed here by scoring them."""
    policy = disturb(make(chunk=1, decode_steps=2))
    tokens = torch.tensor([[3, 1]])
    batch = demonstrations(policy, tokens.expand(8000, 2))
    with torch.no_grad():
        mean = policy.loss(batch, generator())["tokens"].mean().item()
        scores = [
            policy.log_prob(demonstrations(policy, tokens)["observation"], {"tokens": tokens, "order": order}).logp
            for order in (torch.tensor([[0, 1]]), torch.tensor([[1, 0]]))
        ]
    expected = -torch.stack(scores).sum(-1).mean().item()
    assert 2 * mean == pytest.approx(expected, abs=0.05)


def test_padding_is_neither_learned_nor_learned_from():
    policy = disturb(make())
    batch = demonstrations(policy, torch.randint(0, 5, (64, 6), generator=generator()))
    batch["action_valid"][:, 1:] = False
    loss = policy.loss(batch, generator(1))["tokens"]
    batch["actions"][:, 1:] *= -1
    assert torch.equal(policy.loss(batch, generator(1))["tokens"], loss)
    assert (loss > 0).all(), "at least one token is masked"


PATTERN = torch.tensor([[a, 4 - a, a, a] for a in range(5)])


def learned(steps: int = 300, **changes: Any) -> TokenPolicy:
    """A policy trained on five equally likely chunks, in which the first token decides about all."""
    policy = make(chunk=2, **changes)
    batch = demonstrations(policy, PATTERN.repeat(8, 1))
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    draws = generator(1)
    for _ in range(steps):
        optimiser.zero_grad()
        policy.loss(batch, draws)["tokens"].mean().backward()
        optimiser.step()
    return policy


def sampled(policy: TokenPolicy, rows: int = 500) -> Tensor:
    return policy.act(demonstrations(policy, PATTERN[:1].expand(rows, 4))["observation"], generator(2)).latents[
        "tokens"
    ]


@pytest.mark.long
def test_it_learns_chunks_of_several_modes():
    """One token at a time every sample is a demonstrated chunk; all at once the tokens know nothing of each other."""
    policy = learned(decode_steps=4)
    tokens = sampled(policy)
    known = (tokens[:, None] == PATTERN).all(-1)
    assert known.any(-1).float().mean() > 0.95
    assert known.any(0).all(), "a mode is missing"
    latents = {"tokens": PATTERN, "order": torch.arange(4).expand(5, 4)}
    scores = policy.log_prob(demonstrations(policy, PATTERN)["observation"], latents)
    first = scores.logp[:, 0].exp()
    assert (first - 0.2).abs().max() < 0.1 and (scores.logp[:, 1:].exp() > 0.9).all()
    blind = make(chunk=2, decode_steps=1)
    blind.load_state_dict(policy.state_dict())
    assert (sampled(blind)[:, None] == PATTERN).all(-1).any(-1).float().mean() < 0.3


@pytest.mark.long
@pytest.mark.parametrize("schedule", DecodeSchedule)
def test_policy_gradients_on_its_scores_raise_reward(schedule: DecodeSchedule):
    """A bandit paying for chunks whose tokens agree with their neighbours and are large; advantages as in GRPO."""
    policy = make(chunk=2, decode_steps=2, decode_schedule=schedule)
    observation = demonstrations(policy, PATTERN[:1].expand(64, 4))["observation"]
    optimiser = torch.optim.Adam(policy.parameters(), lr=2e-3)
    draws, rewards = generator(1), []
    for _ in range(60):
        latents = policy.act(observation, draws).latents
        tokens = latents["tokens"].float()
        reward = tokens.mean(-1) / 4 - 0.1 * tokens.diff(dim=-1).abs().mean(-1)
        rewards.append(reward.mean().item())
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        optimiser.zero_grad()
        (-(policy.log_prob(observation, latents).logp * advantage[:, None]).sum(-1).mean()).backward()
        optimiser.step()
    assert rewards[-1] > 0.9 > 0.5 > rewards[0]


def test_checkpoints_round_trip(tmp_path: Path):
    policy, observation = disturb(make(decode_schedule=DecodeSchedule.ASCENDING)), observe()
    policy.prepare_finetuning()
    policy.add_lora(2)
    assert not decoding(policy).mask.requires_grad
    policy.save(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert isinstance(loaded, TokenPolicy) and loaded.config == policy.config
    first, second = policy.act(observation, generator()), loaded.act(observation, generator())
    assert torch.equal(first.logp, second.logp) and torch.equal(first.latents["order"], second.latents["order"])


def test_causal_decoding_has_no_order_and_no_weights_of_its_own():
    policy, observation = make(**CAUSAL), observe()
    assert set(policy.act(observation, generator()).latents) == {"tokens"}
    assert not list(policy.decoding.parameters())
    assert {name for name in make().state_dict() if name not in policy.state_dict()} == {
        "decoding.mask",
        "decoding.position.weight",
    }


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match=r"decode_steps=0"):
        make(decode_steps=0)
    with pytest.raises(ConfigError, match=r"decode_steps to 1 \.\. 6.*decode_schedule=ascending"):
        make(decode_steps=7)
    make(decode_steps=7, decode_schedule=DecodeSchedule.ASCENDING)
    make(decode_steps=7, **CAUSAL)


def test_units_of_another_way_of_decoding_are_refused():
    policy, observation = make(), observe()
    latents = policy.act(observation, generator()).latents
    with pytest.raises(SpecError, match="'order'"):
        policy.log_prob(observation, {"tokens": latents["tokens"]})
    with pytest.raises(SpecError, match=r"the pass \(of 3\)"):
        policy.log_prob(observation, {**latents, "order": latents["order"] + 1})


def test_backbones_that_are_causal_by_nature_are_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 8}
    bloom = LanguageModel(transformers.BloomModel(transformers.BloomConfig(n_head=2, **sizes)))
    with pytest.raises(ConfigError, match=r"BloomModel.*decoding=causal"):
        bloom.require_attend("policy.token.decoding=masked")
    recurrent = LanguageModel(transformers.MambaModel(transformers.MambaConfig(**sizes)))
    with pytest.raises(ConfigError, match="MambaModel"):
        recurrent.require_attend("policy.token.decoding=masked")
    gpt = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=8)
    LanguageModel(transformers.GPT2Model(gpt)).require_attend("policy.token.decoding=masked")


@pytest.mark.parametrize("kind", ["Mistral", "Gemma3"])
def test_a_window_is_seen_through_until_it_is_outgrown_and_then_refused(kind: str):
    """Against the same weights without a window; what has forgotten its prompt says so, not that tensors do not fit."""
    transformers = pytest.importorskip("transformers")
    made = {"Mistral": (transformers.MistralConfig, transformers.MistralModel)}
    made["Gemma3"] = (transformers.Gemma3TextConfig, transformers.Gemma3TextModel)
    sizes = {
        "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "Gemma3":
        sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    config, network = made[kind]
    torch.manual_seed(0)
    wide = LanguageModel(network(config(sliding_window=512, **sizes)))
    narrow = LanguageModel(network(config(sliding_window=8, **sizes)))
    narrow.load_state_dict(wide.state_dict())
    narrow.require_attend("policy.token.decoding=masked")  # whose prompt is one token
    for length, fits in ((3, True), (4, True), (5, False), (9, False)):
        tokens = torch.arange(1, length + 1)[None] % 8
        text, embedded = torch.ones_like(tokens).bool(), torch.randn(1, 3, 16, generator=generator())
        readings = [model.read(tokens, text, torch.zeros(2, dtype=torch.int64)) for model in (wide, narrow)]
        embedded = embedded.expand(2, -1, -1)
        expected = wide.attend(readings[0], embedded)
        if fits:
            for _ in range(2):  # nothing of the first pass is left in the second
                assert torch.allclose(narrow.attend(readings[1], embedded), expected, atol=1e-6)
            continue
        with pytest.raises(ConfigError, match=rf"has {length + 3} tokens.*smaller than 8.*decoding=causal"):
            narrow.attend(readings[1], embedded)
