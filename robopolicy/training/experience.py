"""Training data from rollouts: critic values and targets, advantages, and behaviour log-probabilities of executed
actions.

All results are stored in the extras of `Rollouts` (see `robopolicy.core.extras`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, ScoreError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.images import black_out
from robopolicy.core.policy import (
    CachesCondition,
    EncodesObservation,
    ScoredPolicy,
    SupportsMixedPrecision,
    TensorObservation,
    Trainable,
    is_condition,
)
from robopolicy.core.rollouts import Rollouts, critic_observation, row_selector
from robopolicy.core.spec import TASK
from robopolicy.core.steps import ACTIONS_COMPARED, require_own_actions
from robopolicy.nn.configuration import LearningPrecision
from robopolicy.nn.micro_batches import rows_at_once, scores_of
from robopolicy.nn.optimisers import require_finite
from robopolicy.nn.precision import require_precision
from robopolicy.rl.advantages.gae import chunk_rewards, finished_returns, gae, next_values
from robopolicy.rl.context import latents_for_other_policy
from robopolicy.rl.critic import Critic, ReturnScale
from robopolicy.rl.objective import effective_sample_size
from robopolicy.rl.registry import Need

READ_AT_ONCE = 256
"""Maximum number of observations encoded at once."""
SCORED_AT_ONCE = 4096
"""Maximum number of chunks whose log-probabilities are computed at once, without gradient."""
VALUED_AT_ONCE = 8192
"""Maximum number of chunks whose values are computed at once."""


def with_executed(
    rollouts: Rollouts, policy: ScoredPolicy, instructions: tuple[str, ...], version: int | None = None
) -> Rollouts:
    """Restrict log-probabilities to the executed part of chunks that ended early; latents["executed"] [B, T, C] marks
    it for the policy.

    Behaviour log-probabilities of these chunks are recomputed with `policy`, which must be the unchanged acting policy.
    Chunks of versions other than `version` (None: none) were handled when that version acted.
    """
    # A scored log-probability of a whole chunk counts actions that were never executed, behind the episode's end.
    shortened_mask = rollouts.alive & (~rollouts.valid).any(-1)
    if not bool(shortened_mask.any()):
        return rollouts
    latents = {**rollouts.latents, "executed": rollouts.valid}
    marked = replace(rollouts, latents=latents, logp_behaviour=rollouts.logp_behaviour.clone())
    if version is not None:
        shortened_mask &= rollouts.policy_version == version
    if not bool(shortened_mask.any()):
        return marked
    with torch.no_grad():
        decisions = _gathered(marked, shortened_mask, instructions, images=reads_images(policy, marked))
        marked.logp_behaviour[shortened_mask], _ = _scored(policy, decisions)
    return marked


@torch.no_grad()
def with_values(
    rollouts: Rollouts,
    critic: Critic,
    return_scale: ReturnScale,
    discount: float,
    gae_lambda: float,
    *,
    finished: bool = False,
    again: bool = False,
) -> Rollouts:
    """Add `value`, `value_target` and `advantage_gae` [B, T]; `return_scale` is first updated with the rewards that it
    normalises, unless they have been in it before (again).

    finished: targets are returns of episodes that end here, and `target_known` [B, T] marks them. critic: observation
    [N, H, ...] -> values [N]. V of a chunk's successor is V of the next column where the episode continues. Otherwise
    the critic is evaluated again: at the last column, and where a time limit or the imagination horizon truncated an
    episode, whose value is bootstrapped.
    """
    rewards = torch.stack(list(rollouts.rewards.values())).sum(0)
    per_chunk = chunk_rewards(rewards, rollouts.valid, discount)
    # Before dividing, with rewards as they came: the scale must not depend on itself.
    if not again:
        return_scale.update(per_chunk, rollouts.ended, discount ** rollouts.duration.float())
    rewards = rewards / return_scale.scale.to(rewards.dtype)
    values = critic_values(critic, rollouts, torch.ones_like(rollouts.alive)).reshape(rollouts.shape)
    # Where an episode goes on, V of the next column is at hand; after a real end V is 0. Only these are left.
    bootstrap_mask = rollouts.ended & ~rollouts.terminated
    bootstrap_mask[:, -1] = True
    at_end = torch.zeros_like(values)
    at_end[bootstrap_mask] = critic_values(critic, rollouts, bootstrap_mask, following=True)
    advantages, returns = gae(
        rewards,
        rollouts.valid,
        values,
        next_values(values, at_end, rollouts.ended),
        rollouts.terminated,
        rollouts.ended,
        discount,
        gae_lambda,
    )
    extras = {"value": values, "value_target": returns, "advantage_gae": advantages}
    if finished:
        # Rewards have been divided by the scale by now, so the finished returns are in the critic's units.
        scaled = chunk_rewards(rewards, rollouts.valid, discount)
        decay = discount ** rollouts.duration.float()
        extras["value_target"], extras["target_known"] = finished_returns(rollouts, scaled, decay)
    return rollouts.with_extras(**extras)


@torch.no_grad()
def recompute_log_probs(
    rollouts: Rollouts,
    policy: ScoredPolicy,
    instructions: tuple[str, ...],
    blackout: torch.Generator | None = None,
    *,
    another: bool = False,
) -> tuple[Tensor, Tensor]:
    """Recompute the log-probabilities of all chunks under `policy`; return logp and entropy, [B, T, K] fp32, 0 on
    padding.

    blackout: generator that selects camera image patches to black out first, to measure dependence on the image;
    another: `policy` is not the acting policy, so it cannot use features cached by the acting policy's encoder.
    """
    alive = rollouts.alive
    afresh = another or blackout is not None  # the cached condition is of the whole image, by the encoder that acted
    images = afresh or reads_images(policy, rollouts)

    def given() -> Iterator[tuple[TensorObservation, Mapping[str, Tensor]]]:
        for observation, latents in _gathered(rollouts, alive, instructions, images=images):
            if blackout is not None:
                observation = {key: black_out(key, value, blackout) for key, value in observation.items()}
            yield observation, latents_for_other_policy(latents) if afresh else latents

    empty = torch.zeros_like(rollouts.logp_behaviour, dtype=torch.float32)
    scores = _scored(policy, given())
    return tuple(empty.index_put((alive,), part) for part in scores)  # type: ignore[return-value]


def with_proximal(rollouts: Rollouts, logp: Tensor, *, forgets_help: bool) -> Rollouts:
    """Return the rollouts with log-probabilities of the proximal policy, [B, T, K].

    forgets_help: chunks of helped episodes were chosen under other words than they are scored under, so their ratio is
    to the policy that acted, which heard the help.
    """
    helped = rollouts.extras.helped
    if forgets_help and helped is not None:
        logp = torch.where(helped[..., None], rollouts.logp_behaviour.to(logp.dtype), logp)
    return replace(rollouts, logp_proximal=logp)


def _gathered(
    rollouts: Rollouts, where: Tensor, instructions: tuple[str, ...], *, images: bool
) -> Iterator[tuple[TensorObservation, dict[str, Tensor]]]:
    """Yield the results of `decisions_at` for slices of the chunks; a slice is at most a minibatch."""
    for part in slices_of(where, rows_at_once(SCORED_AT_ONCE)):
        yield decisions_at(rollouts, part, instructions, images=images)


def _scored(
    policy: ScoredPolicy, decisions: Iterable[tuple[TensorObservation, Mapping[str, Tensor]]]
) -> tuple[Tensor, Tensor]:
    """Return logp and entropy [n, K] of n chunks, computed in slices."""
    scores = [scores_of(policy, observation, latents) for observation, latents in decisions]
    return torch.cat([each.logp for each in scores]), torch.cat([each.entropy for each in scores])


def slices_of(where: Tensor, most: int) -> Iterator[Tensor]:
    """Yield masks [B, T] that split the chunks `where` [B, T] bool into slices of limited size, in order.

    Observations are gathered per slice, because copies of all images (or of unpacked ones) would need as much memory
    again.
    """
    indices = where.flatten().nonzero().squeeze(1)
    if len(indices) <= most:
        yield where
        return
    for slice_indices in indices.split(most):
        yield torch.zeros_like(where).flatten().index_fill(0, slice_indices, True).reshape(where.shape)


@torch.no_grad()
def conditions_of(rollouts: Rollouts, policy: ScoredPolicy, instructions: tuple[str, ...]) -> dict[str, Tensor]:
    """Return features of the chunks' observations by the frozen encoder of `policy`, name -> [B, T, ...], 0 on padding.

    Stored episodes are thus processed like the policy's own, with its current weights; {} when the policy caches no
    features. Each slice has the chunks that are computed at once, at most `READ_AT_ONCE`. Raises DataError when the
    episodes belong to a policy whose latents mean different actions.
    """
    alive = rollouts.alive
    if "chain" in rollouts.latents:
        positions = alive.nonzero()[:ACTIONS_COMPARED].unbind(1)
        ends = rollouts.latents["chain"][positions][:, -1]
        require_own_actions(policy, ends, rollouts.actions[positions], rollouts.valid[positions])
    if not (isinstance(policy, EncodesObservation) and policy.caches_condition and bool(alive.any())):
        return {}
    parts = slices_of(alive, rows_at_once(READ_AT_ONCE))
    conditions = [policy.encode(decisions_at(rollouts, part, instructions)[0]) for part in parts]
    stacked: dict[str, Tensor] = {}
    for name, first in conditions[0].items():
        values = torch.cat([each[name] for each in conditions])
        stacked[name] = first.new_zeros((*alive.shape, *first.shape[1:])).index_put((alive,), values)
    return stacked


def reads_images(policy: ScoredPolicy, rollouts: Rollouts) -> bool:
    """Whether the acting `policy` needs camera images to compute log-probabilities; False if features of its frozen
    encoder are stored.
    """
    caches = isinstance(policy, CachesCondition) and policy.caches_condition
    return not (caches and any(is_condition(name) for name in rollouts.latents))


def decisions_at(
    rollouts: Rollouts, where: Tensor, instructions: tuple[str, ...], *, images: bool = True
) -> tuple[TensorObservation, dict[str, Tensor]]:
    """Gather observations and latents of the n chunks `where` [B, T] bool as rows [n, ...], for log-probability
    computation.

    images: whether to include camera images; copying them takes longer than everything else together.
    """
    pick = row_selector(where)
    observation: TensorObservation = {}
    for key, value in rollouts.observation.items():
        assert isinstance(value, Tensor)
        observation[key] = pick(value)
    if images and rollouts.images is not None:
        observation |= rollouts.images.read(pick(rollouts.images.seen))
    # Also where the world has but one: the policy may know more
    observation[TASK] = [instructions[index] for index in pick(rollouts.task).tolist()]
    return observation, {key: pick(value) for key, value in rollouts.latents.items()}


def critic_values(critic: Critic, rollouts: Rollouts, where: Tensor, *, following: bool = False) -> Tensor:
    """Return the critic's values [n] at (or after) the n chunks `where` [B, T] bool, computed in slices."""
    options = {"following": following, "images": critic.reads_images}
    parts = slices_of(where, rows_at_once(VALUED_AT_ONCE))
    return torch.cat([critic(critic_observation(rollouts, part, **options)) for part in parts])


def episode_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return success, return and count of the episodes that ended in these rollouts, and the reward per policy call."""
    ended_mask = rollouts.ended & rollouts.alive
    count = int(ended_mask.sum())
    reward = torch.stack(list(rollouts.rewards.values())).sum()
    metrics = {"episodes": float(count), "reward_per_decision": float(reward) / max(1, int(rollouts.alive.sum()))}
    if count:
        metrics["success"] = float(rollouts.success[ended_mask].float().mean())
        metrics["return"] = float(rollouts.extras["episode_return"][ended_mask].mean())
    return metrics


def learning_metrics(prepared: Rollouts, needs: frozenset[Need]) -> dict[str, float]:
    """Return learning metrics: fraction of rows with an advantage, reward terms per policy call, accuracy of the side
    models, effective sample size where old rows were scored again. needs: of the algorithm.
    """
    # Groups whose episodes all end alike have an advantage of 0 everywhere and teach nothing.
    signal = (prepared.extras["advantage"].abs().amax((1, 2)) > 1e-6).float().mean()
    metrics = {"signal": float(signal)}
    decisions = max(1, int(prepared.alive.sum()))
    if len(prepared.rewards) > 1:
        metrics |= {f"reward_{name}": float(reward.sum()) / decisions for name, reward in prepared.rewards.items()}
    current = prepared.logp_proximal
    if current is None and Need.SEQUENCE_RATIOS in needs:  # else replayed rows have those of their own iteration
        current = prepared.extras.current_logp
    if current is not None:
        # log of pi_now / pi_behaviour, summed over a sequence below.
        log_ratios = torch.where(prepared.mask, current - prepared.logp_behaviour, 0.0).flatten(1)
        metrics["sequence_ess"] = float(
            effective_sample_size(log_ratios, torch.ones_like(log_ratios, dtype=torch.bool))
        )
    accuracy = prepared.extras.process_accuracy
    if accuracy is not None and not bool(accuracy[0, 0].isnan()):
        metrics["process_accuracy"] = float(accuracy[0, 0])
    return metrics


@torch.no_grad()
def require_same_scores(
    rollouts: Rollouts,
    policy: ScoredPolicy,
    iteration: int,
    instructions: tuple[str, ...],
    tolerance: float,
    where: str,
) -> None:
    """Check on at most 256 chunks of the current policy that the probability ratio is 1 before the first update.

    tolerance: for log-probabilities up to 1. Larger ones, and sums whose terms cancel, have tolerances proportional to
    their own or the mean magnitude. Raises ScoreError if one differs by more, NonFiniteError if one is not finite.
    """
    current_mask = rollouts.played & (rollouts.policy_version == iteration)
    if rollouts.extras.helped is not None:  # they may have acted under other words than they are scored under
        current_mask &= ~rollouts.extras.helped
    indices = current_mask.flatten().nonzero().squeeze(1)
    if not len(indices):
        return
    count = min(len(indices), 256)
    # Evenly spaced over rows and time, without drawing: a check must not move any generator.
    indices = indices[torch.arange(count, device=indices.device) * (len(indices) // count)]
    sample_mask = torch.zeros_like(current_mask).flatten().index_fill(0, indices, True).reshape(current_mask.shape)
    images = reads_images(policy, rollouts)
    logp, _ = _scored(policy, _gathered(rollouts, sample_mask, instructions, images=images))
    mask = rollouts.mask[sample_mask]
    acted = torch.where(mask, rollouts.logp_behaviour[sample_mask], 0.0)
    difference = torch.where(mask, logp - acted, 0.0).abs()
    require_finite("the log-probability", difference.max(), where)
    # A sum whose terms cancel is small, but its rounding is of the size of the terms: hence the mean as a floor.
    size = acted.abs().clamp(min=max(1.0, float(acted.abs().sum() / mask.sum().clamp(min=1))))
    worst = (difference / size).argmax()
    error, limit = float(difference.flatten()[worst]), tolerance * float(size.flatten()[worst])
    if error > limit:
        raise ScoreError(
            f"Before {where}, recomputed log-probabilities differ from those at acting time: "
            f"{float(acted.flatten()[worst]):.3g} differs by {error:.2e} (allowed {limit:.1e}). Acting and "
            "log_prob must use the same schedule, clipping, standard deviation and mode (dropout, precision). If "
            f"the cause is rounding alone, set ratio_tolerance={2 * error / limit * tolerance:.1e}."
        )


def require_lowering(policy: Trainable, precision: LearningPrecision) -> None:
    """Raise ConfigError unless `policy` can train in this precision on its device; see `require_precision`."""
    require_precision(precision, next(policy.parameters()).device)
    if precision == "fp8" and not policy.spec.categorical:
        raise ConfigError(
            f"precision=fp8 rounds the linear layers of token policies, but {type(policy).__name__} is none: set "
            "precision=fp32 or bf16."
        )
    if precision in ("bf16", "fp8") and not isinstance(policy, SupportsMixedPrecision):
        raise ConfigError(
            f"{type(policy).__name__} computes actions and log-probabilities in fp32 only, and ratios must start at "
            "1: set precision=bf16_backward, or fp32."
        )


keep_former_names(__name__, {"rescored": "recompute_log_probs", "parts_of": "slices_of"})
