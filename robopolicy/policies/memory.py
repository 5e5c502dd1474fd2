"""Policy with memory: a causal transformer over the last H control steps decides, in trials of several episodes.

Its memory is its history: a window of the last H frames, which the world, the recorded episodes and the policy server
keep per episode, and begin anew with it. In a world with trials (`core.trials`) one window spans the episodes of a
trial, and `observation.trial` tells it what it did and earned. Every element of an action is one categorical choice
between bins, so log-probabilities are exact. After ReLIC, arXiv:2410.02751: acting reads cached keys and values while
the window has room for its episode or trial, and is as slow as reading all of it anew once it has not. For learning
every decision reads its own window, so decisions can be shuffled.
Axes: N row, H frame, C chunk step, A action dimension, K = C * A choices, V bins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.policy import RECENT, Decision, Scores, TensorObservation
from robopolicy.core.randomness import uniform
from robopolicy.core.spec import IMAGE_PREFIX, Field, check_finite, validate_observation
from robopolicy.core.world import Rows
from robopolicy.nn.encoders import FieldReader
from robopolicy.nn.memory import Memory, MemoryCache
from robopolicy.nn.normalizer import ACTION, Normalizer
from robopolicy.nn.tokens import BinTokenizer
from robopolicy.policies.categorical import CategoricalPolicy
from robopolicy.policies.checkpoint import save_policy
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.interface import check_chunks, instructions_or_default, register_range, select_fields
from robopolicy.policies.steps import probed_actions


class MemoryPolicy(CategoricalPolicy[MemoryPolicyConfig, BinTokenizer]):
    """A `core.policy.Trainable` that reads a window of vectors; see the module.

    config, observation, action, fps, instructions, values, seed: as in `TokenPolicy`. Raises ConfigError when
    config.observation_keys names an unknown field or a camera, or actions are not vectors.
    """

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
        self.action_tokens = BinTokenizer(config.chunk, action.size, config.bins)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.reader = FieldReader(self.fields, config.state_normalization, 10.0, 0)
            inputs = sum(field.size for field in self.fields.values()) + len(self.instructions)
            sink = config.sink_variant if config.sink else None
            self.memory = Memory(inputs, config.width, config.depth, config.heads, sink)
            self.head = nn.Linear(config.width, self.action_tokens.length * config.bins)
            with torch.no_grad():
                self.head.weight.mul_(0.1)
                self.head.bias.zero_()
        self.cache = MemoryCache()
        self.finetuning: dict[str, Any] | None = None
        register_range(self, action)
        if values is not None:
            self.fit_normalizers(values)

    @property
    def reads_instructions(self) -> bool:
        """Whether actions depend on the instruction."""
        return len(self.instructions) > 1

    def reset(self, rows: Rows = None) -> None:
        """Forget all cached keys and values; those of `rows` [R] alone are left when other frames come."""
        if rows is None:
            self.cache.clear()

    def _frames(self, observation: TensorObservation) -> Tensor:
        """Return the windows that the transformer reads, [N, H, inputs]."""
        validate_observation(observation, self.fields, history=self.config.history)
        rows = len(observation[next(iter(self.fields))])
        frames: list[Tensor] = []
        for key in self.fields:
            value = observation[key]
            assert isinstance(value, Tensor)
            frames.append(self.reader.vector(key, value).reshape(rows, self.config.history, -1))
        texts = instructions_or_default(observation, rows, self.instructions)
        if unknown_texts := sorted(set(texts) - set(self.instructions)):
            raise SpecError(f"The policy was not trained on the instruction '{unknown_texts[0]}'.")
        index = torch.tensor([self.instructions.index(text) for text in texts], device=frames[0].device)
        task = functional.one_hot(index, len(self.instructions)).float()
        frames.append(task[:, None].expand(-1, self.config.history, -1))
        return torch.cat(frames, -1)

    def _log_probabilities(self, summary: Tensor) -> Tensor:
        """Return the log-probabilities of all choices, [N, K, V], for what is read of the windows, [N, W]."""
        return self.head(summary).reshape(len(summary), self.action_tokens.length, -1).float().log_softmax(-1)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return a `Decision` with latents "tokens" [B, K] and `RECENT` [B] int64; deterministic: the most likely bins,
        mask False.

        Raises SpecError or NonFiniteError on an invalid observation.
        """
        scores = self._log_probabilities(self.cache.read(self.memory, self._frames(observation)))
        check_finite("log-probabilities of actions", scores)
        draws = uniform(scores.shape[:2], generator, scores.device)
        samples = (scores.exp().cumsum(-1) < draws[..., None]).sum(-1).clamp_max(self.config.bins - 1)
        tokens = scores.argmax(-1) if deterministic else samples
        logp = scores.gather(-1, tokens[..., None]).squeeze(-1)
        mask = torch.zeros_like(logp, dtype=torch.bool) if deterministic else torch.ones_like(logp, dtype=torch.bool)
        return self.decided(self._latents(tokens), logp, mask)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities and entropies [N, K] of tokens [N, K] from `act`; see `core.policy.ScoredPolicy`.

        Gradients reach the newest `RECENT` [N] frames of each window. extras: log_probabilities [N, K, V]. Raises
        SpecError if tokens or observation have wrong shapes.
        """
        self.require_tokens(latents["tokens"])
        summary = self.memory(self._frames(observation), latents.get(RECENT))
        return self.scored(self._log_probabilities(summary), latents)

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents of chunks [N, C, A] in world units; see `core.policy.RecoversLatents`."""
        return self._latents(self.action_tokens.encode(self.action_normalizer(actions.float())))

    def _latents(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"tokens": tokens, RECENT: torch.full_like(tokens[:, 0], self.config.history)}

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
        tokens = self.action_tokens.encode(self.action_normalizer(actions.float()))
        scores = self._log_probabilities(self.memory(self._frames(batch["observation"])))
        logp = scores.gather(-1, tokens[..., None]).squeeze(-1)
        weights = valid.repeat_interleave(self.action_tokens.steps_per_action, dim=1).float()
        return {"tokens": -(logp * weights).sum(-1) / weights.sum(-1).clamp_min(1.0)}

    def normalizers(self) -> dict[str, Normalizer]:
        """Return the normalisers by observation key, and the action normaliser under "action"."""
        return {ACTION: self.action_normalizer, **{key: self.reader.normalizer(key) for key in self.fields}}

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Prepare for policy gradients, which train all K choices and all weights; there is no separate encoder.

        Raises ConfigError for another number of steps.
        """
        if steps not in (None, self.action_tokens.length):
            raise ConfigError(
                f"A memory policy is fine-tuned in all of its {self.action_tokens.length} choices, not {steps}."
            )

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors atomically."""
        save_policy(self, folder)
