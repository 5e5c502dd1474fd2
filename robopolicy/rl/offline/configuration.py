"""What can be set about each agent that learns from recorded data; defaults are those of its paper, or it is said."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, NonNegative, Positive, Share
from robopolicy.core.registry import Kinds

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
    },
)
"""Name -> configuration, a dataclass whose `builds` names the `OfflineAgent`: Class(config, state, action, seed)."""


@dataclass(frozen=True)
class AgentConfig:
    """What every agent has. Raises ConfigError unless discount is in (0, 1) and tau in (0, 1]."""

    width: Count = 256
    """Units of every hidden layer."""
    depth: Count = 2
    """Hidden layers."""
    layer_norm: bool = False
    """Normalise the critics' hidden layers, which keeps values far from the data from growing."""
    rate: Positive = 3e-4
    """Learning rate."""
    discount: Share = 0.99
    """What a reward is worth one control step later."""
    tau: Share = 0.005
    """How far slow copies follow at every step."""

    def __post_init__(self) -> None:
        if not 0 < self.discount < 1 or not 0 < self.tau <= 1:
            raise ConfigError(f"discount {self.discount} must be in (0, 1), tau {self.tau} in (0, 1].")


@dataclass(frozen=True)
class IqlConfig(AgentConfig):
    """Implicit Q-learning, Kostrikov et al. 2021, arXiv:2110.06169.

    The paper has expectile 0.7 (0.9 on mazes), rate 3e-4 and no normalised layers, which served action chunks worse.
    Raises ConfigError unless expectile is in (0, 1).
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.iql:Iql"
    layer_norm: bool = True
    """Normalise the critics' hidden layers, which keeps values far from the data from growing."""
    rate: Positive = 1e-3
    """Learning rate."""
    expectile: Share = 0.9
    """Which expectile of the recorded actions' values a state is worth; 0.5 is their mean."""
    critics: Count = 2
    """Of which the smallest counts."""
    temperature: NonNegative = 3.0
    """Of the weight exp(temperature * advantage) with which actions are imitated."""
    cap: Positive = 100.0
    """Largest weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.expectile < 1:
            raise ConfigError(f"expectile {self.expectile} must be in (0, 1).")


POLICY_NOISE = 0.2
"""Standard deviation of the noise on the target's action (TD3)."""
NOISE_CLIP = 0.5
"""Its bound."""


@dataclass(frozen=True)
class Td3Config(AgentConfig):
    """What agents with a deterministic actor have (TD3, arXiv:1802.09477). Raises ConfigError unless delay >= 1."""

    FIXED: ClassVar[Mapping[str, Any]] = {"policy_noise": POLICY_NOISE, "noise_clip": NOISE_CLIP}
    delay: Count = 2
    """Critic steps per actor step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay < 1:
            raise ConfigError(f"delay {self.delay} must be at least 1.")


@dataclass(frozen=True)
class Td3BcConfig(Td3Config):
    """TD3+BC, Fujimoto & Gu 2021, arXiv:2106.06860. Raises ConfigError unless alpha >= 0."""

    builds: ClassVar[str] = "robopolicy.rl.offline.td3:Td3Bc"
    alpha: NonNegative = 2.5
    """Weight of Q, scaled to a mean size of 1, against imitation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0:
            raise ConfigError(f"alpha {self.alpha} must be at least 0.")


@dataclass(frozen=True)
class ReBracConfig(Td3Config):
    """ReBRAC, Tarasov et al. 2023, arXiv:2305.09836, which takes batches of 1024 and picks both betas per dataset.

    Raises ConfigError unless both betas are at least 0.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.td3:ReBrac"
    beta_actor: NonNegative = 0.1
    """Weight of the actor's squared distance to the recorded action, summed over elements, against Q of size 1."""
    beta_critic: NonNegative = 0.01
    """What the squared distance to the action recorded next costs in targets, in units of reward; 0 needs none."""
    depth: Count = 3
    """Hidden layers."""
    layer_norm: bool = True
    """Normalise the critics' hidden layers, which keeps values far from the data from growing."""
    rate: Positive = 1e-3
    """Learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_actor < 0 or self.beta_critic < 0:
            raise ConfigError(f"beta_actor {self.beta_actor} and beta_critic {self.beta_critic} must be at least 0.")


class NeighbourIndex(Enum):
    """exact: the nearest neighbour; approximate: one that is at most 1 + SLACK times as far, many times faster."""

    EXACT = "exact"
    APPROXIMATE = "approximate"


SLACK = 1.0
"""How much further, as a share, an approximate neighbour may be; most are the nearest all the same."""


@dataclass(frozen=True)
class PrdcConfig(Td3Config):
    """PRDC, Ran et al. 2023, arXiv:2306.06569. Raises ConfigError unless alpha and beta are at least 0."""

    builds: ClassVar[str] = "robopolicy.rl.offline.td3:Prdc"
    FIXED: ClassVar[Mapping[str, Any]] = {"slack": SLACK}
    alpha: NonNegative = 2.5
    """Weight of Q, scaled to a mean size of 1, against the distance to the neighbour's action."""
    beta: NonNegative = 2.0
    """Weight of standardised states beside actions in distances: large asks for the same state, 0 for none."""
    index: NeighbourIndex = NeighbourIndex.EXACT
    """How neighbours are found; exact is slow while the actor is far from all data and beta is small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.alpha, self.beta) < 0:
            raise ConfigError(f"alpha {self.alpha} and beta {self.beta} must be at least 0.")


@dataclass(frozen=True)
class SacConfig(AgentConfig):
    """SAC with many critics: SAC-N and EDAC (An et al. 2021, arXiv:2110.01548), RAVL (arXiv:2402.12527).

    Raises ConfigError unless critics >= 1 and diversity >= 0.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.sac:Sac"
    critics: Count = 10
    """Of which the smallest counts, for targets and for the actor."""
    diversity: NonNegative = 1.0
    """Weight of the critics' penalty for agreeing about how Q changes with the action; 0 is SAC-N."""
    depth: Count = 3
    """Hidden layers."""
    target_entropy: float | None = None
    """Null for minus the number of action elements."""
    learn_temperature: bool = True
    """Whether the price of entropy follows the target."""
    temperature: Positive = 1.0
    """It, at first."""
    entropy_backup: bool = True
    """Whether targets pay for entropy too."""
    actor_rate: Positive | None = None
    """Learning rate of actor and temperature, null for that of the critics."""
    subset: Count | None = None
    """Targets take the smallest of so many critics, drawn anew at every update, and the actor climbs the mean of all
    (REDQ, arXiv:2101.05982); null for the smallest of all in both.
    """
    delay: Count = 1
    """Critic steps per step of actor and temperature."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critics < 1 or self.diversity < 0:
            raise ConfigError(f"critics {self.critics} must be at least 1, diversity {self.diversity} at least 0.")
        if self.subset is not None and not 1 <= self.subset <= self.critics:
            raise ConfigError(f"subset {self.subset} must be 1 to critics, {self.critics}.")
        if self.delay < 1:
            raise ConfigError(f"delay {self.delay} must be at least 1.")


@dataclass(frozen=True)
class RlpdConfig(SacConfig):
    """SAC for learning in the world beside recorded data, RLPD, Ball et al. 2023, arXiv:2302.02948.

    Ten critics with normalised layers, of which two make a target; the paper updates 20 times a step (WSRL: 4).
    """

    diversity: NonNegative = 0.0
    """Weight of the critics' penalty for agreeing about how Q changes with the action, which is EDAC's; 0 is none."""
    depth: Count = 2
    """Hidden layers."""
    layer_norm: bool = True
    """Normalise the critics' hidden layers, which keeps values far from the data from growing."""
    subset: Count | None = 2
    """Targets take the smallest of so many critics, drawn anew at every update, and the actor climbs the mean of all
    (REDQ, arXiv:2101.05982); null for the smallest of all in both.
    """
    entropy_backup: bool = False
    """Whether targets pay for entropy too."""
    temperature: Positive = 0.1
    """The price of entropy, at first; the paper's 1 drowns rewards that are paid once an episode."""


@dataclass(frozen=True)
class CqlConfig(SacConfig):
    """Conservative Q-learning, CQL(H), Kumar et al. 2020, arXiv:2006.04779, on soft actor-critic.

    Raises ConfigError unless alpha >= 0 and samples >= 1.
    """

    builds: ClassVar[str] = "robopolicy.rl.offline.sac:Cql"
    critics: Count = 2
    """Of which the smallest counts, for targets and for the actor."""
    diversity: NonNegative = 0.0
    """Weight of the critics' penalty for agreeing about how Q changes with the action, which is EDAC's; 0 is none."""
    alpha: NonNegative = 0.5
    """Weight of the conservative term, which pushes Q down over all actions and up at recorded ones. The papers' 5 is
    for returns in the hundreds: where an episode earns about 1 it lifts the recorded actions' Q to 8.
    """
    samples: Count = 10
    """Actions per state and source that stand for all of them: uniform, the actor's, the actor's in the next state."""
    calibrated: bool = False
    """Cal-QL: never push the Q of the actor's actions below the return that was recorded from there on."""
    entropy_backup: bool = False
    """Whether targets pay for entropy too."""
    actor_rate: Positive | None = 1e-4
    """Learning rate of actor and temperature, null for that of the critics."""
    temperature: Positive = 0.05
    """The price of entropy, at first; the papers' 1 drowns rewards that are paid once an episode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0 or self.samples < 1:
            raise ConfigError(f"alpha {self.alpha} must be at least 0, samples {self.samples} at least 1.")


@dataclass(frozen=True)
class CalQlConfig(CqlConfig):
    """Cal-QL, Nakamoto et al. 2023, arXiv:2303.05479: CQL whose values are ready for fine-tuning in the world."""

    calibrated: bool = True
    """Never push the Q of the actor's actions below the return that was recorded from there on."""
