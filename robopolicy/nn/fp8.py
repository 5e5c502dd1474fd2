"""Simulated 8-bit products: linear layers whose operands are rounded to e4m3 (1 sign, 4 exponent and 3 mantissa bits).

    with EightBitProducts():
        network(x)  # every torch.nn.functional.linear in it

Inputs are scaled by 448 / max |x| of each row's groups of 128 elements, weights by that of each block of 128 x 128,
before they are rounded: a row does not depend on the others of its batch (Jet-RL, arXiv:2601.14243). Products of
rounded numbers, and attention, are computed in fp64: in fp32 their last bits depend on the batch, which the next
rounding to 3 bits may turn into a step. So a token is scored exactly as it was drawn. In the backward pass gradients,
which are not rounded, are multiplied with the rounded operands. Nothing is faster.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

LARGEST = 448.0
"""Largest number of e4m3."""
GROUP = 128
"""Number of elements that share a scale, along each scaled axis."""


def rounded_e4m3(x: Tensor, axes: int = 1) -> Tensor:
    """Return x [..., D] rounded to e4m3 with one scale per GROUP elements of its last `axes` axes (1 or 2), in fp32.

    The gradient passes unchanged.
    """
    return _Rounded.apply(x, axes)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: int) -> Tensor:
        sizes = x.shape[-axes:]
        padding = [(-size) % GROUP for size in sizes]
        padded = functional.pad(x.float(), [end for pad in reversed(padding) for end in (0, pad)])
        shape = [part for size in padded.shape[-axes:] for part in (size // GROUP, GROUP)]
        groups = padded.unflatten(-1, shape[-2:])
        within: tuple[int, ...] = (-1,)
        if axes == 2:
            groups, within = groups.unflatten(-3, shape[:2]), (-1, -3)
        scale = LARGEST / groups.abs().amax(within, keepdim=True).clamp(min=1e-12)
        rounded = (groups * scale).to(torch.float8_e4m3fn).float() / scale
        unpadded = rounded.reshape(padded.shape)
        for axis, size in enumerate(sizes, start=-axes):
            unpadded = unpadded.narrow(axis, 0, size)
        return unpadded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class EightBitProducts(TorchFunctionMode):
    """Context in which linear layers multiply numbers rounded to e4m3; see the module."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            x, weight, *rest = args
            args = (rounded_e4m3(x), rounded_e4m3(weight, 2), *rest)
        elif func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        dtype = args[0].dtype
        args, kwargs = tree_map(_doubled, (tuple(args), kwargs))
        return func(*args, **kwargs).to(dtype)


def _doubled(value: Any) -> Any:
    """Convert a floating-point tensor to float64; other values are unchanged."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
