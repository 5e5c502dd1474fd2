"""What can be set about each agent that learns from recorded data; defaults are those of its paper."""

from dataclasses import dataclass
from typing import ClassVar

from robopolicy.core.errors import ConfigError


@dataclass(frozen=True)
class AgentConfig:
    """What every agent has. Raises ConfigError unless discount is in (0, 1) and tau in (0, 1]."""

    width: int = 256
    """Units of every hidden layer."""
    depth: int = 2
    """Hidden layers."""
    layer_norm: bool = False
    """Normalise the critics' hidden layers, which keeps values far from the data from growing."""
    rate: float = 3e-4
    """Learning rate."""
    discount: float = 0.99
    """What a reward is worth one control step later."""
    tau: float = 0.005
    """How far slow copies follow at every step."""

    def __post_init__(self) -> None:
        if not 0 < self.discount < 1 or not 0 < self.tau <= 1:
            raise ConfigError(f"discount {self.discount} must be in (0, 1), tau {self.tau} in (0, 1].")


@dataclass(frozen=True)
class IqlConfig(AgentConfig):
    """Implicit Q-learning, Kostrikov et al. 2021, arXiv:2110.06169.

    Raises ConfigError unless expectile is in (0, 1).
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.iql:Iql"
    expectile: float = 0.7
    """Which expectile of the recorded actions' values a state is worth; 0.5 is their mean."""
    temperature: float = 3.0
    """Of the weight exp(temperature * advantage) with which actions are imitated."""
    cap: float = 100.0
    """Largest weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.expectile < 1:
            raise ConfigError(f"expectile {self.expectile} must be in (0, 1).")


@dataclass(frozen=True)
class Td3BcConfig(AgentConfig):
    """TD3+BC, Fujimoto & Gu 2021, arXiv:2106.06860. Raises ConfigError unless alpha >= 0 and delay >= 1."""

    builds: ClassVar[str] = "robopolicy.rl.offline.td3_bc:Td3Bc"
    alpha: float = 2.5
    """Weight of Q, scaled to a mean size of 1, against imitation."""
    policy_noise: float = 0.2
    """Standard deviation of the noise on the target's action."""
    noise_clip: float = 0.5
    """Its bound."""
    delay: int = 2
    """Critic steps per actor step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0 or self.delay < 1:
            raise ConfigError(f"TD3+BC needs alpha >= 0, not {self.alpha}, and delay >= 1, not {self.delay}.")


@dataclass(frozen=True)
class SacConfig(AgentConfig):
    """SAC with many critics: SAC-N and EDAC (An et al. 2021, arXiv:2110.01548), RAVL (arXiv:2402.12527).

    Raises ConfigError unless critics >= 1 and diversity >= 0.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.sac:Sac"
    critics: int = 10
    """Of which the smallest counts, for targets and for the actor."""
    diversity: float = 1.0
    """Weight of the critics' penalty for agreeing about how Q changes with the action; 0 is SAC-N."""
    depth: int = 3
    """Hidden layers."""
    target_entropy: float | None = None
    """Null for minus the number of action elements."""
    learn_temperature: bool = True
    """Whether the price of entropy follows the target."""
    temperature: float = 1.0
    """It, at first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critics < 1 or self.diversity < 0:
            raise ConfigError(f"critics {self.critics} must be at least 1, diversity {self.diversity} at least 0.")
