"""Who computes the decisions of a policy that acts."""

from dataclasses import dataclass

from robopolicy.core.errors import ConfigError
from robopolicy.inference.configuration import InferenceConfig

AUTO = "auto"


@dataclass(frozen=True)
class InferenceSection(InferenceConfig):
    """Who computes the decisions of a policy that acts."""

    engine: str = AUTO
    """auto: what robopolicy optimize has stored beside the checkpoint, else reference. reference computes as training
    does; lean the same (to 1e-5) without what acting does not need; compiled is lean in machine code (it needs a C++
    compiler), on a GPU one CUDA graph a decision. Your own is named by its dotted path.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == AUTO and (self.sampler or self.precision != "fp32"):
            raise ConfigError(
                "inference.sampler and inference.precision belong to an engine: set inference.engine=lean."
            )
