"""How a trained policy computes its decisions, and the ways of living with a delay; nothing heavy is imported here.

The next chunking is one line here, an entry point, or a dotted path: a function (policy, delay, options by name) ->
policy; see `robopolicy.inference.chunking.Chunking`.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class InferenceConfig:
    """How fast, and how exactly, a policy decides."""

    engine: str = "reference"
    """reference computes as training does; lean the same (to 1e-5) without what acting does not need; compiled is lean
    in machine code (torch.compile, which needs a C++ compiler), on a GPU one CUDA graph a decision. Your own is named
    by its dotted path.
    """
    sampler: str = ""
    """Noise-free sampler in the place of a denoising policy's own: ddim, dpm++, unipc (diffusions), euler, heun
    (flows), or a dotted path. Empty for its own.
    """
    steps: Count | None = None
    """Its calls of the network, null for as many as the policy takes."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the network; bf16 is faster where the processor multiplies it, and not exact."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; a decision takes at least 1.")
        if self.steps is not None and not self.sampler:
            raise ConfigError("steps belongs to a sampler: name one (ddim, dpm++, unipc, euler, heun).")
        if self.engine == "reference" and (self.sampler or self.precision != "fp32"):
            raise ConfigError("The reference engine computes as training does: choose engine=lean for another sampler.")

    @property
    def exact(self) -> bool:
        """Whether decisions are those of the reference, up to rounding."""
        return not self.sampler and self.precision == "fp32"
