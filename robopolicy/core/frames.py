"""Frames that one camera took, as a tensor [n, height, width, 3], or packed: each compressed by itself, without loss.

What MuJoCo renders takes a tenth then at 64 px and a fortieth at 512 (zlib's fastest level: 0.1 and 2 ms to pack, half
of that to unpack), what a real camera sees about two thirds. Packed frames stay in the processor's memory; those that
are read are unpacked, on the device of the numbers by which they are asked for.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import integers

FASTEST = 1


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
