"""What an agent has done in the world: its decisions, and what only the end of an episode tells of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.core.transitions import Transitions

FIRST = 1024
"""Decisions that there is room for at first; the room doubles."""


@dataclass
class Experience:
    """Decisions in the order in which they were made, every column known; nothing is ever dropped.

    columns: the tensors of `Transitions`, longer than what is held; count: decisions held.
    """

    columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    count: int = 0

    def __len__(self) -> int:
        return self.count

    @property
    def transitions(self) -> Transitions:
        """All that is held, a view."""
        return Transitions(**{name: column[: self.count] for name, column in self.columns.items()})

    def add(self, state: Tensor, action: Tensor, played: Mapping[str, Tensor]) -> Tensor:
        """Keep n decisions, states [n, S] and actions [n, A]; return where they are, [n].

        played: reward, next_state, terminated, success, episode and decay, as in `Transitions`, each [n, ...]. What
        follows in the episode is not known yet (see `tell`): outcomes are minus infinity, next actions unknown.
        """
        fresh = {
            "state": state,
            "action": action,
            **played,
            "next_action": torch.zeros_like(action),
            "next_known": torch.zeros_like(played["terminated"]),
            "outcome": torch.full_like(played["reward"], -torch.inf),
        }
        end = self.count + len(state)
        for name, value in fresh.items():
            column = self.columns.get(name)
            if column is None or len(column) < end:
                grown = value.new_zeros((max(FIRST, 2 * end), *value.shape[1:]))
                if column is not None:
                    grown[: self.count] = column[: self.count]
                self.columns[name] = column = grown
            column[self.count : end] = value
        places = torch.arange(self.count, end, device=state.device)
        self.count = end
        return places

    def tell(self, wave: Sequence[tuple[Tensor, Tensor]], rows: int) -> None:
        """Fill in what decisions of whole episodes led to: the return from each on, and the action after it.

        wave: of every turn, where its decisions are [n] and in which of the `rows` they were made [n]. The return stays
        minus infinity where a time limit, not the end of the task, ended the episode.
        """
        if not wave:
            return
        columns = self.columns
        reward, action = columns["reward"], columns["action"]
        ahead = reward.new_full((rows,), -torch.inf)
        following = action.new_zeros((rows, action.shape[1]))
        known = torch.zeros(rows, dtype=torch.bool, device=reward.device)
        for places, of in reversed(wave):
            value = torch.where(columns["terminated"][places], 0.0, ahead[of])
            ahead[of] = reward[places] + columns["decay"][places] * value
            columns["outcome"][places] = ahead[of]
            columns["next_action"][places], columns["next_known"][places] = following[of], known[of]
            following[of], known[of] = action[places], True

    def tree(self) -> dict[str, Tensor]:
        """Return what is held, as files can hold it."""
        return {name: column[: self.count].clone() for name, column in self.columns.items()}

    @staticmethod
    def restored(tree: Mapping[str, Tensor], device: torch.device) -> "Experience":
        """Rebuild from `tree`."""
        columns = {name: column.to(device) for name, column in tree.items()}
        return Experience(columns, len(columns["state"]) if columns else 0)
