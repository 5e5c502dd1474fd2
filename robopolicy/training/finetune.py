"""Policy-gradient fine-tuning: one trainer for denoising steps, flow steps and tokens.

With the defaults it is PPO on the denoising chain (DPPO, Ren et al. 2024, arXiv:2409.00588); other mechanisms are
selected by name (`robopolicy algorithms`). The trainer does not depend on the type of step; the critic reads
observations only. Deviations: target-KL stop, log-ratio clamp and gradient clipping are on, because without them
weights became NaN.

Resuming is exact because the world is released before every checkpoint, whether or not the run is killed. Collection
then continues from fresh resets with seeds that depend on (seed, iteration) alone. With over-provisioned groups, it
also resumes the unfinished episodes in the checkpoint.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core import replicas
from robopolicy.core.errors import ConfigError
from robopolicy.core.exchange import broadcast, bytes_exchanged, require_equal
from robopolicy.core.former_names import accept_former_arguments
from robopolicy.core.images import Keeping
from robopolicy.core.policy import Policy, RecordsMeans, ScoredPolicy, Scores, Trainable
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.core.rollouts import Rollouts, concatenate, critic_observation
from robopolicy.core.run import RunFolder
from robopolicy.core.segments import Segments
from robopolicy.core.stages import HasStages
from robopolicy.core.structured import current as current_settings
from robopolicy.core.structured import to_plain
from robopolicy.core.world import World
from robopolicy.nn.fsdp import divided_copy, divided_state, whole_tree, whole_weights
from robopolicy.nn.micro_batches import in_micro_batches, in_minibatches, scores_of
from robopolicy.nn.optimisers import require_finite
from robopolicy.nn.precision import tolerance_in, training_precision
from robopolicy.nn.sharing import copy_trainable, load_trainable_state, trainable_state
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import ActionValues, Context, ScoresChunks, SideModel, Tools
from robopolicy.rl.critic import Critic, ReturnScale
from robopolicy.rl.preferences import StoresPairs
from robopolicy.rl.registry import Need
from robopolicy.rl.replay import JudgesAnew, Reincarnates
from robopolicy.training.collection import ShardWorkers, make_collector, shared_by_replicas, teacher_takes_over
from robopolicy.training.collection.protocol import Reports
from robopolicy.training.collection.shards import ShardedEpisodes
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import (
    conditions_of,
    decisions_at,
    episode_metrics,
    learning_metrics,
    recompute_log_probs,
    require_lowering,
    require_same_scores,
    with_proximal,
    with_values,
)
from robopolicy.training.guidance import Guidance
from robopolicy.training.late_evaluation import LateEvaluation
from robopolicy.training.needs import Sources, add_extras, needs_images, satisfied_needs, with_reference
from robopolicy.training.overlap import total_weight_of
from robopolicy.training.schedules import require_own_schedules, schedule_by
from robopolicy.training.state import (
    load_trainer,
    on_device,
    require_same_config,
    require_same_parts,
    save_trainer,
)
from robopolicy.training.stopping import EndReason, StoppingRule, StoppingSettings, score
from robopolicy.training.update import Learner, minibatch_decisions

Evaluate = Callable[[Policy, bool], Mapping[str, float]]
"""(policy, deterministic) -> metrics: `success` in [0, 1], or only `return` when the world reports no success; policies
are then selected by return. A function of the policy alone (fixed seeds).

If `score` is present, policies are selected by it, and it stays comparable when `after_checkpoint` changes the world;
`achieved` is then the success compared with the target. For a policy also evaluated in the real environment, `real_low`
and `real_high` bound its real success and `gap` is imagined minus real success. `parted` (0 or 1) marks a gap that is
too large; see `StoppingRule` for the consequences.
"""

Confirm = Callable[[Policy, int], Mapping[str, float]]
"""(policy, iteration) -> metrics, including `success` without exploration noise, on episodes that no earlier evaluation
has played. Called when a target is reached; the run ends only if this reaches it too.
"""

AfterCheckpoint = Callable[[int, Policy], bool]
"""(iteration, policy) -> whether the world changed, so that earlier evaluations (except `score`) are not comparable.
Called after every checkpoint but the last and on resume; collection then restarts.
"""


NO_GUIDANCE = Guidance()


@dataclass(frozen=True)
class FinetuneResult:
    """iterations and env_steps done; the reason why it ended; the best evaluation (with its iteration), empty without
    evaluations.
    """

    iterations: int
    env_steps: int
    ended: EndReason
    best: Mapping[str, float]

    @property
    def reached_target(self) -> bool:
        """Whether the run ended by reaching the target."""
        return self.ended is EndReason.TARGET

    @property
    def course(self) -> dict[str, Any]:
        """Summary of the run's length and why it ended, JSON-ready."""
        return {"iterations": self.iterations, "reached_target": self.reached_target, "ended": self.ended.value}


@accept_former_arguments({"oversight": "stopping"})
def finetune(
    policy: Trainable,
    critic: Critic | None,
    world: World,
    config: FinetuneConfig,
    run: RunFolder | None = None,
    *,
    evaluate: Evaluate | None = None,
    confirm: Confirm | None = None,
    seed: int = 0,
    guidance: Guidance = NO_GUIDANCE,
    after_checkpoint: AfterCheckpoint | None = None,
    stopping: StoppingSettings | None = None,
    workers: ShardWorkers | None = None,
) -> FinetuneResult:
    """Improve `policy` in `world`, in place.

    critic: maps an observation [N, H, ...] to values [N]; it is fitted to the scale of the first rollouts, and not used
    by algorithms that compare episodes. run: receives metrics.jsonl, `base/` (the initial policy), `last/`,
    `checkpoint/` and the resume point. `checkpoint/` is the policy that reached the target, else the best evaluated one
    (the base included), or the last one without `evaluate`; at the end `policy` has its weights. After a kill the same
    call resumes and, on a CPU with the same number of threads, gives byte-identical results. guidance: extra inputs
    that some mechanisms need. seed: root of all random numbers. stopping: stopping settings with real evaluation, in
    place of config.patience. With config.shards > 1, `world` has the rows of one shard; workers: that play the
    shards, None to play them here, one after the other. Results do not depend on them.

    Raises ConfigError for an invalid combination, NonFiniteError naming the quantity and the iteration, and
    RuntimeError if recomputed log-probabilities differ from those at acting time.
    """
    course = StoppingRule(stopping or StoppingSettings(config.patience, watched=False), config.target_success)
    evaluations = evaluate, confirm
    tuning = _Finetuning(policy, critic, world, config, run, evaluations, seed, guidance, course, workers)
    return tuning.run(after_checkpoint)


def _divided(policy: Trainable, config: FinetuneConfig, workers: ShardWorkers | None) -> Trainable:
    """Return a copy of `policy` whose weights the processes divide; raises ConfigError for settings that exclude it."""
    if replicas.count() == 1:
        raise ConfigError(
            "fsdp=true divides the policy's weights among processes, but there is only one: start several with "
            "torchrun --nproc-per-node N -m robopolicy finetune ..., or set fsdp=false."
        )
    names = [name for name in ("staleness", "policy_lag", "props_parts", "overlap_evaluation") if getattr(config, name)]
    if config.proximal_policy == "average":
        names.append("proximal_policy=average")
    if names:
        raise ConfigError(
            f"fsdp=true divides the policy's weights, but {', '.join(names)} needs copies of them: set fsdp=false, or "
            "restore the defaults of these settings."
        )
    if workers is not None:
        raise ConfigError(
            "fsdp=true collects and evaluates in the processes that train: set workers.count=1 workers.pool=local."
        )
    return cast(Trainable, divided_copy(cast(nn.Module, policy)))


class _Finetuning:
    """The state of one run."""

    def __init__(
        self,
        policy: Trainable,
        critic: Critic | None,
        world: World,
        config: FinetuneConfig,
        run: RunFolder | None,
        judged: tuple[Evaluate | None, Confirm | None],
        seed: int,
        guidance: Guidance,
        course: StoppingRule,
        workers: ShardWorkers | None,
    ):
        self.world = world
        self.config = config
        self.seed = seed
        self.run_folder = run if replicas.leads() else None
        self.guidance = guidance
        self.teacher = guidance.teacher
        self.evaluate, self.confirm = judged
        self.algorithm = build_algorithm(config)
        guidance.check_teacher(policy, self.algorithm.needs)
        self.algorithm.resolved.check(satisfied_needs(policy, critic, world, config, guidance))
        if Need.MEANS in self.algorithm.needs and isinstance(policy, RecordsMeans):
            policy.record_means = True
        self.critic = critic.eval() if critic is not None and Need.CRITIC in self.algorithm.needs else None
        require_own_schedules(world, self.critic, config, on_workers=workers is not None)
        base = copy_trainable(policy).requires_grad_(False) if Need.BASE in self.algorithm.needs else None
        self.device = next(policy.parameters()).device
        self.plain = policy.eval()
        self.policy = policy = _divided(policy, config, workers) if config.fsdp else policy
        require_lowering(policy, config.precision)
        self.generators = Generators(seed, self.device)
        self.return_scale = ReturnScale().to(self.device)
        self.models = self._build_models(base)
        self.replay = None if self.algorithm.replay is None else self.algorithm.replay()
        experts = guidance.expert_batches(policy, self.generators["experts"])
        instructions = world.spec.instructions
        self.learner = Learner(
            policy, self.critic, base, self.algorithm, config, instructions, self.models, self.teacher, experts
        )
        self.expert_rows = guidance.expert_rows(
            policy, instructions, config.expert_episode_fraction, self.algorithm, self.generators
        )
        self.turns = guidance.turns(config.teacher_fraction, config.teacher_decay_fraction)
        takes_over = teacher_takes_over(self.algorithm)
        rows, episodes = world.batch_size, config.teacher_episode_fraction
        acting = guidance.who_acts(self.turns, episodes, rows=rows, takes_over=takes_over)
        arguments = guidance.demonstrations, acting, guidance.pairs
        others_read = isinstance(self.replay, StoresPairs) or bool(guidance.teacher or guidance.acting)
        stores_images = needs_images(policy, self.critic, self.algorithm, others=others_read)
        images: Keeping = ("packed" if config.packed_images else "plain") if stores_images else "not"
        collector = make_collector(
            *(world, policy, self.algorithm, config, seed, self.generators["act"], *arguments),
            images=images,
            turns=self.turns,
            workers=workers,
            values=self._values,
        )
        self.collector = shared_by_replicas(collector, self.generators)
        self.controllers = {name: build() for name, build in self.algorithm.controllers.items()}
        self.iteration, self.env_steps = 0, 0
        self.history: tuple[float, ...] = ()
        self.memory: dict[str, Any] = {}
        self.course = course
        self.best: dict[str, float] = {}
        self.best_believed = False
        self.best_weights: dict[str, Tensor] | None = None
        self.late = self._late_evaluation(workers)
        self._resume(run)

    @property
    def _has_critic(self) -> bool:
        """Whether a critic (of states, or of noisy actions) warms up before the policy is updated."""
        return self.critic is not None or Need.FLOW_VALUES in self.algorithm.needs

    def run(self, after_checkpoint: AfterCheckpoint | None) -> FinetuneResult:
        if self.config.fsdp and after_checkpoint is not None:
            raise ConfigError(
                "fsdp=true works in simulators only: set fsdp=false for a run that changes its world model."
            )
        if self.config.overlap_evaluation and after_checkpoint is not None:
            raise ConfigError(
                "overlap_evaluation=true works in simulators only, because a world model may change before the "
                "evaluation in it is done: set overlap_evaluation=false."
            )
        if self.iteration == 0:
            self._begin()
        try:
            with progress("Fine-tuning", self.config.iterations) as advance:
                advance(self.iteration)
                while self.iteration < self.config.iterations and self.course.ended is None:
                    # Asked again when a run is resumed at a checkpoint, so that a resumed run sees the same world as
                    # one that was not killed.
                    due = self.iteration > 0 and self._due(self.config.checkpoint_every, False)
                    if after_checkpoint is not None and due and after_checkpoint(self.iteration, self.policy):
                        # what follows is measured in another world, unless policies are chosen by what is real
                        self.best_believed &= "deterministic_score" in self.best
                    metrics = self._iterate()
                    advance(note=f"success {metrics['success']:.2f}" if metrics["episodes"] else "")
            self._finish_late_evaluation()
        finally:
            if self.late is not None:
                self.late.close()
            self.collector.close()
        if self.best_weights is not None:
            load_trainable_state(self.policy, self.best_weights)
        self._write("checkpoint")
        if self.config.fsdp:
            cast(nn.Module, self.plain).to(self.device)
        return FinetuneResult(self.iteration, self.env_steps, self.course.ended or EndReason.ITERATIONS, self.best)

    def _begin(self) -> None:
        """Save and evaluate the initial policy: the first point of the learning curve, and the best until surpassed."""
        figures = self._evaluate() if self.evaluate is not None and self.config.evaluate_every > 0 else {}
        self._write("base")
        if self.run_folder is not None:
            self.run_folder.rewind("iteration", -1)
        self._log({"iteration": 0, "env_steps": 0, **figures})

    def _iterate(self) -> dict[str, float]:
        start, bytes_before = time.perf_counter(), bytes_exchanged()
        self.figures: dict[str, float] = {}
        # evaluations are fp32, as whoever plays the checkpoint is
        with training_precision(self.config.precision), in_micro_batches(self.config.micro_batch):
            if self.turns is not None and not self.config.staleness:  # batches in the background set it themselves
                self.turns.begin(self._context.share)
            overlaps = self.config.overlap_update
            collected_rollouts, rollouts = self._learn_on_arrival() if overlaps else self._collect()
            collect_end = time.perf_counter()
            learning = learning_metrics(rollouts, self.algorithm.needs)
            # Before the update: a controller sees the last update's figures and this iteration's data.
            for controller in self.controllers.values():
                self.learner.knobs.update(controller.step({**self.learner.stats, **learning}, self._context))
            update = self.learner.update(
                rollouts,
                self._context,
                self.generators["minibatches"],
                self._where,
                train_actor=not self._has_critic or self.iteration >= self.config.critic_warmup,
                done=int(overlaps),
            )
        # The leader alone acts, with staleness also in the background of this update.
        states = [state for name, state in self.generators.state().items() if name != "act"]
        require_equal([*self.learner.weights(), *states], "weights or random numbers", self._where)
        updated = time.perf_counter()
        collected_rollouts = collected_rollouts.fresh
        metrics = {**episode_metrics(collected_rollouts.unaided), **self.figures, **learning, **update}
        if self.config.staleness or self.config.policy_lag or self.config.overprovision:
            played_mask = collected_rollouts.played
            metrics["staleness"] = float(
                (self.iteration - collected_rollouts.policy_version[played_mask]).float().mean()
            )
        if isinstance(self.collector, Reports):
            metrics |= self.collector.report(self.iteration)
        if replicas.count() > 1:
            metrics["bytes_exchanged"] = float(bytes_exchanged() - bytes_before)
        # Only fresh decisions count: replayed ones cost no step in the world.
        self.env_steps += int(collected_rollouts.duration[collected_rollouts.played].sum())
        self.iteration += 1
        last = self.iteration == self.config.iterations
        metrics["seconds_collect"] = collect_end - start
        metrics["seconds_update"] = updated - collect_end
        self._finish_late_evaluation()
        due = self.evaluate is not None and self._due(self.config.evaluate_every, last) and self.course.ended is None
        waits = due and not last and self.late is not None
        if due and not waits:
            metrics.update(self._evaluate())
        metrics["seconds_evaluate"] = time.perf_counter() - updated
        row = {"iteration": self.iteration, "env_steps": self.env_steps, **metrics}
        if self.late is not None and waits:
            self.late.hold(self.policy, row)
        else:
            self._log(row)
        if self._due(self.config.checkpoint_every, last or self.course.ended is not None):
            # Also where the run goes on: a resumed run begins with fresh resets, and both must collect the same.
            self.collector.restart()
            self._save()
        return metrics

    def _collect(self) -> tuple[Rollouts, Rollouts]:
        """Return the rollouts of an iteration, as collected and as prepared for learning."""
        with whole_weights(self.policy):
            collected_rollouts = self.collector.collect(self.iteration)
        self._start_late_evaluation()
        with (
            whole_weights(self.policy),
            in_minibatches(minibatch_decisions(self.algorithm, self.config, collected_rollouts)),
        ):
            prepared_rollouts = self._prepare(collected_rollouts)
            self._require_same_scores(prepared_rollouts)
        return collected_rollouts, prepared_rollouts

    def _learn_on_arrival(self) -> tuple[Rollouts, Rollouts]:
        """Accumulate gradients of groups as they arrive, take one step with all, and return what `_collect` does."""
        assert isinstance(self.collector, ShardedEpisodes)  # as `require_overlap` demands
        total_weight, parts = total_weight_of(self.algorithm), dict[int, tuple[Rollouts, Rollouts, Rollouts]]()
        for shard, collected_rollouts in self.collector.arrivals(self.iteration):
            with in_minibatches(minibatch_decisions(self.algorithm, self.config, collected_rollouts)):
                shaped_rollouts, prepared_rollouts = self._with_advantages(collected_rollouts)
                self._require_same_scores(prepared_rollouts)
            self.learner.accumulate(prepared_rollouts, self._context, total_weight, self._where)
            parts[shard] = collected_rollouts, shaped_rollouts, prepared_rollouts
        self.learner.step_accumulated(self._where)
        self._start_late_evaluation()
        # In the order of the shards: only the sum of the gradients depends on that of arrival.
        collected_rollouts, shaped_rollouts, prepared_rollouts = (
            concatenate([parts[shard][place] for shard in sorted(parts)], same_groups=True) for place in range(3)
        )
        self.collector.observe(shaped_rollouts, prepared_rollouts)
        self._remember_returns(shaped_rollouts)
        return collected_rollouts, prepared_rollouts.without(following=True)

    def _start_late_evaluation(self) -> None:
        if self.late is not None and replicas.leads():
            self.late.start()

    def _require_same_scores(self, prepared: Rollouts) -> None:
        """Check that the policy computes the log-probabilities with which it acted."""
        precision, tokens = self.config.precision, self.policy.spec.categorical
        tolerance = tolerance_in(precision, self.config.ratio_tolerance, tokens)
        instructions = self.world.spec.instructions
        require_same_scores(prepared, self.policy, self.iteration, instructions, tolerance, self._where)

    def _remember_returns(self, rollouts: Rollouts) -> None:
        """Keep the mean returns of the latest 256 groups, fresh ones only: what baselines across iterations compare
        with.
        """
        means = Segments.of(rollouts.group).mean(rollouts.row_return)
        self.history = (*self.history, *means.tolist())[-256:]

    def _with_advantages(self, rollouts: Rollouts) -> tuple[Rollouts, Rollouts]:
        """Return the rollouts with the rewards that are learned from, and those kept, with one advantage per step."""
        instructions = self.world.spec.instructions
        sources = Sources(self.policy, self.teacher, instructions, self.generators, self.iteration)
        # Before anything reads ends: values, returns and side models must agree on what a time limit means.
        if self.config.time_limit == "terminate":
            rollouts = rollouts.ended_by_limits()
        rollouts = add_extras(rollouts, self.algorithm.needs, sources)
        for model in self.models.values():
            rollouts = model.annotate(rollouts, self._context)
        for shape_rewards in self.algorithm.rewards:
            rollouts = shape_rewards(rollouts, self._context)
        # Normalised once: statistics that moved would change the values of all older targets.
        if self.critic is not None and self.iteration == 0:
            self.critic.fit(rollouts.observation)
            schedule_by(self.world, self.critic, best=False)
        return self._judged(rollouts)

    def _judged(self, rollouts: Rollouts, *, again: bool = False) -> tuple[Rollouts, Rollouts]:
        """Return rollouts with values, and those kept with one advantage per step; again: not for the first time."""
        if self.critic is not None:
            discount, gae_lambda = self.config.discount, self.config.gae_lambda
            finished = Need.FINISHED in self.algorithm.needs
            rollouts = with_values(
                rollouts, self.critic, self.return_scale, discount, gae_lambda, finished=finished, again=again
            )
            require_finite("the return", rollouts.extras["value_target"], self._where)
        prepared_rollouts = self.algorithm.prepare(rollouts, self._context)
        require_finite("the advantage", prepared_rollouts.extras["advantage"], self._where)
        return rollouts, prepared_rollouts

    def _prepare(self, rollouts: Rollouts) -> Rollouts:
        """Compute advantages, then add replayed and expert rows and what depends on them."""
        instructions = self.world.spec.instructions
        rollouts, prepared_rollouts = self._with_advantages(rollouts)
        # Before replayed or expert rows join, which say nothing about the starts that were proposed.
        if rollouts.whole:
            self.collector.observe(rollouts.fresh.unaided, prepared_rollouts.fresh.unaided)
        # Targets and advantages are made: nothing looks ahead any more, but for a replay that makes them anew.
        if not isinstance(self.replay, JudgesAnew):
            prepared_rollouts = prepared_rollouts.without(following=True)
        if self.replay is not None:
            prepared_rollouts = self.replay.mix(prepared_rollouts, self._context).without(following=True)
            if isinstance(self.replay, Reincarnates) and self.replay.reincarnates(self._context):
                self.learner.rebase()
        if self.expert_rows is not None:
            prepared_rollouts = self.expert_rows.beside(prepared_rollouts, self._context)
        if rollouts.whole:
            self._remember_returns(rollouts.fresh)
        stale = prepared_rollouts.played & (prepared_rollouts.policy_version != self.iteration)
        # Decoupled PPO: the behaviour policy is too old to clip around, so the present policy, before the update, is
        # the proximal one.
        is_proximal = self.config.proximal_policy == "current"
        if bool(stale.any()) and (is_proximal or Need.SEQUENCE_RATIOS in self.algorithm.needs):
            logp, _ = recompute_log_probs(prepared_rollouts, self.policy, instructions)
            around = with_proximal(prepared_rollouts, logp, forgets_help=self.learner.forgets_help)
            prepared_rollouts = around if is_proximal else prepared_rollouts.with_extras(current_logp=around.proximal)
        return with_reference(prepared_rollouts, self.algorithm.needs, self.learner.base, instructions)

    def _build_models(self, base: ScoredPolicy | None) -> dict[str, SideModel]:
        """Construct the side models trained with the policy, with weights initialised from the run's seed."""
        spec = self.world.spec
        tools = Tools(
            policy=self.policy,
            base=base,
            teacher=self.teacher,
            fields=spec.observation,
            history=spec.history,
            instructions=spec.instructions,
            observe=lambda rollouts, where: decisions_at(rollouts, where, spec.instructions)[0],
            score=self._score,
        )
        # A mechanism added or left out must not change the draws of everything else.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "models"))
            return {name: build(tools) for name, build in self.algorithm.models.items()}

    @torch.no_grad()
    def _values(self, rollouts: Rollouts) -> Tensor | None:
        """Return V [B, T] of a side model of action values, else scores of chunks, 0 on padding; None before the model
        has learned, or without one.
        """
        model = next((each for each in self.models.values() if isinstance(each, ActionValues)), None)
        scorer = next((each for each in self.models.values() if isinstance(each, ScoresChunks)), None)
        if self.iteration == 0 or model is None:
            return None if self.iteration == 0 or scorer is None else scorer.chunk_scores(rollouts)
        alive = rollouts.alive
        values = model.values(critic_observation(rollouts, alive))
        return torch.zeros(alive.shape, device=alive.device).index_put((alive,), values)

    def _score(self, policy: ScoredPolicy, rollouts: Rollouts, where: Tensor) -> Scores:
        return scores_of(policy, *decisions_at(rollouts, where, self.world.spec.instructions))

    @property
    def _context(self) -> Context:
        config = self.config
        return Context(
            self.generators["mechanisms"],
            config.discount,
            config.gae_lambda,
            self.iteration,
            config.iterations,
            self.policy.spec.scored_steps,
            self.history,
            self.memory,
            self.figures,
            self.world.spec.instructions,
            self.world.stages if isinstance(self.world, HasStages) else (),
            partial(conditions_of, policy=self.policy, instructions=self.world.spec.instructions),
            lambda rollouts: self._judged(rollouts, again=True)[1],
        )

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.iteration % every == 0)

    @property
    def _where(self) -> str:
        return f"fine-tuning iteration {self.iteration + 1}"

    def _late_evaluation(self, workers: ShardWorkers | None) -> LateEvaluation | None:
        if not self.config.overlap_evaluation or self.evaluate is None:
            return None
        return LateEvaluation(self.policy, self._measure, parallel=workers is not None)

    def _finish_late_evaluation(self) -> None:
        """Wait for the evaluation of the policy that waits for it, if any, and log its iteration."""
        late = self.late
        if late is None or not late.row:
            return
        row, late.row = late.row, {}
        self._log(row | self._judge(late.policy, int(row["iteration"]), late.figures))

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the current policy; see `_judge`."""
        with whole_weights(self.policy):
            return self._judge(self.policy, self.iteration, lambda: self._measure(self.policy))

    def _measure(self, policy: Policy) -> dict[str, float]:
        """Return the metrics of both modes."""
        assert self.evaluate is not None
        return {
            f"{mode}_{name}": float(value)
            for mode in ("deterministic", "stochastic")
            for name, value in self.evaluate(policy, mode == "deterministic").items()
        }

    def _judge(self, policy: Trainable, iteration: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate the policy of an iteration, update the stopping rule, and save the weights if they are the best so
        far.
        """
        figures, confirm = broadcast(measure), self.confirm
        if confirm is not None:
            figures = self.course.confirmed(
                figures,
                lambda: broadcast(lambda: {name: float(v) for name, v in confirm(policy, iteration).items()}),
            )
        self.course.observe(figures)
        reached_target = self.course.ended is EndReason.TARGET
        # The policy that reached the target is kept even if an earlier one scored higher.
        if reached_target or not self.best_believed or score(figures) > score(self.best):
            self.best, self.best_believed = {"iteration": iteration, **figures}, True
            self.best_weights = {name: value.clone() for name, value in trainable_state(policy).items()}
            self._write("checkpoint", None if policy is self.policy else policy)
        return figures

    def _log(self, row: dict[str, float]) -> None:
        if self.run_folder is not None:
            self.run_folder.log(row)

    def _write(self, name: str, policy: Trainable | None = None) -> None:
        """Write the policy (default: the current one) to folder `name` of the run; with fsdp its complete weights are
        then those of `plain`.
        """
        if self.config.fsdp:
            self.plain.load_state_dict(whole_tree(self.policy.state_dict()))
        if self.run_folder is not None:
            (policy or self.plain).save(self.run_folder.path / name)

    def _save(self) -> None:
        if self.run_folder is None and not self.config.fsdp:
            return
        self._write("last")
        tree = whole_tree(self._tree())
        if self.run_folder is None:
            return
        if isinstance(self.replay, StoresPairs):
            self.replay.store(self.run_folder.path / "preferences", self.world.spec.instructions)
        save_trainer(self.run_folder.resume_point, tree)

    def _tree(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "history": list(self.history),
            "memory": self.memory,
            "course": self.course.tree(),
            "config": self._settings(),
            "best": self.best,
            "best_believed": self.best_believed,
            "best_weights": self.best_weights or {},
            "late_evaluation": {} if self.late is None else self.late.tree(),
            "learner": self.learner.tree(),
            "collector": self.collector.tree(),
            "models": {name: model.tree() for name, model in self.models.items()},
            "replay": {} if self.replay is None else self.replay.tree(),
            "controllers": {name: controller.state() for name, controller in self.controllers.items()},
            "return_scale": self.return_scale.state_dict(),
            "generators": self.generators.state(),
        }

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.seed, **to_plain(self.config)}

    def _resume(self, run: RunFolder | None) -> None:
        tree = None if run is None else broadcast(lambda: load_trainer(run.resume_point))
        if tree is None or run is None:
            return
        current = self._tree()
        saved_settings = current_settings(type(self.config), tree["config"], "finetune")
        tree["config"] = {**type(self.config).ADDED, **saved_settings}
        tree.setdefault("late_evaluation", {})  # resume points of version 0.1
        require_same_parts(tree, current, run.resume_point)
        for part in ("config", "collector"):
            require_same_parts(tree[part], current[part], run.resume_point)
        require_same_config(
            tree["config"], self._settings(), may_change=("iterations", "target_success", "patience", "shards", "fsdp")
        )
        self.iteration = tree["iteration"]
        self.env_steps = tree["env_steps"]
        self.best = tree["best"]
        self.course.restore(tree["course"])
        self.best_believed = tree["best_believed"]
        self.history, self.memory = tuple(tree["history"]), tree["memory"]
        self.best_weights = divided_state(self.policy, tree["best_weights"]) or None
        self.learner.restore(tree["learner"])
        self.collector.restore(tree["collector"])
        for name, model in self.models.items():
            model.restore(tree["models"][name])
        if self.replay is not None:
            self.replay.restore(on_device(tree["replay"], self.device))
        for name, controller in self.controllers.items():
            controller.restore(tree["controllers"][name])
        self.return_scale.load_state_dict(tree["return_scale"])
        if self.iteration:
            schedule_by(self.world, self.critic, best=False)
        # Last, when no constructor or `restore` draws any more.
        self.generators.restore(tree["generators"])
        if self.late is not None:
            self.late.restore(self.policy, tree["late_evaluation"])
        if self.run_folder is not None:
            waiting = self.late is not None and bool(self.late.row)  # its iteration is logged with its evaluation
            self.run_folder.rewind("iteration", self.iteration - waiting)
