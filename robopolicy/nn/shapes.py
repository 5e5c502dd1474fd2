"""Meta-device execution: estimate memory of large networks from tensor shapes, without allocating values."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from robopolicy.core.former_names import keep_former_names

META = torch.device("meta")
LARGE = 1 << 14
"""Number of elements from which on a floating-point tensor is created without values."""
aten = torch.ops.aten
_MAKERS = {"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided", "new_empty", "new_zeros", "new_ones"}


@contextmanager
def shapes_only() -> Iterator[None]:
    """Context in which large floating-point tensors, and all results computed from them, are meta tensors without
    values.

    Small tensors, integers and masks keep their values, so that code reading them runs (patch positions, text lengths).
    Values read from a meta tensor are 1 or True. No backward pass is possible, but the memory saved for gradients is
    counted.
    """
    settings: Any = importlib.import_module("torch.fx.experimental._config")  # slow to import, and without types
    with settings.patch(meta_nonzero_assume_all_nonzero=True), _Numberless():
        yield


class _Numberless(TorchDispatchMode):
    """Runs every operation that involves a meta tensor on the device "meta"."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(tensor.device == META for tensor in tensors):
            return _made(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        if "generator" in kwargs:
            kwargs["generator"] = None
        result = func(*tree_map(_numberless, args), **tree_map(_numberless, kwargs))
        # Written in place, a tensor with numbers stays what it is: only the shape of what it would hold is asked for.
        return args[0] if func._schema.is_mutable and isinstance(args[0], Tensor) else result


class MetaAutocast(TorchFunctionMode):
    """torch.autocast to bfloat16 for meta tensors, whose device does not support it: inputs of matrix products become
    bfloat16.
    """

    PRODUCTS = frozenset(
        {
            torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, torch.addmm,
            functional.linear, functional.conv1d, functional.conv2d, functional.scaled_dot_product_attention,
        }
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.PRODUCTS:
            args, kwargs = tree_map(_halved, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _halved(value: Any) -> Any:
    """Convert an fp32 tensor to bfloat16; other values are unchanged."""
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation normally, but create large floating-point tensors on the meta device."""
    name, *_ = func.__name__.split(".")
    shape = args[1] if name.startswith("new_") else args[0] if args else None
    dtype = kwargs.get("dtype") or (args[0].dtype if name.startswith("new_") else torch.get_default_dtype())
    if name not in _MAKERS or not isinstance(shape, (list, tuple)) or not dtype.is_floating_point:
        return func(*args, **kwargs)
    large = torch.Size(shape).numel() >= LARGE
    return torch.empty(tuple(shape), dtype=dtype, device=META) if large else func(*args, **kwargs)


def _numberless(item: Any) -> Any:
    return item.to(META) if isinstance(item, Tensor) and item.device != META else item


keep_former_names(__name__, {"NumberlessAutocast": "MetaAutocast"})
