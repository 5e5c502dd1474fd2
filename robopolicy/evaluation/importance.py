"""Off-policy evaluation by importance sampling: logged actions are weighted by their likelihood under the evaluated
policy.

    w_t = prod_{s <= t} prod_k p_new(x_{s,k+1} | x_{s,k}) / p_log(x_{s,k+1} | x_{s,k})   up to decision t of an episode

over the scored denoising steps k of the logged chains: densities of the chain, not of its action, since many chains
lead to the same action. It needs no model and no critic, but weights multiply: for a policy that differs much from the
logged one few episodes count, as the effective sample size shows. Sources: importance sampling for evaluation, Precup
et al. 2000; self-normalised per decision (CWPDIS), Thomas 2015; chains, DPPO, arXiv:2409.00588. Axes: E episode, T
decision of it, D logged decision, K scored step, P predicted step, A action dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, SpecError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import MatchingLikelihood, Policy, ScoredPolicy
from robopolicy.core.steps import ACTIONS_COMPARED, require_own_actions
from robopolicy.data.chains import Chains
from robopolicy.nn.schedules import Normal
from robopolicy.rl.offline.decisions import ROWS, observations_at


@dataclass(frozen=True)
class Estimate:
    """Importance-sampling estimate. values: [E], whose mean is the estimate; effective: effective sample size of the
    episode weights, at most E.

    clipped: fraction of the weights that exceeded the limit and were reduced to it.
    """

    values: Array
    effective: float
    clipped: float


def importance_estimate(
    log_ratio: Array, reward: Array, *, per_decision: bool = True, normalised: bool = True, clip: float | None = None
) -> Estimate:
    """Estimate a policy's value from log-ratios and rewards [E, T] of each logged action chunk; zeros after the end of
    an episode.

    per_decision: weight a reward by the decisions before it only, not by the complete episode; normalised: divide
    weights by their mean over episodes, which is biased but has much lower variance; clip: largest weight. If
    normalised, `values` are V + sum_t w_t (r_t - V_t), V_t the estimate of that reward: the same mean, and the variance
    of a ratio estimator, which the interval needs.
    """
    total = np.cumsum(np.asarray(log_ratio, dtype=np.float64), 1)
    bound = np.inf if clip is None else np.log(clip)
    log_weight = np.minimum(total, bound)
    last = np.exp(log_weight[:, -1] - log_weight[:, -1].max())
    effective = float(last.sum() ** 2 / np.square(last).sum())
    clipped = float(((total if per_decision else total[:, -1]) > bound).mean())
    if not per_decision:
        log_weight = np.broadcast_to(log_weight[:, -1:], total.shape)
    if not normalised:
        return Estimate((np.exp(log_weight) * reward).sum(1), effective, clipped)
    weight = np.exp(log_weight - log_weight.max(0))
    weight = weight / weight.mean(0)
    each = (weight * reward).mean(0)
    return Estimate(each.sum() + (weight * (reward - each)).sum(1), effective, clipped)


@torch.no_grad()
def log_densities(policy: Policy, episodes: Episodes, chains: Chains) -> Tensor:
    """Return the log-density of every scored step of logged chains under `policy`, [D, K] float64.

    All P x A elements are included without clamping or averaging, unlike in training losses. The first, frozen steps of
    a fine-tuned policy are not scored: they must equal those of the logged policy. Raises ConfigError for a policy
    whose steps are not Gaussian, DataError when its chains have another length.
    """
    if not isinstance(policy, ScoredPolicy) or (isinstance(policy, MatchingLikelihood) and policy.scored_by_matching):
        raise ConfigError(
            f"{type(policy).__name__} has no log-probabilities of denoising steps: importance sampling cannot "
            "evaluate it."
        )
    spec, frames = policy.spec, chains.step + episodes.episode_of_step[chains.step]
    densities: list[Tensor] = []
    for rows in torch.split(torch.arange(len(chains.step), device=episodes.device), ROWS):
        observation, chain = (
            observations_at(episodes, frames[rows], spec.history, list(spec.observation)),
            chains.chain[rows],
        )
        try:
            extras = policy.log_prob(observation, {"chain": chain}).extras
        except SpecError as error:
            raise DataError(
                f"The recorded chains have {chain.shape[1] - 1} denoising steps with log-probabilities, of shape "
                f"{list(chain.shape[2:])}; this policy has {spec.scored_steps}: importance sampling needs policies "
                "with the same denoising steps as the recorded one."
            ) from error
        if "mean" not in extras or "std" not in extras:
            raise ConfigError(
                f"{type(policy).__name__} does not describe the distribution of its steps: use another evaluator."
            )
        normal = Normal(extras["mean"].double(), extras["std"].double())
        densities.append(normal.log_prob(chain[:, 1:].double()).sum((-2, -1)))
    return torch.cat(densities)


def with_densities(policy: Policy, episodes: Episodes, chains: Chains) -> Chains:
    """Return the chains with their log-densities under the policy that acted; raises as `log_densities`."""
    return replace(chains, log_density=log_densities(policy, episodes, chains).float())


class ImportanceEvaluator:
    """Evaluator that weights logged episodes by the likelihood of their action chunks under a policy with exploration
    noise.

    chains: for all decisions of `episodes`; by: "success" or "return", undiscounted; clip: largest weight; least:
    minimum effective number of episodes, below which it refuses. `effective` stores that number for each call. Raises
    DataError when the data does not record the outcome of the episodes, or chains lack their densities.
    """

    def __init__(
        self,
        episodes: Episodes,
        chains: Chains,
        *,
        by: str = "success",
        per_decision: bool = True,
        clip: float = 100.0,
        least: float = 30.0,
        independent: bool = True,
    ):
        if chains.log_density is None:
            raise DataError("The recorded chains lack the log-probabilities of the policy that acted.")
        self.episodes = episodes
        self.chains = chains
        self.per_decision = per_decision
        self.independent = independent
        self.clip, self.least = clip, least
        self.name = f"importance sampling of {len(episodes)} logged episodes"
        self.reward = _by_decision(episodes, chains.step, outcome(episodes, by)).double().cpu().numpy()
        self.effective: list[float] = []

    def values(self, policy: Policy) -> Array:
        """Return values of the logged episodes [E] whose mean estimates the policy's value with exploration noise.

        Raises DataError when the effective number of episodes is too small or the policy maps the chains to other
        actions than the logged ones, and the errors of `log_densities`.
        """
        assert self.chains.log_density is not None
        _require_actions_of(policy, self.episodes, self.chains)
        ratio = (log_densities(policy, self.episodes, self.chains).float() - self.chains.log_density).double().sum(1)
        table = _table(self.episodes, self.chains.step, ratio).cpu().numpy()
        estimate = importance_estimate(table, self.reward, per_decision=self.per_decision, clip=self.clip)
        self.effective.append(estimate.effective)
        if estimate.effective < self.least:
            raise DataError(
                f"The effective sample size of {len(self.episodes)} recorded episodes is {estimate.effective:.1f}, "
                f"below {self.least:g}: this policy differs too much from the recorded one. Record more episodes of "
                "a more similar policy, or evaluate with a world model."
            )
        return estimate.values


def _require_actions_of(policy: Policy, episodes: Episodes, chains: Chains) -> None:
    """Raise DataError when the first logged actions differ from those that `policy` computes from their chains."""
    first = chains.step[:ACTIONS_COMPARED]
    steps = first[:, None] + torch.arange(policy.spec.chunk, device=first.device)
    step = steps.clamp(max=episodes.step_count - 1)
    decided_at = torch.searchsorted(chains.step, steps, right=True) - 1
    same_decision = decided_at == torch.arange(len(first), device=first.device)[:, None]
    valid = (
        same_decision & (episodes.episode_of_step[step] == episodes.episode_of_step[first][:, None]) & (step == steps)
    )
    require_own_actions(policy, chains.chain[: len(first), -1], episodes.actions[step], valid)


def outcome(episodes: Episodes, by: str) -> Tensor:
    """Return the reward of each recorded step [N]: as recorded, or 1 when the episode has just succeeded (-1 when it
    loses success again).

    Raises ConfigError for anything but by="success" or "return", DataError when that was not recorded.
    """
    if by not in ("success", "return"):
        raise ConfigError(f"by={by}: importance sampling evaluates success or return.")
    outcomes = episodes.reward if by == "return" else episodes.step_success
    if outcomes is None:
        raise DataError(f"The recorded episodes contain no {'rewards' if by == 'return' else 'success'}.")
    if by == "return":
        return outcomes
    before = torch.cat([torch.zeros_like(outcomes[:1]), outcomes[:-1]])
    before[episodes.starts] = False
    return outcomes.float() - before.float()


def _by_decision(episodes: Episodes, step: Tensor, reward: Tensor) -> Tensor:
    """Return the sum of rewards [N] during each action chunk, as a table [E, T]; `step`: first steps [D]."""
    place = torch.searchsorted(step, torch.arange(len(reward), device=step.device), right=True) - 1
    sums = torch.zeros(len(step), dtype=torch.float64, device=step.device).index_add(0, place, reward.double())
    return _table(episodes, step, sums)


def _table(episodes: Episodes, step: Tensor, values: Tensor) -> Tensor:
    """Return the values [D] of action chunks by episode and time, [E, T], zeros after the last one."""
    episode = episodes.episode_of_step[step]
    count = torch.bincount(episode, minlength=len(episodes))
    place = torch.arange(len(step), device=step.device) - (count.cumsum(0) - count)[episode]
    table = torch.zeros(len(episodes), int(count.max()), dtype=values.dtype, device=values.device)
    table[episode, place] = values
    return table


def effective_text(counts: Sequence[float]) -> str:
    """Text for logs: the effective number of episodes for each evaluated policy."""
    return ", ".join(f"{count:.0f}" for count in counts)


keep_former_names(__name__, {"ImportanceJudge": "ImportanceEvaluator"})
