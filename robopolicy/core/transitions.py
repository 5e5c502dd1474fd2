"""Transitions (`Transitions`) of single steps or action chunks, recorded or imagined, for training models and
critics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from robopolicy.core.errors import DataError
from robopolicy.core.spec import check_finite


@dataclass(frozen=True)
class Transitions:
    """N steps, or N action chunks of several steps each.

    state, next_state: [N, S], a `StateVector`; action: [N, A], in world units or an agent's; reward: [N]; terminated:
    [N] bool, the task ended with this step (a time limit or the end of an imagined rollout does not count; its next
    state has a value). If known, success: [N] bool, the episode has succeeded by the end of this step; episode: [N]
    int64, index of its episode. For decisions of more than one step: decay: [N], discount of subsequent rewards,
    discount ** duration; reward is then the discounted sum within the decision. next_action: [N, A], the next action;
    undefined after the end and where `next_known` [N] bool is False. outcome: [N], discounted return to the end of the
    episode, minus infinity if a time limit truncated it. next_candidates: [N, K, A], actions that a base policy sampled
    in the next state.
    """

    state: Tensor
    action: Tensor
    reward: Tensor
    next_state: Tensor
    terminated: Tensor
    success: Tensor | None = None
    episode: Tensor | None = None
    decay: Tensor | None = None
    next_action: Tensor | None = None
    next_known: Tensor | None = None
    outcome: Tensor | None = None
    next_candidates: Tensor | None = None

    def __len__(self) -> int:
        return len(self.state)

    @property
    def won(self) -> Tensor:
        """`success` [N] bool; raises DataError if unknown."""
        if self.success is None:
            raise DataError("These transitions do not record success.")
        return self.success

    def backup(self, following: Tensor, discount: float) -> Tensor:
        """Return reward + decay * following [N], only the reward at terminations.

        following: [N], value of the next state; discount: per step, for transitions without `decay`.
        """
        decay = discount if self.decay is None else self.decay
        return self.reward + decay * torch.where(self.terminated, 0.0, following)

    def check(self) -> "Transitions":
        """Raise NonFiniteError naming the non-finite columns."""
        for name in ("state", "action", "reward", "next_state"):
            check_finite(f"transitions: {name}", getattr(self, name))
        return self

    def take(self, index: Tensor) -> "Transitions":
        """Select transitions, by index [n] or mask [N]."""
        return replace(self, **{name: value[index] for name, value in self._known().items()})

    def draw(self, count: int, generator: torch.Generator) -> "Transitions":
        """Draw `count` transitions, with replacement."""
        indices = torch.randint(len(self), (count,), generator=generator, device=generator.device)
        return self.take(indices.to(self.state.device))

    @staticmethod
    def join(parts: Sequence["Transitions"]) -> "Transitions":
        """Concatenate transitions; a column that one part lacks is None in the result."""
        columns_of_parts = [part._known() for part in parts]
        shared_names = [
            item.name for item in fields(Transitions) if all(item.name in columns for columns in columns_of_parts)
        ]
        return Transitions(
            **{name: torch.cat([columns[name] for columns in columns_of_parts]) for name in shared_names}
        )

    def _known(self) -> dict[str, Tensor]:
        """Return the columns that are not None, by name."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in columns.items() if value is not None}
