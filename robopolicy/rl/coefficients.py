"""Coefficients c such that the gradient of `-sum(w * sg(c) * logp)` equals that of the surrogate.

Clipping, decoupled clipping for off-policy data, trust regions, and preferences between episodes. If a paper states a
surrogate, its gradient was derived by hand and is compared with autograd in the tests.

Preferences compare episodes with the same initial state: minibatches must contain complete episodes and, to form pairs,
complete groups: minibatch_episodes at least a few times group_size. An episode's log-ratio is the sum over its scored
steps, independent of ratio_level, relative to the policy at the start of the iteration (`tpo`: to the frozen
reference).
"""

import math

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import uniform
from robopolicy.core.segments import Segments
from robopolicy.rl.context import Coefficients, Scored, require_input
from robopolicy.rl.objective import mean_of_elements
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option


def ppo(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: Tensor | float,
    clip_high: Tensor | float,
    clamped: Tensor | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute the coefficient of PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347), shaped as log_ratio.

    The surrogate min(r A, clip(r, 1 - low, 1 + high) A) has gradient c * grad(logp) with

        c = r A  where  (A >= 0 and r <= 1 + high) or (A < 0 and r >= 1 - low),  else 0.

    dual_clip: with A < 0, c is also 0 where r exceeds dual_clip (Ye et al. 2020, arXiv:1912.09729). clamped: entries
    whose log-ratio was clamped get 0, like the gradient of the clamp. Clip widths broadcast, e.g. one per step [K].
    """
    # d/dtheta of r A is r A grad(logp), since grad r = r grad(logp): the surrogate's gradient is a coefficient on the
    # score. Where the clip is the smaller of the two, the surrogate is constant and the coefficient 0.
    ratio = log_ratio.exp()
    within_clip = torch.where(advantage >= 0, ratio <= 1 + clip_high, ratio >= 1 - clip_low)
    if dual_clip is not None:
        within_clip = within_clip & ((advantage >= 0) | (ratio <= dual_clip))
    if clamped is not None:
        within_clip = within_clip & ~clamped
    return torch.where(within_clip, ratio * advantage, 0.0)


@mechanism(Slot.COEFFICIENT, "ppo", source="Schulman et al. 2017, arXiv:1707.06347; dual clip: arXiv:1912.09729")
def clipped(
    scored: Scored,
    *,
    dual_clip: float | None = None,
    low: float | None = None,
    high: float | None = None,
    keep_above: bool = False,
) -> Coefficients:
    """PPO's clipped ratio; with ratio level episode it is GSPO, with action it is Rank-GRPO.

    Clip widths: low and high, null for clip (and clip_high, clip_base, clip_rate). dual_clip bounds the ratio of action
    chunks with negative advantage. keep_above: steps with A > 0 above the range keep the gradient of its upper end,
    c = (1 + high) A instead of 0, as in AEPO (arXiv:2510.14545).
    """
    bottom, top = scored.clip_low if low is None else low, scored.clip_high if high is None else high
    c = ppo(scored.log_ratio, scored.advantage, bottom, top, scored.clamped, dual_clip)
    if keep_above:
        c = torch.where((scored.advantage > 0) & (scored.ratio > 1 + top), (1 + top) * scored.advantage, c)
    return c, {}


def clip_schedule(steps: int, base: float, epsilon: float, rate: float) -> Tensor:
    """Return DPPO's clip width per step, [K], from `base` at the noisiest to `epsilon` at the cleanest step.

        eps_i = base + (epsilon - base) * (e^(rate t_i) - 1) / (e^rate - 1),   t_i = i / (K - 1)

    Source: Ren et al. 2024, arXiv:2409.00588. K = 1 is the cleanest step (t = 1); rate 0 is the linear limit. A width
    depends on the log-probability reduction: .01 on a mean over 28 dimensions is about .28 on their sum.
    """
    t = torch.linspace(0.0, 1.0, steps, dtype=torch.float64) if steps > 1 else torch.ones(1, dtype=torch.float64)
    shape = t if rate == 0 else torch.expm1(rate * t) / math.expm1(rate)
    return (base + (epsilon - base) * shape).float()


@mechanism(Slot.COEFFICIENT, "decoupled_ppo", source="AReaL, arXiv:2505.24298; Hilton et al. 2022, arXiv:2110.00641")
def decoupled_ppo(scored: Scored, *, limit: float = 5.0, dual_clip: float | None = None) -> Coefficients:
    """PPO clipped around the proximal policy, weighted by proximal / behaviour, capped at `limit` and without gradient.

    The papers have no cap; AReaL's code drops steps above 5 or, as here, caps them. dual_clip: as in ppo.
    """
    c = ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped, dual_clip)
    # Two ratios with two tasks: this one corrects for who played, the clip around proximal bounds the step.
    weight = scored.staleness.exp().clamp(max=limit)
    return weight * c, {"staleness_weight": weight[scored.mask].mean()}


def entropy_covariance(scored: Scored) -> Tensor:
    """Return (log pi - mean) (A - mean) over the minibatch's scored steps, [b, t, K]; -inf elsewhere."""
    mask, logp = scored.mask, scored.logp
    advantage = scored.advantage
    product = (logp - logp[mask].mean()) * (advantage - advantage[mask].mean())
    return torch.where(mask, product, -torch.inf)


@mechanism(Slot.COEFFICIENT, "clip_cov", source="Clip-Cov, arXiv:2505.22617; SPEAR, arXiv:2509.22601")
def clip_cov(
    scored: Scored, *, share: float = 0.0002, limit: float = 5.0, bounds: tuple[float, float] | None = None
) -> Coefficients:
    """Decoupled PPO without the steps that reduce entropy most: those whose probability and advantage covary.

        cov = (log pi - mean) (A - mean),   over the minibatch's scored steps

    sums to the entropy reduction of a policy gradient step. The `share` of steps with the largest positive cov get no
    gradient; they still count in the averages. Minibatches of fewer than 1 / share steps lose none: Clip-Cov's share is
    .0002, that of SPEAR's authors .02, of replayed episodes. bounds: as in Clip-Cov, the share, at least one step, is
    drawn at random from those with cov between these bounds that PPO does not clip; (1, 5) was tuned for words. limit:
    as in decoupled_ppo.
    """
    c, stats = decoupled_ppo(scored, limit=limit)
    mask, covariance = scored.mask, entropy_covariance(scored)
    count = int(share * int(mask.sum()))
    score = covariance
    if bounds is not None:
        draws, count = require_input(scored.generator, "generator"), max(1, count)
        order = uniform(covariance.shape, draws, covariance.device)
        is_candidate = (covariance > bounds[0]) & (covariance < bounds[1]) & mask & (c != 0)
        score = torch.where(is_candidate, order.to(score) + 1e-9, -torch.inf)
    top_mask = torch.zeros_like(mask).flatten().scatter(0, score.flatten().topk(count).indices, True)
    top_mask = top_mask.reshape(mask.shape) & (score > 0)
    return torch.where(top_mask, 0.0, c), {**stats, "covariance": covariance[mask].mean()}


@mechanism(Slot.COEFFICIENT, "bapo", source="BAPO, arXiv:2510.18927")
def bapo(
    scored: Scored,
    *,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
    positive_share: float = 0.5,
) -> Coefficients:
    """PPO whose clip bounds widen until positive-advantage chunks make up `positive_share` of the surrogate's
    magnitude.

    This fraction is P / (P + N) with P = sum of min(r, top) A where A > 0, N = sum of max(r, bottom) |A| where A < 0:
    the values of the clipped surrogate, including clipped steps. The lower bound is raised first, then the upper one,
    with the figures of the authors' README and in the order of their code. The paper's Algorithm 1 raises the upper
    bound first, then the lower one in steps of 0.02, up to a share of 0.4; and their code bounds the loss of A < 0 at a
    ratio of 3, which the paper does not state and this leaves out.
    """
    bottom, top = low[0], high[0]
    share = _positive_share(scored, bottom, top)
    while float(share) < positive_share and (bottom < low[1] - 1e-9 or top < high[1] - 1e-9):
        if bottom < low[1] - 1e-9:
            bottom = min(bottom + step, low[1])
        else:
            top = min(top + step, high[1])
        share = _positive_share(scored, bottom, top)
    c = ppo(scored.log_ratio, scored.advantage, 1 - bottom, top - 1, scored.clamped)
    bounds = {"bapo_low": torch.tensor(bottom), "bapo_high": torch.tensor(top)}
    return c, {**bounds, "positive_share": share.detach()}


def _positive_share(scored: Scored, bottom: float, top: float) -> Tensor:
    positive_sum = (scored.ratio.clamp(max=top) * scored.advantage.clamp(min=0))[scored.mask].sum()
    negative_sum = (scored.ratio.clamp(min=bottom) * scored.advantage.clamp(max=0))[scored.mask].sum().abs()
    return positive_sum / (positive_sum + negative_sum).clamp(min=1e-12)


def mean_shift(scored: Scored) -> tuple[Tensor, Tensor]:
    """Return the KL(old || new) of the elements in a step's log-probability, reduced as that is, and their std, both
    [b, t, K].

    It is 1/2 sum w (mean - mean_old)^2 with the weights `logp_precision` of the policy's scores; std: the mean over
    these elements. latents["mean"] contains the behaviour policy's means [b, t, K', P, A]; raises ConfigError if the
    policy's likelihood stores none.
    """
    if "mean" not in scored.rollouts.latents:
        raise ConfigError(
            "This mechanism needs the mean of every denoising step under the acting policy, which this policy's "
            "likelihood does not store."
        )
    mean, precision = scored.extra("mean"), scored.extra("logp_precision")
    old = scored.rollouts.latents["mean"]
    old = torch.gather(old, 2, scored.chosen[..., None, None].expand(mean.shape))
    # What lies behind the executed steps of a chunk was drawn but has moved nothing: its weight is 0.
    shift = 0.5 * (precision * (mean - old).square()).sum((3, 4))
    return shift, mean_of_elements(scored.extra("std").expand(mean.shape), {"logp_precision": precision})


def guarded_log_ratio(log_ratio: Tensor, shift: Tensor, std: Tensor) -> Tensor:
    """Compute GRPO-Guard's regulated log-ratio, which removes the left shift of a Gaussian step's ratio, all [b, t, K].

        log r' = [log r + |mean - mean_old|^2 / (2 std^2)] * std

    log_ratio and shift have the same reduction over dimensions. Under samples of the old policy E[log r'] = 0,
    while E[log r] = -shift; the factor std gives all steps the same scale. Source: GRPO-Guard, arXiv:2510.22319 (public
    documentation).
    """
    # With x ~ N(mean_old, std) the log-ratio has mean -shift and standard deviation |mean - mean_old| / std: adding the
    # shift centres it, multiplying by std makes it depend on the distance alone, whatever the step's noise.
    return (log_ratio + shift) * std


@mechanism(Slot.COEFFICIENT, "grpo_guard", source="GRPO-Guard, arXiv:2510.22319", needs=(Need.MEANS, Need.STEP_RATIOS))
def grpo_guard(scored: Scored) -> Coefficients:
    """PPO on ratios whose mean is corrected to 1, so that clipping acts equally on both sides of a Gaussian step.

    c = std r' A, the gradient of the clipped surrogate of r' (see `guarded_log_ratio`; deviation: the gradient of the
    shift, of first order in how far the means have moved, is dropped). Clip widths apply to the scaled log-ratio and
    are std times smaller: the default clip=0.2 is wide for it, the benchmark's is 0.003. The paper also divides the
    loss of a step by its length dt; all flows here take steps of equal length, where that is one factor for the
    complete loss, and a denoising chain has no such length. r is the ratio to the policy that acted, also for older
    episodes: the recorded means are its means.
    """
    shift, std = mean_shift(scored)
    # To the proximal policy a shift from the means of the acting one would not belong: r' would differ from 1 for a
    # policy that has not moved.
    to_acting = scored.log_ratio + scored.staleness
    log_ratio = guarded_log_ratio(to_acting.clamp(-scored.limit, scored.limit), shift, std)
    # d log r' / d log pi = std, by the chain rule.
    clamped = scored.clamped | (to_acting.abs() > scored.limit)
    c = std * ppo(log_ratio, scored.advantage, scored.clip_low, scored.clip_high, clamped)
    ratio_mean, guarded = scored.ratio[scored.mask].mean(), log_ratio.exp()[scored.mask].mean()
    return torch.where(scored.mask, c, 0.0), {"ratio_mean": ratio_mean, "guarded_ratio_mean": guarded}


@mechanism(Slot.COEFFICIENT, "none", source="auxiliary losses alone")
def nothing(scored: Scored) -> Coefficients:
    """No policy gradient: only the auxiliary losses train the policy."""
    return torch.zeros_like(scored.logp), {}


@mechanism(Slot.COEFFICIENT, "opd", source="on-policy distillation, arXiv:2306.13649", needs=(Need.TEACHER_SCORES,))
def on_policy_distillation(scored: Scored, *, reward: float = 0.0, cap: float = 5.0) -> Coefficients:
    """Reverse KL to the teacher on the student's own chunks: c = log teacher - log pi, with magnitude at most `cap`.

    reward: weight of PPO's coefficient, which is added to also learn from the outcome. The teacher must define the same
    steps: the same tokens, or the same denoising schedule. No ratio weighs the steps: on data that are older than the
    policy, as from an iteration's second minibatch on, this is the gradient of (log teacher - log pi)^2 / 2 over what
    the acting policy drew, which is zero at the teacher too.
    """
    teacher = scored.rollouts.extras["teacher_logp"].gather(-1, scored.chosen)
    # The gradient of KL(pi || teacher) is E_pi[(log pi - log teacher) grad log pi]; this is minus that.
    gap = teacher - scored.logp
    c = gap.clamp(-cap, cap)
    if reward:
        c = c + reward * ppo(scored.log_ratio, scored.advantage, scored.clip_low, scored.clip_high, scored.clamped)
    return torch.where(scored.mask, c, 0.0), {"teacher_gap": -gap[scored.mask].mean()}


def sides(advantage: Tensor, counted: Tensor, group: Tensor) -> Tensor:
    """Return 1 for episodes whose mean advantage is above that of their group, -1 for those below, [b]; else 0.

    advantage, counted: [b, t, K]; entries where counted is False are excluded, and an episode without any counted entry
    gets 0; group: [b].
    """
    size = counted.sum((1, 2))
    # In double precision: equal advantages must have equal means, or rounding would make pairs of ties.
    mean = torch.where(counted, advantage, 0.0).double().sum((1, 2)) / size.clamp(min=1)
    groups = Segments.of(group)
    deviation = mean - groups.mean(mean, size > 0)[groups.index]
    return torch.where((deviation.abs() > 1e-6) & (size > 0), deviation.sign(), 0.0)


def pair_mean(pairs: Tensor) -> Tensor:
    """Return 1 / pairs [b, b], scaled by the number b of episodes, so that the magnitude is independent of the
    minibatch.
    """
    return len(pairs) / pairs.sum().clamp(min=1)


@mechanism(
    Slot.COEFFICIENT,
    "tpo",
    source="GRAPE (trajectory-wise preference optimization), arXiv:2411.19309; anchor: OPA-DPO, arXiv:2501.09695",
    needs=(Need.WHOLE_GROUPS, Need.BASE, Need.REFERENCE_SCORES),
)
def tpo(scored: Scored, *, beta: float = 0.1, reduction: str = "sum", anchor: float = 0.0) -> Coefficients:
    """-log sigmoid(m), m = beta (sum of log pi / pi_ref over the chosen episode - the same over the rejected one).

    Pairs combine episodes whose mean advantage is above their group's (chosen) with those below (rejected); the loss is
    the mean over these pairs. dm / dlog pi(step) is beta in the chosen and -beta in the rejected episode, and the
    derivative of -log sigmoid(m) is -sigmoid(-m). So c = beta sigmoid(-m) on every step of the chosen episode and its
    negative on the rejected one. Steps whose advantage is 0 count on neither side (shared steps of branches cancel).
    weight=constant with length=1 gives this loss exactly. pi_ref is the base policy, which replay=preferences replaces
    by the current policy at the start of each round. reduction: sum, as in the paper, or mean over an episode's counted
    steps. A sum grows with T chunks times K steps: the longer a chain, the sooner a pair saturates, at a change of
    about 1 / (beta T K) per step. So scale beta down with T K, or use the mean with a beta about T K times larger.
    Nothing is clipped and nothing overflows: log-ratios are summed in fp64 and only enter a sigmoid. If a policy's step
    log-probabilities are means over their elements (logp_reduction=mean), beta applies per element. anchor: weight of
    -log sigmoid(beta sum of log pi / pi_ref) of chosen episodes, their mean, which keeps them from becoming unlikely
    (OPA-DPO: 1, with a reference that has imitated own and corrected episodes).
    """
    if reduction not in ("sum", "mean"):
        raise unknown_option("tpo.reduction", reduction, ("sum", "mean"))
    reference = scored.rollouts.extras["reference_logp"].gather(-1, scored.chosen)
    counted_mask = scored.mask & (scored.advantage != 0)
    change = torch.where(counted_mask, scored.logp - reference, 0.0).double().sum((1, 2))
    share = 1 / counted_mask.sum((1, 2)).clamp(min=1) if reduction == "mean" else torch.ones_like(change)
    change = change * share
    group = scored.rollouts.group
    side = sides(scored.advantage, counted_mask, group)
    pairs = (group[:, None] == group[None]) & (side[:, None] > 0) & (side[None] < 0)
    margin = beta * (change[:, None] - change[None])
    pull = torch.where(pairs, beta * torch.sigmoid(-margin), 0.0) * pair_mean(pairs)
    # Row sums: what an episode wins as the chosen one; column sums: what it loses as the rejected one.
    is_chosen = pairs.any(1)
    anchor_pull = torch.where(is_chosen, anchor * beta * torch.sigmoid(-beta * change), 0.0) * pair_mean(is_chosen)
    per_episode = ((pull.sum(1) - pull.sum(0) + anchor_pull) * share).to(scored.logp.dtype)
    stats = {"pairs": pairs.sum().float()}
    if bool(pairs.any()):
        stats |= {
            "preferred_right": ((margin > 0) & pairs).sum() / pairs.sum(),
            "margin": margin[pairs].mean(),
            "chosen_log_ratio": change[side > 0].mean(),
            "rejected_log_ratio": change[side < 0].mean(),
        }
    steps = torch.where(counted_mask, per_episode[:, None, None], 0.0)
    return steps, {name: value.float() for name, value in stats.items()}
