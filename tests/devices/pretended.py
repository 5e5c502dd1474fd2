"""A CUDA device on a machine without one: tensors that say they lie on it, and must not meet those of the CPU.

A pretended tensor holds its numbers on the CPU, so everything that reads values (`.item()`, checks for finiteness,
whole training loops) runs as it does there. Where tensors of two devices meet, or a generator draws on the other
device, it raises `WrongDevice`, as CUDA would. Why not torch's FakeTensorMode: it has no numbers, so nothing that reads
one can run under it; without a driver its tensors have no backward pass ("hasPrimaryContext expects a valid device
index"); and it lets pass what CUDA refuses: an index on the GPU into a tensor on the CPU, and `clamp` by a bound on the
CPU.

To torch's C++ the tensors are those of the device "meta", which needs no driver; `.device` and the like say "cuda:0".
Not covered by it: CUDA's own random numbers (draws are those of the CPU), its kernels and their precision, autocast,
streams, graphs, pinned memory and torch.compile, and libraries that ask the device in C++.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from robopolicy.core.randomness import EpisodeGenerator

CUDA = torch.device("cuda", 0)
HIDDEN = torch.device("meta")
"""What torch's C++ takes pretended tensors for."""
ROOT = Path(__file__).parents[2]
aten = torch.ops.aten


class WrongDevice(RuntimeError):
    """What CUDA would refuse."""


class Pretended(Tensor):
    """A tensor that pretends to lie on the GPU; its numbers are in `numbers`."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Pretended":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=HIDDEN,
        )
        made.numbers = numbers
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.numbers!r} on {CUDA}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            parameter = getattr(self, "_is_param", False)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if parameter else copied
        return memo[id(self)]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """What lets `nn.Module.to` put one in the place of a parameter."""
        return ["numbers"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "Pretended":
        return Pretended(inner["numbers"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran on a pretended tensor outside of pretended_cuda().")


class PretendedGenerator(torch.Generator):
    """A generator of the CPU that says of which device it is."""

    def __new__(cls, device: torch.device | str = "cpu") -> "PretendedGenerator":
        made = super().__new__(cls, "cpu")
        made._pretended = torch.device(device)
        return made

    def __init__(self, device: torch.device | str = "cpu"):
        """As torch's."""

    @property
    def device(self) -> torch.device:
        return self._pretended


def _episode_generator(cls: type, seed: int, device: torch.device | str = "cpu") -> EpisodeGenerator:
    """An `EpisodeGenerator` of the CPU that says of which device it is."""
    made = torch._C.Generator.__new__(cls, "cpu")
    made._pretended = torch.device(device)
    return made


class Log:
    """Where the GPU was waited for, or data was copied to it: (what, file:line) -> how often."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, what: str) -> None:
        """Count one at the innermost line of ours."""
        self.counts[what, _place()] += 1


def _place() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith((f"{ROOT}/robopolicy/", f"{ROOT}/worldmodels/", f"{ROOT}/sims/")):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


WAITS = {
    aten._local_scalar_dense.default: "read",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "mask",
    aten.unique_consecutive.default: "unique",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.bincount.default: "bincount",
    aten.equal.default: "equal",
    aten.multinomial.default: "multinomial",
}
"""Operations for whose result the CPU waits."""
TRANSFERS = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
SCALARS = {
    aten.where.self: (1, 2),
    aten.masked_fill.Tensor: (2,),
    aten.masked_fill_.Tensor: (2,),
    aten.fill_.Tensor: (1,),
}
"""Where a number on the CPU may stand among tensors of the GPU, beside element by element operations on two tensors."""


def _require_one_device(func: Any, args: Sequence[Any], tensors: list[Tensor]) -> None:
    """Raise WrongDevice where CUDA would not compute with tensors of both devices."""
    others = [tensor for tensor in tensors if not isinstance(tensor, Pretended)]
    if not others or len(others) == len(tensors) or func in TRANSFERS:
        return
    if func in INDEXING:  # indices may be on the CPU, and a number that is written
        values = args[2] if len(args) > 2 else None
        fine = isinstance(args[0], Pretended) and (values is None or isinstance(values, Pretended) or not values.dim())
    elif func in SCALARS:
        allowed = [args[place] for place in SCALARS[func]]
        fine = all(not other.dim() and any(other is item for item in allowed) for other in others)
    else:
        binary = torch.Tag.pointwise in func.tags and len(tensors) == 2 and func is not aten.clamp.Tensor
        fine = binary and not others[0].dim()
    if not fine:
        told = ", ".join(
            f"{list(each.shape)} on {'cuda:0' if isinstance(each, Pretended) else 'cpu'}" for each in tensors
        )
        raise WrongDevice(f"{func} got tensors of two devices: {told}.")


class _Computing(TorchDispatchMode):
    """Computes with the numbers of pretended tensors, and pretends that what comes of them is on the GPU."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, Pretended)}
        _require_one_device(func, args, tensors)
        asked = kwargs.get("device")
        on_gpu = bool(known) if asked is None else torch.device(asked).type == HIDDEN.type
        self._note(func, args, tensors, bool(known), on_gpu)
        if not known and not on_gpu:
            return func(*args, **kwargs)
        inner = tree_map(_numbers, kwargs)
        if asked is not None:
            inner["device"] = torch.device("cpu")
        result = func(*tree_map(_numbers, tuple(args)), **inner)
        if torch.Tag.inplace_view in func.tags:
            with no_dispatch():  # what it pretends to be gets the new shape as well
                func(*args, **kwargs)
        if not on_gpu or (func is aten.copy_.default and not isinstance(args[0], Pretended)):
            return args[0] if func is aten.copy_.default else result

        def pretend(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            return known[id(item)] if id(item) in known else Pretended(item)

        return tree_map(pretend, result)

    def _note(self, func: Any, args: Any, tensors: list[Tensor], from_gpu: bool, on_gpu: bool) -> None:
        if func in TRANSFERS:
            source = isinstance(args[1] if func is not aten._to_copy.default else args[0], Pretended)
            target = on_gpu if func is aten._to_copy.default else isinstance(args[0], Pretended)
            if source != target:
                self.log.note("to the CPU" if source else "to the GPU")
        elif from_gpu and func in WAITS:
            self.log.note(WAITS[func])
        elif from_gpu and func in INDEXING:
            indices = [item for item in args[1] if item is not None]
            if any(item.dtype in (torch.bool, torch.uint8) for item in indices):
                self.log.note("mask")
            elif not all(isinstance(item, Pretended) for item in indices):
                self.log.note("to the GPU")


def _numbers(item: Any) -> Any:
    return item.numbers if isinstance(item, Pretended) else item


def _listed(index: Any) -> Any:
    """Return an index that is a list, or numpy's, as the tensor on the CPU that torch makes of it."""
    return torch.as_tensor(index) if isinstance(index, (list, np.ndarray)) else index


def _hidden(item: Any) -> Any:
    """Return the device under which C++ knows pretended tensors, where `item` names the GPU."""
    if isinstance(item, torch.device):
        return HIDDEN if item.type == "cuda" else item
    return HIDDEN if isinstance(item, str) and item.partition(":")[0] == "cuda" else item


_READ = {
    torch.Tensor.device.__get__: CUDA,
    torch.Tensor.is_cuda.__get__: True,
    torch.Tensor.is_cpu.__get__: False,
    torch.Tensor.is_meta.__get__: False,
}
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray}
_BRACKETS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_TO_NUMPY = {torch.Tensor.numpy, torch.Tensor.__array__}


class _Speaking(TorchFunctionMode):
    """Answers for pretended tensors in Python, and checks that generators draw on their own device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ:
            return _READ[func] if isinstance(args[0], Pretended) else func(*args)
        if func in _TO_NUMPY and isinstance(args[0], Pretended):
            raise WrongDevice("Can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first.")
        if func is torch.Tensor.tolist and isinstance(args[0], Pretended):
            return args[0].cpu().tolist()
        if func is torch.Tensor.cuda:
            return args[0].to(HIDDEN)
        if func is torch.Tensor.data.__set__ and isinstance(args[0], Pretended) != isinstance(args[1], Pretended):
            raise NotImplementedError("tensor.data = a tensor of another device")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _hidden(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(_hidden(item) for item in args)
        if func is torch.Tensor.new_tensor and isinstance(args[0], Pretended) and "device" not in kwargs:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(HIDDEN)
        if func in _BRACKETS and isinstance(args[0], Pretended):
            index = tuple(_listed(item) for item in args[1]) if isinstance(args[1], tuple) else _listed(args[1])
            args = (args[0], index, *args[2:])
        generator = kwargs.get("generator")
        if generator is None:
            generator = next((item for item in args if isinstance(item, torch.Generator)), None)
        if generator is not None:
            _require_own_device(func, generator, args, kwargs)
        if func in _MAKERS and kwargs.get("device") is HIDDEN:
            return func(*args, **{**kwargs, "device": "cpu"}).to(HIDDEN)
        return func(*args, **kwargs)


def _require_own_device(func: Any, generator: torch.Generator, args: Any, kwargs: Any) -> None:
    drawn_on = next((item for item in tree_leaves(args) if isinstance(item, Tensor)), None)
    asked = kwargs.get("device")
    on_gpu = isinstance(drawn_on, Pretended) if asked is None else torch.device(asked).type == HIDDEN.type
    if on_gpu != (generator.device.type == "cuda"):
        name = getattr(func, "__name__", func)
        where = "cuda" if on_gpu else "cpu"
        raise WrongDevice(f"{name}: expected a '{where}' device type for generator but found '{generator.device}'.")


def _load_file(path: Any, device: torch.device | str = "cpu", **options: Any) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in _LOAD_FILE(path, **options).items()}


def _autocast(device_type: str, *args: Any, **options: Any) -> Any:
    return nullcontext() if device_type == "cuda" else _AUTOCAST(device_type, *args, **options)


_AUTOCAST = torch.autocast
_LOAD_FILE = safetensors.torch.load_file


@contextmanager
def pretended_cuda() -> Iterator[Log]:
    """Let "cuda" be a device within; yields the log of where it was waited for.

    Tensors that were made within are of no use outside.
    """
    log = Log()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "Generator", PretendedGenerator))
        stack.enter_context(mock.patch.object(EpisodeGenerator, "__new__", _episode_generator))
        stack.enter_context(mock.patch.object(EpisodeGenerator, "device", PretendedGenerator.device, create=True))
        stack.enter_context(mock.patch.object(safetensors.torch, "load_file", _load_file))
        stack.enter_context(mock.patch("robopolicy.core.tensors.load_file", _load_file))
        stack.enter_context(mock.patch.object(torch, "autocast", _autocast))
        for name in ("synchronize", "set_rng_state"):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *args: None))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", lambda *args: torch.get_rng_state()))
        free, total = 70 * 10**9, 80 * 10**9
        stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", lambda *args: (free, total)))
        stack.enter_context(_Computing(log))
        stack.enter_context(_Speaking())
        yield log
