"""Settings of learning from recorded data; this module imports no heavy dependencies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, NonNegative, Positive
from robopolicy.core.registry import Kinds
from robopolicy.core.structured import FormerNames


@dataclass(frozen=True)
class CriticFitConfig:
    """Settings for fitting an agent's critic to recorded action chunks."""

    steps: Count = 1500
    """Number of updates before the first round."""
    # More did harm: the longer a critic learns from one log, the steeper it is wrong where nothing was recorded.
    batch_size: Count = 256
    """Number of action chunks per update."""
    redraw_every: Natural = 0
    """Number of updates after which imagined and guided episodes are drawn again, by the agent itself, whose actor
    learns with the critic (RAVL, policy-guided diffusion); 0 draws them once, by the policy.
    """

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ConfigError("steps and batch_size must be at least 1.")


@dataclass(frozen=True)
class ChainPpoConfig(FormerNames):
    """PPO through the chain of denoising (or token) steps at recorded observations, with a critic's values as reward:
    RL-100.

    The policy samples new chunks at recorded observations; a chunk's advantage is min Q - V, standardised over the
    batch.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.improvers:ChainPpo"
    tunes_chain: ClassVar[bool] = True
    """Whether the method trains the final denoising steps, as many as fine-tuning does (finetune.finetuned_steps)."""
    RENAMED: ClassVar[Mapping[str, str]] = {"decisions": "observations"}
    iterations: Count = 1
    """Number of times per round that new action chunks are sampled; after the first, the candidate itself samples
    them.
    """
    observations: Count = 4096
    """Number of recorded observations at which the policy samples new action chunks."""
    epochs: Count = 4
    """Number of passes over the sampled chunks."""
    minibatch: Count = 1024
    """Minibatch size in action chunks."""
    learning_rate: Positive = 3e-4
    """Learning rate of the policy."""
    clip: Positive = 0.05
    """Width of the ratio's clip range."""
    target_kl: Positive | None = 0.1
    """KL divergence of complete action chunks that ends an iteration's epochs, null for none."""
    ratio_tolerance: NonNegative = 1e-4
    """Maximum difference between recomputed and recorded log-probabilities of fresh chunks."""

    def __post_init__(self) -> None:
        if min(self.iterations, self.observations, self.epochs, self.minibatch) < 1:
            raise ConfigError("iterations, observations, epochs and minibatch must be at least 1.")


@dataclass(frozen=True)
class WeightedImitationConfig(FormerNames):
    """Advantage-weighted regression: imitate recorded actions with weight exp(temperature * advantage).

    Sources: AWR, Peng et al. 2019, arXiv:1910.00177; with expectile critics as in IQL, arXiv:2110.06169, and for
    denoising policies as in DPPO's baseline DAWR, arXiv:2409.00588. Advantages are standardised over the data.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.improvers:WeightedImitation"
    RENAMED: ClassVar[Mapping[str, str]] = {"cap": "max_weight"}
    steps: Count = 500
    """Number of updates per round."""
    batch_size: Count = 256
    """Number of action chunks per update."""
    learning_rate: Positive = 3e-4
    """Learning rate of the policy."""
    temperature: NonNegative = 1.0
    """Strength of the preference for better actions; 0 is plain imitation."""
    max_weight: Positive = 20.0
    """Maximum imitation weight."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.temperature < 0 or self.max_weight <= 0:
            raise ConfigError(
                "steps and batch_size must be at least 1, temperature at least 0, and max_weight above 0."
            )


@dataclass(frozen=True)
class FilteredImitationConfig(FormerNames):
    """Filtered behaviour cloning: imitate the best fraction of the recorded action chunks and ignore the rest.

    Source: CRR's binary weights 1[A > threshold], Wang et al. 2020, arXiv:2006.15134, with the threshold at a quantile
    of the data; a baseline for RECAP (arXiv:2511.14759). Deviations: the advantages are those that `recap` offers, and
    the critic is fitted beforehand.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.recap:FilteredImitation"
    RENAMED: ClassVar[Mapping[str, str]] = {"decisions": "samples_per_observation", "positive": "positive_fraction"}
    steps: Count = 1000
    """Number of updates per round."""
    batch_size: Count = 256
    """Number of action chunks per update."""
    learning_rate: Positive = 1e-3
    """Learning rate of the policy."""
    advantage: Literal["own", "critic", "steps", "success"] = "own"
    """Advantage of an action chunk: as in recap, or success (whether its episode succeeded; all such chunks are
    imitated).
    """
    samples_per_observation: Count = 8
    """advantage=own: number of action chunks sampled from the policy per recorded observation."""
    positive_fraction: Fraction = 0.3
    """Fraction of the action chunks that is imitated."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.samples_per_observation) < 1:
            raise ConfigError("steps, batch_size and samples_per_observation must be at least 1.")
        if not 0 < self.positive_fraction < 1:
            raise ConfigError("positive_fraction must be between 0 and 1.")


@dataclass(frozen=True)
class BestOfConfig(FormerNames):
    """The policy imitates the best of several of its own sampled chunks, as selected by the critic: IDQL's choice,
    distilled.

    At recorded observations the policy samples several chunks and imitates the one with the highest minimum over the
    critics. Sources: IDQL, arXiv:2304.10573 (the choice); Digi-Q, arXiv:2502.15760 (imitating it). Every target is an
    action that the proposing policy could produce, so critic errors far from the data matter less than with gradient
    ascent.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.improvers:BestOf"
    RENAMED: ClassVar[Mapping[str, str]] = {"decisions": "observations"}
    candidates: Count = 16
    """Number of action chunks sampled per observation."""
    proposer: Literal["base", "incumbent"] = "base"
    """Policy that samples the candidates: base (the initial policy, on which the critic is most accurate) or the
    incumbent.
    """
    observations: Count = 8192
    """Number of recorded observations."""
    steps: Count = 500
    """Number of updates per round."""
    batch_size: Count = 256
    """Number of action chunks per update."""
    learning_rate: Positive = 1e-3
    """Learning rate of the policy."""

    def __post_init__(self) -> None:
        if min(self.candidates, self.observations, self.steps, self.batch_size) < 1:
            raise ConfigError("candidates, observations, steps and batch_size must be at least 1.")


@dataclass(frozen=True)
class DiffusionQlConfig:
    """Diffusion-QL: imitate recorded actions while maximising a critic through the chain of denoising steps.

    Source: Wang et al. 2022, arXiv:2208.06193: the loss is the imitation loss minus eta * Q / mean|Q|, with the action
    back-propagated through its denoising steps. Deviations: Q is the minimum over the critics, not one chosen at
    random. The chain is the noise-free one, which is used at inference. The critic is fitted beforehand, not
    alternately. The policy also exploits critic errors: use a critic trained on actions outside the data, such as
    offline.agent=rebrac.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.gradients:DiffusionQl"
    steps: Count = 500
    """Number of updates per round."""
    batch_size: Count = 256
    """Number of action chunks per update."""
    learning_rate: Positive = 1e-3
    """Learning rate of the policy."""
    eta: NonNegative = 0.3
    """Weight of the critic relative to imitation; 0 is plain imitation."""
    through: Literal["all", "last"] = "all"
    """Denoising steps that the critic's gradient passes through: all, or only the last (deterministic policy gradient),
    which is cheaper and leaves the output of earlier steps unchanged.
    """

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.eta < 0:
            raise ConfigError("steps and batch_size must be at least 1, and eta at least 0.")


@dataclass(frozen=True)
class AdjointMatchingConfig(FormerNames):
    """Adjoint matching: tilt a flow policy towards a critic, to base(a) exp(strength Q(a)).

    Sources: adjoint matching, Domingo-Enrich et al. 2024, arXiv:2409.08861; QAM, arXiv:2601.14234, its use with critics
    of recorded data. No gradient passes through the learning chain or through a likelihood. Deviations: the base is the
    initial policy, which is not trained together with the candidate; chains are sampled with a posterior sampler, which
    is memoryless even on few steps; the critic is fitted beforehand, not alternately.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.gradients:AdjointMatching"
    RENAMED: ClassVar[Mapping[str, str]] = {"strength": "inverse_temperature"}
    steps: Count = 600
    """Number of updates per round."""
    batch_size: Count = 128
    """Number of recorded observations per update, with one denoising chain each."""
    learning_rate: Positive = 1e-3
    """Learning rate of the policy."""
    inverse_temperature: NonNegative = 5.0
    """Inverse temperature: log-probability per unit of value; 0 leaves the flow unchanged."""
    pessimism: NonNegative = 1.0
    """Number of standard deviations over the critics subtracted from their mean; 1 gives the minimum of two critics."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or min(self.inverse_temperature, self.pessimism) < 0:
            raise ConfigError(
                "steps and batch_size must be at least 1, and inverse_temperature and pessimism at least 0."
            )


@dataclass(frozen=True)
class RecapConfig(FormerNames):
    """RECAP: imitate all recorded data conditioned on a "better than usual" indicator; at inference the indicator is
    set to better.

    Source: pi*0.6, Physical Intelligence 2025, arXiv:2511.14759. An indicator I = [advantage > threshold] is an input
    of the policy and is dropped at random, which allows classifier-free guidance; failures serve as negative examples.
    Deviations: labels that scale and shift the network's features replace the words in a prompt. Advantages are
    relative to the policy's own actions, not to the state value under the recorded behaviour. The critic is that of
    offline.agent, not a distribution over returns. A round continues from the incumbent, not from the pre-trained
    policy.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.recap:Recap"
    RENAMED: ClassVar[Mapping[str, str]] = {
        "decisions": "samples_per_observation",
        "positive": "positive_fraction",
        "dropout": "indicator_dropout",
    }
    steps: Count = 1000
    """Number of updates per round."""
    batch_size: Count = 256
    """Number of action chunks per update."""
    learning_rate: Positive = 1e-3
    """Learning rate of the policy."""
    advantage: Literal["own", "critic", "steps"] = "own"
    """Advantage of an action chunk: own (min Q minus its mean over the policy's own chunks at that observation, so that
    it depends on the action and not the state), critic (min Q - V), or steps (reward during the chunk plus V after it
    minus V before it).
    """
    samples_per_observation: Count = 8
    """advantage=own: number of action chunks sampled from the policy per recorded observation."""
    positive_fraction: Fraction = 0.3
    """Fraction of the action chunks labelled better than average."""
    indicator_dropout: Fraction = 0.3
    """Fraction of training samples without the advantage indicator (classifier-free guidance)."""
    guidance: NonNegative = 2.5
    """Guidance weight of the positive indicator at inference: 1 uses it alone, more extrapolates (two network calls per
    step).
    """

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.samples_per_observation) < 1:
            raise ConfigError("steps, batch_size and samples_per_observation must be at least 1.")
        if not 0 < self.positive_fraction < 1 or not 0 <= self.indicator_dropout < 1:
            raise ConfigError("positive_fraction and indicator_dropout must be between 0 and 1.")


@dataclass(frozen=True)
class ImaginedPpoConfig(FormerNames):
    """PPO through the denoising chain in a world model trained on the log; it has its own fine-tuning settings.

    Source: the setting of MOPO and DiWA (arXiv:2005.13239, arXiv:2508.03645), with a gate. The evaluator of the gate
    must not be the model that the policy was trained in.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.imagined:ImaginedPpo"
    tunes_chain: ClassVar[bool] = True
    """Whether the method trains the final denoising steps, as in `ChainPpoConfig`."""
    imagines: ClassVar[bool] = True
    """Whether the method trains in a world model instead of with a critic of the data."""
    RENAMED: ClassVar[Mapping[str, str]] = {"near_base": "bc_weight"}
    iterations: Count = 20
    """Number of fine-tuning iterations per round; the critic is retrained in each round."""
    bc_weight: NonNegative = 0.05
    """Weight of the loss toward the incumbent (bc, as in DiWA), 0 for none."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.bc_weight < 0:
            raise ConfigError("iterations must be at least 1, bc_weight at least 0.")


@dataclass(frozen=True)
class DsrlConfig(FormerNames):
    """DSRL: steer a frozen diffusion or flow policy by its initial noise; an actor over noise maximises the critic.

    Source: DSRL, Wagenmaker et al. 2025, arXiv:2506.15799 (its noise-aliased form). All executed actions are ones that
    the frozen policy could produce. `robopolicy online` can continue from it.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.frozen:Dsrl"
    RENAMED: ClassVar[Mapping[str, str]] = {"bound": "noise_bound", "own_share": "actor_noise_fraction"}
    noise_bound: Positive = 1.5
    """Largest noise that the actor may choose, in standard deviations."""
    steps: Count = 2000
    """Number of updates per round."""
    batch_size: Count = 256
    """Number of recorded observations per update."""
    learning_rate: Positive = 1e-3
    """Learning rate of the actor and the critics over noise."""
    actor_noise_fraction: Fraction = 0.5
    """Fraction of a batch whose noise is chosen by the actor, so that the critics are accurate there; the paper's is
    0.
    """
    critics: Count = 2
    """Number of critics over noise."""
    width: Count = 256
    """Number of units per hidden layer."""
    depth: Count = 2
    """Number of hidden layers."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.critics, self.width, self.depth) < 1 or self.noise_bound <= 0:
            raise ConfigError(
                "steps, batch_size, critics, width and depth must be at least 1, and noise_bound above 0."
            )
        if not 0 <= self.actor_noise_fraction <= 1:
            raise ConfigError(f"actor_noise_fraction={self.actor_noise_fraction} must be in [0, 1].")


@dataclass(frozen=True)
class IdqlConfig:
    """IDQL: an unchanged policy executes the best of several sampled chunks, as selected by the critic,
    arXiv:2304.10573.

    Nothing is imitated, so no imitation error arises, but each policy call samples a batch of chunks. The paper's
    critic is offline.agent=iql with offline.agent.expectile=0.7.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.frozen:Idql"
    deploys_critic: ClassVar[bool] = True
    """Whether the critic acts together with the policy, so that it reads only the policy's observations."""
    candidates: Count = 4
    """Number of candidate action chunks in the first round; doubled after an accepted round, increased by half after a
    rejected one.
    """

    def __post_init__(self) -> None:
        if self.candidates < 2:
            raise ConfigError(f"candidates={self.candidates} must be at least 2.")


@dataclass(frozen=True)
class LatentSeekConfig:
    """LatentSeek: an unchanged denoising policy acts from initial noise that was moved towards higher values of the
    critic, by gradient steps at every policy call, arXiv:2505.13308.
    """

    builds: ClassVar[str] = "robopolicy.training.offline.seeking:LatentSeek"
    deploys_critic: ClassVar[bool] = True
    """Whether the critic acts together with the policy, so that it reads only the policy's observations."""
    steps: Count = 10
    """Number of gradient steps that a round adds; fewer after a rejected one."""
    learning_rate: Positive = 0.03
    """Step size (Adam)."""
    noise_penalty: NonNegative = 0.01
    """Weight of the noise's mean square, which keeps it where the policy was trained."""
    enough: float | None = None
    """Value of the critic beyond which a row stops, null for none."""


@dataclass(frozen=True)
class GuidedConfig(FormerNames):
    """Synthetic episodes from a diffusion model of the log, guided towards the policy: arXiv:2404.06356."""

    RENAMED: ClassVar[Mapping[str, str]] = {"count": "episodes"}

    episodes: Count = 1024
    """Number of generated episodes."""
    guidance: NonNegative = 1.0
    """Strength of the guidance of generated actions towards the policy's; 0 leaves them distributed like the recorded
    ones.
    """
    length: Count = 16
    """Number of steps per generated episode, a multiple of 2; recorded episodes must be at least as long, or end the
    task.
    """
    steps: Count = 2500
    """Number of training steps of the diffusion model."""
    width: Count = 128
    """Width of the diffusion network."""
    batch_size: Count = 64
    """Number of recorded subsequences per training step."""

    def __post_init__(self) -> None:
        if min(self.episodes, self.steps, self.width, self.batch_size) < 1 or self.length < 2 or self.guidance < 0:
            raise ConfigError(
                "episodes, steps, width and batch_size must be at least 1, length at least 2, and guidance at least 0."
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
        "latent_seek": "robopolicy.training.offline.configuration:LatentSeekConfig",
        "imagined_ppo": "robopolicy.training.offline.configuration:ImaginedPpoConfig",
    },
)
"""Name -> configuration, a dataclass whose `builds` names the class that produces candidates: Class(config), an
`Improver`.
"""
