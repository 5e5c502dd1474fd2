"""Exchange of tensors between the data-parallel processes of a run (`core.replicas`).

With one process every function returns its argument. Axes: N rows of a minibatch, of which process r of R computes rows
r, r + R, ... with gradient.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch import distributed as _torch_distributed

from robopolicy.core import replicas
from robopolicy.core.arrays import is_mapping
from robopolicy.core.errors import ConfigError, RobopolicyError
from robopolicy.core.randomness import derive_seed
from robopolicy.core.regression import DividesBatches
from robopolicy.core.row_draws import RowDraws
from robopolicy.core.tensors import join_tree, split_tree

distributed: Any = _torch_distributed
"""torch does not type its collectives."""
FEWEST = 2
"""Minimum number of rows per process: minibatches with fewer are computed in full by every process."""


@contextmanager
def _exchanging() -> Generator[None]:
    """Turn errors of the connection into ReplicaLostError."""
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL have no class of their own for a lost peer
        raise replicas.lost() from error


def broadcast[T](make: Callable[[], T], source: int = 0) -> T:
    """Return `make()` of process `source`, the leader, in every process; only that process calls it.

    The value consists of nested mappings, tensors (received on the CPU) and JSON values.
    """
    if replicas.count() == 1:
        return make()
    if replicas.rank() != source:
        described = json.loads(_bytes_of(None, source))
        tensors = load(_bytes_of(None, source))
        return join_tree(described, tensors, "the broadcast tensors", "the broadcast tree")["value"]
    value, tensors = make(), dict[str, Tensor]()
    skeleton = json.dumps(split_tree({"value": value}, "", tensors)).encode()
    for data in (skeleton, save(tensors)):
        _bytes_of(data, source)
    return value


def _bytes_of(data: bytes | None, source: int) -> bytes:
    """Broadcast the bytes of process `source`."""
    with _exchanging():
        size = torch.tensor([len(data or b"")])
        distributed.broadcast(size, source)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data is not None:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        distributed.broadcast(_counted(buffer), source)
    return b"" if data is not None else cast(Any, buffer).numpy().tobytes()


_total = [0]


def _counted(value: Tensor) -> Tensor:
    """Add the bytes of a tensor [...] that is exchanged to `bytes_exchanged`."""
    _total[0] += value.nbytes
    return value


def bytes_exchanged() -> int:
    """Return the bytes of all tensors that this process has so far sent to the others, or received from them."""
    return _total[0]


@dataclass(frozen=True)
class Part:
    """The rows of a minibatch of N that this process computes with gradient: all of them, or every R-th.

    rows: N; own: their slice; is_exact: whether random numbers of the own rows are those that one process draws for
    them. A minibatch of too few rows is computed in full by every process; `share` then divides its gradient among
    them.
    """

    rows: int
    own: slice = slice(None)
    is_exact: bool = True

    @property
    def is_all(self) -> bool:
        """Whether this process computes all rows."""
        return self.own == slice(None)

    @property
    def count(self) -> int:
        """Number of own rows."""
        return len(range(self.rows)[self.own])

    @property
    def share(self) -> float:
        """Weight of the mean over the own rows in the mean over all N; of the processes, these add up to 1."""
        return 1 / replicas.count() if self.is_all else self.count / self.rows

    def among(self, where: Tensor) -> Tensor:
        """Return the own ones of the N rows marked in `where` [...] bool."""
        if self.is_all:
            return where
        indices = where.flatten().nonzero().squeeze(1)[self.own]
        return torch.zeros_like(where).flatten().index_fill(0, indices, True).reshape(where.shape)

    def gathered(self, own: Tensor) -> Tensor:
        """Return values [N, ...] of all rows, without gradient, from those of the own rows [n, ...]."""
        if self.is_all:
            return own.detach()
        parts = _padded_of_all(own, -(-self.rows // replicas.count()))
        return torch.stack(parts, 1).flatten(0, 1)[: self.rows]

    def drawing(self) -> RowDraws | nullcontext[None]:
        """Return a context in which random numbers of the own rows are those that one process would draw for them, if
        the part is exact.
        """
        return RowDraws(self.rows, self.own) if self.is_exact and not self.is_all else nullcontext()

    def noise(self, generator: torch.Generator) -> torch.Generator:
        """Return the generator of a loss of the own rows: `generator`, or of a part that is not exact one of this
        process's own, seeded by a draw of `generator`, which all processes advance alike.
        """
        if self.is_exact or self.is_all:
            return generator
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        own_seed = derive_seed(seed, f"process {replicas.rank()}")
        return torch.Generator(generator.device).manual_seed(own_seed)


def part_of(rows: int) -> Part:
    """Return this process's part of a minibatch of `rows` rows."""
    size = replicas.count()
    return Part(rows) if size == 1 or rows < FEWEST * size else Part(rows, slice(replicas.rank(), None, size))


def divided(batch: Any, model: object) -> tuple[Part, Any]:
    """Return this process's part of a training batch, and its rows; with one process, the batch.

    batch: nested mappings and dataclasses of tensors and lists [N, ...], and scalars []; others if the model
    `DividesBatches`. The part is exact if the batch has the entry "observation", as batches of policies do, or the
    model divides it: other losses may draw random numbers for the batch as a whole. Raises ConfigError if the numbers
    of rows differ.
    """
    if replicas.count() == 1:
        return Part(0), batch
    if isinstance(model, DividesBatches):
        part = part_of(model.rows(batch))
        return part, batch if part.is_all else model.divided(batch, part.own)
    sizes = set(_sizes(batch))
    if len(sizes) != 1:
        raise ConfigError(
            f"{type(model).__name__} has batches whose parts have different numbers of rows, which data-parallel "
            "processes cannot divide: train it in one process, without torchrun or accelerate."
        )
    part = replace(part_of(sizes.pop()), is_exact=is_mapping(batch) and "observation" in batch)
    return part, batch if part.is_all else _taken(batch, part.own)


def _branches(batch: Any) -> Mapping[str, Any] | None:
    """Return the named parts of a batch, None for a tensor or list."""
    if is_mapping(batch):
        return batch
    return dict(vars(batch)) if is_dataclass(batch) else None


def _sizes(batch: Any) -> Iterator[int]:
    branches = _branches(batch)
    if branches is not None:
        for value in branches.values():
            yield from _sizes(value)
    else:
        yield from () if _is_scalar(batch) else (len(batch),)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _taken(batch: Any, own: slice) -> Any:
    branches = _branches(batch)
    if branches is None:
        return batch if _is_scalar(batch) else batch[own]
    parts = {name: _taken(value, own) for name, value in branches.items()}
    return parts if is_mapping(batch) else replace(batch, **parts)


def of_leader(value: Tensor) -> Tensor:
    """Return the leader's `value` [...] in every process, for a decision on which all must agree.

    On GPUs the same computation may round differently in two processes; if one stopped and the other waited for its
    gradients, it would wait forever.
    """
    if replicas.count() == 1:
        return value
    result = value.detach().clone()
    with _exchanging():
        distributed.broadcast(result, 0)
    return result


def rows_of_all(own: Tensor) -> Tensor:
    """Return the rows [N, ...] of all processes, in the order of their ranks, from the own ones [n, ...]."""
    if replicas.count() == 1:
        return own
    sizes = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(replicas.count())]
    with _exchanging():
        distributed.all_gather(sizes, torch.tensor([len(own)], device=own.device))
    parts = _padded_of_all(own, max(map(int, sizes)))
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def _padded_of_all(own: Tensor, size: int) -> list[Tensor]:
    """Return the rows of each process without gradient, padded to [size, ...], from the own ones [n, ...]."""
    padded = own.new_zeros((size, *own.shape[1:]))
    padded[: len(own)] = own.detach()
    parts = [torch.empty_like(padded) for _ in range(replicas.count())]
    with _exchanging():
        distributed.all_gather(parts, _counted(padded))
    return parts


def is_divided(value: object) -> bool:
    """Whether a tensor is one of which each process has a part (a DTensor of FSDP)."""
    return hasattr(value, "full_tensor")


def add_gradients(parameters: Sequence[nn.Parameter], terms: Iterable[Tensor] = ()) -> list[Tensor]:
    """Replace the gradients of `parameters` by their sums over all processes; return the sums of the scalars `terms`,
    [] each.

    They are added in one exchange; those of divided weights have been added by FSDP. Every process gets the same bits.
    A non-finite number in one of them is one in all. Raises ConfigError if FSDP has found no gradients.
    """
    scalars = [term.detach() for term in terms]
    if replicas.count() == 1:
        return scalars
    device = parameters[0].device
    kind = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
    whole = [each for each in parameters if not is_divided(each)]
    if len(whole) < len(parameters) and all(each.grad is None for each in parameters):
        raise ConfigError(
            "FSDP has found no gradients: log_prob of this policy returns a type whose tensors "
            "it does not find. Return robopolicy.core.policy.Scores, or register the type with "
            "torch.utils._pytree.register_dataclass."
        )
    present = torch.tensor([each.grad is not None for each in whole], dtype=kind, device=device)
    pieces = [
        torch.zeros(each.numel(), dtype=kind, device=device) if each.grad is None else each.grad.flatten().to(kind)
        for each in whole
    ]
    ends = [each.reshape(1).to(device, kind) for each in scalars]
    flat = torch.cat([*pieces, present, *ends])
    if len(flat):
        with _exchanging():
            distributed.all_reduce(_counted(flat))
    place = 0
    with torch.no_grad():
        for index, parameter in enumerate(whole):
            size = parameter.numel()
            if flat[len(flat) - len(ends) - len(whole) + index] > 0:
                parameter.grad = flat[place : place + size].reshape(parameter.shape).to(parameter.dtype)
            place += size
    return [value.to(scalar.dtype) for value, scalar in zip(flat[len(flat) - len(ends) :], scalars, strict=True)]


class ReplicasDifferError(RobopolicyError):
    """The processes of a run have different weights or random numbers."""


def require_equal(tensors: Iterable[Tensor], what: str, where: str) -> None:
    """Raise ReplicasDifferError unless tensors [...] are the same bits in all processes; where: name of the step.

    Divided tensors are not compared.
    """
    if replicas.count() == 1:
        return
    whole = (each.detach() for each in tensors if not is_divided(each))
    total = sum(int(each.contiguous().view(_WORDS[each.element_size()]).sum()) for each in whole)
    sums = [torch.zeros(1, dtype=torch.int64) for _ in range(replicas.count())]
    with _exchanging():
        distributed.all_gather(sums, torch.tensor([total % 2**62]))
    if any(not torch.equal(each, sums[0]) for each in sums):
        raise ReplicasDifferError(
            f"The {what} of this run's {replicas.count()} processes differ at {where}. They need the same packages, "
            "threads and kind of device; otherwise a mechanism computed something that depends on the process."
        )


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes."""
