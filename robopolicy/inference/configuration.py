"""Settings of inference engines and action chunking; no heavy imports.

Add a chunking with a line here, an entry point, or an import path: a function (policy, delay, options by name) ->
policy; see `robopolicy.inference.chunking.Chunking`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count
from robopolicy.core.registry import Registry

SYNCHRONOUS = "synchronous"
CHUNKINGS = Registry(
    "chunking",
    "robopolicy.chunking",
    {
        SYNCHRONOUS: "robopolicy.inference.chunking:synchronous",
        "prefetch": "robopolicy.inference.chunking:prefetch",
        "ensembling": "robopolicy.inference.chunking:ensembling",
        "bidirectional": "robopolicy.inference.chunking:bidirectional",
        "rtc": "robopolicy.inference.rtc:rtc",
        "trained_rtc": "robopolicy.inference.rtc:trained_rtc",
        "lerobot_rtc": "robopolicy.inference.rtc:lerobot_rtc",
    },
)


class ExportFormat(Enum):
    """File format of an exported policy."""

    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"


@dataclass(frozen=True)
class InferenceConfig:
    """Speed and exactness of a policy's inference."""

    engine: str = "reference"
    """Inference engine. reference computes as in training; lean computes the same (to 1e-5) without what only training
    needs; compiled is lean compiled to machine code (torch.compile, which needs a C++ compiler), on a GPU one CUDA
    graph per policy call. A custom engine is given by its import path.
    """
    sampler: str = ""
    """Noise-free sampler that replaces a denoising policy's own: ddim, dpm++, unipc (diffusion), euler, heun (flow), or
    an import path. Empty for its own.
    """
    steps: Count | None = None
    """Number of network calls of the sampler, null for the policy's own."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the network; bf16 is faster where the hardware supports it, and not exact."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be at least 1.")
        if self.steps is not None and not self.sampler:
            raise ConfigError("steps needs a sampler: ddim, dpm++, unipc, euler or heun.")
        if self.engine == "reference" and (self.sampler or self.precision != "fp32"):
            raise ConfigError("The reference engine uses the sampler of training: set engine=lean for another sampler.")

    @property
    def exact(self) -> bool:
        """Whether actions equal those of the reference, up to rounding."""
        return not self.sampler and self.precision == "fp32"
