"""Experimental questions that a token policy answers about its own chunks, in tokens of its own vocabulary after those
of the chunk: did the episode succeed (RISE, SPARK), and what did the chunk change (CodeRL+)?

Answers are drawn anew for every minibatch from the present policy, and trained in the same update by their reward, as
in GRPO: a question's answers are a group. Chunks of actions never reach the places behind them, so a question needs no
words; a policy is asked one kind of question only.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.policy import AnswersInTokens, TensorObservation
from robopolicy.core.randomness import choice_at, uniform
from robopolicy.core.rollouts import Rollouts, tensor_of
from robopolicy.core.spec import elements_of
from robopolicy.rl.context import AuxiliaryInputs, Context, Tools, score_extra
from robopolicy.rl.registry import Need, Slot, mechanism


def draw_answers(
    policy: AnswersInTokens, observation: TensorObservation, latents: Mapping[str, Tensor], draws: Tensor
) -> Tensor:
    """Return answers of L tokens [N, L] to each of N chunks, drawn one after another by uniform numbers [N, L]."""
    answers = torch.zeros_like(draws, dtype=torch.int64)
    with torch.no_grad():
        for place in range(draws.shape[1]):
            logp = policy.answer_log_probs(observation, latents, answers[:, : place + 1])[:, place]
            answers[:, place] = choice_at(logp, draws[:, place])
    return answers


def question_loss(
    inputs: AuxiliaryInputs,
    askable: Tensor,
    reward_of: Callable[[Tensor, Tensor], Tensor],
    *,
    length: int,
    share: float,
    answers: int,
) -> Tensor:
    """Return -L / K mean(A mean log p) over answers [m, G, L] to each of the m chunks that are asked, a scalar.

    askable: [n] bool; at most share * n of them are asked, drawn at random. reward_of: (answers, chunks that are asked
    [m]) -> rewards [m, G], with G = `answers`. A: standardised over the answers to a question, as in GRPO. K: mean
    number of tokens of a chunk. Both papers take the mean over all tokens of a batch, so a token of an answer weighs as
    much as one of a chunk, and their answers are about as long as what they judge. In a mean over answers alone, those
    of a single token would push as hard as whole chunks, and the policy unlearns to act.
    """
    policy = cast(AnswersInTokens, inputs.policy)  # which Need.FURTHER_TOKENS asks for
    draws, count = inputs.context.generator, len(askable)
    order = uniform((count,), draws, askable.device).masked_fill(~askable, 2.0)
    numbers = uniform((count, answers, length), draws, askable.device)
    chunks = order.argsort()[: min(int(askable.sum()), max(1, round(share * count)))]
    if not len(chunks):
        return inputs.scores.logp.sum() * 0.0
    index = chunks.repeat_interleave(answers)
    observation: TensorObservation = {
        key: value[index] if isinstance(value, Tensor) else [value[place] for place in integers(index)]
        for key, value in inputs.observation.items()
    }
    latents = {name: value[index] for name, value in inputs.latents.items()}
    tokens = draw_answers(policy, observation, latents, numbers[chunks].flatten(0, 1))
    logp = policy.answer_log_probs(observation, latents, tokens).gather(-1, tokens[..., None]).squeeze(-1).mean(-1)
    reward = reward_of(tokens.reshape(len(chunks), answers, length), chunks)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, unbiased=False, keepdim=True) + 1e-6)
    chunk_tokens = inputs.mask.sum() / count
    return -length / chunk_tokens.clamp(min=1) * (advantage * logp.reshape(advantage.shape)).mean()


def verdict_reward(verdict: Tensor, success: Tensor, vocabulary: int) -> Tensor:
    """Return 1 for a right verdict, -.5 for a wrong one and -1 for a token that is none, [...], as in RISE.

    verdict: tokens [...]; success: [...] bool. Of the vocabulary the last token says success, and the first failure.
    """
    is_verdict = (verdict == 0) | (verdict == vocabulary - 1)
    right = (verdict == vocabulary - 1) == success
    return torch.where(is_verdict, torch.where(right, 1.0, -0.5), -1.0)


@mechanism(
    Slot.AUXILIARY,
    "self_verification",
    source="RISE, arXiv:2505.13445; SPARK, arXiv:2509.22624",
    needs=(Need.CATEGORICAL, Need.FURTHER_TOKENS, Need.OUTCOMES, Need.WHOLE_MINIBATCHES),
)
def self_verification(
    inputs: AuxiliaryInputs, *, weight: float = 0.125, share: float = 0.125, answers: int = 8
) -> Tensor:
    """The policy says after an episode's last chunk whether the episode succeeded, and is paid for being right.

    One token of the policy's own head is the verdict: `verdict_reward` of answers [m, G]. share: at most this fraction
    of a minibatch's chunks is asked, as in RISE (128 of 1024). The papers' verdicts follow words of a critique, and
    RISE's baseline is a critic. Adds the figure verdict_accuracy. Returns a scalar.
    """
    outcome = inputs.extras["outcome"]
    vocabulary = score_extra(inputs.scores, "log_probabilities").shape[-1]

    def reward(tokens: Tensor, chunks: Tensor) -> Tensor:
        rewards = verdict_reward(tokens[..., 0], (outcome[chunks] == 1)[:, None], vocabulary)
        inputs.context.figures["verdict_accuracy"] = float((rewards == 1).float().mean())
        return rewards

    return weight * question_loss(inputs, outcome >= 0, reward, length=1, share=share, answers=answers)


def bins_of(change: Tensor, spread: Tensor, levels: int) -> Tensor:
    """Return the bins of changes [..., E], [..., E] int64: `levels` bins, each half a standard deviation `spread` [E]
    wide, the middle one around 0.
    """
    return (change / spread * 2).round().clamp(-(levels // 2), levels // 2).long() + levels // 2


@mechanism(Slot.MODEL, "changes", source="CodeRL+, arXiv:2510.18471", gives=(Need.CHANGES,))
class Changes:
    """Records how much every chunk changed some elements of the observation, in bins half a standard deviation wide.

    elements: their names, such as [cube_x,cube_y]; levels: number of bins, odd. Adds extras["change"] [B, T, E] int64.
    The standard deviations are those of the first iteration. Raises ConfigError for unknown elements and even levels.
    """

    def __init__(self, tools: Tools, *, elements: tuple[str, ...] = (), levels: int = 9):
        names = elements_of(tools.fields)
        if not elements:
            raise ConfigError(
                "models=[changes] needs the elements of the observation that the policy is to predict: set "
                "options.changes.elements, such as [cube_x,cube_y]."
            )
        for name in elements:
            if name not in names:
                raise ConfigError(f"options.changes.elements: no element is named '{name}'.{did_you_mean(name, names)}")
        if levels < 3 or levels % 2 == 0:
            raise ConfigError(f"options.changes.levels={levels} must be an odd number from 3.")
        self.places, self.levels = [names[name] for name in elements], levels
        self.spread: Tensor | None = None

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Add the bins."""
        sides = (rollouts.observation, rollouts.next_observation)
        before, after = (
            torch.stack([tensor_of(side, key)[:, :, -1, index] for key, index in self.places], -1) for side in sides
        )
        change = after - before
        if self.spread is None:
            self.spread = change[rollouts.alive].std(0, unbiased=False).clamp(min=1e-6)
        return rollouts.with_extras(change=bins_of(change, self.spread, self.levels))

    def tree(self) -> dict[str, Any]:
        """Return the standard deviations."""
        return {} if self.spread is None else {"spread": self.spread}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.spread = tree.get("spread")


@mechanism(
    Slot.AUXILIARY,
    "predict_changes",
    source="CodeRL+, arXiv:2510.18471",
    needs=(Need.CATEGORICAL, Need.FURTHER_TOKENS, Need.CHANGES, Need.WHOLE_MINIBATCHES),
)
def predict_changes(
    inputs: AuxiliaryInputs, *, weight: float = 0.67, share: float = 0.4, answers: int = 8, exact: bool = True
) -> Tensor:
    """The policy says after a chunk what it will change, one token for each element of models=[changes], and is paid 1
    if all are right.

    The tokens are the first ones of its vocabulary, one for each bin. share, weight: the paper asks in 40 % of a batch;
    .4 / .6 where the loss of the rest has the weight 1. It asks about a buffer of recent programs, here about the
    chunks of the minibatch. exact: false pays the share of right elements, for policies that never answered and are
    hardly ever right in all. Adds the figure change_accuracy, the mean reward. Returns a scalar.
    """
    change = inputs.extras["change"]

    def reward(tokens: Tensor, chunks: Tensor) -> Tensor:
        right = tokens == change[chunks][:, None]
        rewards = right.all(-1).float() if exact else right.float().mean(-1)
        inputs.context.figures["change_accuracy"] = float(rewards.mean())
        return rewards

    everywhere = torch.ones(len(change), dtype=torch.bool, device=change.device)
    return weight * question_loss(inputs, everywhere, reward, length=change.shape[-1], share=share, answers=answers)
