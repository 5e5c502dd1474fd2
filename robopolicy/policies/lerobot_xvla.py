"""X-VLA (arXiv:2510.10274), LeRobot's `xvla`, taken apart: a Florence-2 encoder and a transformer with soft prompts.

Its transformer estimates clean actions, and every step mixes the estimate with the noise of the beginning: see
`EstimateSchedule`. What an element of the action is depends on `action_mode`: some modes keep the grippers from the
transformer and let it say the logit of closing, which the sigmoid makes an action of. That is a map of each element by
itself, so the probability of a latent is that of its action up to a factor which no ratio of two policies sees.
Axes: N row, P predicted step, L model-facing action element, A action dimension, S steps of a chunk.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import CONDITION
from robopolicy.nn.configuration import FlowNoise
from robopolicy.nn.schedules import EstimateSchedule
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.lerobot_configuration import LeRobotTuning
from robopolicy.policies.lerobot_family import Batch, flow_chain
from robopolicy.policies.network import Condition

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy

ACTION_MODES = ("auto", "ee6d", "joint", "agibot_ee6d", "franka_joint7", "so101_bimanual")
"""LeRobot's own: each makes an action's element of the latent element in its place, and of nothing else."""
FEATURES, VIEWS, DOMAIN, STATE = (f"{CONDITION}.{name}" for name in ("features", "views", "domain", "state"))


class XVLA:
    """See the module; latents hold the estimate and the noise, 2L elements."""

    reads_instructions = True
    first_step = 0
    steps_setting = "num_denoising_steps"

    def __init__(self, policy: "PreTrainedPolicy"):
        inner: Any = policy
        self.policy, self.model, self.config = inner, inner.model, inner.config
        self.space = self.model.action_space
        self.latent_size: int = 2 * self.model.dim_action

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """See `Family`. Raises ConfigError for noise that belongs to velocities."""
        if tuning.flow_noise is FlowNoise.SDE:
            raise ConfigError("flow_noise=sde corrects a velocity, and X-VLA has none: leave flow_noise=constant.")
        return flow_chain(self.config, self.config.num_denoising_steps, tuning)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """See `Family`."""
        given = self.policy._build_model_inputs(dict(frames[-1]))
        images = given["image_input"].to(self._dtype)
        seen = self.model.forward_vlm(given["input_ids"], images, given["image_mask"])
        return {
            FEATURES: seen["vlm_features"],
            VIEWS: seen["aux_visual_inputs"],
            DOMAIN: given["domain_id"],
            STATE: given["proprio"],
        }

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Estimate clean actions, beside the noise: [N, P, 2L]; see `Family`."""
        vectors = EstimateSchedule.mixed(x, time), time, condition[STATE], condition[FEATURES], condition[VIEWS]
        mixed, time, state, features, views = (vector.to(self._dtype) for vector in vectors)
        state, mixed = self.space.preprocess(state, mixed)
        estimate = self.model.transformer(
            domain_id=condition[DOMAIN],
            vlm_features=features,
            aux_visual_inputs=views,
            action_with_noise=mixed,
            proprio=state,
            t=time,
        )
        return torch.cat([estimate.to(x.dtype), x.chunk(2, -1)[1]], -1)

    def denoising_modules(self) -> list[nn.Module]:
        """See `Family`."""
        return [self.model.transformer]

    def draw_levels(self, count: int) -> Tensor:
        """Draw times [count] that are evenly spread over [0, 1), all moved by one draw; see `Family`.

        In random order: the levels of one sample, which lie beside each other, shall not be alike.
        """
        spread = (torch.rand(1) + torch.arange(count) / count) % (1 - 1e-5)
        return spread[torch.randperm(count)]

    def schedule(self, config: DenoisingPolicyConfig) -> EstimateSchedule:
        """See `Family`."""
        explores = config.flow_noise is not FlowNoise.ODE
        level = max(config.flow_noise_level, config.min_sampling_std) if explores else 0.0
        return EstimateSchedule(config.sampling_steps, level)

    def finished(self, latents: Tensor) -> Tensor:
        """Return actions [N, S, A], whose grippers are probabilities where the mode says so; see `Family`."""
        return self.space.postprocess(latents.chunk(2, -1)[0].clone())

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the action mode's own loss, a mean over steps and rows, of each step alone, [N, P]; see `Family`."""

        def of_step(estimate: Tensor, wanted: Tensor) -> Tensor:
            losses = self.space.compute_loss(estimate[None, None], wanted[None, None])
            return torch.stack([*losses.values()]).sum()

        pair = (each.chunk(2, -1)[0].flatten(0, 1) for each in (prediction, target))
        return torch.func.vmap(of_step)(*pair).unflatten(0, prediction.shape[:2])

    @property
    def _dtype(self) -> torch.dtype:
        return self.model._get_target_dtype()
