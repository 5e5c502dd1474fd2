"""Experimental replay of episodes that other runs of the same policy share through a folder."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.extras import Extras
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.core.storage import write_folder_atomic
from robopolicy.core.tensors import load_tree, save_tree
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.replay import append_rollouts
from robopolicy.rl.side_models import mixed_groups

_NAME = "episodes"


def whole_groups(rollouts: Rollouts, wanted: int, generator: torch.Generator) -> Tensor:
    """Return the rows [n] of complete groups drawn at random, as many groups as have at most `wanted` rows together."""
    groups = Segments.of(rollouts.group)
    order = torch.randperm(groups.count, generator=generator, device=generator.device)
    group_indices = order[: int((groups.size()[order].cumsum(0) <= wanted).sum())]
    return torch.isin(groups.index, group_indices).nonzero().squeeze(1)


@mechanism(Slot.REPLAY, "shared", source="SAPO-swarm, arXiv:2509.08721", needs=(Need.GROUPS,))
class Shared:
    """Learn from groups of other runs beside one's own: each run writes its groups to a folder and takes theirs.

    folder: that all runs can reach; member: this run's name in it, another for every run; take: rows of others per own
    row (1 is best in the paper, 3 unstable); age: iterations for which groups are shared. Groups whose outcomes do not
    differ are not shared. The newest are taken first, with their own advantages, which compare episodes of one group;
    the ratios correct for the other policy: coefficient=decoupled_ppo also weighs by it. All runs must train the same
    kind of policy from the same base. What others have written by now depends on their speed, so a run cannot be
    repeated exactly. Raises ConfigError without folder and member, and for episodes that do not fit this policy.
    """

    def __init__(self, *, folder: str = "", member: str = "", take: float = 1.0, age: int = 2):
        if not folder or not member or "@" in member:
            raise ConfigError(
                "replay=shared needs options.shared.folder=FOLDER, which the runs share, and "
                "options.shared.member=NAME, another name for each run (without @)."
            )
        self.folder, self.member = Path(folder), member
        self.take, self.age = take, age

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Write the own groups, and return them together with those of others."""
        self._write(rollouts, context.iteration)
        row_limit = round(self.take * len(rollouts.group))
        foreign_parts: list[Rollouts] = []
        for path in self._others(context.iteration):
            part = self._fitting(Rollouts.of(load_tree(path, _NAME, rollouts.group.device)), rollouts, path)
            rows = whole_groups(part, row_limit - sum(len(each.group) for each in foreign_parts), context.generator)
            if len(rows):
                foreign_parts.append(part.take(rows))
        context.figures["shared_rows"] = float(sum(len(each.group) for each in foreign_parts))
        return append_rollouts(rollouts, foreign_parts)

    def _write(self, rollouts: Rollouts, iteration: int) -> None:
        """Write the groups with different outcomes, and delete own ones that are too old."""
        has_mixed_outcomes = mixed_groups(rollouts, rollouts.row_return)
        own_rows = rollouts.take(has_mixed_outcomes.nonzero().squeeze(1)).without(following=True).compact()
        if len(own_rows.group):
            tree = replace(own_rows, logp_proximal=None).to("cpu").tree()
            write_folder_atomic(
                self.folder / f"{self.member}@{iteration}", lambda inside: save_tree(inside, _NAME, tree)
            )
        for path in self.folder.glob(f"{self.member}@*"):
            if int(path.name.rpartition("@")[2]) < iteration - self.age:
                shutil.rmtree(path, ignore_errors=True)

    def _others(self, iteration: int) -> list[Path]:
        """Return the folders of others that are not too old, newest first."""
        paths = [path for path in self.folder.glob("*@*") if not path.name.startswith((f"{self.member}@", "."))]
        dated = [(int(path.name.rpartition("@")[2]), path) for path in paths if path.name.rpartition("@")[2].isdigit()]
        return [path for number, path in sorted(dated, reverse=True) if number >= iteration - self.age]

    def _fitting(self, part: Rollouts, rollouts: Rollouts, path: Path) -> Rollouts:
        """Return foreign rows with the columns of own ones; raises ConfigError if actions or latents differ."""
        shapes = [
            {name: tuple(value.shape[2:]) for name, value in (*each.latents.items(), ("actions", each.actions))}
            for each in (rollouts, part)
        ]
        for name, shape in shapes[0].items():
            if name != "executed" and shapes[1].get(name) != shape:
                raise ConfigError(
                    f"replay=shared: '{path}' is of another kind of policy: its {name} have shape "
                    f"{list(shapes[1].get(name, ()))}, this policy's {list(shape)}. Give each kind its own folder."
                )
        extras = {
            name: part.extras[name] if name in part.extras else value.new_zeros((*part.shape, *value.shape[2:]))
            for name, value in rollouts.extras.items()
        }
        first, *other_names = rollouts.rewards
        zeros = torch.zeros_like(part.valid, dtype=torch.float32)
        total = torch.stack(list(part.rewards.values())).sum(0)
        return replace(
            part,
            extras=Extras.of(extras),
            rewards={first: total, **dict.fromkeys(other_names, zeros)},
            latents={name: value for name, value in part.latents.items() if name in (*rollouts.latents, "executed")},
            policy_version=torch.full_like(part.policy_version, -1),
            branch_sampling_step=None if rollouts.branch_sampling_step is None else torch.zeros_like(part.group),
        )

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; what is shared lies in the folder."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""
