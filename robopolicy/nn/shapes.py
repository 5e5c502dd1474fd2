"""Networks without numbers: what a large one takes is known from the shapes of its tensors alone."""

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

META = torch.device("meta")
LARGE = 1 << 14
"""A floating-point tensor of so many elements is made without numbers."""
aten = torch.ops.aten
_MAKERS = {"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided", "new_empty", "new_zeros", "new_ones"}


@contextmanager
def shapes_only() -> Iterator[None]:
    """Within, large floating-point tensors are made without numbers, and so is all that is computed with them.

    Small ones, integers and masks have theirs, so that code which reads them runs: places of patches, lengths of texts.
    What is read from a tensor without numbers is 1, and true. Nothing can be computed back, but what a gradient would
    keep is known.
    """
    settings: Any = importlib.import_module("torch.fx.experimental._config")  # slow to import, and without types
    with settings.patch(meta_nonzero_assume_all_nonzero=True), _Numberless():
        yield


class _Numberless(TorchDispatchMode):
    """Runs every operation that meets a tensor without numbers on the device "meta", which has none."""

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
        found = func(*tree_map(_numberless, args), **tree_map(_numberless, kwargs))
        # Written in place, a tensor with numbers stays what it is: only the shape of what it would hold is asked for.
        return args[0] if func._schema.is_mutable and isinstance(args[0], Tensor) else found


class NumberlessAutocast(TorchFunctionMode):
    """torch.autocast to bfloat16 for tensors without numbers, whose device has none: what multiplies gets bfloat16."""

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
    """Return a tensor of fp32 in bfloat16, anything else as it is."""
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute as always, but without numbers where a large floating-point tensor is made of nothing."""
    name, *_ = func.__name__.split(".")
    shape = args[1] if name.startswith("new_") else args[0] if args else None
    dtype = kwargs.get("dtype") or (args[0].dtype if name.startswith("new_") else torch.get_default_dtype())
    if name not in _MAKERS or not isinstance(shape, (list, tuple)) or not dtype.is_floating_point:
        return func(*args, **kwargs)
    large = torch.Size(shape).numel() >= LARGE
    return torch.empty(tuple(shape), dtype=dtype, device=META) if large else func(*args, **kwargs)


def _numberless(item: Any) -> Any:
    return item.to(META) if isinstance(item, Tensor) and item.device != META else item
