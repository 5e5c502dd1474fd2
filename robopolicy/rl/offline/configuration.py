"""Settings of the offline RL agents; defaults are those of the papers unless stated otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, NonNegative, Positive
from robopolicy.core.registry import Kinds
from robopolicy.core.structured import FormerNames

AGENTS = Kinds(
    "offline agent",
    "robopolicy.offline_agents",
    {
        "iql": "robopolicy.rl.offline.configuration:IqlConfig",
        "td3_bc": "robopolicy.rl.offline.configuration:Td3BcConfig",
        "rebrac": "robopolicy.rl.offline.configuration:ReBracConfig",
        "prdc": "robopolicy.rl.offline.configuration:PrdcConfig",
        "cql": "robopolicy.rl.offline.configuration:CqlConfig",
        "cal_ql": "robopolicy.rl.offline.configuration:CalQlConfig",
        "edac": "robopolicy.rl.offline.configuration:SacConfig",
        "rlpd": "robopolicy.rl.offline.configuration:RlpdConfig",
        "mdpo": "robopolicy.rl.offline.configuration:MdpoConfig",
    },
)
"""Mapping from name to configuration, a dataclass whose `builds` names the `OfflineAgent`: Class(config, state, action,
seed).
"""


@dataclass(frozen=True)
class AgentConfig(FormerNames):
    """Settings common to all agents. Raises ConfigError unless discount is in (0, 1) and tau in (0, 1]."""

    RENAMED: ClassVar[Mapping[str, str]] = {"rate": "learning_rate"}

    width: Count = 256
    """Number of units per hidden layer."""
    depth: Count = 2
    """Number of hidden layers."""
    layer_norm: bool = False
    """Apply layer normalisation to the critics' hidden layers, which limits overestimation far from the data."""
    learning_rate: Positive = 3e-4
    """Learning rate."""
    discount: Fraction = 0.99
    """Discount factor per control step."""
    tau: Fraction = 0.005
    """Update rate of the target networks (Polyak averaging) per update."""

    def __post_init__(self) -> None:
        if not 0 < self.discount < 1 or not 0 < self.tau <= 1:
            raise ConfigError(f"discount={self.discount} must be in (0, 1), and tau={self.tau} in (0, 1].")


@dataclass(frozen=True)
class IqlConfig(AgentConfig):
    """Implicit Q-learning, Kostrikov et al. 2021, arXiv:2110.06169.

    The paper has expectile 0.7 (0.9 on mazes), rate 3e-4 and no layer normalisation, which worked worse with action
    chunks. Raises ConfigError unless expectile is in (0, 1).
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.iql:Iql"
    RENAMED: ClassVar[Mapping[str, str]] = {"cap": "max_weight"}
    layer_norm: bool = True
    """Apply layer normalisation to the critics' hidden layers, which limits overestimation far from the data."""
    learning_rate: Positive = 1e-3
    """Learning rate."""
    expectile: Fraction = 0.9
    """Expectile of the recorded actions' values that defines a state's value; 0.5 is their mean."""
    critics: Count = 2
    """Number of critics; their minimum is used."""
    temperature: NonNegative = 3.0
    """Inverse temperature of the imitation weight exp(temperature * advantage)."""
    max_weight: Positive = 100.0
    """Maximum imitation weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.expectile < 1:
            raise ConfigError(f"expectile={self.expectile} must be in (0, 1).")


POLICY_NOISE = 0.2
"""Standard deviation of the noise on the target's action (TD3)."""
NOISE_CLIP = 0.5
"""Clipping bound of the noise on the target action."""


@dataclass(frozen=True)
class Td3Config(AgentConfig):
    """Settings of agents with a deterministic actor (TD3, arXiv:1802.09477). Raises ConfigError unless delay >= 1."""

    FIXED: ClassVar[Mapping[str, Any]] = {"policy_noise": POLICY_NOISE, "noise_clip": NOISE_CLIP}
    RENAMED: ClassVar[Mapping[str, str]] = {"delay": "policy_delay"}
    policy_delay: Count = 2
    """Number of critic updates per actor update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy_delay < 1:
            raise ConfigError(f"policy_delay={self.policy_delay} must be at least 1.")


@dataclass(frozen=True)
class Td3BcConfig(Td3Config):
    """TD3+BC, Fujimoto & Gu 2021, arXiv:2106.06860. Raises ConfigError unless alpha >= 0."""

    builds: ClassVar[str] = "robopolicy.rl.offline.td3:Td3Bc"
    alpha: NonNegative = 2.5
    """Weight of Q, normalised to a mean absolute value of 1, relative to imitation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0:
            raise ConfigError(f"alpha={self.alpha} must be at least 0.")


@dataclass(frozen=True)
class ReBracConfig(Td3Config):
    """ReBRAC, Tarasov et al. 2023, arXiv:2305.09836, which uses batches of 1024 and tunes both betas per dataset.

    Raises ConfigError unless both betas are at least 0.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.td3:ReBrac"
    beta_actor: NonNegative = 0.1
    """Weight of the actor's squared distance to the recorded action, summed over elements, relative to Q normalised to
    1.
    """
    beta_critic: NonNegative = 0.01
    """Penalty in the critics' targets on the squared distance to the next recorded action, in units of reward; 0 needs
    no next actions.
    """
    depth: Count = 3
    """Number of hidden layers."""
    layer_norm: bool = True
    """Apply layer normalisation to the critics' hidden layers, which limits overestimation far from the data."""
    learning_rate: Positive = 1e-3
    """Learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_actor < 0 or self.beta_critic < 0:
            raise ConfigError(f"beta_actor={self.beta_actor} and beta_critic={self.beta_critic} must be at least 0.")


class NeighbourIndex(Enum):
    """exact: the nearest neighbour; approximate: one that is at most 1 + SLACK times as far, many times faster."""

    EXACT = "exact"
    APPROXIMATE = "approximate"


SLACK = 1.0
"""Maximum relative excess distance of an approximate neighbour; most are the nearest anyway."""


@dataclass(frozen=True)
class PrdcConfig(Td3Config):
    """PRDC, Ran et al. 2023, arXiv:2306.06569. Raises ConfigError unless alpha and beta are at least 0."""

    builds: ClassVar[str] = "robopolicy.rl.offline.td3:Prdc"
    FIXED: ClassVar[Mapping[str, Any]] = {"slack": SLACK}
    alpha: NonNegative = 2.5
    """Weight of Q, normalised to a mean absolute value of 1, relative to the distance to the neighbour's action."""
    beta: NonNegative = 2.0
    """Weight of standardised states relative to actions in distances; large values require the same state, 0 ignores
    states.
    """
    index: NeighbourIndex = NeighbourIndex.EXACT
    """Nearest-neighbour search; exact is slow while the actor is far from all data and beta is small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.alpha, self.beta) < 0:
            raise ConfigError(f"alpha={self.alpha} and beta={self.beta} must be at least 0.")


@dataclass(frozen=True)
class SacConfig(AgentConfig):
    """SAC with many critics: SAC-N and EDAC (An et al. 2021, arXiv:2110.01548), RAVL (arXiv:2402.12527).

    Raises ConfigError unless critics >= 1 and diversity >= 0.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.sac:Sac"
    RENAMED: ClassVar[Mapping[str, str]] = {
        "actor_rate": "actor_learning_rate",
        "subset": "critic_subset",
        "delay": "policy_delay",
    }
    critics: Count = 10
    """Number of critics; targets and actor use their minimum."""
    diversity: NonNegative = 1.0
    """Weight of the penalty on agreement between the critics' action gradients (EDAC); 0 is SAC-N."""
    depth: Count = 3
    """Number of hidden layers."""
    target_entropy: float | None = None
    """Target entropy of the actor, null for minus the number of action elements."""
    learn_temperature: bool = True
    """Whether the entropy temperature is trained towards the target entropy."""
    temperature: Positive = 1.0
    """Initial entropy temperature."""
    entropy_backup: bool = True
    """Whether targets include the entropy term."""
    actor_learning_rate: Positive | None = None
    """Learning rate of the actor and the temperature, null for that of the critics."""
    critic_subset: Count | None = None
    """Number of critics, sampled at every update, whose minimum is the target; the actor maximises the mean of all
    (REDQ, arXiv:2101.05982), with cql and cal_ql the minimum (WSRL). null uses the minimum of all for both.
    """
    policy_delay: Count = 1
    """Number of critic updates per update of actor and temperature."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critics < 1 or self.diversity < 0:
            raise ConfigError(f"critics={self.critics} must be at least 1, and diversity={self.diversity} at least 0.")
        if self.critic_subset is not None and not 1 <= self.critic_subset <= self.critics:
            raise ConfigError(f"critic_subset={self.critic_subset} must be from 1 to critics={self.critics}.")
        if self.policy_delay < 1:
            raise ConfigError(f"policy_delay={self.policy_delay} must be at least 1.")


@dataclass(frozen=True)
class RlpdConfig(SacConfig):
    """SAC for online learning with recorded data, RLPD, Ball et al. 2023, arXiv:2302.02948.

    Ten layer-normalised critics, of which two form a target; the paper updates 20 times per step (WSRL: 4).
    """

    diversity: NonNegative = 0.0
    """Weight of EDAC's penalty on agreement between the critics' action gradients; 0 is none."""
    depth: Count = 2
    """Number of hidden layers."""
    layer_norm: bool = True
    """Apply layer normalisation to the critics' hidden layers, which limits overestimation far from the data."""
    critic_subset: Count | None = 2
    """Number of critics, sampled at every update, whose minimum is the target; the actor maximises the mean of all
    (REDQ, arXiv:2101.05982). null uses the minimum of all critics for both.
    """
    entropy_backup: bool = False
    """Whether targets include the entropy term."""
    temperature: Positive = 0.1
    """Initial entropy temperature; the paper's 1 is too large for rewards given once per episode."""


@dataclass(frozen=True)
class MdpoConfig(SacConfig):
    """Off-policy mirror descent policy optimisation, Tomar et al. 2020, arXiv:2005.09814.

    Raises ConfigError with learn_temperature, whose target is an entropy.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.sac:Mdpo"
    critics: Count = 2
    """Number of critics; targets and actor use their minimum."""
    diversity: NonNegative = 0.0
    """Weight of EDAC's penalty on agreement between the critics' action gradients; 0 is none."""
    depth: Count = 2
    """Number of hidden layers."""
    entropy_backup: bool = False
    """Whether targets include the entropy term."""
    learn_temperature: bool = False
    """Whether the entropy temperature is trained towards the target entropy."""
    temperature: Positive = 0.1
    """1 / t_k: weight of the KL divergence from the previous policy; for returns of about 1."""
    mirror_steps: Count = 100
    """Number of actor updates between two copies of the actor as the previous policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn_temperature:
            raise ConfigError("learn_temperature=true needs an entropy to reach, which mdpo has not: set it to false.")


@dataclass(frozen=True)
class CqlConfig(SacConfig):
    """Conservative Q-learning, CQL(H), Kumar et al. 2020, arXiv:2006.04779, based on soft actor-critic.

    Raises ConfigError unless alpha >= 0 and samples >= 1.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.sac:Cql"
    critics: Count = 2
    """Number of critics; targets and actor use their minimum."""
    diversity: NonNegative = 0.0
    """Weight of EDAC's penalty on agreement between the critics' action gradients; 0 is none."""
    alpha: NonNegative = 0.5
    """Weight of the conservative term, which lowers Q over all actions and raises it at recorded ones. The papers' 5 is
    for returns in the hundreds; with returns of about 1 it raises the recorded actions' Q to 8.
    """
    samples: Count = 10
    """Number of sampled actions per state and source (uniform, the actor's, the actor's in the next state) in the
    conservative term.
    """
    calibrated: bool = False
    """Cal-QL: never lower the Q of the actor's actions below the recorded return from that state."""
    entropy_backup: bool = False
    """Whether targets include the entropy term."""
    actor_learning_rate: Positive | None = 1e-4
    """Learning rate of the actor and the temperature, null for that of the critics."""
    temperature: Positive = 0.05
    """Initial entropy temperature; the papers' 1 is too large for rewards given once per episode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0 or self.samples < 1:
            raise ConfigError(f"alpha={self.alpha} must be at least 0, and samples={self.samples} at least 1.")


@dataclass(frozen=True)
class CalQlConfig(CqlConfig):
    """Cal-QL, Nakamoto et al. 2023, arXiv:2303.05479: CQL with values calibrated for online fine-tuning."""

    calibrated: bool = True
    """Never lower the Q of the actor's actions below the recorded return from that state."""
