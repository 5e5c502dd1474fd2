"""What has to be known of a denoising policy of LeRobot's so that it learns here: `Family`, and what most share.

Axes: N row, k denoising steps, P predicted step, L latent element, A action dimension, S steps of a chunk.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from robopolicy.nn.schedules import Schedule
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.lerobot.configuration import LeRobotTuning
from robopolicy.policies.network import Condition

TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"

Batch = Mapping[str, Any]
"""One frame of a history as LeRobot's preprocessor hands it over: key -> [N, ...]."""


class Family(Protocol):
    """A LeRobot policy taken apart.

    latent_size: L; first_step: predicted steps before the one that is executed first; reads_instructions: whether the
    condition depends on the instruction; steps_setting: what LeRobot's config calls the number of steps, "" where its
    sampler cannot take a student's few.
    """

    latent_size: int
    first_step: int
    reads_instructions: bool

    @property
    def steps_setting(self) -> str:
        """See the class."""
        ...

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

    def draw_levels(self, count: int) -> Tensor:
        """Draw the levels [count] of the schedule at which LeRobot trains, from torch's global generator."""
        ...

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Return the schedule of LeRobot's sampler, with the exploration noise of config."""
        ...

    def finished(self, latents: Tensor) -> Tensor:
        """Return what LeRobot's policy returns of clean latents [N, S, L]: normalised actions, [N, S, A]."""
        ...

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return what LeRobot's training loss says of each step, [N, P], of predictions and targets [N, P, L]."""
        ...


@runtime_checkable
class SeveralAtOnce(Protocol):
    """Optional: a family that need not copy the condition for each of several steps."""

    def denoise_several(self, x: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Predict [N, k, P, L] of k latents of each row, x [N, k, P, L] at times [N, k], as `denoise` does of one."""
        ...

    def pays(self, x: Tensor, condition: Condition) -> bool:
        """Whether that is cheaper than copies, of x [N, k, P, L]."""
        ...


class Squared:
    """What families share whose latents are actions, padded at most, and learned by their squared error."""

    def __init__(self, config: Any):
        self.config = config
        self.action_size: int = config.action_feature.shape[0]

    def finished(self, latents: Tensor) -> Tensor:
        """Return the first A elements of latents, [N, S, A]; see `Family`."""
        return latents[..., : self.action_size]

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the mean square over the first A elements, [N, P]; see `Family`."""
        return (prediction - target)[..., : self.action_size].square().mean(-1)


def flow_chain(config: Any, steps: int, tuning: LeRobotTuning) -> dict[str, Any]:
    """Return what a `DenoisingPolicyConfig` says of a chain of `steps` whose noise is that of `tuning`."""
    level = tuning.flow_noise_level
    return {
        "kind": PolicyKind.FLOW,
        "history": config.n_obs_steps,
        "chunk": config.n_action_steps,
        "prediction_steps": getattr(config, "chunk_size", None) or config.horizon,
        "sampling_steps": steps,
        "finetuned_steps": steps,
        "flow_noise": tuning.flow_noise,
        "flow_noise_level": level,
        "flow_noise_bounds": (level, level),
        "clip": None,
    }
