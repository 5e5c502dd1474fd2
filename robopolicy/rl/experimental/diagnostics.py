"""Experimental side models that measure: which weights move, and whether a teacher pulls where returns would."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core.checkpoints import load_weights
from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages.tree import in_sampling_steps, owners, subtree_means
from robopolicy.rl.context import Context, Tools, require_input
from robopolicy.rl.registry import Need, Slot, mechanism


def moved_masks(first: Mapping[str, Tensor], last: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Return the entries that changed by more than `threshold`, name -> bool [...], of the tensors that both have."""
    return {
        name: (last[name].double() - value.double()).abs() > threshold
        for name, value in first.items()
        if name in last and value.is_floating_point()
    }


@mechanism(Slot.MODEL, "subnetwork", source="RL-subnetworks, arXiv:2505.11711", needs=(Need.BASE,))
class Subnetwork:
    """Log which share of the trained weights has moved since the base, and train only those that moved in another run.

    Figures: moved, the share with a change above `threshold`; moved_bf16, the share that differs in bfloat16. run: the
    folder of a fine-tuning run from the same base, with base/ and checkpoint/: gradients of weights that did not move
    there are 0, and such weights are set back to the base after every step (weight decay moves them too). The paper
    finds 5 to 30 % moved; Adam at the rates used here moves nearly all. Raises ConfigError if the run's folder has no
    weight of this policy.
    """

    def __init__(self, tools: Tools, *, run: str = "", threshold: float = 1e-5):
        self.threshold = threshold
        base = dict(cast(nn.Module, require_input(tools.base, "base")).named_parameters())
        names = {id(weight): name for name, weight in cast(nn.Module, tools.policy).named_parameters()}
        trained = [(names[id(weight)], weight) for weight in tools.policy.trainable_parameters()]
        self.weights = [(weight, base[name].detach()) for name, weight in trained]
        self.masks: list[tuple[Tensor, Tensor, Tensor]] = []
        if not run:
            return
        masks = moved_masks(load_weights(Path(run) / "base"), load_weights(Path(run) / "checkpoint"), threshold)
        for name, weight in trained:
            if name in masks:
                mask = masks[name].to(weight.device)
                self.masks.append((weight, base[name].detach(), mask))
                weight.register_hook(partial(torch.mul, mask))  # pyright: ignore[reportUnknownMemberType]
        if not self.masks:
            raise ConfigError(
                f"options.subnetwork.run={run} has no weights of this policy: it must be the folder of a fine-tuning "
                "run from the same base policy."
            )

    @torch.no_grad()
    def hold_weights(self) -> None:
        """Set excluded weights back to the base."""
        for weight, base, mask in self.masks:
            weight.copy_(torch.where(mask, weight, base))

    @torch.no_grad()
    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Log the shares."""
        total = sum(weight.numel() for weight, _ in self.weights)
        moved_count = sum(int(((weight - base).abs() > self.threshold).sum()) for weight, base in self.weights)
        coarse = sum(int((weight.bfloat16() != base.bfloat16()).sum()) for weight, base in self.weights)
        context.figures.update(moved=moved_count / max(1, total), moved_bf16=coarse / max(1, total))
        return rollouts

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; masks are read again."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""


def angle(weight: Tensor, value: Tensor, gap: Tensor, nodes: Segments) -> tuple[Tensor, Tensor]:
    """Return the cosine between the gradients of returns and of distillation at every node [S], and where it is known.

        ideal: w_i (Q_i - sum w Q),   distillation: w_i (g_i - sum w g),   g = log(q / pi)

    weight: probability of a candidate [N], which sum to 1 in a node; value: its Q; gap: its g.
    """
    ideal, pull = (weight * (each - nodes.sum(weight * each)[nodes.index]) for each in (value, gap))
    norm = (nodes.sum(ideal.square()) * nodes.sum(pull.square())).sqrt()
    return nodes.sum(ideal * pull) / norm.clamp(min=1e-12), norm > 1e-9


@mechanism(
    Slot.MODEL,
    "distillation_angle",
    source="OPD-unmasked, arXiv:2605.10889",
    needs=(Need.GROUPS, Need.TEACHER_SCORES),
)
class DistillationAngle:
    """Log the cosine between what returns and what a teacher would change at the forks of branching episodes.

    The candidates of a fork (finetune.branch_at; first chunks of a group too) are samples of the policy, so they weigh
    alike; Q of one is the mean return of the episodes that continue from it, and its log-probabilities are sums over
    its chunk. Figures: distillation_angle, its means at forks of groups that succeed in at least half and in less than
    half of their episodes (_won, _lost), and the share below 0. It measures and changes nothing. Raises ConfigError for
    branches inside policy calls.
    """

    def __init__(self, tools: Tools):
        del tools

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Log the figures. Raises ConfigError for branches inside policy calls."""
        if in_sampling_steps(rollouts):
            raise ConfigError("models=[distillation_angle] compares complete chunks: set branch_sampling_step=null.")
        owner, (values, _) = owners(rollouts), subtree_means(rollouts, rollouts.row_return.double())
        place = torch.arange(owner.shape[1], device=owner.device)
        groups = Segments.of(rollouts.group)
        past = torch.cat([-1 - groups.index[:, None], owner[:, :-1]], 1)
        own_mask = (
            (owner == torch.arange(len(owner), device=owner.device)[:, None]) & rollouts.mask.any(-1) & rollouts.alive
        )
        nodes = Segments.of(past[own_mask], place.expand(owner.shape)[own_mask])
        change = torch.where(rollouts.mask, rollouts.extras["teacher_logp"] - rollouts.logp_behaviour, 0.0)
        weight = 1 / nodes.size()[nodes.index].double()
        cosine, known_mask = angle(weight, values[own_mask], change.double().sum(-1)[own_mask], nodes)
        rate = groups.mean(rollouts.row_success.double())[groups.index][:, None].expand(owner.shape)[own_mask]
        won = nodes.mean(rate) >= 0.5
        for name, part in (("", known_mask), ("_won", known_mask & won), ("_lost", known_mask & ~won)):
            if bool(part.any()):
                context.figures[f"distillation_angle{name}"] = float(cosine[part].mean())
        if bool(known_mask.any()):
            context.figures["distillation_angle_negative"] = float((cosine[known_mask] < 0).double().mean())
        return rollouts

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; nothing is learned."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""
