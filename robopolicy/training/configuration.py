"""What can be set about fine-tuning, with the defaults that worked."""

from dataclasses import dataclass

from robopolicy.core.errors import ConfigError
from robopolicy.rl.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class FinetuneConfig(AlgorithmConfig):
    """Fine-tuning defaults, for log-probabilities that are means over dimensions (the clip width belongs to that).

    algorithm and the slots below it choose the mechanisms. iterations of collecting, then `epochs` over minibatches of
    `minibatch` decisions (or of minibatch_episodes whole episodes; group algorithms with episode ratios need those).
    Collected are `decisions` chunks a row with a critic, or whole episodes in `groups` groups of group_size with the
    same start, out of a pool of `starts` (0: always fresh ones), for algorithms that compare episodes; before the
    decisions branch_at every running episode splits into branch_width that go on from the same state, sharing the first
    branch_unit units of the decision there (null: none). unfinished: share of the episodes that an iteration may leave
    in flight, to go on with in the next one. staleness: how many updates old the weights may be that collect, in a
    thread beside the learner; 0 collects and learns in turns, repeatably; delay: how many updates old they are made to
    be, in turns and repeatably; props: collect in so many parts, the later ones steered away from what has been sampled
    too often, 0 for off. discount is per control step, gae_lambda per decision; clip runs from clip_base (null:
    clip) at the noisiest unit to clip at the cleanest with clip_rate, clip_high is the width above 1 (null: clip);
    target_kl (of the whole decision) ends the epochs of an iteration, and a step that went beyond twice of it is taken
    back; actor_rate is reached over actor_warmup steps (Adam's first are its largest, and every one of them can change
    what every unit does); the first critic_warmup iterations train the critic alone; scored_units > 0 scores that many
    random units of each decision per minibatch instead of all (cheaper, noisier). Checkpoints come every
    checkpoint_every iterations; evaluations before the first and every evaluate_every (0: none); target_success ends
    the run once the deterministic success reaches it.
    """

    iterations: int = 60
    decisions: int = 20
    groups: int = 64
    group_size: int = 8
    starts: int = 0
    branch_at: tuple[int, ...] = ()
    branch_width: int = 2
    branch_unit: int | None = None
    unfinished: float = 0.0
    staleness: int = 0
    delay: int = 0
    props: int = 0
    epochs: int = 5
    minibatch: int = 2048
    minibatch_episodes: int = 0
    scored_units: int = 0
    critic_warmup: int = 1
    actor_rate: float = 5e-4
    actor_warmup: int = 30
    critic_rate: float = 1e-3
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    clip_base: float | None = None
    clip_high: float | None = None
    clip_rate: float = 0.0
    log_ratio_clamp: float = 3.0
    ratio_tolerance: float = 1e-5
    target_kl: float | None = 0.1
    checkpoint_every: int = 10
    evaluate_every: int = 10
    target_success: float | None = None

    def __post_init__(self):
        for name in ("iterations", "decisions", "groups", "group_size", "epochs", "minibatch", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.discount <= 1 or not 0 <= self.gae_lambda <= 1:
            raise ConfigError(f"discount {self.discount} must be in (0, 1], gae_lambda {self.gae_lambda} in [0, 1].")
        if not 0 <= self.unfinished < 1 or min(self.staleness, self.delay) < 0:
            raise ConfigError(f"unfinished {self.unfinished} must be in [0, 1), staleness and delay at least 0.")
        if sum(value > 0 for value in (self.staleness, self.delay, self.props)) > 1:
            raise ConfigError(
                f"staleness {self.staleness} collects in a thread, delay {self.delay} in turns with old weights, props "
                f"{self.props} with adjusted ones: choose one."
            )
        if self.actor_warmup < 1:
            raise ConfigError(f"actor_warmup is {self.actor_warmup}; 1 means none.")
        if min(self.clip, self.clip_base or self.clip, self.clip_high or self.clip, self.log_ratio_clamp) <= 0:
            raise ConfigError("clip, clip_base, clip_high and log_ratio_clamp must be positive.")
