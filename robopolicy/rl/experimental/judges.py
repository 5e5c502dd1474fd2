"""Experimental side models that judge: rollouts by a head trained on them, and chunks by what a teacher would do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.rollouts import Rollouts, critic_observation
from robopolicy.core.segments import Segments, quantile
from robopolicy.nn.normalizer import with_constants_kept
from robopolicy.rl.advantages.tree import owners, sampled_steps, subtree_means
from robopolicy.rl.context import Context, Tools, require_input
from robopolicy.rl.experimental.own_teacher import as_undisturbed
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.rewards import last_chunk, paid_at_end
from robopolicy.rl.side_models import (
    ImplicitReward,
    SidePerceptron,
    StatePerceptron,
    device_of,
    minibatches,
    rows_of,
)


def judge_loss(logits: Tensor, success: Tensor, group: Tensor, pairs: float, most: int) -> Tensor:
    """Return the loss of a judge's logits [b], a scalar.

    Episodes of groups that all succeeded or all failed: binary cross-entropy. Others: (1 - pairs) times that, plus
    `pairs` times -log sigmoid(m_good - m_bad) over at most `most` pairs of a success and a failure of the same group.
    """
    entropy = functional.binary_cross_entropy_with_logits(logits, success.to(logits.dtype), reduction="none")
    better = (group[:, None] == group[None]) & success[:, None] & ~success[None]
    mixed = better.any(1) | better.any(0)
    loss = torch.where(mixed, (1 - pairs) * entropy, entropy).mean()
    good, bad = better.nonzero()[:most].unbind(1)
    if not len(good):
        return loss
    return loss + pairs * mixed.float().mean() * functional.softplus(logits[bad] - logits[good]).mean()


@mechanism(
    Slot.MODEL, "rollout_judge", source="SPARK, arXiv:2509.22624; RISE, arXiv:2505.13445", needs=(Need.EPISODES,)
)
class Judge(SidePerceptron):
    """Predict from an episode's last state whether it succeeded, trained on the policy's own rollouts as it changes.

    Each iteration first judges its episodes and then learns from a share of them: binary cross-entropy, and in mixed
    groups also pairs (`judge_loss`). process_accuracy in metrics.jsonl is the share judged rightly before. pay: weight
    of the predicted probability of success, added to the rewards as the term "judge", 0 for none: with share < 1 most
    episodes then need no label but for the figure. pairs, most: SPARK's .7 and 32; RISE learns from an eighth of a
    batch. Both papers generate their verdicts as text by the policy itself, which has no counterpart in a policy that
    outputs actions. Reads the state vectors.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        pay: float = 0.0,
        share: float = 1.0,
        pairs: float = 0.7,
        most: int = 32,
        rate: float = 1e-3,
        epochs: int = 16,
        width: int = 128,
    ):
        super().__init__(StatePerceptron(tools, 0, 1, width).to(device_of(tools)), rate)
        self.pay, self.share = pay, share
        self.pairs, self.most = pairs, most
        self.epochs = epochs

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Judge, pay, then train."""
        self.network.fit(rollouts)
        observation = critic_observation(rollouts, last_chunk(rollouts), following=True)
        success = rollouts.row_success
        with torch.no_grad():
            logits_before = self.network(observation).squeeze(-1)
        accuracy = ((logits_before > 0) == success).float().mean()
        draws = context.generator
        count = max(1, round(self.share * len(success)))
        rows = torch.randperm(len(success), generator=draws, device=draws.device)[:count].to(success.device)
        for _ in range(self.epochs):
            order = rows[torch.randperm(count, generator=draws, device=draws.device).to(rows.device)]
            part = {key: value[order] for key, value in observation.items()}
            logits = self.network(part).squeeze(-1)
            self.step(judge_loss(logits, success[order], rollouts.group[order], self.pairs, self.most))
        if self.pay:
            term = {"judge": paid_at_end(rollouts, self.pay * logits_before.sigmoid())}
            rollouts = replace(rollouts, rewards={**rollouts.rewards, **term})
        return rollouts.with_extras(process_accuracy=accuracy.expand(rollouts.shape))


def likeness_score(likeness: Tensor, prior: float) -> Tensor:
    """Return (prior + sum of likeness) / (2 prior + M), [n] from the likeness in 0..1 of M chunks [M, n]."""
    return (prior + likeness.sum(0)) / (2 * prior + len(likeness))


def surprising_chunks(rollouts: Rollouts, share: float) -> Tensor:
    """Return the chunks whose surprise, the mean of -log pi over their steps, peaks in their episode, [B, T] bool.

    Of the local maxima only those among the `share` most surprising chunks of all.
    """
    alive, count = rollouts.alive, rollouts.mask.sum(-1)
    logp = torch.where(rollouts.mask, rollouts.logp_behaviour, 0.0).sum(-1) / count.clamp(min=1)
    surprise = torch.where(alive & (count > 0), -logp, -torch.inf)
    edge = torch.full_like(surprise[:, :1], -torch.inf)
    before, after = torch.cat([edge, surprise[:, :-1]], 1), torch.cat([surprise[:, 1:], edge], 1)
    threshold = quantile(surprise[surprise.isfinite()], 1 - share)
    return (surprise >= before) & (surprise >= after) & (surprise >= threshold) & surprise.isfinite()


@mechanism(
    Slot.MODEL,
    "teacher_chunks",
    source="OmniOPD, arXiv:2606.01476",
    needs=(Need.EPISODES, Need.TEACHER),
    gives=(Need.PREFERENCE,),
)
class TeacherChunks:
    """Judge chunks by how many chunks that a teacher samples in the same state are like them; needs no probabilities.

    At the chunks of `surprising_chunks` a teacher of any kind samples `samples` chunks; their likeness is exp(-d^2 /
    2), d^2 the mean squared distance over executed elements in standard deviations of the batch's actions.
    extras["preference"] [B, T] = (prior + sum of likeness) / (2 prior + M) there, and their mean elsewhere, so that
    advantage=discriminator gives other chunks 0. The paper reports that it needs a KL to the base beside it:
    auxiliaries=[kl_base]. Its formulas were not found; these are ours.
    """

    def __init__(self, tools: Tools, *, share: float = 0.25, samples: int = 4, prior: float = 0.5):
        self.tools = tools
        self.share, self.samples = share, samples
        self.prior = prior

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Sample the teacher's chunks, and add the preferences."""
        peak_mask = surprising_chunks(rollouts, self.share)
        teacher, observation = require_input(self.tools.teacher, "teacher"), self.tools.observe(rollouts, peak_mask)
        actions, valid = rollouts.actions[peak_mask], rollouts.valid[peak_mask][..., None]
        spread = with_constants_kept(rollouts.actions[rollouts.valid].std(0, unbiased=False))
        likeness: list[Tensor] = []
        for _ in range(self.samples):
            samples = teacher.act(observation, context.generator).actions[:, : actions.shape[1]]
            length = samples.shape[1]  # a teacher's chunks may be shorter
            difference = torch.where(valid[:, :length], (samples - actions[:, :length]) / spread, 0.0)
            count = valid[:, :length].sum((1, 2)) * actions.shape[-1]
            likeness.append((-0.5 * difference.square().sum((1, 2)) / count).exp())
        score = likeness_score(torch.stack(likeness), self.prior)
        preference = torch.full(rollouts.shape, float(score.mean()), device=score.device)
        return rollouts.with_extras(preference=preference.masked_scatter(peak_mask, score.float()))

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; nothing is learned."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""


def sibling_pairs(rollouts: Rollouts, best: int) -> tuple[Tensor, Tensor]:
    """Return the rows and chunks (row, t) of good and of bad siblings at forks, [n, 2] each.

    Siblings are chunks with the same past. Of those with a success below them the `best` with the highest mean return,
    against as many of those with a failure below them with the lowest: all pairs of which the first is higher.
    """
    owner, (values, _) = owners(rollouts), subtree_means(rollouts, rollouts.row_return.double())
    success_below, failure_below = (
        subtree_means(rollouts, each.double())[0] > 0 for each in (rollouts.row_success, ~rollouts.row_success)
    )
    row = torch.arange(len(owner), device=owner.device)
    own_mask = (owner == row[:, None]) & rollouts.alive
    past = torch.cat([-1 - Segments.of(rollouts.group).index[:, None], owner[:, :-1]], 1)
    good: list[Tensor] = []
    bad: list[Tensor] = []
    for column in range(owner.shape[1]):
        fork_mask = own_mask[:, column]
        forks, value = Segments.of(past[:, column]), values[:, column]
        high, low = (fork_mask & each[:, column] for each in (success_below, failure_below))
        high, low = high & (forks.rank(-value, high) < best), low & (forks.rank(value, low) < best)
        pairs = (past[:, None, column] == past[None, :, column]) & high[:, None] & low[None]
        first, second = (pairs & (value[:, None] > value[None] + 1e-6)).nonzero().unbind(1)
        for places, rows in ((good, first), (bad, second)):
            places.append(torch.stack([rows, torch.full_like(rows, column)], 1))
    return torch.cat(good), torch.cat(bad)


@mechanism(
    Slot.MODEL, "step_preference", source="rStar-Math, arXiv:2501.04519", needs=(Need.GROUPS,), gives=(Need.PREFERENCE,)
)
class StepPreference(SidePerceptron):
    """Prefer chunks that lead to higher returns than their siblings: -log sigmoid(m(s, good) - m(s, bad)) over pairs.

    Pairs are those of `sibling_pairs`, at the forks of branching episodes (finetune.branch_at; first chunks of a group
    too). Adds extras["preference"] [B, T] = m(s, a), for advantage=discriminator. rounds: the model is fitted in the
    first iteration of each of this many parts of the run (the paper: 4), 0 for every iteration; it guides the search
    for siblings (allocator=tree_search, options.tree_search.guided) by tanh m. Reads the state vectors.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        best: int = 2,
        rate: float = 1e-3,
        epochs: int = 4,
        minibatch: int = 1024,
        width: int = 256,
        rounds: int = 0,
    ):
        spec = tools.policy.spec
        super().__init__(StatePerceptron(tools, spec.chunk * spec.action.size, 1, width).to(device_of(tools)), rate)
        self.best, self.epochs = best, epochs
        self.rounds = rounds
        self.minibatch = minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Train on the pairs, then add the preferences."""
        self.network.fit(rollouts)
        alive = rollouts.alive
        features, actions = critic_observation(rollouts, alive), rollouts.actions[alive].flatten(1)
        number = torch.zeros(alive.shape, dtype=torch.int64, device=alive.device)
        number[alive] = torch.arange(len(actions), device=alive.device)
        good, bad = (number[places.unbind(1)] for places in sibling_pairs(rollouts, self.best))
        is_due = not self.rounds or context.iteration % max(1, -(-context.iterations // self.rounds)) == 0
        for index in minibatches(len(good), self.minibatch, self.epochs if is_due else 0, context):
            high, low = (self.network(rows_of(features, rows[index]), actions[rows[index]]) for rows in (good, bad))
            self.step(functional.softplus(low - high).mean())
        with torch.no_grad():
            preferences = self.network(features, actions).squeeze(-1)
        context.figures["sibling_pairs"] = float(len(good))
        return rollouts.with_extras(
            preference=torch.zeros(alive.shape, device=alive.device).index_put((alive,), preferences)
        )

    @torch.no_grad()
    def chunk_scores(self, rollouts: Rollouts) -> Tensor:
        """Return tanh m(s, a) [B, T], 0 on padding."""
        alive = rollouts.alive
        scores = self.network(critic_observation(rollouts, alive), rollouts.actions[alive].flatten(1)).squeeze(-1)
        return torch.zeros(alive.shape, device=alive.device).index_put((alive,), scores.tanh())


def middle_of(reward: Tensor, success: Tensor) -> Tensor:
    """Return the middle of the mean rewards [b] of successes and of failures, a scalar; the mean if all are alike."""
    sides = [reward[success], reward[~success]]
    return torch.stack([side.mean() for side in sides if len(side)]).mean()


@mechanism(
    Slot.MODEL, "learning_teacher", source="VPD, arXiv:2605.15113", needs=(Need.EPISODES,), gives=(Need.IMPLICIT,)
)
class LearningTeacher(ImplicitReward):
    """A teacher that learns from outcomes beside the policy: a copy q whose log-ratio to the policy tells successes.

        r = beta sum (log q - log pi),   L = -log sigmoid(r - delta) of a success, -log sigmoid(delta - r) of a failure

    pi is the current policy without gradient, the moving prior; delta the moving mean of the middle between both kinds.
    q is trained in every `every`-th iteration. Adds extras["process"] [B, T, K] = beta (log q - log pi), which
    advantage=process_gap follows: the reverse KL to q on own episodes. privileged: q sees more than the policy, the
    fields without faults (world.options.undisturbed=true). In the paper it reads critiques as text, which a policy of
    actions cannot, and shares the policy's weights, where this copy has its own.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        beta: float = 0.1,
        every: int = 5,
        momentum: float = 0.9,
        rate: float = 1e-4,
        epochs: int = 1,
        minibatch: int = 64,
        privileged: bool = False,
    ):
        super().__init__(tools, beta, rate, epochs, minibatch)
        self.every, self.momentum = every, momentum
        self.privileged = privileged
        self.delta = 0.0

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Move delta, train in every `every`-th iteration, then add the rewards."""
        view = as_undisturbed(rollouts) if self.privileged else rollouts
        sampled = sampled_steps(rollouts)
        with torch.no_grad():
            prior = self._logp(self.tools.policy, rollouts, sampled)
            reward = self.beta * (self._logp(self.network, view, sampled) - prior).sum((1, 2))
        middle = float(middle_of(reward, rollouts.row_success))
        self.delta = self.momentum * self.delta + (1 - self.momentum) * middle
        if context.iteration % self.every == 0:
            for index in minibatches(len(rollouts.group), self.minibatch, self.epochs, context):
                part = view.take(index)
                gap = self._logp(self.network, part, sampled[index]) - prior[index]
                self.step(self.loss(self.beta * gap.sum((1, 2)), part))
        with torch.no_grad():
            process = self.beta * (self._logp(self.network, view, sampled) - prior)
        right = ((process.sum((1, 2)) > self.delta) == rollouts.row_success).float().mean()
        return rollouts.with_extras(process=process, process_accuracy=right.expand(rollouts.shape))

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the mean of -log sigmoid of the distance to delta on the right side, of logits r [b], a scalar."""
        side = torch.where(rollouts.row_success, 1.0, -1.0).to(logits.dtype)
        return functional.softplus(-side * (logits - self.delta)).mean()

    def tree(self) -> dict[str, Any]:
        """Return weights, moments and delta."""
        return {**super().tree(), "delta": self.delta}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        super().restore(tree)
        self.delta = tree["delta"]
