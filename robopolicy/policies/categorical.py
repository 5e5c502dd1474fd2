"""Base class of policies whose action chunks are K categorical choices between V tokens.

Axes: N row, C control step of a chunk, A action dimension, K choice, V token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.policy import Decision, Scores
from robopolicy.core.spec import Field, PolicySpec
from robopolicy.core.world import Rows
from robopolicy.nn.normalizer import Normalizer, fit_normalizers
from robopolicy.nn.tokens import BinTokenizer, FrequencyTokenizer
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.interface import in_range
from robopolicy.policies.token.configuration import TokenPolicyConfig


class CategoricalPolicy[
    Config: TokenPolicyConfig | MemoryPolicyConfig,
    Tokens: BinTokenizer | FrequencyTokenizer,
](nn.Module):
    """Base class: spec, normalisers, and what follows from the log-probabilities of all choices.

    A subclass sets these attributes and implements `normalizers`, `act` and `log_prob`.
    """

    memoryless = True

    config: Config
    fields: dict[str, Field]
    action: Field
    fps: float
    instructions: tuple[str, ...]
    action_tokens: Tokens
    action_normalizer: Normalizer
    finetuning: dict[str, Any] | None
    action_low: Tensor
    action_high: Tensor

    @property
    def spec(self) -> PolicySpec:
        """Inputs and outputs; the scored steps are the K choices of a chunk."""
        return PolicySpec(
            observation=self.fields,
            action=self.action,
            history=self.config.history,
            chunk=self.config.chunk,
            prediction=self.config.chunk,
            scored_steps=self.action_tokens.length,
            fps=self.fps,
            instructions=self.instructions,
            categorical=True,
            steps_per_action=self.action_tokens.steps_per_action,
        )

    def decided(self, latents: dict[str, Tensor], logp: Tensor, mask: Tensor) -> Decision:
        """Decode tokens [N, K] to actions [N, C, A] within the world's bounds; logp [N, K] of tokens that were not
        sampled (mask False) is 0.
        """
        actions = self.action_normalizer.inverse(self.action_tokens.decode(latents["tokens"]))
        actions = in_range(actions, self.action_low, self.action_high)
        return Decision(actions, latents, torch.where(mask, logp, 0.0), mask)

    def require_tokens(self, tokens: Tensor) -> None:
        """Raise SpecError unless tokens have the shape [N, K]."""
        if tuple(tokens.shape[1:]) != (self.action_tokens.length,):
            raise SpecError(
                f"The tokens have shape {list(tokens.shape)}, but this policy's tokens have [N, "
                f"{self.action_tokens.length}]."
            )

    def scored(self, log_probabilities: Tensor, latents: Mapping[str, Tensor]) -> Scores:
        """Return logp and entropy [N, K] of latents["tokens"] [N, K], given the log-probabilities [N, K, V] of all.

        "chosen" [N, k] int64 selects k of the K tokens per row; "executed" [N, C] bool: tokens of control steps that
        were not executed have logp 0 (with frequencies every token affects every step, and all count).
        """
        logp = log_probabilities.gather(-1, latents["tokens"][..., None]).squeeze(-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        if "executed" in latents and self.action_tokens.steps_per_action:
            token_mask = latents["executed"].repeat_interleave(self.action_tokens.steps_per_action, dim=1)
            logp, entropy = logp * token_mask, entropy * token_mask
        if "chosen" in latents:
            indices = latents["chosen"]
            logp, entropy = logp.gather(1, indices), entropy.gather(1, indices)
            log_probabilities = log_probabilities.gather(
                1, indices[..., None].expand(-1, -1, log_probabilities.shape[-1])
            )
        return Scores(logp, entropy, {"log_probabilities": log_probabilities})

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers by observation key, and the action normaliser under "action".

        Raises NotImplementedError in this base class.
        """
        raise NotImplementedError

    def fit_normalizers(self, values: Mapping[str, Tensor]) -> None:
        """Fit every normaliser on data: values by observation key [samples, *shape] and "action" [samples, A].

        Raises ConfigError when a key is missing or fine-tuning has started.
        """
        if self.finetuning is not None:
            raise ConfigError("The normalisers are fixed after fine-tuning has started: fit them before pre-training.")
        fit_normalizers(self.normalizers(), values)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Weights that an optimiser may change."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; no row [R] has state between policy calls."""
