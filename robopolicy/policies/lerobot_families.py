"""What differs between LeRobot's denoising policies: how one reads a batch, takes a step and draws training times.

Every family calls LeRobot's own modules, in the order of LeRobot's own `sample_actions`: the observation is read once,
and the keys and values that it leaves in every layer are the condition, so that steps are taken, and scored again,
without it. Axes: N row, P predicted step, L latent element, S prefix token, D size of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from robopolicy.policies.lerobot_configuration import LeRobotTuning
from robopolicy.policies.network import Condition

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy

KEYS, VALUES, MASK, STATE = (f"condition.{name}" for name in ("keys", "values", "mask", "state"))
TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"

Batch = Mapping[str, Any]
"""One frame of a history as LeRobot's preprocessor hands it over: key -> [N, ...]."""


class Family(Protocol):
    """A LeRobot policy taken apart.

    latent_size: L; first_step: predicted steps before the one that is executed first; reads_instructions: whether the
    condition depends on the instruction.
    """

    latent_size: int
    first_step: int
    reads_instructions: bool

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """Return what a `DenoisingPolicyConfig` says of its chunks and its chain."""
        ...

    def read(self, frames: Sequence[Batch]) -> Condition:
        """Return what the history's frames, oldest first, come to."""
        ...

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, L] of latents x [N, P, L] at times [N] in (0, 1], 1 is noise."""
        ...

    def denoising_modules(self) -> list[nn.Module]:
        """Return the modules that `denoise` uses and `read` does not."""
        ...

    def draw_times(self, count: int) -> Tensor:
        """Draw the times [count] at which LeRobot trains, from torch's global generator."""
        ...


class SmolVLA:
    """SmolVLA: the state is the last token of the prefix, and the expert sees the prefix in every layer."""

    reads_instructions = True
    first_step = 0

    def __init__(self, policy: "PreTrainedPolicy"):
        inner: Any = policy
        self.policy, self.model, self.config = inner, inner.model, inner.config
        self.latent_size: int = self.config.max_action_dim

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """See `Family`."""
        return _flow_chain(self.config, self.config.num_steps, tuning)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """See `Family`. Texts are padded to one length, so that conditions of all decisions can be stacked."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        batch = dict(frames[-1])
        images, image_masks = self.policy.prepare_images(batch)
        missing = self.config.tokenizer_max_length - batch[TOKENS].shape[1]
        tokens, mask = (nn.functional.pad(batch[name], (0, missing)) for name in (TOKENS, TOKEN_MASK))
        state = self.policy.prepare_state(batch)
        embedded, seen, order = self.model.embed_prefix(images, image_masks, tokens, mask.bool(), state=state)
        _, cache = self.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(seen, order),
            position_ids=seen.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return {**_stacked(cache), MASK: seen}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict velocities [N, P, L]; see `Family`."""
        return self.model.denoise_step(condition[MASK], _cache(condition), x, time)

    def denoising_modules(self) -> list[nn.Module]:
        """See `Family`."""
        model = self.model
        return [
            model.vlm_with_expert.lm_expert,
            model.action_in_proj,
            model.action_out_proj,
            model.action_time_mlp_in,
            model.action_time_mlp_out,
        ]

    def draw_times(self, count: int) -> Tensor:
        """Draw times [count]; see `Family`."""
        return self.model.sample_time(count, torch.device("cpu"))


class Pi:
    """pi0, whose state is the first token of the suffix, and pi05, whose state is part of the text."""

    reads_instructions = True
    first_step = 0

    def __init__(self, policy: "PreTrainedPolicy"):
        inner: Any = policy
        self.policy, self.model, self.config = inner, inner.model, inner.config
        self.latent_size: int = self.config.max_action_dim
        self.reads_state_apart = self.config.type == "pi0"

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """See `Family`."""
        return _flow_chain(self.config, self.config.num_inference_steps, tuning)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """See `Family`."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d

        batch, joint = frames[-1], self.model.paligemma_with_expert
        images, image_masks = self.policy._preprocess_images(batch)
        embedded, seen, order = self.model.embed_prefix(images, image_masks, batch[TOKENS], batch[TOKEN_MASK].bool())
        joint.paligemma.model.language_model.config._attn_implementation = "eager"
        _, cache = joint.forward(
            attention_mask=prepare_attention_masks_4d(make_att_2d_masks(seen, order)),
            position_ids=seen.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        state = {STATE: self.policy.prepare_state(batch)} if self.reads_state_apart else {}
        return {**_stacked(cache), MASK: seen, **state}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict velocities [N, P, L]; see `Family`."""
        state = (condition[STATE],) if self.reads_state_apart else ()
        return self.model.denoise_step(*state, condition[MASK], _cache(condition), x, time)

    def denoising_modules(self) -> list[nn.Module]:
        """See `Family`. The expert's head of words is never used."""
        model = self.model
        modules = [model.paligemma_with_expert.gemma_expert.model, model.action_in_proj, model.action_out_proj]
        if self.reads_state_apart:
            return [*modules, model.state_proj, model.action_time_mlp_in, model.action_time_mlp_out]
        return [*modules, model.time_mlp_in, model.time_mlp_out]

    def draw_times(self, count: int) -> Tensor:
        """Draw times [count]; see `Family`."""
        return self.model.sample_time(count, torch.device("cpu"))


FAMILIES: Mapping[str, Callable[["PreTrainedPolicy"], Family]] = {"smolvla": SmolVLA, "pi0": Pi, "pi05": Pi}
"""LeRobot's `type` -> what takes its policy apart."""


def why_not_trainable(policy: "PreTrainedPolicy") -> str:
    """Return why a LeRobot policy cannot be fine-tuned here, nothing where it can."""
    config: Any = policy.config
    if config.type not in FAMILIES:
        return (
            f"its steps have no probabilities here. Those that can be: {', '.join(FAMILIES)}. What it does can be "
            "recorded (collect.policy) and imitated by another policy."
        )
    if getattr(config, "adapt_to_pi_aloha", False):
        return "adapt_to_pi_aloha maps actions in a way that has no inverse here."
    if getattr(config, "use_relative_actions", False):
        return "with use_relative_actions its processors remember the last state, of one robot: set it to false."
    if not getattr(config, "use_cache", True):
        return "use_cache=false reads the observation again in every step: set it to true in config.json."
    return ""


def _flow_chain(config: Any, steps: int, tuning: LeRobotTuning) -> dict[str, Any]:
    level = tuning.flow_noise_level
    return {
        "history": config.n_obs_steps,
        "chunk": config.n_action_steps,
        "prediction_steps": config.chunk_size,
        "sampling_steps": steps,
        "finetuned_steps": steps,
        "flow_noise": tuning.flow_noise,
        "flow_noise_level": level,
        "flow_noise_bounds": (level, level),
        "clip": None,
    }


def _stacked(cache: Any) -> dict[str, Tensor]:
    """Return keys and values of all layers, [N, layers, heads, S, D] each."""
    return {
        KEYS: torch.stack([layer.keys for layer in cache.layers], 1),
        VALUES: torch.stack([layer.values for layer in cache.layers], 1),
    }


def _cache(condition: Condition) -> Any:
    """Return a cache of transformers' that holds the condition's keys and values; to be written to, and thrown away."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(condition[KEYS].unbind(1), condition[VALUES].unbind(1), strict=True)):
        cache.update(keys, values, layer)
    return cache
