"""Advice after fine-tuning: find in the recorded metrics why a policy is no better than its base, and suggest what to
try.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from robopolicy.configuration.sections.learn import FinetuneSection
from robopolicy.evaluation.intervals import Paired
from robopolicy.evaluation.success import PolicyEvaluation, compare
from robopolicy.rl.registry import Need
from robopolicy.runs import output
from robopolicy.training.configuration import FinetuneConfig

FEW = 10
"""Number of iterations below which a policy has hardly had time to change."""
STILL = 1e-4
"""KL divergence per iteration below which a policy has hardly changed."""
CEILING = 0.98
"""Success rate of the base policy above which evaluations can hardly show a gain."""


class Scored(Protocol):
    """The parts of an evaluation that the advice reads."""

    @property
    def score(self) -> float:
        """Success rate, or the mean return when the world does not report success."""
        ...

    @property
    def reports_success(self) -> bool:
        """Whether the score is a success rate."""
        ...


@dataclass(frozen=True)
class Evidence:
    """Metrics recorded during a fine-tuning run; each sequence has one entry per iteration that logged the metric.

    iterations: number of iterations; learned: iterations in which the policy took gradient steps; episodes: episodes
    that ended; success, returns: their means during collection; signal: fraction of batch rows with a non-zero
    advantage; kl, clip_fraction: of the updates; stops: fraction of iterations whose epochs were stopped early by the
    target KL divergence; best: iteration whose weights were saved, if known.
    """

    iterations: int = 0
    learned: int = 0
    episodes: int = 0
    success: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    paid: tuple[float, ...] = ()
    signal: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()
    clip_fraction: tuple[float, ...] = ()
    stops: float = 0.0
    best: int | None = None

    @staticmethod
    def of(records: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None = None) -> "Evidence":
        """Read the evidence from the records of metrics.jsonl; best: the evaluation whose weights were saved."""
        iterations = [record for record in records if record.get("iteration", 0) > 0 and "episodes" in record]

        def column(name: str) -> tuple[float, ...]:
            return tuple(float(record[name]) for record in iterations if record.get(name) is not None)

        stops, best_iteration = column("kl_stop"), (best or {}).get("iteration")
        return Evidence(
            iterations=len(iterations),
            learned=sum(steps > 0 for steps in column("actor_steps")),
            episodes=round(sum(column("episodes"))),
            success=column("success"),
            returns=column("return"),
            paid=column("reward_per_decision"),
            signal=column("signal"),
            kl=column("kl"),
            clip_fraction=column("clip_fraction"),
            stops=sum(stops) / len(stops) if stops else 0.0,
            best=None if best_iteration is None else int(best_iteration),
        )


def evident_cause(
    seen: Evidence,
    base: Scored,
    tuned: Scored,
    config: FinetuneConfig,
    difference: Paired | None = None,
    world: str = "",
    inside: str = "",
) -> str:
    """Return the first cause that the evidence supports, with a remedy; "" if it supports none.

    difference: tuned - base on the same episodes; world: name of the world; inside: word inserted before "episodes",
    such as " imagined".
    """
    told_apart = difference is not None and difference.high < 0
    causes = (
        nothing_paid(seen, config, world, inside),
        "" if told_apart else _nothing_to_gain(base),
        _too_large(seen, config),
        _other_reward(seen),
        _hardly_moved(seen, config),
        _within_noise(difference),
    )
    return next(filter(None, causes), "")


def nothing_paid(seen: Evidence, config: FinetuneConfig, world: str = "", inside: str = "") -> str:
    """Return advice for runs in which no episode succeeded and all rewards were equal, so there is no learning signal.

    Return "" if some episode succeeded or rewards differed. world, inside: as in `evident_cause`.
    """
    if not seen.paid or any(seen.success):
        return ""
    ways = (
        "start from demonstrated states (finetune.algorithm=grpo finetune.hint=guide finetune.num_initial_states=64), "
        "pre-train "
        "on better demonstrations (`robopolicy train`), or distil a successful teacher (`robopolicy teach`)"
    )
    if ":" in world:  # an outside environment, whose reward is an option
        ways = f"reward intermediate progress (world.options.reward=package.module:NAME), {ways}"
    subject = f"{seen.episodes}{inside} episodes"
    if not any(seen.paid):
        if not seen.episodes:
            return (
                f"All rewards were zero in {seen.iterations} iterations, and no{inside} episode ended: collect "
                f"longer rollouts, finetune.rollout_length={4 * config.rollout_length}; or {ways}."
            )
        return f"All rewards were zero in {subject}, so there is no learning signal. Try to {ways}."
    if seen.signal and not any(seen.signal):
        return (
            f"The episodes of each initial state had equal returns in all {subject}, so there is no learning signal. "
            f"Increase the episodes per group, finetune.group_size={2 * config.group_size}; or {ways}."
        )
    if len(seen.returns) > 1 and max(seen.returns) == min(seen.returns):
        return (
            f"All of {subject} had the same return, {seen.returns[0]:.4g}, so there is no learning signal. Try to "
            f"{ways}."
        )
    return ""


def _nothing_to_gain(base: Scored) -> str:
    if not base.reports_success or base.score < CEILING:
        return ""
    return (
        f"Almost no improvement is possible: the base already succeeds in {base.score:.1%}. Evaluate it where it "
        "fails: another world or harder initial states (world.name, world.options), or compare returns."
    )


def _too_large(seen: Evidence, config: FinetuneConfig) -> str:
    """Check whether updates exceeded their configured bounds (target KL, clipping)."""
    clipped = sum(seen.clip_fraction) / len(seen.clip_fraction) if seen.clip_fraction else 0.0
    if not seen.kl or (seen.stops < 0.5 and clipped < 0.3):
        return ""
    worst = f"the KL divergence of an update reached {max(seen.kl):.2g}"
    if config.target_kl is not None:
        worst += f" and ended {seen.stops:.0%} of the iterations early (finetune.target_kl={config.target_kl:g})"
    fewer = f" finetune.epochs={config.epochs // 2}" if config.epochs > 1 else ""
    return (
        f"Updates were too large: {worst}, and {clipped:.0%} of the ratios were clipped. Try "
        f"finetune.learning_rate={config.learning_rate / 3:.1g}{fewer} finetune.clip={config.clip / 2:.2g}."
    )


def _other_reward(seen: Evidence) -> str:
    """Check whether the return rose while success fell: the reward does not match success."""
    if min(len(seen.success), len(seen.returns)) < 4:
        return ""
    (began, end), (low, high) = _ends(seen.success), _ends(seen.returns)
    if end >= began - 0.1 or high <= low:
        return ""
    return (
        f"During collection the return rose from {low:.3g} to {high:.3g} while success fell from {began:.0%} to "
        f"{end:.0%}: the reward does not match success. Reward success only (finetune.rewards=[success_only]), or "
        "fix the reward."
    )


def _hardly_moved(seen: Evidence, config: FinetuneConfig) -> str:
    if seen.learned and seen.kl and max(seen.kl) < STILL:
        return (
            f"The policy hardly changed: the KL divergence of an update was at most {max(seen.kl):.1g}. Try "
            f"finetune.learning_rate={config.learning_rate * 3:.1g}, or more iterations."
        )
    if 0 < seen.iterations < FEW:
        return (
            f"{seen.iterations} iterations are too few to show an effect: set "
            f"finetune.iterations={max(50, 10 * seen.iterations)} or more."
        )
    return ""


def _within_noise(difference: Paired | None) -> str:
    if difference is None or not difference.low <= 0 <= difference.high or difference.low == difference.high == 0:
        return ""
    return (
        f"The difference, {difference.difference:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}] on "
        f"{difference.episodes} episodes, is not significant: evaluate on more episodes, "
        f"finetune.evaluate_episodes={4 * difference.episodes}, or train longer, finetune.iterations."
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last quarter of `values`."""
    part = max(1, len(values) // 4)
    return sum(values[:part]) / part, sum(values[-part:]) / part


def print_advice(
    verdicts: Mapping[str, PolicyEvaluation],
    section: FinetuneSection,
    horizon: int = 0,
    iterations: int | None = None,
    seen: Evidence | None = None,
    world: str = "",
) -> None:
    """Print why the tuned policy is no better than its base, according to the run's metrics, and what to try.

    horizon: control steps per episode, 0 if unknown; iterations: number of iterations, None if there were enough; seen:
    recorded metrics, None if there are none; world: name of the world.
    """
    base, tuned_result = (verdicts[name].deterministic for name in ("base", "tuned"))
    if tuned_result.score > base.score:
        return
    prefix = f"Fine-tuning did not raise {'success' if base.reports_success else 'the return'}."
    causes = "`robopolicy doctor DATA doctor.policy=CHECKPOINT` checks for other causes."
    critic = Need.CRITIC in section.resolved().needs
    unpaid = "" if seen is None else nothing_paid(seen, section, world)
    if not unpaid and critic and iterations is not None and iterations <= section.critic_warmup:
        output.print(
            f"{prefix} Only the critic was trained: finetune.critic_warmup={section.critic_warmup} takes all "
            f"{iterations} iterations. Set finetune.iterations above it, or finetune.critic_warmup=0."
        )
        return
    if seen is not None and seen.iterations:
        evident = evident_cause(seen, base, tuned_result, section, compare(base, tuned_result), world)
        if evident:
            output.print(f"{prefix} {evident}", markup=False, soft_wrap=True)
            return
        suggestion = f"finetune.num_envs={2 * section.num_envs}" if critic else f"finetune.groups={2 * section.groups}"
        largest = f" (a KL divergence of at most {max(seen.kl):.2g})" if seen.kl else ""
        output.print(
            f"{prefix} Rewards were non-zero and updates stayed within their bounds{largest}: the policy may have "
            f"overfitted to lucky episodes. Try {suggestion} or finetune.epochs=2. {causes}",
            markup=False,
            soft_wrap=True,
        )
    elif critic:
        output.print(
            f"{prefix} A common cause is updates that are too large: try finetune.clip=0.01 finetune.epochs=2, or, "
            "while the critic is not yet accurate, finetune.learning_rate=1e-4 finetune.critic_warmup=4 "
            f"finetune.minibatch=256 or more finetune.num_envs. {causes}"
        )
    else:
        output.print(
            f"{prefix} A common cause is updates that are too large and overfit to lucky episodes: divide "
            f"finetune.learning_rate by 3, set finetune.epochs=2, or double finetune.groups. {causes}"
        )
    # Where a time limit is no end, what would have come after it counts, and no episode shows that to the critic.
    horizon_steps = 1 / max(1 - section.discount, 1e-9)
    if critic and horizon and horizon_steps > horizon and section.time_limit == "truncate":
        output.print(
            f"The critic's effective horizon is 1 / (1 - finetune.discount) = {horizon_steps:.0f} control steps, "
            f"longer than an episode ({horizon}): try finetune.discount={max(0.5, 1 - 2 / horizon):.2g} or "
            "finetune.time_limit=terminate first."
        )
