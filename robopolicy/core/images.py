"""Camera images of decisions, stored once: windows of the last H frames are put together where they are read.

The frames of a history are shown again with every decision that overlaps it, a start's with every episode of its group,
a prefix's with every branch, and what follows a decision with the next. Here an instant, what all cameras show at one
time, is kept once and referred to by its number. Axes: B row, T decision, R row of a wave, H history frame, n instants.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.spec import IMAGE_PREFIX


def cameras_in(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return what belongs to cameras of what is named by an observation's keys."""
    return {key: value for key, value in observation.items() if key.startswith(IMAGE_PREFIX)}


class FrameStore:
    """Takes in windows of frames and keeps every instant once, told apart by 128 bits of a BLAKE2 hash of its pixels.

    frames: camera's key -> [n, *shape], those to begin with.
    """

    def __init__(self, frames: Mapping[str, Tensor] | None = None):
        self._numbers: dict[bytes, int] = {}
        self._parts: list[dict[str, Tensor]] = []
        if frames:
            self.add({key: value[:, None] for key, value in frames.items()})

    @property
    def frames(self) -> dict[str, Tensor]:
        """All that is kept, camera's key -> [n, *shape]; {} of nothing."""
        if len(self._parts) > 1:
            self._parts = [{key: torch.cat([part[key] for part in self._parts]) for key in self._parts[0]}]
        return dict(self._parts[0]) if self._parts else {}

    def add(self, shown: Mapping[str, Tensor]) -> Tensor:
        """Keep what is new in windows of every camera, key -> [R, H, *shape]; return the numbers of frames, [R, H]."""
        pixels = [cast(Array, value.cpu().contiguous().numpy()) for value in shown.values()]  # pyright: ignore[reportUnknownMemberType]
        count, history = pixels[0].shape[:2]
        numbers: list[int] = []
        fresh: list[tuple[int, int]] = []
        for place in itertools.product(range(count), range(history)):
            digest = blake2b(digest_size=16)
            for camera in pixels:
                digest.update(camera[place])
            known = len(self._numbers)
            numbers.append(self._numbers.setdefault(digest.digest(), known))
            if numbers[-1] == known:
                fresh.append(place)
        if fresh:
            row, frame = torch.tensor(fresh).T
            self._parts.append({key: value[row, frame] for key, value in shown.items()})
        device = next(iter(shown.values())).device
        return torch.tensor(numbers, dtype=torch.int64, device=device).reshape(count, history)


@dataclass(frozen=True)
class Images:
    """What cameras showed in n instants, and which of them decisions saw.

    frames: camera's key -> [n, height, width, 3] uint8; seen: [B, T, H] int64, the frames that a decision was shown,
    oldest first; after: [B, T, H] int64, 1 + those that were shown after decisions which nothing follows, elsewhere 0,
    for there the next column has them; None: left out.
    """

    frames: Mapping[str, Tensor]
    seen: Tensor
    after: Tensor | None = None

    @staticmethod
    def of(observation: Mapping[str, Any]) -> "Images | None":
        """Return the camera images [B, T, H, ...] of an observation, stored once; None where it has none."""
        shown, store = cameras_in(observation), FrameStore()
        if not shown:
            return None
        shape = next(iter(shown.values())).shape[:2]
        seen = store.add({key: value.flatten(0, 1) for key, value in shown.items()})
        return Images(store.frames, seen.reshape(*shape, -1))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of what a decision was shown, (H, height, width, 3) by camera's key."""
        return {key: (self.seen.shape[-1], *value.shape[1:]) for key, value in self.frames.items()}

    def only(self, keys: Collection[str]) -> "Images":
        """Leave out all cameras but these."""
        return replace(self, frames={key: value for key, value in self.frames.items() if key in keys})

    def read(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return frames by their numbers [...]: camera's key -> [..., height, width, 3]."""
        return {key: value[numbers] for key, value in self.frames.items()}

    def following(self, where: Tensor) -> dict[str, Tensor]:
        """Return key -> [n, H, ...] after the n decisions `where` [B, T] bool; LookupError where none is kept."""
        if self.after is None or bool((self.after[where] == 0).any()):
            raise LookupError("Images after a decision are kept only where an episode or its rollout ends.")
        return self.read(self.after[where] - 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Images":
        """Return these frames under what `function` makes of the numbers [B, T, H]."""
        return replace(self, seen=function(self.seen), after=None if self.after is None else function(self.after))

    def to(self, device: torch.device | str) -> "Images":
        """Move every tensor."""
        frames = {key: value.to(device) for key, value in self.frames.items()}
        return replace(self.map(lambda numbers: numbers.to(device)), frames=frames)

    def compact(self) -> "Images":
        """Return these without the frames that nothing refers to any more."""
        ends = [] if self.after is None else [self.after[self.after > 0] - 1]
        count = len(next(iter(self.frames.values())))
        seen = torch.zeros(count, dtype=torch.bool, device=self.seen.device)
        seen[torch.cat([self.seen.flatten(), *ends])] = True
        used = seen.nonzero().squeeze(1)
        if len(used) == count:
            return self
        number = torch.zeros(count + 1, dtype=torch.int64, device=used.device)  # of 1 + a frame, and of none
        number[used + 1] = torch.arange(1, len(used) + 1, device=used.device)
        after = None if self.after is None else number[self.after]
        return Images(self.read(used), number[self.seen + 1] - 1, after)

    @staticmethod
    def join(parts: "list[Images]", pad: Callable[[Tensor], Tensor]) -> "Images":
        """Join rows of several; pad: makes their numbers [B, T, H] equally long, by zeros. Images after decisions stay
        where all of them have some. Raises ValueError where their cameras differ.
        """
        if len({tuple(sorted(part.frames)) for part in parts}) > 1:
            raise ValueError("Rollouts that are to be joined differ in cameras.")
        parts = [part.compact() for part in parts]
        counts = [len(next(iter(part.frames.values()))) for part in parts]
        first = [sum(counts[:index]) for index in range(len(parts))]
        seen = torch.cat([pad(part.seen + offset) for part, offset in zip(parts, first, strict=True)])
        ends = [part.after for part in parts if part.after is not None]
        after = None
        if len(ends) == len(parts):
            moved = [torch.where(end > 0, end + offset, 0) for end, offset in zip(ends, first, strict=True)]
            after = torch.cat([pad(end) for end in moved])
        return Images({key: torch.cat([part.frames[key] for part in parts]) for key in parts[0].frames}, seen, after)
