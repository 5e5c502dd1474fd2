"""Experimental self-distillation: the policy is its own teacher, which sees more than it.

A world with faults may show every field also as it is without the fault (world.options.undisturbed=true): a picture
that is not black, a reading without an offset. The policy reads the disturbed ones, and its teacher, of the same kind
and with the same inputs, the undisturbed ones in their place.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.faulty import UNDISTURBED
from robopolicy.core.policy import TensorObservation
from robopolicy.core.rollouts import Rollouts
from robopolicy.nn.micro_batches import scores_of
from robopolicy.nn.sharing import copy_trainable
from robopolicy.rl.context import AuxiliaryInputs, Context, Tools, latents_for_other_policy
from robopolicy.rl.experimental import distillation
from robopolicy.rl.registry import Need, Slot, mechanism


def undisturbed_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with the undisturbed ones, of any type, in the place of those that the policy reads.

    Raises ConfigError if there are none.
    """
    undisturbed = {key.removesuffix(UNDISTURBED): value for key, value in fields.items() if key.endswith(UNDISTURBED)}
    if not undisturbed:
        raise ConfigError(
            "A teacher that sees more than the policy needs a world that shows more: set world.options.faults, such as "
            "[blackout], and world.options.undisturbed=true."
        )
    return {**fields, **undisturbed}


def as_undisturbed(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts as a teacher of undisturbed fields sees them; raises ConfigError if there are none."""
    cameras: dict[str, Any] = {} if rollouts.images is None else dict(rollouts.images.frames)
    fields = undisturbed_fields({**rollouts.observation, **cameras})
    images = rollouts.images
    if images is not None:
        images = replace(images, frames={key: fields[key] for key in images.frames})
    observation: TensorObservation = {key: fields[key] for key in rollouts.observation}
    return replace(rollouts, observation=observation, images=images, latents=latents_for_other_policy(rollouts.latents))


@mechanism(Slot.MODEL, "own_teacher", source="Vision-OPD, arXiv:2605.18740", gives=(Need.OWN_TEACHER,))
class OwnTeacher:
    """A moving average of the policy, to be its teacher: mean + rate (policy - mean) before every update.

    auxiliaries=[distill_own] learns from it. The paper averages after every step of the optimiser.
    """

    def __init__(self, tools: Tools, *, rate: float = 0.05):
        self.rate, self.policy = rate, tools.policy
        self.teacher = copy_trainable(tools.policy).requires_grad_(False).eval()

    @torch.no_grad()
    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Move the average towards the policy; the rollouts stay."""
        for mean, weight in zip(self.teacher.parameters(), self.policy.parameters(), strict=True):
            mean.lerp_(weight.to(mean.dtype), self.rate)
        return rollouts

    def tree(self) -> dict[str, Any]:
        """Return the average's weights."""
        return {"teacher": self.teacher.state_dict()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the average's weights."""
        self.teacher.load_state_dict(tree["teacher"])


@mechanism(
    Slot.AUXILIARY,
    "distill_own",
    source="Vision-OPD, arXiv:2605.18740",
    needs=(Need.OWN_TEACHER,),
)
def distill_own(
    inputs: AuxiliaryInputs,
    *,
    weight: float = 1.0,
    divergence: str = "reverse",
    top: int = 0,
    ratio_cap: float | None = 2.0,
) -> Tensor:
    """Match, at the policy's own steps, what its own average would do with the undisturbed view.

    Options as in auxiliaries=[distill]; the paper: divergence=jsd, top=100, of tokens. Its teacher sees the part of the
    picture that matters enlarged, which to a robot's policy would be another scene; here it sees what a fault hides.
    Returns a scalar. Raises ConfigError without undisturbed fields, and for options that only tokens have.
    """
    teacher = next(model.teacher for model in inputs.models.values() if isinstance(model, OwnTeacher))
    with torch.no_grad():
        view = undisturbed_fields(inputs.observation)
        other = scores_of(teacher, view, latents_for_other_policy(inputs.latents)).extras
    extras = inputs.scores.extras
    if "log_probabilities" in extras:
        name = "log_probabilities"
        distance = distillation.divergence(extras[name], other[name], divergence, top)
    else:
        distance = distillation.squared_distance(extras, other["mean"], divergence, top, None)
    distance = distillation.capped_ratio(inputs, ratio_cap) * distance
    return weight * (inputs.step_weights * torch.where(inputs.mask, distance, 0.0)).sum()
