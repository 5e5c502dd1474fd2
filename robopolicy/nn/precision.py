"""Numerical precision of networks: fp32, or bfloat16 if the hardware supports it.

World models use a separate precision, see `autocast`. Policies and critics train in the precision chosen by the run:
weights, gradients, Adam's moments, sums of log-probabilities, advantages and losses are always fp32. Only the precision
of matrix multiplications differs, which are most of the computation.

- fp32: all products in fp32.
- bf16: networks that run through `run_in_training_precision` use bfloat16 (denoisers between noisy actions and
  prediction, the hidden layers of critics; not robopolicy's encoders of observations), and so do the transformers of
  `lowering`: vision-language models, LeRobot's encoders, whose keys and values are then cached in bfloat16. Heads of
  tokens use fp32; backward passes use the precision of the forward pass. Acting and log-probabilities run through the
  same calls, so ratios still start at 1: exactly on an x86 CPU where the products of a row do not depend on the number
  of rows, elsewhere up to their rounding (`tolerance_in`).
- fp8: the linear layers of the same networks multiply numbers rounded to 8 bits, in acting as in training (`fp8`). It
  is simulated: it shows what 8 bits do to learning, and saves neither time nor memory. For token policies.
- bf16_backward: forward passes equal those of fp32 bit for bit; the products of the backward pass are bfloat16.
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
from robopolicy.core.former_names import keep_former_names
from robopolicy.nn.configuration import LearningPrecision, Precision
from robopolicy.nn.fp8 import EightBitProducts
from robopolicy.nn.shapes import META, MetaAutocast

ROUNDING = 2**-5
"""Tolerance for log-probabilities, averaged over elements, due to bfloat16."""

OF_TOKENS = 1e-4
"""Tolerance for token log-probabilities due to different batch sizes."""

_lowered: ContextVar[LearningPrecision] = ContextVar("lowered", default="fp32")
_again: ContextVar[bool] = ContextVar("again", default=False)


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the autocast context for `device`; "auto" is bfloat16 on CUDA and on CPUs with bfloat16 instructions.

    On a core with AVX512_BF16, convolutions and transformers train 1.3 times as fast and imagined rollouts run 1.5
    times as fast.
    """
    half = precision == "bfloat16"
    if precision == "auto":
        half = device.type == "cuda" or (device.type == "cpu" and _cpu_multiplies())
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)


def require_precision(precision: LearningPrecision, device: torch.device) -> None:
    """Raise ConfigError if `device` lacks the requested bfloat16, and warn if it only emulates it."""
    if precision in ("fp32", "fp8"):
        return
    prefix = f"precision={precision} computes matrix products in bfloat16"
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{prefix}, which is supported only on CPUs and CUDA, not on {device.type}: set precision=fp32."
        )
    if device.type == "cuda":
        has_bf16, fast = torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16, fast = torch.ops.mkldnn._is_mkldnn_bf16_supported(), _cpu_multiplies()
    if not has_bf16:
        raise ConfigError(f"{prefix}, which this {device.type} does not support: set precision=fp32.")
    if not fast:
        warnings.warn(
            f"{prefix}, which this {device.type} only emulates (CPUs need avx512_bf16 or amx_bf16, see lscpu): it "
            "will be slower than precision=fp32.",
            RobopolicyWarning,
            stacklevel=2,
        )


@contextmanager
def training_precision(precision: LearningPrecision) -> Iterator[None]:
    """Context in which `run_in_training_precision` uses this precision, in the current thread."""
    token = _lowered.set(precision if precision in ("bf16", "fp8") else "fp32")
    try:
        yield
    finally:
        _lowered.reset(token)


def tolerance_in(precision: LearningPrecision, tolerance: float, categorical: bool = False) -> float:
    """Return the tolerance for recomputed log-probabilities of fresh action chunks, given the fp32 tolerance
    `tolerance`.

    categorical: for tokens, at least 1e-4. A Gaussian step is recomputed from the prediction it was drawn with. A
    token's log-probability is a difference of logits, each with the rounding of a full transformer at another batch
    size: about 1e-5 in trained networks, negligible for probability ratios.

    Kernels selected by batch size may round a prediction differently, by 2^-8 of it. Divided by a Gaussian std of 0.1
    or more and averaged over a decision's elements, this changes a log-probability by about 0.01.
    """
    tolerance = max(tolerance, OF_TOKENS) if categorical else tolerance
    return max(tolerance, ROUNDING) if precision == "bf16" else tolerance


def lowered_precision() -> LearningPrecision:
    """Return the precision that `run_in_training_precision` currently uses: fp32, bf16 or fp8."""
    return _lowered.get()


def is_lowered() -> bool:
    """Whether `run_in_training_precision` currently uses another precision than fp32."""
    return _lowered.get() != "fp32"


def run_in_training_precision(network: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Run a network on `device` in the run's training precision; the output [...] is always fp32.

    The output is converted to fp32 at once, because a bfloat16 prediction combined with a schedule's scalars would stay
    bfloat16.
    """
    if not is_lowered():
        return network()
    with lowering(device):
        return network().float()


def lowering(device: torch.device) -> AbstractContextManager[object]:
    """Return the context for products on `device` in the run's training precision."""
    if not is_lowered():
        return nullcontext()
    if _lowered.get() == "fp8":
        return EightBitProducts()
    return MetaAutocast() if device == META else torch.autocast(device.type, torch.bfloat16)


def cast_for_cache(made: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert outputs computed within `lowering`, name -> [N, ...], for storage: bfloat16, which halves the memory."""
    if _lowered.get() != "bf16":
        return made
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in made.items()}


def as_cached(made: Mapping[str, Tensor], network: nn.Module) -> Mapping[str, Tensor]:
    """Convert stored outputs of `cast_for_cache`, name -> [N, ...], for use by a network: to fp32 unless precision is
    lowered.

    A network with bfloat16 weights produced bfloat16 itself and gets it back unchanged.
    """
    if _lowered.get() == "bf16" or any(weight.dtype is torch.bfloat16 for weight in network.parameters()):
        return made
    return {name: value.float() if value.dtype is torch.bfloat16 else value for name, value in made.items()}


def backward_precision(precision: LearningPrecision) -> AbstractContextManager[object]:
    """Return the context for `loss.backward()`; with bf16 its matrix products follow the forward pass automatically."""
    return _BackwardProducts() if precision == "bf16_backward" else nullcontext()


@contextmanager
def recomputing(lowered: LearningPrecision) -> Iterator[None]:
    """Context for recomputing a forward pass during backward, with the precision of the original pass in any thread.

    CUDA runs backward in a separate thread without the lowered setting. `backward_precision` lowers gradient products
    only, not these recomputed ones.
    """
    tokens = _lowered.set(lowered), _again.set(True)
    try:
        yield
    finally:
        _lowered.reset(tokens[0])
        _again.reset(tokens[1])


class _BackwardProducts(TorchDispatchMode):
    """Multiplies fp32 matrices in bfloat16; all other operations, including sums, are unchanged."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self.PRODUCTS and not _again.get() and args[0].dtype == args[1].dtype == torch.float32:
            return func(args[0].bfloat16(), args[1].bfloat16()).float()
        return func(*args, **(kwargs or {}))


def _cpu_multiplies() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


keep_former_names(
    __name__,
    {
        "multiplied": "run_in_training_precision",
        "learning_in": "training_precision",
        "to_keep": "cast_for_cache",
        "as_kept": "as_cached",
        "backward_in": "backward_precision",
        "computing_again": "recomputing",
    },
)
