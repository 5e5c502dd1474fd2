"""Minibatch updates of one iteration: critic regression and the actor's single loss form.

The actor's update does not depend on the type of step: `evaluate` gives log-probabilities, the algorithm computes
coefficients from advantages and ratios, and the loss is `-sum(w * sg(c) * logp) + auxiliaries`.

`PolicyAverage` is a moving average of past policies, used as clipping centre when the acting policy is old. Source:
PPO-EWMA, Hilton et al. 2022, arXiv:2110.00641; used for asynchronous collection without old log-probabilities in
Missing Old Logits, arXiv:2605.12070.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core import replicas
from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.exchange import Part, add_gradients, of_leader, part_of
from robopolicy.core.extras import Extras
from robopolicy.core.policy import Policy, ScoredPolicy, Scores, TensorObservation, Trainable
from robopolicy.core.rollouts import Rollouts, critic_observation
from robopolicy.core.row_draws import RowDraws
from robopolicy.core.segments import Segments
from robopolicy.nn.fsdp import divided_state, whole_tree
from robopolicy.nn.micro_batches import scores_of, values_of
from robopolicy.nn.optimisers import (
    SavedWeights,
    adamw,
    clip_gradients,
    make_optimiser,
    optimiser_tree,
    require_finite,
    restore_optimiser,
    restore_weights,
    save_weights,
    set_learning_rate,
)
from robopolicy.nn.precision import backward_precision
from robopolicy.nn.sharing import copy_trainable, load_trainable_state, trainable_state
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.coefficients import clip_schedule
from robopolicy.rl.context import AuxiliaryInputs, Coefficients, Context, HoldsWeights, Scored, SideModel, score_extra
from robopolicy.rl.critic import Critic
from robopolicy.rl.objective import (
    approximate_kl,
    clip_fraction,
    effective_sample_size,
    explained_variance,
    log_ratios,
    policy_loss,
    value_loss,
)
from robopolicy.rl.registry import Need, Slot
from robopolicy.training.configuration import LOG_RATIO_CLAMP, FinetuneConfig
from robopolicy.training.experience import decisions_at, reads_images, with_proximal

WHOLE = frozenset({Need.WHOLE_EPISODES, Need.WHOLE_GROUPS})
TotalWeight = Callable[[Tensor, Rollouts], Tensor]
"""Map from a mask [b, t, K] and its rollouts to the sum of the weights of its steps before they are divided by it."""


def by_episode(algorithm: Algorithm, config: FinetuneConfig) -> bool:
    """Whether minibatches consist of complete episodes instead of single action chunks."""
    return bool(algorithm.needs & WHOLE) or config.minibatch_episodes > 0


def minibatch_rows(algorithm: Algorithm, config: FinetuneConfig, rows: int) -> int:
    """Return the number of rows per minibatch, given `rows` episodes or chunks in total."""
    if by_episode(algorithm, config):
        return config.minibatch_episodes or max(1, rows // 4)
    return config.minibatch


def minibatch_decisions(algorithm: Algorithm, config: FinetuneConfig, rollouts: Rollouts) -> int:
    """Return the number of chunks per minibatch for these rollouts."""
    rows, steps = rollouts.shape
    return minibatch_rows(algorithm, config, rows) * (steps if by_episode(algorithm, config) else 1)


def random_steps(algorithm: Algorithm, config: FinetuneConfig) -> int:
    """Return the number of random steps per chunk whose log-probability is computed, 0 for all.

    Where all steps of a chunk count together, all are computed, with a note when the settings ask for fewer: recipes
    set scored_steps for PPO, and any algorithm can be chosen with them.
    """
    if not config.scored_steps:
        return 0
    if algorithm.ratio_level.needs_all_steps:
        reason = f"ratio_level={algorithm.ratio_level.value} needs all denoising steps of a chunk"
    elif Need.WHOLE_GROUPS in algorithm.needs:
        reason = "this algorithm compares episodes by the sum over all their denoising steps"
    else:
        return config.scored_steps
    warnings.warn(f"scored_steps={config.scored_steps} is not used: {reason}.", RobopolicyNote, stacklevel=3)
    return 0


CLIP_SETTINGS = "clip", "clip_base", "clip_high", "clip_rate"
"""Settings of the clip range."""


def watch_clip(coefficient: Callable[[Scored], Coefficients], scored: Scored) -> tuple[Coefficients, bool]:
    """Return the coefficients, and whether they read the clip widths of `scored`, whatever their options."""
    was_read = False

    class Watched(Scored):
        def __getattribute__(self, name: str) -> Any:
            nonlocal was_read
            was_read = was_read or name in ("clip_low", "clip_high")
            return super().__getattribute__(name)

    return coefficient(Watched(**vars(scored))), was_read


class Learner:
    """Policy, critic (or None) and their optimisers."""

    def __init__(
        self,
        policy: Trainable,
        critic: Critic | None,
        base: Trainable | None,
        algorithm: Algorithm,
        config: FinetuneConfig,
        instructions: tuple[str, ...],
        models: Mapping[str, SideModel] | None = None,
        teacher: Policy | None = None,
        experts: Iterator[dict[str, Any]] | None = None,
    ):
        self.scored_steps = random_steps(algorithm, config)
        self.policy = policy
        self.critic = critic
        self.base = base
        self.teacher = teacher
        self.models, self.experts = models or {}, experts
        self.algorithm = algorithm
        self.forgets_help = bool(getattr(algorithm.allocator(), "forget", False))
        self.config = config
        self.instructions = instructions
        self.parameters = list(policy.trainable_parameters())
        rate, decay = config.learning_rate, config.weight_decay
        self.optimiser = make_optimiser(config.optimiser, self.parameters, rate, decay)
        self.critic_parameters = [] if critic is None else [item for item in critic.parameters() if item.requires_grad]
        self.critic_optimiser = None
        if critic is not None:
            self.critic_optimiser = adamw(self.critic_parameters, config.critic_learning_rate, decay)
        self.sampling_steps = policy.spec.scored_steps
        device = self.parameters[0].device
        base_width = config.clip if config.clip_base is None else config.clip_base
        # DPPO: the clip width grows along the denoising steps, from `clip_base` at the noisiest.
        widths = clip_schedule(self.sampling_steps, base_width, config.clip, config.clip_rate).to(device)
        self.clip_low = widths
        self.clip_high = widths if config.clip_high is None else widths * (config.clip_high / config.clip)
        usual = FinetuneConfig()
        settings = {name: getattr(config, name) for name in CLIP_SETTINGS}
        self.own_clip = {name: value for name, value in settings.items() if value != getattr(usual, name)}
        self.steps = 0
        self.knobs: dict[str, float] = {}
        self.stats: dict[str, float] = {}
        self.reborn = False
        self.before_step: SavedWeights = []
        self.live: Tensor | None = None
        self.accumulated: tuple[float, Tensor] | None = None
        self.most, self.chooses = self.sampling_steps, True
        self.by_episode = by_episode(algorithm, config)
        self.average = PolicyAverage(policy, config.proximal_decay) if config.proximal_policy == "average" else None

    def update(
        self,
        rollouts: Rollouts,
        context: Context,
        draws: torch.Generator,
        where: str,
        *,
        train_actor: bool = True,
        done: int = 0,
    ) -> dict[str, float]:
        """Run the epochs on rollouts with `advantage` (and `value_target`) among their extras; return the metrics.

        draws: generator of minibatches and steps; where: name of the iteration in errors; done: number of epochs that
        `step_accumulated` has taken of them.
        """
        self.before_step = self.before_step if done else []
        rows: list[dict[str, Tensor]] = []
        was_stopped = False
        source = self._source(rollouts)
        self.live = self._live(source)
        self.most = self._most_noisy(source) if self.chooses else len(self._steps())
        # After the KL stop the critic finishes this epoch, since its targets do not depend on the policy.
        for _ in range(self.config.epochs - done):
            for index in self._minibatches(source, draws):
                batch = source.take(index)
                stats: dict[str, Tensor] = {}
                if self.critic is not None:
                    stats.update(self._critic_step(batch, where))
                if train_actor and not was_stopped:
                    actor_stats, was_stopped = self._actor_step(batch, context, draws, where)
                    stats.update(actor_stats)
                rows.append(stats)
            if was_stopped:
                break
        names = dict.fromkeys(name for row in rows for name in row)
        means = {name: float(torch.stack([row[name] for row in rows if name in row]).mean()) for name in names}
        if self.critic is not None:
            extras, alive = rollouts.extras, rollouts.alive
            variance = explained_variance(extras["value"][alive], extras["value_target"][alive])
            if not bool(variance.isnan()):
                means["explained_variance"] = float(variance)
        steps = done + sum("policy_loss" in row for row in rows)
        before = self.stats if done else {}  # of the accumulated step, where no other follows
        self.stats = {**before, **means, "actor_steps": steps, "kl_stop": float(was_stopped)}
        return self.stats

    def _source(self, rollouts: Rollouts) -> Rollouts:
        """Return the data that minibatches are sampled from: rows are whole episodes, or single chunks.

        Fields that no step reads are dropped, because gathering images for every minibatch takes longer than the update
        itself. Next observations are already used in the critic's targets. Cached conditions of a frozen encoder
        replace images, unless an auxiliary loss samples new chunks.
        """
        without_images = self.critic is None or not self.critic.reads_images
        # Auxiliary losses may ask a policy for fresh decisions, for which a cached condition is not enough.
        images = not self._asked() and without_images and not reads_images(self.policy, rollouts)
        rollouts = rollouts.without(following=True, images=images)
        if self.by_episode:
            return rollouts
        flat = rollouts.flat()
        played_mask = flat.played.squeeze(1)
        return flat if bool(played_mask.all()) else flat.take(played_mask.nonzero().squeeze(1))

    def _scale(self, loss: str) -> float:
        """Return the factor of an auxiliary loss, or of the policy-gradient loss, "rl"."""
        return self.knobs.get(f"{loss}_scale", 1.0)

    def _asked(self) -> list[str]:
        """Return the names of the auxiliary losses whose factor is not zero."""
        return [name for name in self.algorithm.auxiliaries if self._scale(name)]

    def _minibatches(self, source: Rollouts, draws: torch.Generator) -> list[Tensor]:
        """Return the rows of each minibatch of an epoch: random rows, or the episodes of whole groups."""
        rows = len(source.group)
        size = minibatch_rows(self.algorithm, self.config, rows)
        if Need.WHOLE_GROUPS not in self.algorithm.needs:
            return list(torch.randperm(rows, generator=draws, device=draws.device).split(size))
        groups = Segments.of(source.group)
        order = torch.randperm(groups.count, generator=draws, device=draws.device)
        # A group is compared as a whole, so minibatches are of whole groups of about the wanted number of rows.
        group_batches = order.split(max(1, round(size * groups.count / rows)))
        return [torch.isin(groups.index, part).nonzero().squeeze(1) for part in group_batches]

    def _critic_step(self, batch: Rollouts, where: str) -> dict[str, Tensor]:
        assert self.critic is not None
        assert self.critic_optimiser is not None
        alive = batch.alive
        part = part_of(int(alive.sum()))
        own = part.among(alive)
        known = batch.extras.target_known
        loss = value_loss(
            values_of(self.critic, critic_observation(batch, own, images=self.critic.reads_images)),
            batch.extras["value_target"][own],
            None if known is None else known[own],
        )
        if part.share < 1:
            loss = loss * _share_of(part, own, alive, known)
        self.critic_optimiser.zero_grad(set_to_none=True)
        with backward_precision(self.config.precision):
            loss.backward()
        (whole_loss,) = add_gradients(self.critic_parameters, [loss])
        require_finite("the value loss", whole_loss, where)
        clip_gradients(self.critic_parameters, self.config.gradient_clip, where)
        self.critic_optimiser.step()
        return {"value_loss": whole_loss}

    def _actor_step(
        self, batch: Rollouts, context: Context, draws: torch.Generator, where: str
    ) -> tuple[dict[str, Tensor], bool]:
        """Take one policy-gradient step, or none and return True when the KL target is exceeded."""
        config, alive = self.config, batch.alive
        step, subset = self._choose_steps(batch, draws)
        part = part_of(int(alive.sum()))
        own = part.among(alive)
        observation, latents = decisions_at(batch, own, self.instructions)
        if subset:
            latents["chosen"] = step[own]
        scores = scores_of(self.policy, observation, latents)
        if subset and not self.scored_steps and self.live is None and scores.logp.shape[-1] == self.sampling_steps:
            # A policy that ignores "chosen" scores all steps: from now on none is chosen.
            self.chooses, self.most = False, self.sampling_steps  # it scores all steps, whatever is asked for
            return self._actor_step(batch, context, draws, where)
        if scores.logp.shape != (part.count, step.shape[-1]):
            raise ConfigError(
                f"The policy returned log-probabilities of {scores.logp.shape[1]} steps instead of {step.shape[-1]}: "
                "it does not support subsets of steps, so set scored_steps=0."
            )
        nothing = torch.zeros(step.shape, device=alive.device)
        logp = nothing.masked_scatter(own[..., None], scores.logp)
        whole_logp = logp.detach()
        if not part.is_all:
            whole_logp = nothing.masked_scatter(alive[..., None], part.gathered(scores.logp))
        if self.average is not None:
            # From the moving average, step by step, as it is now: PPO-EWMA's proximal policy.
            average_logp = part.gathered(self.average.log_prob(observation, latents))
            proximal = whole_logp.masked_scatter(alive[..., None], average_logp)
            proximal = batch.proximal.float().scatter(-1, step, proximal)
            batch = with_proximal(batch, proximal, forgets_help=self.forgets_help)
        # Detached: the gradient runs through logp in `policy_loss` alone, never through ratios.
        scored_batch = self._score(batch, whole_logp, step, scores, part, context.share)
        scored_batch = replace(scored_batch, generator=draws)
        require_finite("the log-probability", torch.where(scored_batch.mask, scored_batch.logp, 0.0), where)
        stats = self._diagnose(scored_batch)
        # Measured before the step, so it is of all steps so far; beyond twice the target the last one is undone too.
        if config.target_kl is not None:
            stats["kl"] = of_leader(stats["kl"])
            if float(stats["kl"]) > config.target_kl:
                if float(stats["kl"]) > 2 * config.target_kl:
                    self._take_back()
                return stats, True
        coefficient, extra = self._coefficient(scored_batch)
        coefficient = coefficient * self._scale("rl")
        weight = self.algorithm.weight(scored_batch.mask, batch)
        inputs = self._inputs((observation, latents, scores), own, part, scored_batch, context)
        auxiliaries = self._auxiliaries(inputs, part, scored_batch)
        loss = policy_loss(logp, coefficient, weight, auxiliaries)
        if part.is_all and part.share < 1:
            loss = loss * part.share
            auxiliaries = {name: value * part.share for name, value in auxiliaries.items()}
        self.optimiser.zero_grad(set_to_none=True)
        with backward_precision(config.precision):
            loss.backward()
        whole_loss, *terms = add_gradients(self.parameters, [loss, *auxiliaries.values()])
        norm = self._descend(whole_loss, where)
        named_terms = dict(zip(auxiliaries, terms, strict=True))
        return {**stats, **extra, **named_terms, "policy_loss": whole_loss, "gradient_norm": norm}, False

    def _descend(self, loss: Tensor, where: str) -> Tensor:
        """Take the optimiser's step along the gradients of `loss`, and return their norm before clipping."""
        config = self.config
        require_finite("the policy loss", loss, where)
        norm = clip_gradients(self.parameters, config.gradient_clip, where)
        if config.target_kl is not None:
            self.before_step = save_weights(self.optimiser)
        self.steps += 1
        # Warm-up counts the actor's own steps: while only the critic learns it stands still.
        rate = config.learning_rate * min(1.0, self.steps / config.actor_warmup) * self.knobs.get("lr_scale", 1.0)
        set_learning_rate(self.optimiser, rate)
        self.optimiser.step()
        for model in self.models.values():
            if isinstance(model, HoldsWeights):
                model.hold_weights()
        if self.average is not None:
            self.average.update(self.policy)
        return norm.detach()

    def accumulate(self, rollouts: Rollouts, context: Context, total_weight: TotalWeight, where: str) -> None:
        """Add the gradients of some groups with `advantage` among their extras, before the step that is taken with all
        groups of an iteration.

        total_weight: by which a mean over a minibatch is multiplied to be a sum; their sum divides all gradients later.
        """
        if self.accumulated is None:
            self.optimiser.zero_grad(set_to_none=True)
            self.accumulated = (0.0, torch.zeros((), device=self.parameters[0].device))
        source = self._source(rollouts)
        self.live, self.most = None, self.sampling_steps
        rows = len(source.group)
        for index in torch.arange(rows, device=source.group.device).split(
            minibatch_rows(self.algorithm, self.config, rows)
        ):
            batch = source.take(index)
            alive = batch.alive
            step = torch.arange(self.sampling_steps, device=alive.device).expand(*batch.shape, -1)
            scores = scores_of(self.policy, *decisions_at(batch, alive, self.instructions))
            logp = torch.zeros(step.shape, device=alive.device).masked_scatter(alive[..., None], scores.logp)
            scored_batch = self._score(batch, logp.detach(), step, scores, part_of(len(scores.logp)), context.share)
            require_finite("the log-probability", torch.where(scored_batch.mask, scored_batch.logp, 0.0), where)
            coefficient, _ = self._coefficient(scored_batch)
            weight, total = self.algorithm.weight(scored_batch.mask, batch), total_weight(scored_batch.mask, batch)
            loss = policy_loss(logp, coefficient * self._scale("rl"), weight * total)
            with backward_precision(self.config.precision):
                loss.backward()
            self.accumulated = self.accumulated[0] + float(total), self.accumulated[1] + loss.detach()

    def step_accumulated(self, where: str) -> dict[str, float]:
        """Take one step of the policy with the mean of the accumulated gradients; return its metrics."""
        assert self.accumulated is not None
        total, loss = self.accumulated
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= total
        self.accumulated, self.before_step = None, []
        norm = self._descend(loss / total, where)
        figures = {"policy_loss": float(loss / total), "gradient_norm": float(norm)}
        self.stats = {**figures, "actor_steps": 1.0, "kl_stop": 0.0}
        return self.stats

    def _inputs(
        self,
        chunks: tuple[TensorObservation, Mapping[str, Tensor], Scores],
        own: Tensor,
        part: Part,
        scored: Scored,
        context: Context,
    ) -> AuxiliaryInputs:
        """Return the inputs of auxiliary losses for the chunks `own` [b, t] of a minibatch: observation, latents and
        scores of these are `chunks`.
        """
        observation, latents, scores = chunks
        proximal = scored.rollouts.proximal.gather(-1, scored.chosen)[own] if self.algorithm.auxiliaries else None
        extras = scored.rollouts.extras.map(lambda column: column[own]) if self.algorithm.auxiliaries else Extras()
        return AuxiliaryInputs(
            observation=observation,
            latents=latents,
            mask=scored.mask[own],
            scores=scores,
            policy=self.policy,
            base=self.base,
            teacher=self.teacher,
            experts=self.experts,
            models=self.models,
            proximal=proximal,
            extras=extras,
            context=context,
            steps_per_row=None if part.is_all else float(scored.mask.sum()) / part.rows,
        )

    def _auxiliaries(self, inputs: AuxiliaryInputs, part: Part, scored: Scored) -> dict[str, Tensor]:
        """Return the scaled auxiliary losses, of which each process of a data-parallel run computes its share."""
        losses: dict[str, Tensor] = {}
        for name in self._asked():
            auxiliary, scale = self.algorithm.auxiliaries[name], self._scale(name)
            if part.is_all:
                losses[name] = scale * auxiliary(inputs)
            elif name in self.algorithm.undivided:
                losses[name] = scale / replicas.count() * auxiliary(self._of_all(inputs, scored))
            else:
                with RowDraws(part.rows, part.own) as draws:
                    value = auxiliary(inputs)
                if draws.shared:
                    raise ConfigError(
                        f"auxiliaries=[{name}] draws random numbers that belong to no action chunk of a minibatch "
                        f"({draws.shared[0]}), so it cannot be divided among {replicas.count()} processes: set "
                        "micro_batch=0, declare Need.WHOLE_MINIBATCHES for it, or train in one process."
                    )
                losses[name] = scale * part.share * value
        return losses

    def _of_all(self, inputs: AuxiliaryInputs, scored: Scored) -> AuxiliaryInputs:
        """Return the inputs of an auxiliary loss for all chunks of the minibatch; their scores have no gradient."""
        batch, alive = scored.rollouts, scored.rollouts.alive
        observation, latents = decisions_at(batch, alive, self.instructions)
        return replace(
            inputs,
            observation=observation,
            latents=latents,
            mask=scored.mask[alive],
            scores=Scores(scored.logp[alive], torch.zeros_like(scored.logp[alive])),
            proximal=batch.proximal.gather(-1, scored.chosen)[alive],
            extras=batch.extras.map(lambda column: column[alive]),
            steps_per_row=None,
        )

    def _score(self, batch: Rollouts, logp: Tensor, step: Tensor, scores: Scores, part: Part, share: float) -> Scored:
        """Combine a minibatch and its log-probabilities into the input of the coefficients."""
        behaviour, proximal, mask, advantage = (
            item.gather(-1, step)
            for item in (batch.logp_behaviour, batch.proximal, batch.mask, batch.extras["advantage"])
        )
        mask = mask & batch.alive[..., None]
        level, limit = self.algorithm.ratio_level, LOG_RATIO_CLAMP
        # The ratio is to the proximal policy; what lies between that and the behaviour policy is `staleness` below.
        ratios = log_ratios(logp, proximal, mask, limit, level, self.policy.spec.steps_per_action)
        alive = batch.alive

        def extra(name: str) -> Tensor:
            value = (scores.entropy if name == "entropy" else score_extra(scores, name)).detach()
            trailing = () if value.shape == scores.logp.shape else value.shape[-2:]
            value = part.gathered(value.expand(*scores.logp.shape, *trailing))
            return value.new_zeros((*step.shape, *trailing)).index_put((alive,), value)

        return Scored(
            logp=logp,
            log_ratio=ratios.log_ratio,
            clamped=ratios.clamped,
            staleness=torch.where(mask, proximal - behaviour, 0.0),
            advantage=advantage,
            mask=mask,
            clip_low=self.clip_low[step] * self.knobs.get("clip_low_scale", 1.0),
            clip_high=self.clip_high[step] * self.knobs.get("clip_high_scale", 1.0),
            chosen=step,
            rollouts=batch,
            knobs=self.knobs,
            share=share,
            extra=extra,
            limit=limit,
        )

    def _coefficient(self, scored: Scored) -> Coefficients:
        """Return the coefficients; with the first ones, note settings of the clip range that they do not read."""
        if not self.own_clip:
            return self.algorithm.coefficient(scored)
        coefficients, is_read = watch_clip(self.algorithm.coefficient, scored)
        if not is_read:
            name = self.algorithm.resolved.slots[Slot.COEFFICIENT][0].entry.name
            settings = ", ".join(f"{setting}={value}" for setting, value in self.own_clip.items())
            warnings.warn(
                f"{settings}: no effect on the policy, since coefficient={name} clips by its own options or not at all "
                f"(robopolicy algorithms {name}).",
                RobopolicyNote,
                stacklevel=2,
            )
        self.own_clip = {}
        return coefficients

    def _diagnose(self, scored: Scored) -> dict[str, Tensor]:
        # A random choice stands for all noisy steps; those without noise do not differ.
        scale = self.sampling_steps / len(self._steps()) * self.most / scored.chosen.shape[-1]
        flat, mask = scored.log_ratio.flatten(0, 1), scored.mask.flatten(0, 1)
        each = scored.step_log_ratio.flatten(0, 1) if self.algorithm.ratio_level.shares_sums else flat
        low, high = scored.clip_low.flatten(0, 1), scored.clip_high.flatten(0, 1)
        return {
            "kl": scale * approximate_kl(each, mask),
            "clip_fraction": clip_fraction(flat, mask, low, high),
            "effective_sample_size": effective_sample_size(each, mask),
            "clamped": scored.clamped.float().sum(),
        }

    def _live(self, source: Rollouts) -> Tensor | None:
        """Return the steps that are not pruned in every chunk, [k] of K; None when there are no fully pruned steps."""
        # A step that no decision of this iteration learns from is not even scored.
        pruned = source.extras.pruned
        dead = None if pruned is None or not len(pruned) else pruned.flatten(0, 1).all(0)
        return None if dead is None or not bool(dead.any()) else (~dead).nonzero().squeeze(1)

    def _steps(self) -> Tensor:
        """Return the steps that are not pruned in every chunk, [k] of K."""
        return torch.arange(self.sampling_steps) if self.live is None else self.live

    def _most_noisy(self, source: Rollouts) -> int:
        """Return the maximum number of noisy steps per chunk; the others have no gradient."""
        # Steps without noise have no density and no gradient: scoring them would be wasted.
        steps = self._steps().to(source.mask.device)
        return max(1, int(source.mask[..., steps].sum(-1).max())) if len(source.mask) else len(steps)

    def _choose_steps(self, batch: Rollouts, draws: torch.Generator) -> tuple[Tensor, bool]:
        """Return the indices of the steps to evaluate, [b, t, k] in the chain's order, and whether they are a subset;
        noisy steps are preferred.
        """
        steps = self._steps().to(draws.device)
        shape, count = (*batch.shape, len(steps)), min(self.scored_steps or self.most, self.most)
        if count >= len(steps):
            return steps.expand(shape), len(steps) < self.sampling_steps
        order = batch.mask[..., steps].to(draws.device, torch.float32)
        if self.scored_steps:
            priorities = torch.rand(shape, generator=draws, device=draws.device)
            # A random order among the noisy steps, with the others behind all of them.
            order = torch.where(order > 0, priorities, -1.0)
        # topk leaves ties in any order, and coefficients such as min_pro read what came before a step.
        return steps[order.topk(count, dim=-1).indices.sort(-1).values], True

    @torch.no_grad()
    def _take_back(self) -> None:
        """Undo this iteration's last actor step, if there is one."""
        if self.before_step:
            restore_weights(self.optimiser, self.before_step)
            if self.average is not None:
                self.average.take_back()

    def rebase(self) -> None:
        """Reset the base (reference) policy to the current policy; the KL/BC terms are relative to it from now on."""
        if self.base is not None:
            load_trainable_state(self.base, whole_tree(trainable_state(self.policy)))
            self.reborn = True

    def weights(self) -> list[Tensor]:
        """Return the trained weights of the policy and the critic."""
        return [*self.parameters, *self.critic_parameters]

    def tree(self) -> dict[str, Any]:
        """Return the mutable state, for a checkpoint."""
        return {
            "steps": self.steps,
            "knobs": dict(self.knobs),
            "stats": dict(self.stats),
            "policy": self.policy.state_dict(),
            "critic": {} if self.critic is None else self.critic.state_dict(),
            "actor_optimiser": optimiser_tree(self.optimiser),
            "critic_optimiser": {} if self.critic_optimiser is None else optimiser_tree(self.critic_optimiser),
            **({} if self.average is None else {"average": self.average.tree()}),
            **({"base": self.base.state_dict()} if self.reborn and self.base is not None else {}),
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.steps = tree["steps"]
        self.knobs = dict(tree["knobs"])
        self.stats = dict(tree["stats"])
        self.policy.load_state_dict(divided_state(self.policy, tree["policy"]))
        restore_optimiser(self.optimiser, tree["actor_optimiser"])
        if self.critic is not None and self.critic_optimiser is not None:
            self.critic.load_state_dict(tree["critic"])
            restore_optimiser(self.critic_optimiser, tree["critic_optimiser"])
        if self.average is not None:
            self.average.restore(tree["average"])
        if self.base is not None and "base" in tree:
            self.base.load_state_dict(tree["base"])
            self.reborn = True


def _share_of(part: Part, own: Tensor, alive: Tensor, known: Tensor | None) -> Tensor | float:
    """Return the weight of a mean over the own chunks in the mean over all chunks with a known target."""
    if known is None or part.is_all:
        return part.share
    return known[own].sum().clamp(min=1) / known[alive].sum().clamp(min=1)


class PolicyAverage:
    """Average of the weights after every update; the newest has weight 1, each earlier one `decay` times its
    successor's.

    mean_n = sum_i decay^(n - i) w_i / sum_i decay^(n - i), i = 0 (the initial policy) .. n

    decay: in [0, 1), 0 is the policy itself; its centre of mass lies decay / (1 - decay) updates back.
    """

    def __init__(self, policy: Trainable, decay: float):
        self.decay, self.total = decay, 1.0
        mean = copy_trainable(policy)
        self._learning = [weight for weight in mean.parameters() if weight.requires_grad]
        self._mean: Trainable = mean.requires_grad_(False).eval()
        self._before: tuple[float, list[Tensor]] | None = None

    @property
    def policy(self) -> ScoredPolicy:
        """The averaged policy, frozen."""
        return self._mean

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities [N, K] of recorded chunks under the average, without gradient."""
        with torch.no_grad():
            return scores_of(self._mean, observation, latents).logp

    @torch.no_grad()
    def update(self, policy: Trainable) -> None:
        """Add the weights after an update."""
        # Kept for `take_back`, where the KL stop undoes the step that this average has taken in.
        self._before = self.total, [weight.clone() for weight in self._learning]
        self.total = self.decay * self.total + 1
        learning = (weight for weight in policy.parameters() if weight.requires_grad)
        for mean, weight in zip(self._learning, learning, strict=True):
            # mean_n = mean_{n-1} + (w_n - mean_{n-1}) / total, which is the weighted mean of the docstring.
            mean.lerp_(weight, 1 / self.total)

    @torch.no_grad()
    def take_back(self) -> None:
        """Undo the last update, if there is one."""
        if self._before is None:
            return
        self.total, weights = self._before
        for mean, before in zip(self._learning, weights, strict=True):
            mean.copy_(before)
        self._before = None

    def tree(self) -> dict[str, Any]:
        """Return the mutable state, for a checkpoint."""
        return {"total": self.total, "policy": self._mean.state_dict()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.total = tree["total"]
        self._mean.load_state_dict(tree["policy"])
