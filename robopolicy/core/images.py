"""Camera images of decisions, stored once: windows of the last H frames are put together where they are read.

The frames of a history are shown again with every decision that overlaps it, a start's with every episode of its group,
a prefix's with every branch, and what follows a decision with the next. Here an instant, what all cameras show at one
time, is kept once and referred to by its number.

Frames of one camera are a tensor [n, height, width, 3], or packed: each compressed by itself, without loss. What MuJoCo
renders takes a tenth then at 64 px and a fortieth at 512 (zlib's fastest level: 0.1 and 2 ms to pack, half of that to
unpack), what a real camera sees about two thirds. Packed frames stay in the processor's memory; those that are read are
unpacked, on the device of the numbers by which they are asked for.

Axes: B row, T decision, R row of a wave, H history frame, n instants.
"""

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array, integers
from robopolicy.core.spec import IMAGE_PREFIX

FASTEST = 1
READ_AT_ONCE = 64
"""Frames."""
type Keeping = Literal["not", "plain", "packed"]
"""How what cameras showed is kept: not at all, as it is, or compressed without loss."""


class PackedFrames:
    """n frames of the same shape; `packed[numbers]` is what it is of a tensor. parts: each one's bytes, compressed."""

    def __init__(self, parts: Iterable[bytes], one: tuple[int, ...]):
        self.parts, self.one = tuple(parts), one

    @staticmethod
    def of(frames: "Frames") -> "PackedFrames":
        """Pack frames [n, *one] uint8; raises TypeError for any other type of number."""
        if isinstance(frames, PackedFrames):
            return frames
        if frames.dtype != torch.uint8:
            raise TypeError(f"Frames that are packed are uint8, not {frames.dtype}.")
        raw = frames.cpu().contiguous()
        packed = (zlib.compress(memoryview(frame.numpy()), FASTEST) for frame in raw)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        return PackedFrames(packed, tuple(frames.shape[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, *one)."""
        return len(self.parts), *self.one

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, numbers: Tensor) -> Tensor:
        """Unpack frames by their numbers [...] int64: [..., *one] uint8."""
        asked = integers(numbers.flatten())
        places = {number: place for place, number in enumerate(dict.fromkeys(asked))}  # each is unpacked once
        found = np.empty((len(places), *self.one), np.uint8)
        for number, place in places.items():
            found[place] = np.frombuffer(zlib.decompress(self.parts[number]), np.uint8).reshape(self.one)
        rows = torch.tensor([places[number] for number in asked], dtype=torch.int64).reshape(numbers.shape)
        return torch.from_numpy(found)[rows].to(numbers.device)  # pyright: ignore[reportUnknownMemberType]

    def tree(self) -> dict[str, Any]:
        """Return what `frames_of` needs, for a checkpoint: tensors, and the shape of one."""
        sizes = [len(part) for part in self.parts]
        data = torch.frombuffer(bytearray(b"".join(self.parts)), dtype=torch.uint8) if sizes else torch.empty(0).byte()
        return {"packed": data, "sizes": torch.tensor(sizes, dtype=torch.int64), "one": list(self.one)}


type Frames = Tensor | PackedFrames
"""Those of one camera, [n, *shape]."""


def frames_tree(frames: Frames) -> Any:
    """Return frames as a part of a checkpoint's tree."""
    return frames.tree() if isinstance(frames, PackedFrames) else frames


def frames_of(tree: Tensor | Mapping[str, Any]) -> Frames:
    """Return the frames [n, *shape] that `frames_tree` was made of."""
    if isinstance(tree, Tensor):
        return tree
    data = memoryview(tree["packed"].cpu().numpy())
    ends = integers(tree["sizes"].cumsum(0))
    parts = (bytes(data[first:end]) for first, end in zip([0, *ends], ends, strict=False))
    return PackedFrames(parts, tuple(tree["one"]))


def some_of(frames: Frames, numbers: Tensor) -> Frames:
    """Return the frames of these numbers [m], packed where they were."""
    if isinstance(frames, PackedFrames):
        return PackedFrames((frames.parts[number] for number in integers(numbers)), frames.one)
    return frames[numbers]


def joined_frames(parts: list[Frames]) -> Frames:
    """Return the frames of all parts, one after the other, packed where one of them is."""
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(plain) == len(parts):
        return torch.cat(plain)
    packed = [PackedFrames.of(part) for part in parts]
    return PackedFrames((frame for part in packed for frame in part.parts), packed[0].one)


def cameras_in(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return what belongs to cameras of what is named by an observation's keys."""
    return {key: value for key, value in observation.items() if key.startswith(IMAGE_PREFIX)}


class FrameStore:
    """Takes in windows of frames and keeps every instant once, told apart by 128 bits of a BLAKE2 hash of its pixels.

    frames: camera's key -> [n, *shape], those to begin with; packed: whether they are held compressed.
    """

    def __init__(self, frames: Mapping[str, Frames] | None = None, *, packed: bool = False):
        self.packed = packed
        self._numbers: dict[bytes, int] = {}
        self._parts: list[dict[str, Frames]] = []
        self._count = 0
        if frames:
            self._keep(frames)
            for first in range(0, self._count, READ_AT_ONCE):  # packed ones are not unpacked all at once
                some = torch.arange(first, min(first + READ_AT_ONCE, self._count))
                digests = _digests({key: value[some][:, None] for key, value in frames.items()})
                self._numbers.update((digest, first + place) for place, digest in enumerate(digests))

    @property
    def frames(self) -> dict[str, Frames]:
        """All that is kept, camera's key -> [n, *shape]; {} of nothing."""
        if len(self._parts) > 1:
            self._parts = [{key: joined_frames([part[key] for part in self._parts]) for key in self._parts[0]}]
        return dict(self._parts[0]) if self._parts else {}

    def tree(self) -> dict[str, Any]:
        """Return all that is kept, for a checkpoint."""
        return {key: frames_tree(value) for key, value in self.frames.items()}

    @staticmethod
    def of(tree: Mapping[str, Any], *, packed: bool = False) -> "FrameStore":
        """Return the store that `tree` is of; packed: as it shall be now."""
        return FrameStore({key: frames_of(value) for key, value in tree.items()}, packed=packed)

    def add(self, shown: Mapping[str, Tensor]) -> Tensor:
        """Keep what is new in windows of every camera, key -> [R, H, *shape]; return the numbers of frames, [R, H]."""
        count, history = next(iter(shown.values())).shape[:2]
        numbers: list[int] = []
        fresh: list[tuple[int, int]] = []
        for place, digest in zip(itertools.product(range(count), range(history)), _digests(shown), strict=True):
            known = self._count + len(fresh)
            numbers.append(self._numbers.setdefault(digest, known))
            if numbers[-1] == known:
                fresh.append(place)
        if fresh:
            row, frame = torch.tensor(fresh).T
            self._keep({key: value[row, frame] for key, value in shown.items()})
        device = next(iter(shown.values())).device
        return torch.tensor(numbers, dtype=torch.int64, device=device).reshape(count, history)

    def _keep(self, frames: Mapping[str, Frames]) -> None:
        self._parts.append({key: PackedFrames.of(value) if self.packed else value for key, value in frames.items()})
        self._count += len(next(iter(frames.values())))


def _digests(shown: Mapping[str, Tensor]) -> Iterator[bytes]:
    """Yield what tells the instants of windows, key -> [R, H, *shape], apart: row after row, 128 bits of each."""
    pixels = [cast(Array, value.cpu().contiguous().numpy()) for value in shown.values()]  # pyright: ignore[reportUnknownMemberType]
    for place in itertools.product(*map(range, pixels[0].shape[:2])):
        digest = blake2b(digest_size=16)
        for camera in pixels:
            digest.update(camera[place])
        yield digest.digest()


def store_for(images: Keeping) -> FrameStore | None:
    """Return an empty store that keeps images in this way, None where they are not kept."""
    return None if images == "not" else FrameStore(packed=images == "packed")


@dataclass(frozen=True)
class Images:
    """What cameras showed in n instants, and which of them decisions saw.

    frames: camera's key -> [n, height, width, 3] uint8, as they are or packed; seen: [B, T, H] int64, the frames that a
    decision was shown, oldest first; after: [B, T, H] int64, 1 + those that were shown after decisions which nothing
    follows, elsewhere 0, for there the next column has them; None: left out.
    """

    frames: Mapping[str, Frames]
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
        frames = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in self.frames.items()}
        return replace(self.map(lambda numbers: numbers.to(device)), frames=frames)

    def tree(self) -> dict[str, Any]:
        """Return what `from_tree` needs, for a checkpoint: no frame that nothing refers to."""
        kept = self.compact()
        return {**vars(kept), "frames": {key: frames_tree(value) for key, value in kept.frames.items()}}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "Images":
        """Return the images that `tree` is of."""
        frames = {key: frames_of(value) for key, value in tree["frames"].items()}
        return Images(frames, tree["seen"], tree["after"])

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
        frames = {key: some_of(value, used) for key, value in self.frames.items()}
        return Images(frames, number[self.seen + 1] - 1, after)

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
        frames = {key: joined_frames([part.frames[key] for part in parts]) for key in parts[0].frames}
        return Images(frames, seen, after)
