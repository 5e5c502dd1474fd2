"""A token policy answers questions after its own chunks: exact log-probabilities, learned in the same update."""

from dataclasses import replace

import pytest
import torch
from seeing_toys import SeeingWorld, denoising_policy, token_policy

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import AnswersInTokens, to_tensors
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE, Field
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.policies.token.configuration import TokenDecoding
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

CONFIG = FinetuneConfig(
    algorithm="grpo", iterations=2, groups=4, group_size=4, epochs=1, minibatch=64, evaluate_every=0,
    learning_rate=3e-3, auxiliaries=("self_verification",),
)  # fmt: skip


class NamedWorld(SeeingWorld):
    """The same, whose elements have names."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size)
        fields = {**self.spec.observation, STATE: Field((2,), names=("x", "y"))}
        self.spec = replace(self.spec, observation=fields)


def parallel(world) -> TokenPolicy:
    token = TokenConfig(width=8, depth=1, heads=2, feed_forward=8, bins=5, decoding=TokenDecoding.PARALLEL)
    config = TokenPolicyConfig(chunk=1, observation_keys=(STATE,), token=token)
    spec = world.spec
    return TokenPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)


@pytest.mark.checks("auxiliaries/self_verification", "auxiliaries/predict_changes", "RISE", "CodeRL+")
def test_answers_are_said_by_the_policys_own_head_after_the_chunk():
    """The first place after a chunk of K tokens is scored as token K + 1 of a longer chunk would be, token by token."""
    world = SeeingWorld(6)
    policy = token_policy(world)
    observation = to_tensors(world.reset(seeds=range(6)))
    decision = policy.act(observation, torch.Generator().manual_seed(0))
    answers = torch.tensor([[0, 4, 2]]).expand(6, -1)
    logp = policy.answer_log_probs(observation, decision.latents, answers)
    assert logp.shape == (6, 3, 5)
    torch.testing.assert_close(logp.exp().sum(-1), torch.ones(6, 3))
    language, prompt = policy._action_language, policy._prompt(observation)
    hidden = policy.language.extend(prompt.reading, prompt.observation)
    for token in decision.latents["tokens"].unbind(1):
        hidden = policy.language.extend(prompt.reading, policy.action_embedding(token)[:, None])
    for place, token in enumerate(answers.unbind(1)):
        torch.testing.assert_close(logp[:, place], language.log_probabilities(hidden[:, -1]), atol=1e-5, rtol=1e-5)
        hidden = policy.language.extend(prompt.reading, policy.action_embedding(token)[:, None])
    other = policy.answer_log_probs(observation, {"tokens": 4 - decision.latents["tokens"]}, answers)
    assert not torch.allclose(logp, other), "they depend on the chunk"
    assert isinstance(policy, AnswersInTokens) and policy.answers_in_tokens


@pytest.mark.checks("RISE", "CodeRL+")
def test_policies_that_cannot_go_on_are_refused():
    world = NamedWorld(8)
    with pytest.raises(ConfigError, match="decoding=causal"):
        parallel(world).answer_log_probs({}, {}, torch.zeros(1, 1))
    for policy in (parallel(world), denoising_policy(world)):
        policy.prepare_finetuning()
        with pytest.raises(ConfigError, match="self_verification needs"):
            finetune(policy, None, world, CONFIG)


@pytest.mark.long
@pytest.mark.checks("auxiliaries/self_verification", "RISE")
def test_verdicts_and_actions_learn_in_one_update(tmp_path):
    """By chance a fifth of five tokens is right; a bandit's outcome depends on what it sees and does."""
    world = SeeingWorld(16)
    policy = token_policy(world)
    policy.prepare_finetuning()
    options = {"self_verification": {"weight": 1.0, "share": 1.0}}
    config = replace(CONFIG, iterations=25, groups=16, epochs=2, actor_warmup=1, options=options, target_kl=None)
    finetune(policy, None, world, config, RunFolder(tmp_path))
    records = RunFolder(tmp_path).metrics()[1:]
    accuracy = [record["verdict_accuracy"] for record in records]
    assert accuracy[0] < 0.4 and sum(accuracy[-3:]) / 3 > accuracy[0] + 0.2, accuracy
    assert all("self_verification" in record and record["gradient_norm"] > 0 for record in records)


@pytest.mark.long
@pytest.mark.checks("auxiliaries/predict_changes", "models/changes", "CodeRL+")
def test_changes_are_predicted_and_survive_a_checkpoint(tmp_path):
    world = NamedWorld(8)
    config = replace(
        CONFIG, models=("changes",), auxiliaries=("predict_changes",), checkpoint_every=1,
        options={"changes": {"elements": ("x",), "levels": 5}},
    )  # fmt: skip
    finals = []
    for name, stops in (("whole", (4,)), ("stopped", (2, 4))):
        for stop in stops:
            policy = token_policy(world)
            policy.prepare_finetuning()
            finetune(policy, None, NamedWorld(8), replace(config, iterations=stop), RunFolder(tmp_path / name))
        finals.append(policy)
        assert all(0 <= each["change_accuracy"] <= 1 for each in RunFolder(tmp_path / name).metrics()[1:])
    for one, other in zip(*(each.parameters() for each in finals), strict=True):
        assert torch.equal(one, other)
