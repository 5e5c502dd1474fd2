"""In which precision networks are run: bfloat16 where the hardware multiplies it.

World models have a precision of their own, see `autocast`. Policies and critics learn in one that the run chooses:
weights, their gradients and Adam's moments, what is added up in a decision's log-probability, advantages and losses are
fp32 in all of them, and what differs is in which numbers matrices are multiplied, which is most of the work.

- fp32: nothing differs.
- bf16: networks that go through `multiplied` run in bfloat16 (denoisers between noisy actions and prediction, the
  hidden layers of critics; our encoders of observations do not), and so do the transformers of `lowering`: language
  models with what they see, LeRobot's encoders, whose keys and values are then kept in bfloat16. Heads of tokens are
  fp32, backward passes follow. A policy acts and is scored through the same calls, so ratios still begin at 1: exactly
  on an x86 CPU where a row's products do not depend on how many rows there are, elsewhere up to their rounding
  (`tolerance_in`).
- bf16_backward: forward passes are those of fp32, to the last bit; the products of the backward pass are bfloat16.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.nn.configuration import LearningPrecision, Precision
from robopolicy.nn.shapes import META, NumberlessAutocast

ROUNDING = 2**-5
"""How far log-probabilities, means over elements, may be apart because of bfloat16."""

OF_TOKENS = 1e-4
"""How far log-probabilities of tokens may be apart because of the number of rows they are computed with."""

_lowered: ContextVar[bool] = ContextVar("lowered", default=False)
_again: ContextVar[bool] = ContextVar("again", default=False)


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the context in which networks run on `device`; "auto" is bfloat16 on CUDA and on CPUs that multiply it.

    On a core with AVX512_BF16 convolutions and transformers train 1.3 times as fast and imagine 1.5 times as fast.
    """
    half = precision == "bfloat16"
    if precision == "auto":
        half = device.type == "cuda" or (device.type == "cpu" and _cpu_multiplies())
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)


def require_precision(precision: LearningPrecision, device: torch.device) -> None:
    """Raise ConfigError where `device` has no bfloat16 that a run asks for, and warn where it merely imitates it."""
    if precision == "fp32":
        return
    told = f"precision={precision} multiplies in bfloat16"
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{told}, which is made for CPUs and CUDA, not for {device.type}: set precision=fp32.")
    if device.type == "cuda":
        known, fast = torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        known, fast = torch.ops.mkldnn._is_mkldnn_bf16_supported(), _cpu_multiplies()
    if not known:
        raise ConfigError(f"{told}, which this {device.type} cannot: set precision=fp32.")
    if not fast:
        warnings.warn(
            f"{told}, which this {device.type} only imitates (a CPU multiplies it with avx512_bf16 or amx_bf16, see "
            "lscpu): it will be slower than precision=fp32, not faster.",
            RobopolicyWarning,
            stacklevel=2,
        )


@contextmanager
def learning_in(precision: LearningPrecision) -> Iterator[None]:
    """Let what goes through `multiplied` run in this precision, in this thread and until the context ends."""
    token = _lowered.set(precision == "bf16")
    try:
        yield
    finally:
        _lowered.reset(token)


def tolerance_in(precision: LearningPrecision, tolerance: float, categorical: bool = False) -> float:
    """Return how far the score of a fresh decision may be from the one it was taken with, if in fp32 it is `tolerance`.

    categorical: of tokens, at least 1e-4. A Gaussian step is scored from the prediction it was drawn with; a token's
    log-probability is a difference of logits, each of which carries the rounding of a whole transformer in batches of
    another size: some 1e-5 in networks of any use, which is nothing to a ratio of probabilities.

    Kernels that are chosen by the number of rows may round a prediction differently, by 2^-8 of it. Divided by a
    Gaussian's std of 0.1 or more and averaged over a decision's elements that moves a log-probability by some 0.01.
    """
    tolerance = max(tolerance, OF_TOKENS) if categorical else tolerance
    return max(tolerance, ROUNDING) if precision == "bf16" else tolerance


def is_lowered() -> bool:
    """Whether `multiplied` means bfloat16 here."""
    return _lowered.get()


def multiplied(network: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return what a network makes on `device`, [...], in the precision that the run learns in; always fp32 itself.

    Back in fp32 at once, because a bfloat16 prediction that a schedule's scalars go on with would stay one.
    """
    if not _lowered.get():
        return network()
    with lowering(device):
        return network().float()


def lowering(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which networks on `device` multiply in the precision that the run learns in."""
    if not _lowered.get():
        return nullcontext()
    return NumberlessAutocast() if device == META else torch.autocast(device.type, torch.bfloat16)


def to_keep(made: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return what a network made within `lowering`, name -> [N, ...], as it is kept: in bfloat16, which takes half."""
    if not _lowered.get():
        return made
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in made.items()}


def as_kept(made: Mapping[str, Tensor], network: nn.Module) -> Mapping[str, Tensor]:
    """Return what `to_keep` kept, name -> [N, ...], for a network that runs now: in fp32 where nothing is lowered.

    A network with weights in bfloat16 has made it so by itself, and gets it back as it was.
    """
    if _lowered.get() or any(weight.dtype is torch.bfloat16 for weight in network.parameters()):
        return made
    return {name: value.float() if value.dtype is torch.bfloat16 else value for name, value in made.items()}


def backward_in(precision: LearningPrecision) -> AbstractContextManager[object]:
    """Return the context for `loss.backward()`; with bf16 its products follow the forward pass by themselves."""
    return _BackwardProducts() if precision == "bf16_backward" else nullcontext()


@contextmanager
def computing_again(lowered: bool) -> Iterator[None]:
    """Let a forward pass that is computed again on the way back be as it was: lowered or not, whatever its thread.

    CUDA goes backward on a thread of its own, where nothing is lowered; and what `backward_in` lowers is the products
    of the gradient, not these.
    """
    tokens = _lowered.set(lowered), _again.set(True)
    try:
        yield
    finally:
        _lowered.reset(tokens[0])
        _again.reset(tokens[1])


class _BackwardProducts(TorchDispatchMode):
    """Multiplies fp32 matrices in bfloat16; everything else, sums included, is left as it is."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self.PRODUCTS and not _again.get() and args[0].dtype == args[1].dtype == torch.float32:
            return func(args[0].bfloat16(), args[1].bfloat16()).float()
        return func(*args, **(kwargs or {}))


def _cpu_multiplies() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
