"""What can be set about learning from recorded data; nothing heavy is imported here."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, NonNegative, Positive, Share
from robopolicy.core.registry import Kinds


@dataclass(frozen=True)
class CriticFitConfig:
    """How an agent's critic is fitted to recorded decisions."""

    steps: Count = 1500
    """Updates before the first round."""
    # More did harm: the longer a critic learns from one log, the steeper it is wrong where nothing was recorded.
    batch_size: Count = 256
    """Decisions an update."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ConfigError("steps and batch_size must be at least 1.")


@dataclass(frozen=True)
class ChainPpoConfig:
    """PPO through the chain of denoising (or token) steps at recorded observations, paid by a critic: RL-100.

    The policy decides anew at recorded observations; a decision's advantage is min Q - V, standardised over the batch.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.improvers:ChainPpo"
    tunes_chain: ClassVar[bool] = True
    """It learns through the scored steps that fine-tuning trains, as many as that is set to."""
    iterations: Count = 1
    """How often a round draws new decisions; beyond one the candidate itself draws them."""
    decisions: Count = 4096
    """Recorded observations at which the policy decides anew."""
    epochs: Count = 4
    """Passes over them."""
    minibatch: Count = 1024
    """Decisions in a minibatch."""
    learning_rate: Positive = 3e-4
    """The policy's."""
    clip: Positive = 0.05
    """Width of the ratio's clip range."""
    target_kl: Positive | None = 0.1
    """KL divergence of whole decisions that ends an iteration's epochs, null for no end."""
    ratio_tolerance: NonNegative = 1e-4
    """How far a policy's score of its own fresh decisions may be from the one it acted with."""

    def __post_init__(self) -> None:
        if min(self.iterations, self.decisions, self.epochs, self.minibatch) < 1:
            raise ConfigError("iterations, decisions, epochs and minibatch must be at least 1.")


@dataclass(frozen=True)
class WeightedImitationConfig:
    """Advantage-weighted regression: recorded actions are imitated, with weight exp(temperature * advantage).

    Sources: AWR, Peng et al. 2019, arXiv:1910.00177; with expectile critics as in IQL, arXiv:2110.06169, and for
    denoising policies as in DPPO's baseline DAWR, arXiv:2409.00588. Advantages are standardised over the data.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.improvers:WeightedImitation"
    steps: Count = 500
    """Updates a round."""
    batch_size: Count = 256
    """Decisions an update."""
    learning_rate: Positive = 3e-4
    """The policy's."""
    temperature: NonNegative = 1.0
    """How strongly better actions are preferred; 0 is plain imitation."""
    cap: Positive = 20.0
    """Largest weight."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.temperature < 0 or self.cap <= 0:
            raise ConfigError("steps and batch_size must be at least 1, temperature at least 0, cap above 0.")


@dataclass(frozen=True)
class FilteredImitationConfig:
    """The better share of the recorded decisions is imitated, the rest left out: filtered behaviour cloning.

    Source: CRR's binary weights 1[A > threshold], Wang et al. 2020, arXiv:2006.15134, with the threshold at a share of
    the data; what RECAP (arXiv:2511.14759) is to be compared with. Deviations: advantages are those that `recap` knows,
    and the critic was fitted before.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.recap:FilteredImitation"
    steps: Count = 1000
    """Updates a round."""
    batch_size: Count = 256
    """Decisions an update."""
    learning_rate: Positive = 1e-3
    """The policy's."""
    advantage: Literal["own", "critic", "steps", "success"] = "own"
    """Of a decision: as recap's; success, whether its episode succeeded, of which all are imitated."""
    decisions: Count = 8
    """Decisions of the policy at every recorded observation, for own."""
    positive: Share = 0.3
    """Share of the decisions that is imitated."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.decisions) < 1:
            raise ConfigError("steps, batch_size and decisions must be at least 1.")
        if not 0 < self.positive < 1:
            raise ConfigError("positive is between 0 and 1.")


@dataclass(frozen=True)
class BestOfConfig:
    """The policy imitates the best of several decisions of its own, by the critic: IDQL's choice, made its own.

    At recorded observations it decides several times; what the smallest critic finds best is imitated. Sources: IDQL,
    arXiv:2304.10573 (the choice); Digi-Q, arXiv:2502.15760 (imitating it). What is imitated is always something that
    the proposer would have done, so a critic's errors far from the data are met less than by climbing its gradient.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.improvers:BestOf"
    candidates: Count = 16
    """Decisions at every observation."""
    proposer: Literal["base", "incumbent"] = "base"
    """Who makes them: the policy as it came, whose decisions the critic knows best, or the incumbent."""
    decisions: Count = 8192
    """Recorded observations."""
    steps: Count = 500
    """Updates a round."""
    batch_size: Count = 256
    """Decisions an update."""
    learning_rate: Positive = 1e-3
    """The policy's."""

    def __post_init__(self) -> None:
        if min(self.candidates, self.decisions, self.steps, self.batch_size) < 1:
            raise ConfigError("candidates, decisions, steps and batch_size must be at least 1.")


@dataclass(frozen=True)
class DiffusionQlConfig:
    """Diffusion-QL: recorded actions are imitated while a critic is climbed through the chain of denoising steps.

    Source: Wang et al. 2022, arXiv:2208.06193: the loss is that of imitation minus eta * Q / mean|Q|, the action being
    back-propagated through the steps that made it. Deviations: Q is that of the smallest critic, not of one drawn at
    random; the chain is the noise-free one, which is what is served; the critic is fitted before, not alternately. It
    climbs mistakes too: give it a critic that knows actions which were not recorded, such as offline.agent=rebrac.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.gradients:DiffusionQl"
    steps: Count = 500
    """Updates a round."""
    batch_size: Count = 256
    """Decisions an update."""
    learning_rate: Positive = 1e-3
    """The policy's."""
    eta: NonNegative = 0.3
    """Weight of the critic beside imitation; 0 is plain imitation."""
    through: Literal["all", "last"] = "all"
    """all steps of the chain, or its last alone (deterministic policy gradient through the chain's last step): cheaper,
    and what earlier steps make stays as it is.
    """

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.eta < 0:
            raise ConfigError("steps and batch_size must be at least 1, eta at least 0.")


@dataclass(frozen=True)
class AdjointMatchingConfig:
    """Adjoint matching: a flow is tilted towards what a critic values, to base(a) exp(strength Q(a)).

    Sources: adjoint matching, Domingo-Enrich et al. 2024, arXiv:2409.08861; QAM, arXiv:2601.14234, its use with critics
    of recorded data. No gradient passes through the chain that learns, and none through a likelihood. Deviations: the
    base is the policy as it came, which is not trained beside the candidate; chains are drawn by a posterior sampler,
    which is memoryless on few steps too; the critic is fitted before, not alternately.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.gradients:AdjointMatching"
    steps: Count = 600
    """Updates a round."""
    batch_size: Count = 128
    """Recorded observations an update, with a chain for each."""
    learning_rate: Positive = 1e-3
    """The policy's."""
    strength: NonNegative = 5.0
    """What a unit of value is worth in log-probability (the inverse temperature); 0 leaves the flow as it is."""
    pessimism: NonNegative = 1.0
    """Standard deviations over critics that are taken off their mean value; 1 is the smaller of two."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or min(self.strength, self.pessimism) < 0:
            raise ConfigError("steps and batch_size must be at least 1, strength and pessimism at least 0.")


@dataclass(frozen=True)
class RecapConfig:
    """RECAP: everything that was recorded is imitated, told whether it was better than usual; acting, it is told so.

    Source: pi*0.6, Physical Intelligence 2025, arXiv:2511.14759: an indicator I = [advantage > threshold] is an input
    of the policy, hidden at random, which makes classifier-free guidance possible; failures are learned from as what
    not to do. Deviations: labels that scale and shift what the network sees for the words in a prompt; advantages are
    beside the policy's own decisions, not beside what a state is worth to whoever was recorded; the critic is that of
    offline.agent, no distribution over returns; a round goes on from the incumbent, not from the pre-trained policy.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.recap:Recap"
    steps: Count = 1000
    """Updates a round."""
    batch_size: Count = 256
    """Decisions an update."""
    learning_rate: Positive = 1e-3
    """The policy's."""
    advantage: Literal["own", "critic", "steps"] = "own"
    """Of a decision: own, min Q minus the mean of what the policy would decide there, so that the action counts and not
    the state; critic, min Q - V; steps, what was paid during it and V behind it, minus V before it.
    """
    decisions: Count = 8
    """Decisions of the policy at every recorded observation, for own."""
    positive: Share = 0.3
    """Share of the decisions that counts as better than usual."""
    dropout: Share = 0.3
    """Share of what is learned from which the indicator is hidden."""
    guidance: NonNegative = 2.5
    """Weight of "positive" beside nothing while acting: 1 is positive alone, more exaggerates (two calls a step)."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.decisions) < 1:
            raise ConfigError("steps, batch_size and decisions must be at least 1.")
        if not 0 < self.positive < 1 or not 0 <= self.dropout < 1:
            raise ConfigError("positive and dropout are between 0 and 1.")


@dataclass(frozen=True)
class ImaginedPpoConfig:
    """PPO through the denoising chain in a world model of the log; the settings of fine-tuning are its own.

    Source: MOPO's and DiWA's setting (arXiv:2005.13239, arXiv:2508.03645), behind a gate. Whoever judges it must not be
    the model that it learned in.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.imagined:ImaginedPpo"
    tunes_chain: ClassVar[bool] = True
    """As of `ChainPpoConfig`."""
    imagines: ClassVar[bool] = True
    """It learns in a world model, not from a critic of the data."""
    iterations: Count = 20
    """Of fine-tuning, a round; its critic is fitted anew in each."""
    near_base: NonNegative = 0.05
    """Weight of staying near the incumbent (bc, DiWA's), 0 for none."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.near_base < 0:
            raise ConfigError("iterations must be at least 1, near_base at least 0.")


@dataclass(frozen=True)
class DsrlConfig:
    """A frozen diffusion or flow policy is steered by its initial noise: an actor over noise climbs the critic.

    Source: DSRL, Wagenmaker et al. 2025, arXiv:2506.15799 (its noise-aliased form). Whatever is learned, what is done
    is something that the policy would have done. `robopolicy online` goes on from it.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.frozen:Dsrl"
    bound: Positive = 1.5
    """Largest noise that may be chosen, in standard deviations."""
    steps: Count = 2000
    """Updates a round."""
    batch_size: Count = 256
    """Recorded observations an update."""
    learning_rate: Positive = 1e-3
    """Of actor and critics over noise."""
    own_share: Share = 0.5
    """Share of a batch in which the noise is the actor's own, so that its critics hold where it is; the paper's is 0.
    """
    critics: Count = 2
    """Over noise."""
    width: Count = 256
    """Units of every hidden layer."""
    depth: Count = 2
    """Hidden layers."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.critics, self.width, self.depth) < 1 or self.bound <= 0:
            raise ConfigError("steps, batch_size, critics, width and depth must be at least 1, bound above 0.")
        if not 0 <= self.own_share <= 1:
            raise ConfigError(f"own_share {self.own_share} must be in [0, 1].")


@dataclass(frozen=True)
class IdqlConfig:
    """A policy that stays as it is does the best of several of its decisions, by the critic: IDQL, arXiv:2304.10573.

    Nothing is imitated, so nothing is lost on the way, and deciding costs a batch of decisions. The paper's critic is
    offline.agent=iql with offline.agent.expectile=0.7.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.frozen:Idql"
    deploys_critic: ClassVar[bool] = True
    """The critic acts along, so it sees what the policy reads and nothing else."""
    candidates: Count = 4
    """Decisions that the first round tries; after an acceptance twice as many, after a refusal half as many more."""

    def __post_init__(self) -> None:
        if self.candidates < 2:
            raise ConfigError(f"candidates is {self.candidates}: there is a choice among 2 or more.")


@dataclass(frozen=True)
class GuidedConfig:
    """Synthetic episodes, drawn by a diffusion model of the log and guided towards the policy: arXiv:2404.06356."""

    count: Count = 1024
    """Episodes."""
    guidance: NonNegative = 1.0
    """How far their actions are pushed towards the policy's; 0 leaves them like the recorded ones."""
    length: Count = 16
    """Steps of each, a multiple of 2; recorded episodes must be as long, or end the task."""
    steps: Count = 2500
    """Training steps of the diffusion model."""
    width: Count = 128
    """Of its network."""
    batch_size: Count = 64
    """Recorded subsequences a training step."""

    def __post_init__(self) -> None:
        if min(self.count, self.steps, self.width, self.batch_size) < 1 or self.length < 2 or self.guidance < 0:
            raise ConfigError(
                "count, steps, width and batch_size must be at least 1, length at least 2, guidance at least 0."
            )


IMPROVERS = Kinds(
    "improver",
    "robopolicy.improvers",
    {
        "chain_ppo": "robopolicy.training.offline.configuration:ChainPpoConfig",
        "best_of": "robopolicy.training.offline.configuration:BestOfConfig",
        "weighted_imitation": "robopolicy.training.offline.configuration:WeightedImitationConfig",
        "filtered_imitation": "robopolicy.training.offline.configuration:FilteredImitationConfig",
        "diffusion_ql": "robopolicy.training.offline.configuration:DiffusionQlConfig",
        "adjoint_matching": "robopolicy.training.offline.configuration:AdjointMatchingConfig",
        "recap": "robopolicy.training.offline.configuration:RecapConfig",
        "dsrl": "robopolicy.training.offline.configuration:DsrlConfig",
        "idql": "robopolicy.training.offline.configuration:IdqlConfig",
        "imagined_ppo": "robopolicy.training.offline.configuration:ImaginedPpoConfig",
    },
)
"""Name -> configuration, a dataclass whose `builds` names what makes a candidate: Class(config), an `Improver`."""
