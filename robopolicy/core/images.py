"""Deduplicated storage of rollout camera images; history windows of H frames are assembled on access.

The same frame occurs in every overlapping history, in every episode of a group with the same initial state, in every
branch of a prefix, and as next observation. Here each instant (the images of all cameras at one time) is stored once
and referenced by index.

Frames of one camera are a tensor [n, height, width, 3] or packed, i.e. losslessly compressed one by one. MuJoCo images
then take a tenth at 64 px and a fortieth at 512 px (zlib's fastest level: 0.1 and 2 ms to pack, half of that to
unpack), images of a real camera about two thirds. Packed frames stay in CPU memory; frames are unpacked on access, to
the device of the index tensor.

Axes: B row, T decision, R row of a batch of episodes, H history frame, n instants.
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
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import IMAGE_PREFIX

FASTEST = 1
READ_AT_ONCE = 64
"""Number of frames unpacked at once."""
type Keeping = Literal["not", "plain", "packed"]
"""Storage of camera images: not at all, unchanged, or compressed without loss."""


class PackedFrames:
    """n compressed frames of equal shape; `packed[numbers]` indexes them like a tensor. parts: compressed bytes per
    frame.
    """

    def __init__(self, parts: Iterable[bytes], one: tuple[int, ...]):
        self.parts, self.one = tuple(parts), one

    @staticmethod
    def of(frames: "Frames") -> "PackedFrames":
        """Pack frames [n, *one] uint8; raises TypeError for any other dtype."""
        if isinstance(frames, PackedFrames):
            return frames
        if frames.dtype != torch.uint8:
            raise TypeError(f"Packed frames must be uint8, not {frames.dtype}.")
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
        """Unpack the frames with indices [...] int64 to [..., *one] uint8."""
        frame_numbers = integers(numbers.flatten())
        places = {number: place for place, number in enumerate(dict.fromkeys(frame_numbers))}  # each is unpacked once
        unpacked = np.empty((len(places), *self.one), np.uint8)
        for number, place in places.items():
            unpacked[place] = np.frombuffer(zlib.decompress(self.parts[number]), np.uint8).reshape(self.one)
        rows = torch.tensor([places[number] for number in frame_numbers], dtype=torch.int64).reshape(numbers.shape)
        return torch.from_numpy(unpacked)[rows].to(numbers.device)  # pyright: ignore[reportUnknownMemberType]

    def tree(self) -> dict[str, Any]:
        """Return the checkpoint form that `frames_of` reads: tensors and the shape of one frame."""
        sizes = [len(part) for part in self.parts]
        data = torch.frombuffer(bytearray(b"".join(self.parts)), dtype=torch.uint8) if sizes else torch.empty(0).byte()
        return {"packed": data, "sizes": torch.tensor(sizes, dtype=torch.int64), "one": list(self.one)}


type Frames = Tensor | PackedFrames
"""Frames of one camera, [n, *shape]."""


def frames_tree(frames: Frames) -> Any:
    """Return frames as part of a checkpoint's tree."""
    return frames.tree() if isinstance(frames, PackedFrames) else frames


def frames_of(tree: Tensor | Mapping[str, Any]) -> Frames:
    """Return the frames [n, *shape] stored by `frames_tree`."""
    if isinstance(tree, Tensor):
        return tree
    data = memoryview(tree["packed"].cpu().numpy())
    ends = integers(tree["sizes"].cumsum(0))
    parts = (bytes(data[first:end]) for first, end in zip([0, *ends], ends, strict=False))
    return PackedFrames(parts, tuple(tree["one"]))


def select_frames(frames: Frames, numbers: Tensor) -> Frames:
    """Return the frames with indices [m], packed if the input was."""
    if isinstance(frames, PackedFrames):
        return PackedFrames((frames.parts[number] for number in integers(numbers)), frames.one)
    return frames[numbers]


def joined_frames(parts: list[Frames]) -> Frames:
    """Concatenate frames; the result is packed if one part is."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    packed = [PackedFrames.of(part) for part in parts]
    return PackedFrames((frame for part in packed for frame in part.parts), packed[0].one)


def cameras_in(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the camera entries of a mapping with observation keys."""
    return {key: value for key, value in observation.items() if key.startswith(IMAGE_PREFIX)}


class FrameStore:
    """Stores windows of frames, each instant once; instants are identified by a 128-bit BLAKE2 hash of their pixels.

    frames: camera key -> [n, *shape], initial frames; packed: whether frames are stored compressed.
    """

    def __init__(self, frames: Mapping[str, Frames] | None = None, *, packed: bool = False):
        self.packed = packed
        self._numbers: dict[bytes, int] = {}
        self._parts: list[dict[str, Frames]] = []
        self._count = 0
        if frames:
            self._keep(frames)
            for first in range(0, self._count, READ_AT_ONCE):  # packed ones are not unpacked all at once
                indices = torch.arange(first, min(first + READ_AT_ONCE, self._count))
                digests = _digests({key: value[indices][:, None] for key, value in frames.items()})
                self._numbers.update((digest, first + place) for place, digest in enumerate(digests))

    @property
    def frames(self) -> dict[str, Frames]:
        """All stored frames, camera key -> [n, *shape]; {} if empty."""
        if len(self._parts) > 1:
            self._parts = [{key: joined_frames([part[key] for part in self._parts]) for key in self._parts[0]}]
        return dict(self._parts[0]) if self._parts else {}

    def tree(self) -> dict[str, Any]:
        """Return all stored frames as a checkpoint tree."""
        return {key: frames_tree(value) for key, value in self.frames.items()}

    @staticmethod
    def of(tree: Mapping[str, Any], *, packed: bool = False) -> "FrameStore":
        """Restore a store from `tree`; packed: whether it compresses from now on."""
        return FrameStore({key: frames_of(value) for key, value in tree.items()}, packed=packed)

    def add(self, shown: Mapping[str, Tensor]) -> Tensor:
        """Add the windows of all cameras, key -> [R, H, *shape], storing new frames; return frame indices [R, H]."""
        count, history = next(iter(shown.values())).shape[:2]
        numbers: list[int] = []
        new_places: list[tuple[int, int]] = []
        for place, digest in zip(itertools.product(range(count), range(history)), _digests(shown), strict=True):
            next_number = self._count + len(new_places)
            numbers.append(self._numbers.setdefault(digest, next_number))
            if numbers[-1] == next_number:
                new_places.append(place)
        if new_places:
            row, frame = torch.tensor(new_places).T
            self._keep({key: value[row, frame] for key, value in shown.items()})
        device = next(iter(shown.values())).device
        return torch.tensor(numbers, dtype=torch.int64, device=device).reshape(count, history)

    def _keep(self, frames: Mapping[str, Frames]) -> None:
        self._parts.append({key: PackedFrames.of(value) if self.packed else value for key, value in frames.items()})
        self._count += len(next(iter(frames.values())))


def _digests(shown: Mapping[str, Tensor]) -> Iterator[bytes]:
    """Yield a 128-bit hash of each instant of windows, key -> [R, H, *shape], in row order."""
    pixels = [cast(Array, value.cpu().contiguous().numpy()) for value in shown.values()]  # pyright: ignore[reportUnknownMemberType]
    for place in itertools.product(*map(range, pixels[0].shape[:2])):
        digest = blake2b(digest_size=16)
        for camera in pixels:
            digest.update(camera[place])
        yield digest.digest()


def store_for(images: Keeping) -> FrameStore | None:
    """Return an empty store for this storage mode; None if images are not stored."""
    return None if images == "not" else FrameStore(packed=images == "packed")


@dataclass(frozen=True)
class Images:
    """Images of n instants, and their indices per policy call.

    frames: camera key -> [n, height, width, 3] uint8, plain or packed; seen: [B, T, H] int64, indices of the frames in
    a decision's observation, oldest first; after: [B, T, H] int64, 1 + the indices of the frames after a decision that
    has no successor, 0 elsewhere (the next column has them); None: not stored.
    """

    frames: Mapping[str, Frames]
    seen: Tensor
    after: Tensor | None = None

    @staticmethod
    def of(observation: Mapping[str, Any]) -> "Images | None":
        """Return the camera images [B, T, H, ...] of an observation, deduplicated; None if it has none."""
        cameras, store = cameras_in(observation), FrameStore()
        if not cameras:
            return None
        shape = next(iter(cameras.values())).shape[:2]
        indices = store.add({key: value.flatten(0, 1) for key, value in cameras.items()})
        return Images(store.frames, indices.reshape(*shape, -1))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the images of one policy call, (H, height, width, 3) by camera key."""
        return {key: (self.seen.shape[-1], *value.shape[1:]) for key, value in self.frames.items()}

    def only(self, keys: Collection[str]) -> "Images":
        """Keep only these cameras."""
        return replace(self, frames={key: value for key, value in self.frames.items() if key in keys})

    def read(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return the frames with indices [...]: camera key -> [..., height, width, 3]."""
        return {key: value[numbers] for key, value in self.frames.items()}

    def following(self, where: Tensor) -> dict[str, Tensor]:
        """Return the images after the n action chunks selected by `where` [B, T] bool, key -> [n, H, ...]; LookupError
        if they are not stored.
        """
        if self.after is None or bool((self.after[where] == 0).any()):
            raise LookupError("Next-observation images are stored only at the end of an episode or rollout.")
        return self.read(self.after[where] - 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Images":
        """Apply `function` to the frame indices [B, T, H]."""
        return replace(self, seen=function(self.seen), after=None if self.after is None else function(self.after))

    def to(self, device: torch.device | str) -> "Images":
        """Move every tensor to `device`."""
        frames = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in self.frames.items()}
        return replace(self.map(lambda numbers: numbers.to(device)), frames=frames)

    def tree(self) -> dict[str, Any]:
        """Return the checkpoint form that `from_tree` reads, without unreferenced frames."""
        compacted = self.compact()
        return {**vars(compacted), "frames": {key: frames_tree(value) for key, value in compacted.frames.items()}}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "Images":
        """Restore images from `tree`."""
        frames = {key: frames_of(value) for key, value in tree["frames"].items()}
        return Images(frames, tree["seen"], tree["after"])

    def compact(self) -> "Images":
        """Drop frames that are no longer referenced."""
        ends = [] if self.after is None else [self.after[self.after > 0] - 1]
        count = len(next(iter(self.frames.values())))
        is_used = torch.zeros(count, dtype=torch.bool, device=self.seen.device)
        is_used[torch.cat([self.seen.flatten(), *ends])] = True
        used_frames = is_used.nonzero().squeeze(1)
        if len(used_frames) == count:
            return self
        number = torch.zeros(count + 1, dtype=torch.int64, device=used_frames.device)  # of 1 + a frame, and of none
        number[used_frames + 1] = torch.arange(1, len(used_frames) + 1, device=used_frames.device)
        after = None if self.after is None else number[self.after]
        frames = {key: select_frames(value, used_frames) for key, value in self.frames.items()}
        return Images(frames, number[self.seen + 1] - 1, after)

    @staticmethod
    def join(parts: "list[Images]", pad: Callable[[Tensor], Tensor]) -> "Images":
        """Concatenate along rows; pad: pads the indices [B, T, H] with zeros to equal length. Images after action
        chunks are kept only if all parts have them. Raises ValueError when the cameras differ.
        """
        if len({tuple(sorted(part.frames)) for part in parts}) > 1:
            raise ValueError("Rollouts to be concatenated have different cameras.")
        parts = [part.compact() for part in parts]
        counts = [len(next(iter(part.frames.values()))) for part in parts]
        first = [sum(counts[:index]) for index in range(len(parts))]
        indices = torch.cat([pad(part.seen + offset) for part, offset in zip(parts, first, strict=True)])
        ends = [part.after for part in parts if part.after is not None]
        after = None
        if len(ends) == len(parts):
            shifted_ends = [torch.where(end > 0, end + offset, 0) for end, offset in zip(ends, first, strict=True)]
            after = torch.cat([pad(end) for end in shifted_ends])
        frames = {key: joined_frames([part.frames[key] for part in parts]) for key in parts[0].frames}
        return Images(frames, indices, after)


def black_out(key: str, value: Any, draws: torch.Generator, share: float = 0.5, patches: int = 8) -> Any:
    """Black out a random share of the patches of images [N, H, height, width, 3], the same in every frame.

    patches: their number along each side; another field than a camera's is returned as it is.
    """
    if not key.startswith(IMAGE_PREFIX):
        return value
    count, _, height, width, _ = value.shape
    visible_mask = torch.rand((count, patches, patches), generator=draws, device=draws.device) >= share
    rows = torch.arange(height, device=value.device) * patches // height
    columns = torch.arange(width, device=value.device) * patches // width
    return value * visible_mask[:, rows][:, :, columns][:, None, :, :, None]


keep_former_names(__name__, {"some_of": "select_frames"})
