"""What a robot says of the plan that it is executing, so that the next one follows on from it.

Axes: B row, n steps left of the plan, A action dimension.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from robopolicy.core.errors import NonFiniteError, SpecError
from robopolicy.core.spec import PolicySpec
from robopolicy.inference.chunking import Underway
from robopolicy.serving.protocol import DELAY, PLAN


@dataclass(frozen=True, eq=False)
class Left:
    """What is left of a robot's plan.

    actions: [n, A] in the world's units, the first for the observation that comes with it; delay: how many of them will
    have been executed when the next plan is there; decisions: how many plans its episode has had.
    """

    actions: np.ndarray
    delay: int
    decisions: int

    @property
    def shape(self) -> tuple[int, int]:
        """What requests must have in common to be answered together."""
        return len(self.actions), self.delay


def taken(request: MutableMapping[Any, Any], spec: PolicySpec, decisions: int) -> Left | None:
    """Take what a request says of its robot's plan out of it, None where it says nothing.

    Raises SpecError on other than [n <= P, A] numbers and an integer from 0 to n, NonFiniteError on NaN or infinity.
    """
    if PLAN not in request:
        if request.pop(DELAY, None) is not None:
            raise SpecError(f"'{DELAY}' belongs to '{PLAN}', the actions that are left, and that is missing.")
        return None
    actions, delay = request.pop(PLAN), request.pop(DELAY, 0)
    kind = isinstance(actions, np.ndarray) and actions.dtype.kind in "fiu"
    if not kind or actions.shape[1:] != spec.action.shape or len(actions) > spec.prediction:
        shown = list(actions.shape) if isinstance(actions, np.ndarray) else type(actions).__name__
        raise SpecError(
            f"'{PLAN}' holds the actions that are left, [n, {str(list(spec.action.shape))[1:-1]}] numbers with at most "
            f"{spec.prediction} steps, not {shown}."
        )
    if not np.isfinite(actions).all():
        raise NonFiniteError(f"'{PLAN}' holds NaN or infinity.")
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay <= len(actions):
        raise SpecError(f"'{DELAY}' is an integer from 0 to {len(actions)}, the number of actions left, not {delay!r}.")
    return Left(actions.astype(np.float32), delay, decisions if len(actions) else 0)


def underway(parts: Sequence[Left], chunk: int, device: torch.device) -> Underway:
    """Return what is left of B robots' plans of one `shape`, for `robopolicy.inference.chunking.Plans`."""
    rest = torch.from_numpy(np.stack([part.actions for part in parts])).to(device)
    # A robot may know a plan of which this server has not heard: it has had one then.
    decisions = torch.tensor([max(part.decisions, int(len(part.actions) > 0)) for part in parts], device=device)
    return Underway(rest, decisions, parts[0].delay, chunk)
