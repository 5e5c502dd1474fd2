"""What is to be played: single episodes in groups, and where they branch."""

from collections.abc import Sequence
from dataclasses import dataclass

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.world import Snapshot


@dataclass(frozen=True)
class Request:
    """One episode to play. seed: of its start; group: whose outcomes it is compared with; task: index of the
    instruction, -1: whatever the seed says; state: one row's state to begin in instead.
    """

    seed: int
    group: int
    task: int = -1
    state: Snapshot | None = None


@dataclass(frozen=True)
class Branching:
    """at: decisions (from 0) at which every running episode splits; width: into how many, itself among them.

    step: how many steps of the decision the branches share (BranchGRPO's tree over the denoising chain; 0 shares the
    initial noise), several for a split after each of so many, at which every branch splits again; None: they split
    before the decision and share nothing of it. uncertain: the branches due to a group's episodes that stand at a
    decision together are shared out among them by how surprising their last decisions were (TreePO). Raises ConfigError
    unless width is at least 2 and decisions and steps are distinct and from 0.
    """

    at: tuple[int, ...] = ()
    width: int = 2
    step: int | tuple[int, ...] | None = None
    uncertain: bool = False

    def __post_init__(self):
        if self.width < 2 or any(step < 0 for step in self.at) or len(set(self.at)) != len(self.at):
            raise ConfigError(
                f"branch_width is {self.width}, branch_at {list(self.at)}: split in 2 or more, at 0 or later."
            )
        if isinstance(self.step, tuple) and (not self.step or len(set(self.step)) != len(self.step)):
            raise ConfigError(f"branch_sampling_step is {list(self.step)}: name distinct steps, or null for none.")

    @property
    def steps(self) -> tuple[int, ...]:
        """How many steps of the decision are shared at each split there, in order; -1: it is made afresh."""
        if self.step is None:
            return (-1,)
        return (self.step,) if isinstance(self.step, int) else tuple(sorted(self.step))

    @property
    def leaves(self) -> int:
        """Episodes that one root becomes, if none ends before the last split."""
        return self.width ** (len(self.at) * len(self.steps))


def groups_of(seeds: Sequence[int] | Array, sizes: int | Sequence[int], tasks: Sequence[int] = ()) -> list[Request]:
    """Return requests for one group per seed, `sizes` episodes each (ragged where a sequence is given).

    seeds: [G] of G groups; sizes: for all of them, or [G]; tasks: indices of instructions [G], or none. Raises
    ValueError where their numbers differ.
    """
    counts = [sizes] * len(seeds) if isinstance(sizes, int) else list(sizes)
    chosen = list(tasks) or [-1] * len(seeds)
    return [
        Request(int(seed), group, task)
        for group, (seed, count, task) in enumerate(zip(seeds, counts, chosen, strict=True))
        for _ in range(count)
    ]
