"""Policy-gradient fine-tuning: PPO over the units inside each decision (DPPO when the units are denoising steps).

Ren et al. 2024 (arXiv:2409.00588), written on the core's form `-sum(w * sg(c) * logp) + auxiliaries`. Left out: nothing
of a unit's meaning is known here; the critic sees observations only. Deviations: target-KL stop, log-ratio clamp and
gradient clip are on, because without them the prototype's weights became NaN.

Resuming is exact because of one rule: streams start from fresh episodes, with seeds that depend on (seed, iteration)
alone, after every checkpoint, whether or not the run was killed. So no world state has to be saved.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, NonFiniteError
from robopolicy.core.policy import Evaluation, Policy
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import to_plain
from robopolicy.core.world import World
from robopolicy.rl import diagnostics
from robopolicy.rl.coefficients import clip_schedule, denoising_discount, ppo
from robopolicy.rl.collect import Streams, play, start_streams
from robopolicy.rl.critic import Critic
from robopolicy.rl.objective import policy_loss, value_loss
from robopolicy.rl.ratios import log_ratios
from robopolicy.rl.returns import ReturnScale
from robopolicy.rl.weights import unit_mean
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import Experience, episode_metrics, score
from robopolicy.training.state import (
    adamw,
    clip_gradients,
    load_trainer,
    optimiser_tree,
    require_finite,
    require_same_config,
    restore_optimiser,
    save_trainer,
    set_learning_rate,
)

Evaluate = Callable[[Policy, bool], Mapping[str, float]]
"""(policy, deterministic) -> figures, among them `success` in [0, 1]; a function of the policy alone (own seeds)."""


@dataclass(frozen=True)
class FinetuneResult:
    """iterations and env_steps done in total; whether the target ended it; figures of the best evaluation."""

    iterations: int
    env_steps: int
    reached_target: bool
    best: Mapping[str, float]


def finetune(
    policy: Any,
    critic: Critic,
    world: World,
    config: FinetuneConfig,
    run: RunFolder | None = None,
    *,
    evaluate: Evaluate | None = None,
    seed: int = 0,
) -> FinetuneResult:
    """Improve `policy` (a Policy and nn.Module with `trainable_parameters()`) in `world`, in place.

    critic: maps an observation [N, H, ...] to values [N]; it is fitted to the scale of the first rollouts. run: gets
    metrics.jsonl, `base/` (the policy as it came), `last/`, `checkpoint/` (the best evaluated, the base among them, or
    the last without `evaluate`) and the resume point; the same call again after a kill goes on from there and ends, on
    a CPU, byte for byte in the same place. At the end `policy` holds what is in `checkpoint/`. seed: root of every
    random number drawn. Raises NonFiniteError naming the quantity and the iteration, and RuntimeError if the policy
    scores its decisions differently from when it acted.
    """
    return _Finetuning(policy, critic, world, config, run, evaluate, seed).run()


class _Finetuning:
    """The state of one run."""

    def __init__(
        self,
        policy: Any,
        critic: Critic,
        world: World,
        config: FinetuneConfig,
        run: RunFolder | None,
        evaluate: Evaluate | None,
        seed: int,
    ):
        self.policy, self.seed = policy.eval(), seed
        self.critic, self.world, self.config = critic.eval(), world, config
        self.run_folder, self.evaluate = run, evaluate
        self.base: Any = copy.deepcopy(policy).requires_grad_(False) if config.bc_weight > 0 else None
        self.device = next(policy.parameters()).device
        self.generators = Generators(seed, self.device)
        self.return_scale = ReturnScale().to(self.device)
        self.actor_parameters = list(self.policy.trainable_parameters())
        self.critic_parameters = [parameter for parameter in critic.parameters() if parameter.requires_grad]
        self.actor_optimiser = adamw(self.actor_parameters, config.actor_rate, config.weight_decay)
        self.critic_optimiser = adamw(self.critic_parameters, config.critic_rate, config.weight_decay)
        units = self.policy.spec.units
        self.clip = clip_schedule(units, config.clip_base, config.clip, config.clip_rate).to(self.device)
        self.credit = denoising_discount(units, config.denoising_discount).to(self.device)
        self.streams: Streams | None = None
        self.iteration, self.env_steps, self.actor_steps = 0, 0, 0
        self.before_step: list[Tensor] = []
        self.reached_target = False
        self.best: dict[str, float] = {}
        self.best_weights: dict[str, Tensor] | None = None
        self._resume()

    def run(self) -> FinetuneResult:
        if self.iteration == 0:
            self._begin()
        with progress("Fine-tuning", self.config.iterations) as advance:
            advance(self.iteration)
            while self.iteration < self.config.iterations and not self.reached_target:
                metrics = self._iterate()
                advance(note=f"success {metrics['success']:.2f}" if metrics["episodes"] else "")
        if self.best_weights is not None:
            self.policy.load_state_dict(self.best_weights)
        if self.run_folder is not None:
            self.policy.save(self.run_folder.checkpoint)
        return FinetuneResult(self.iteration, self.env_steps, self.reached_target, self.best)

    def _begin(self) -> None:
        """Keep the policy as it came, and measure it: where the learning curve starts, and the best until beaten."""
        figures = self._evaluate() if self.evaluate is not None and self.config.evaluate_every > 0 else {}
        if self.run_folder is not None:
            self.policy.save(self.run_folder.path / "base")
            self.run_folder.rewind("iteration", -1)
            self.run_folder.log({"iteration": 0, "env_steps": 0, **figures})

    def _iterate(self) -> dict[str, float]:
        started = time.perf_counter()
        rollouts = self._collect()
        if self.iteration == 0:
            self.critic.fit(rollouts.observation)
        experience = score(
            rollouts,
            self.critic,
            self.return_scale,
            self.config.discount,
            self.config.gae_lambda,
            self.world.spec.instructions,
        )
        experience = experience.with_executed(self.policy, rollouts)
        require_finite("the advantage", experience.advantages, self._where)
        require_finite("the return", experience.returns, self._where)
        collected = time.perf_counter()
        self._require_same_scores(experience)
        update = self._update(experience)
        updated = time.perf_counter()
        metrics = {**episode_metrics(rollouts), **update}
        self.env_steps += int(rollouts.valid.sum())
        self.iteration += 1
        last = self.iteration == self.config.iterations
        if self.evaluate is not None and self._due(self.config.evaluate_every, last):
            metrics.update(self._evaluate())
        metrics["seconds_collect"] = collected - started
        metrics["seconds_update"] = updated - collected
        metrics["seconds_evaluate"] = time.perf_counter() - updated
        if self.run_folder is not None:
            self.run_folder.log({"iteration": self.iteration, "env_steps": self.env_steps, **metrics})
        if self._due(self.config.checkpoint_every, last or self.reached_target):
            self._save()
            self.streams = None
        return metrics

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.iteration % every == 0)

    @property
    def _where(self) -> str:
        return f"fine-tuning iteration {self.iteration + 1}"

    def _collect(self) -> Rollouts:
        if self.streams is None:
            self.streams = start_streams(self.world, self.policy, self.seed, f"collect/{self.iteration}")
        try:
            return play(self.world, self.policy, self.config.decisions, self.generators["act"], self.streams)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} It happened while collecting for {self._where}.") from error

    @torch.no_grad()
    def _require_same_scores(self, experience: Experience) -> None:
        """Check on some rows that the ratio is 1 before the first update."""
        count = min(len(experience), 256)
        rows = experience.rows(torch.arange(count, device=self.device) * (len(experience) // count))
        logp = self.policy.evaluate(rows.observation, rows.units).logp
        difference = torch.where(rows.mask, logp - rows.logp, 0.0).abs().max()
        require_finite("the log-probability", difference, self._where)
        if float(difference) > self.config.ratio_tolerance:
            raise RuntimeError(
                f"Before {self._where} the policy scores its own decisions differently from when it acted: log-"
                f"probabilities differ by {float(difference):.2e} (allowed {self.config.ratio_tolerance:.0e}). "
                "Sampling and scoring must share schedule, clipping, standard deviation and mode (dropout, precision)."
            )

    def _update(self, experience: Experience) -> dict[str, float]:
        """Run the epochs of one iteration and return its diagnostics."""
        train_actor = self.iteration >= self.config.critic_warmup
        self.before_step = []
        rows: list[dict[str, Tensor]] = []
        stopped = False
        for _ in range(self.config.epochs):
            order = torch.randperm(len(experience), generator=self.generators["minibatches"], device=self.device)
            for index in order.split(self.config.minibatch):
                batch = experience.rows(index)
                stats = self._critic_step(batch)
                if train_actor and not stopped:
                    actor_stats, stopped = self._actor_step(batch)
                    stats.update(actor_stats)
                rows.append(stats)
            if stopped:
                break
        names = dict.fromkeys(name for row in rows for name in row)
        means = {name: float(torch.stack([row[name] for row in rows if name in row]).mean()) for name in names}
        actor_steps = sum("policy_loss" in row for row in rows)
        explained = diagnostics.explained_variance(experience.values, experience.returns)
        return {**means, "explained_variance": float(explained), "actor_steps": actor_steps, "kl_stop": float(stopped)}

    def _critic_step(self, batch: Experience) -> dict[str, Tensor]:
        loss = value_loss(self.critic(batch.observation), batch.returns, batch.mask.any(-1))
        require_finite("the value loss", loss.detach(), self._where)
        self.critic_optimiser.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients(self.critic_parameters, self.config.gradient_clip, self._where)
        self.critic_optimiser.step()
        return {"value_loss": loss.detach()}

    def _actor_step(self, batch: Experience) -> tuple[dict[str, Tensor], bool]:
        """Take one policy-gradient step, or none and return True when the KL target is exceeded."""
        config = self.config
        batch, clip, credit = self._choose_units(batch)
        logp = self.policy.evaluate(batch.observation, batch.units).logp
        if logp.shape != batch.logp.shape:
            raise ConfigError(
                f"The policy scored {logp.shape[1]} units where {batch.logp.shape[1]} were asked for: it cannot score "
                "a choice of units, so set scored_units=0."
            )
        require_finite("the log-probability", torch.where(batch.mask, logp.detach(), 0.0), self._where)
        ratios = log_ratios(logp, batch.logp, batch.mask, config.log_ratio_clamp, config.ratio_level)
        whole = len(self.clip) / logp.shape[1]
        stats = {
            "kl": whole * diagnostics.approximate_kl(ratios.log_ratio, batch.mask),
            "clip_fraction": diagnostics.clip_fraction(ratios.log_ratio, batch.mask, clip, clip),
            "effective_sample_size": diagnostics.effective_sample_size(ratios.log_ratio, batch.mask),
            "clamped": ratios.clamped.float().sum(),
        }
        if config.target_kl is not None and float(stats["kl"]) > config.target_kl:
            if float(stats["kl"]) > 2 * config.target_kl:
                self._take_back()
            return stats, True
        advantage = batch.advantages[:, None] * credit
        coefficient = ppo(ratios.log_ratio, advantage, clip, clip, ratios.clamped)
        loss = policy_loss(logp, coefficient, unit_mean(batch.mask), self._auxiliaries(batch))
        require_finite("the policy loss", loss.detach(), self._where)
        self.actor_optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip_gradients(self.actor_parameters, config.gradient_clip, self._where)
        self.before_step = [parameter.detach().clone() for parameter in self.actor_parameters]
        self.actor_steps += 1
        set_learning_rate(self.actor_optimiser, config.actor_rate * min(1.0, self.actor_steps / config.actor_warmup))
        self.actor_optimiser.step()
        return {**stats, "policy_loss": loss.detach(), "gradient_norm": norm.detach()}, False

    @torch.no_grad()
    def _take_back(self) -> None:
        """Undo the last actor step, if this iteration has made one."""
        for parameter, before in zip(self.actor_parameters, self.before_step, strict=bool(self.before_step)):
            parameter.copy_(before)

    def _choose_units(self, batch: Experience) -> tuple[Experience, Tensor, Tensor]:
        """Return the batch with the units to score, and their clip widths and credits, [K] or [n, k]."""
        count, total = self.config.scored_units, len(self.clip)
        if not 0 < count < total:
            return batch, self.clip, self.credit
        draw = torch.rand(len(batch), total, generator=self.generators["units"], device=self.device)
        chosen = draw.topk(count, dim=1).indices
        return batch.only_units(chosen), self.clip[chosen], self.credit[chosen]

    def _auxiliaries(self, batch: Experience) -> dict[str, Tensor]:
        if self.base is None:
            return {}
        decision = self.base.act(batch.observation, self.generators["base"])
        evaluation: Evaluation = self.policy.evaluate(batch.observation, decision.units)
        likelihood = (unit_mean(decision.mask) * torch.where(decision.mask, evaluation.logp, 0.0)).sum()
        return {"bc": -self.config.bc_weight * likelihood}

    def _evaluate(self) -> dict[str, float]:
        """Measure both modes, keep the weights if they are the best so far, and see whether the target is reached."""
        assert self.evaluate is not None
        figures: dict[str, float] = {}
        for mode, deterministic in (("deterministic", True), ("stochastic", False)):
            measured = self.evaluate(self.policy, deterministic)
            figures.update({f"{mode}_{name}": float(value) for name, value in measured.items()})
        success = figures["deterministic_success"]
        if not self.best or success > self.best["deterministic_success"]:
            self.best = {"iteration": self.iteration, **figures}
            self.best_weights = {name: value.clone() for name, value in self.policy.state_dict().items()}
            if self.run_folder is not None:
                self.policy.save(self.run_folder.checkpoint)
        target = self.config.target_success
        self.reached_target = target is not None and success >= target
        return figures

    def _save(self) -> None:
        if self.run_folder is None:
            return
        self.policy.save(self.run_folder.path / "last")
        tree = {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "actor_steps": self.actor_steps,
            "reached_target": self.reached_target,
            "config": self._settings(),
            "best": self.best,
            "best_weights": self.best_weights or {},
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "return_scale": self.return_scale.state_dict(),
            "actor_optimiser": optimiser_tree(self.actor_optimiser),
            "critic_optimiser": optimiser_tree(self.critic_optimiser),
            "generators": self.generators.state(),
        }
        save_trainer(self.run_folder.resume_point, tree)

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.seed, **to_plain(self.config)}

    def _resume(self) -> None:
        tree = None if self.run_folder is None else load_trainer(self.run_folder.resume_point)
        if tree is None or self.run_folder is None:
            return
        require_same_config(tree["config"], self._settings(), may_change=("iterations", "target_success"))
        self.iteration, self.env_steps, self.best = tree["iteration"], tree["env_steps"], tree["best"]
        self.reached_target, self.actor_steps = tree["reached_target"], tree["actor_steps"]
        self.best_weights = tree["best_weights"] or None
        self.policy.load_state_dict(tree["policy"])
        self.critic.load_state_dict(tree["critic"])
        self.return_scale.load_state_dict(tree["return_scale"])
        restore_optimiser(self.actor_optimiser, tree["actor_optimiser"])
        restore_optimiser(self.critic_optimiser, tree["critic_optimiser"])
        self.generators.restore(tree["generators"])
        self.run_folder.rewind("iteration", self.iteration)
