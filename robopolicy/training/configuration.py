"""What can be set about fine-tuning, with the defaults that worked."""

from dataclasses import dataclass

from robopolicy.core.errors import ConfigError
from robopolicy.rl.ratios import RatioLevel


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tuning defaults, for log-probabilities that are means over dimensions (the clip width belongs to that).

    iterations of `decisions` chunks per row, then `epochs` over minibatches of `minibatch` decisions; discount is per
    control step, gae_lambda per decision, denoising_discount per unit; clip runs from clip_base at the noisiest unit to
    clip at the cleanest with clip_rate; target_kl (of the whole decision) ends the epochs of an iteration, and a step
    that went beyond twice of it is taken back; actor_rate is reached over actor_warmup steps (Adam's first are its
    largest, and every one of them can change what every unit does); the first
    critic_warmup iterations train the critic alone; scored_units > 0 scores that many random units of each decision per
    minibatch instead of all (cheaper, noisier); bc_weight times -logp of the base policy's own decisions is added.
    Checkpoints come every checkpoint_every iterations; evaluations before the first and every evaluate_every (0: none);
    target_success ends the run once the deterministic success reaches it.
    """

    iterations: int = 60
    decisions: int = 20
    epochs: int = 5
    minibatch: int = 2048
    scored_units: int = 0
    critic_warmup: int = 1
    actor_rate: float = 5e-4
    actor_warmup: int = 30
    critic_rate: float = 1e-3
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    discount: float = 0.99
    gae_lambda: float = 0.95
    denoising_discount: float = 0.9
    clip: float = 0.2
    clip_base: float = 0.2
    clip_rate: float = 0.0
    log_ratio_clamp: float = 3.0
    ratio_level: RatioLevel = RatioLevel.UNIT
    ratio_tolerance: float = 1e-5
    target_kl: float | None = 0.1
    bc_weight: float = 0.0
    checkpoint_every: int = 10
    evaluate_every: int = 10
    target_success: float | None = None

    def __post_init__(self):
        for name in ("iterations", "decisions", "epochs", "minibatch", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.discount <= 1 or not 0 <= self.gae_lambda <= 1:
            raise ConfigError(f"discount {self.discount} must be in (0, 1], gae_lambda {self.gae_lambda} in [0, 1].")
        if self.actor_warmup < 1:
            raise ConfigError(f"actor_warmup is {self.actor_warmup}; 1 means none.")
        if self.clip <= 0 or self.clip_base <= 0 or self.log_ratio_clamp <= 0:
            raise ConfigError("clip, clip_base and log_ratio_clamp must be positive.")
