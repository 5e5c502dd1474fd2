"""Policy with memory: a causal transformer over the last H control steps decides, in trials of several episodes.

Its memory is its history: a window of the last H frames, which the world, the recorded episodes and the policy server
keep per episode, and begin anew with it. In a world with trials (`core.trials`) one window spans the episodes of a
trial, and `observation.trial` tells it what it did and earned. Every element of an action is one categorical choice
between bins, so log-probabilities are exact. After ReLIC, arXiv:2410.02751; here the window is read anew at every
decision instead of from cached keys and values, so that nothing in it is out of date and decisions can be shuffled.
Axes: N row, H frame, C chunk step, A action dimension, K = C * A choices, V bins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.policy import Decision, Scores, TensorObservation
from robopolicy.core.randomness import uniform
from robopolicy.core.spec import IMAGE_PREFIX, Field, PolicySpec, check_finite, validate_observation
from robopolicy.core.world import Rows
from robopolicy.nn.encoders import FieldReader
from robopolicy.nn.memory import Memory
from robopolicy.nn.normalizer import ACTION, Normalizer, fit_normalizers
from robopolicy.nn.tokens import BinTokenizer
from robopolicy.policies.checkpoint import save_policy
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.interface import check_chunks, in_range, instructions_or_default, register_range, select_fields
from robopolicy.policies.steps import probed_actions


class MemoryPolicy(nn.Module):
    """A `core.policy.Trainable` that reads a window of vectors; see the module.

    config, observation, action, fps, instructions, values, seed: as in `TokenPolicy`. Raises ConfigError when
    config.observation_keys names an unknown field or a camera, or actions are not vectors.
    """

    action_low: Tensor
    action_high: Tensor

    def __init__(
        self,
        config: MemoryPolicyConfig,
        observation: Mapping[str, Field],
        action: Field,
        *,
        fps: float,
        instructions: tuple[str, ...] = ("",),
        values: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.config, self.action = config, action
        self.fps = fps
        self.instructions = tuple(instructions)
        self.fields = select_fields(config.observation_keys, observation)
        images = [key for key in self.fields if key.startswith(IMAGE_PREFIX)]
        if images or len(action.shape) != 1:
            raise ConfigError(
                f"policy.kind=memory reads and decides vectors, not {', '.join(images) or list(action.shape)}: set "
                "policy.observation_keys to fields that are vectors."
            )
        self.action_normalizer = Normalizer(action.shape, config.action_normalization)
        self.bins = BinTokenizer(config.chunk, action.size, config.bins)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.reader = FieldReader(self.fields, config.state_normalization, 10.0, 0)
            inputs = sum(field.size for field in self.fields.values()) + len(self.instructions)
            self.memory = Memory(inputs, config.width, config.depth, config.heads, config.sink)
            self.head = nn.Linear(config.width, self.bins.length * config.bins)
            with torch.no_grad():
                self.head.weight.mul_(0.1)
                self.head.bias.zero_()
        self.finetuning: dict[str, Any] | None = None
        register_range(self, action)
        if values is not None:
            self.fit_normalizers(values)

    @property
    def spec(self) -> PolicySpec:
        """Inputs and outputs; the scored steps are the K choices of a chunk."""
        return PolicySpec(
            observation=self.fields,
            action=self.action,
            history=self.config.history,
            chunk=self.config.chunk,
            prediction=self.config.chunk,
            scored_steps=self.bins.length,
            fps=self.fps,
            instructions=self.instructions,
            categorical=True,
            steps_per_action=self.bins.steps_per_action,
        )

    @property
    def reads_instructions(self) -> bool:
        """Whether actions depend on the instruction."""
        return len(self.instructions) > 1

    def _log_probabilities(self, observation: TensorObservation) -> Tensor:
        """Return the log-probabilities of all choices, [N, K, V]."""
        validate_observation(observation, self.fields, history=self.config.history)
        rows = len(observation[next(iter(self.fields))])
        frames: list[Tensor] = []
        for key in self.fields:
            value = observation[key]
            assert isinstance(value, Tensor)
            frames.append(self.reader.vector(key, value).reshape(rows, self.config.history, -1))
        texts = instructions_or_default(observation, rows, self.instructions)
        if others := sorted(set(texts) - set(self.instructions)):
            raise SpecError(f"The policy was not trained on the instruction '{others[0]}'.")
        index = torch.tensor([self.instructions.index(text) for text in texts], device=frames[0].device)
        task = functional.one_hot(index, len(self.instructions)).float()
        frames.append(task[:, None].expand(-1, self.config.history, -1))
        summary = self.memory(torch.cat(frames, -1))
        return self.head(summary).reshape(rows, self.bins.length, -1).float().log_softmax(-1)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return a `Decision` with latents "tokens" [B, K] int64; deterministic: the most likely bins, mask False.

        Raises SpecError or NonFiniteError on an invalid observation.
        """
        scores = self._log_probabilities(observation)
        check_finite("log-probabilities of actions", scores)
        draws = uniform(scores.shape[:2], generator, scores.device)
        samples = (scores.exp().cumsum(-1) < draws[..., None]).sum(-1).clamp_max(self.config.bins - 1)
        tokens = scores.argmax(-1) if deterministic else samples
        logp = scores.gather(-1, tokens[..., None]).squeeze(-1)
        mask = torch.zeros_like(logp, dtype=torch.bool) if deterministic else torch.ones_like(logp, dtype=torch.bool)
        actions = in_range(self._actions(tokens), self.action_low, self.action_high)
        return Decision(actions, {"tokens": tokens}, torch.where(mask, logp, 0.0), mask)

    def _actions(self, tokens: Tensor) -> Tensor:
        """Return actions [N, C, A] in world units for tokens [N, K]."""
        return self.action_normalizer.inverse(self.bins.decode(tokens))

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities and entropies [N, K] of tokens [N, K] from `act`; see `core.policy.ScoredPolicy`.

        extras: log_probabilities [N, K, V]. Raises SpecError if tokens or observation have wrong shapes.
        """
        tokens = latents["tokens"]
        if tuple(tokens.shape[1:]) != (self.bins.length,):
            raise SpecError(f"The tokens have shape {list(tokens.shape)}, not [N, {self.bins.length}].")
        scores = self._log_probabilities(observation)
        logp = scores.gather(-1, tokens[..., None]).squeeze(-1)
        entropy = -(scores.exp() * scores).sum(-1)
        if "executed" in latents:
            executed = latents["executed"].repeat_interleave(self.bins.steps_per_action, dim=1)
            logp, entropy = logp * executed, entropy * executed
        if "chosen" in latents:
            index = latents["chosen"]
            logp, entropy = logp.gather(1, index), entropy.gather(1, index)
            scores = scores.gather(1, index[..., None].expand(-1, -1, scores.shape[-1]))
        return Scores(logp, entropy, {"log_probabilities": scores})

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents of chunks [N, C, A] in world units; see `core.policy.RecoversLatents`."""
        return {"tokens": self.bins.encode(self.action_normalizer(actions.float()))}

    def describe_steps(self) -> dict[str, Any]:
        """Implement `core.steps.DescribesSteps.describe_steps`."""
        return {
            "kind": "tokens, bins",
            "vocabulary": self.config.bins,
            "executed steps": self.config.chunk,
            **probed_actions(self.action_normalizer.inverse, self.action.size, self.action_low.device),
        }

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"tokens": [N]}, the mean cross entropy of demonstrated bins; see `core.policy.Trainable`."""
        actions, valid = check_chunks(batch, self.config.chunk, self.action.size)
        tokens = self.bins.encode(self.action_normalizer(actions.float()))
        logp = self._log_probabilities(batch["observation"]).gather(-1, tokens[..., None]).squeeze(-1)
        weights = valid.repeat_interleave(self.bins.steps_per_action, dim=1).float()
        return {"tokens": -(logp * weights).sum(-1) / weights.sum(-1).clamp_min(1.0)}

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers by observation key, and the action normaliser under "action"."""
        return {ACTION: self.action_normalizer, **{key: self.reader.normalizer(key) for key in self.fields}}

    def fit_normalizers(self, values: Mapping[str, Tensor]) -> None:
        """Fit every normaliser on data: values by observation key [samples, *shape] and "action" [samples, A]."""
        fit_normalizers(self.normalizers(), values)

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare for policy gradients, which train all K choices and all weights; there is no separate encoder.

        Raises ConfigError for another number of steps.
        """
        if steps not in (None, self.bins.length):
            raise ConfigError(f"A memory policy is fine-tuned in all of its {self.bins.length} choices, not {steps}.")

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Weights that an optimiser may change."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def reset(self, rows: Rows = None) -> None:
        """Do nothing: the memory of rows [R] is their window of observations, which begins anew with an episode."""

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors atomically."""
        save_policy(self, folder)
