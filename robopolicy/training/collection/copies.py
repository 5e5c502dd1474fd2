"""Collectors that act with a copy of the policy: in the background, with old weights, or steered (PROPS).

In the background, with a fixed staleness: a thread owns the world and a copy of the policy; physics and tensor
operations release Python's lock, so both run at the same time. Batch n starts once the learner has done n - staleness
updates (the admission of AReaL, arXiv:2505.24298), with exactly those weights. All action chunks of a batch have one
version, except those of episodes that continue from an earlier batch (APRIL). staleness 1 collects one batch ahead.
`DelayedCollector` acts with equally old weights, but alternates with learning.

PROPS collects on-policy data with less sampling error, by reducing the probability of actions that were sampled too
often. The data of an iteration is collected in parts. After each part a copy of the policy is trained to make the
actions sampled until then slightly less likely, and it collects the next part, so that underrepresented actions become
more frequent. All parts together match the policy's distribution more closely than the same number of independent
samples, and training treats them as samples of the policy. The same holds for rollouts of earlier iterations if they
are included: new parts then compensate for what they underrepresent. Source: Corrado & Hanna 2023, arXiv:2311.08290
(proximal robust on-policy sampling). On denoising chains the steps are the transition densities of all steps (the paper
has Gaussian heads).
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.policy import Trainable
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.nn.micro_batches import scores_of
from robopolicy.nn.optimisers import clip_gradients
from robopolicy.nn.sharing import load_trainable_state, trainable_state
from robopolicy.rl.weights import step_mean
from robopolicy.training.collection.protocol import BatchCollector, Reports
from robopolicy.training.experience import decisions_at, recompute_log_probs


class CopyCollector(ABC):
    """Base class: a `Collector` that wraps `collector` and acts with `actor`, a copy of the learning `policy`."""

    def __init__(self, collector: BatchCollector, policy: Trainable, actor: Trainable):
        self.collector = collector
        self.policy = policy
        self.actor = actor

    @abstractmethod
    def collect(self, iteration: int) -> Rollouts:
        """Return the rollouts of an iteration (from 0); raises NonFiniteError naming it."""

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Record the outcomes of the initial states."""
        self.collector.observe(collected, prepared)

    def restart(self) -> None:
        """Reset the world, so that the next call starts new episodes."""
        self.collector.restart()

    def close(self) -> None:
        """Stop background work."""
        self.collector.close()

    def report(self, number: int) -> dict[str, float]:
        """Return the metrics of a batch; see `Reports`."""
        return self.collector.report(number) if isinstance(self.collector, Reports) else {}

    def tree(self) -> dict[str, Any]:
        """Return the collector's state."""
        return self.collector.tree()

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.collector.restore(tree)


class BackgroundCollector(CopyCollector):
    """Runs `collector` in a separate thread, with `actor`, a copy of the policy that only this thread uses.

    Batch n acts with the weights of update max(n - staleness, r), r being the iteration of the last restart. It is
    started as soon as these weights exist, and `collect(n)` waits for it. Batches and observed outcomes reach the
    collector in one fixed order, so results do not depend on timing. No batch is started that the next restart would
    discard: `restart_every` is the number of iterations between restarts, `iterations` the length of the run. begin: is
    called in the thread with the number of each batch, before it. `close` must be called.
    """

    def __init__(
        self,
        collector: BatchCollector,
        policy: Trainable,
        actor: Trainable,
        staleness: int,
        *,
        restart_every: int,
        iterations: int,
        begin: Callable[[int], None] = lambda number: None,
    ):
        super().__init__(collector, policy, actor)
        self.staleness = staleness
        self.restart_every, self.iterations = restart_every, iterations
        self.begin = begin
        self._thread: ThreadPoolExecutor | None = None
        self._batches: dict[int, Future[Rollouts]] = {}
        self._observed: deque[Future[None]] = deque()
        self._next: int | None = None

    def collect(self, iteration: int) -> Rollouts:
        """Start the batches that act with the weights after `iteration` updates, and wait for the batch of this number;
        re-raises the thread's errors.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="collector")
        # The first batch after a restart is of the present iteration: nothing is collected for updates gone by.
        first = iteration if self._next is None else self._next
        restart = min((iteration // self.restart_every + 1) * self.restart_every, self.iterations)
        self._next = max(first, min(iteration + self.staleness + 1, restart))
        if first < self._next:
            weights = {name: value.detach().clone() for name, value in trainable_state(self.policy).items()}
            for number in range(first, self._next):
                self._batches[number] = self._submit(self._batch, number, iteration, weights)
        rollouts = self._batches.pop(iteration).result()
        while self._observed and self._observed[0].done():
            self._observed.popleft().result()
        return rollouts

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Record the outcomes of the initial states, after the batches that have been started."""
        parts = (rollouts.without(following=True, images=True) for rollouts in (collected, prepared))
        self._observed.append(self._submit(self.collector.observe, *parts))

    def restart(self) -> None:
        """Discard the batches that were started, and start new episodes at the next call."""
        self._wait()
        super().restart()

    def close(self) -> None:
        """Stop the thread after its current batch."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self._batches.clear()
        self._next = None
        super().close()

    def _submit[**P, R](self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        assert self._thread is not None
        # With the context goes the precision that this thread learns in.
        return self._thread.submit(partial(copy_context().run, work, *args, **kwargs))

    def _batch(self, number: int, version: int, weights: Mapping[str, Tensor]) -> Rollouts:
        load_trainable_state(self.actor, weights)
        self.begin(number)
        return self.collector.batch(number, version)

    def _wait(self) -> None:
        """Let all started work end: what it leaves in the collector's state must not depend on timing."""
        for batch in self._batches.values():
            batch.exception()  # nothing needs these batches
        while self._observed:
            self._observed.popleft().result()
        self._batches.clear()
        self._next = None


class DelayedCollector(CopyCollector):
    """Collects synchronously with weights that are `delay` updates old: reproducible staleness.

    Simulates a slow link to the robots, and measures the effect of stale data on an algorithm. The old weights survive
    a restart.
    """

    def __init__(self, collector: BatchCollector, policy: Trainable, actor: Trainable, delay: int):
        super().__init__(collector, policy, actor)
        self.past: deque[dict[str, Tensor]] = deque(maxlen=delay + 1)

    def collect(self, iteration: int) -> Rollouts:
        """Collect with the oldest stored weights, at most `delay` updates old."""
        self.past.append({name: value.detach().clone() for name, value in trainable_state(self.policy).items()})
        load_trainable_state(self.actor, self.past[0])
        # While fewer than delay + 1 weights are there, the oldest is younger than `delay` updates.
        return self.collector.batch(iteration, iteration + 1 - len(self.past))

    def tree(self) -> dict[str, Any]:
        """Return the collector's state and the old weights."""
        return {**super().tree(), "past": {str(place): weights for place, weights in enumerate(self.past)}}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        super().restore(tree)
        self.past.extend(tree["past"][str(place)] for place in range(len(tree["past"])))


def sampling_error_loss(log_ratio: Tensor, mask: Tensor, epsilon: float, kl_weight: float) -> Tensor:
    """Return mean(max(r, clip(r, 1 - eps, 1 + eps))) + kl_weight * mean(r - 1 - log r) over masked steps, a scalar.

    log_ratio, mask: [N, K]. r: probability under the sampling policy divided by that under the policy. The gradient is
    zero below 1 - eps, so no step is pushed further.
    """
    ratio = log_ratio.exp()
    # max(r, clip(r)): above 1 - eps a step is pushed down, below it is left alone.
    surrogate = torch.max(ratio, ratio.clamp(1 - epsilon, 1 + epsilon))
    # E_policy[r - 1 - log r] = KL(policy || actor), each term at least 0.
    divergence = log_ratio.expm1() - log_ratio
    return (step_mean(mask) * torch.where(mask, surrogate + kl_weight * divergence, 0.0)).sum()


class PropsCollector(CopyCollector):
    """Collects each iteration's rollouts in `parts`, all but the first with an adjusted copy of the policy.

    generator: draws the minibatches of the adjustment, which restarts from the policy for each part, so it has no state
    to save. past: number of earlier iterations stored; their rows are appended after the fresh ones, marked by the
    extra `replayed`. rate, epochs, minibatch: settings of its Adam; epsilon: clip width; kl_weight, kl_stop: KL penalty
    toward the policy, and KL at which adjustment stops.
    """

    def __init__(
        self,
        collector: BatchCollector,
        policy: Trainable,
        actor: Trainable,
        instructions: tuple[str, ...],
        generator: torch.Generator,
        parts: int,
        *,
        past: int = 0,
        rate: float = 1e-4,
        epochs: int = 4,
        epsilon: float = 0.1,
        kl_weight: float = 0.1,
        kl_stop: float = 0.03,
        minibatch: int = 2048,
    ):
        super().__init__(collector, policy, actor)
        self.parts = parts
        self.instructions = instructions
        self.generator = generator
        self.past: deque[Rollouts] = deque(maxlen=past)
        self.rate = rate
        self.epochs = epochs
        self.epsilon = epsilon
        self.minibatch = minibatch
        self.kl_weight, self.kl_stop = kl_weight, kl_stop

    def collect(self, iteration: int) -> Rollouts:
        """Return all parts of an iteration followed by the stored rollouts, with log-probabilities under the policy
        itself.
        """
        parts: list[Rollouts] = []
        past = [self._as_own(rollouts) for rollouts in self.past]
        for part in range(self.parts):
            load_trainable_state(self.actor, trainable_state(self.policy))
            if past or parts:
                self._adjust([*past, *parts])
            batch = self.collector.batch(iteration * self.parts + part, iteration)
            parts.append(self._as_own(batch))
        new_rollouts = concatenate(parts)
        if not self.past.maxlen:
            return new_rollouts
        self.past.append(new_rollouts)
        marked_parts = [
            _marked(new_rollouts, False, iteration),
            *(_marked(rollouts, True, iteration) for rollouts in past),
        ]
        return concatenate(marked_parts)

    def report(self, number: int) -> dict[str, float]:
        """Return the metrics of an iteration, summed over its parts; see `Reports`."""
        total = Counter[str]()
        for part in range(self.parts):
            total.update(super().report(number * self.parts + part))
        return dict[str, float](total)

    def tree(self) -> dict[str, Any]:
        """Return the collector's state and the stored rollouts."""
        return {**super().tree(), "past": {str(place): rollouts.tree() for place, rollouts in enumerate(self.past)}}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        super().restore(tree)
        self.past.extend(Rollouts.of(tree["past"][str(place)]) for place in range(len(tree["past"])))

    def _adjust(self, played: list[Rollouts]) -> None:
        """Make the collected actions less likely under the actor, within a trust region.

        Parameters that are frozen in the policy stay frozen here, because a frozen encoder's features are stored with
        the chunks.
        """
        parameters = list(self.actor.parameters())
        for parameter, learns in zip(parameters, self.policy.parameters(), strict=True):
            parameter.requires_grad_(learns.requires_grad)
        optimiser = torch.optim.Adam(list(self.actor.trainable_parameters()), lr=self.rate)
        for batch in self._minibatches([rollouts.flat() for rollouts in played]):
            if not self._step(batch, optimiser):
                break
        self.actor.requires_grad_(False)

    def _minibatches(self, parts: list[Rollouts]) -> Iterator[Rollouts]:
        """Yield minibatches of single action chunks [n, 1], one part after the other in every epoch."""
        draws = self.generator
        for _ in range(self.epochs):
            for rollouts in parts:
                live = rollouts.played.squeeze(1).nonzero().squeeze(1)
                order = live[torch.randperm(len(live), generator=draws, device=draws.device)]
                for index in order.split(self.minibatch):
                    yield rollouts.take(index)

    def _step(self, batch: Rollouts, optimiser: torch.optim.Optimizer) -> bool:
        """Take one adjustment step; return False without a step when the actor is already too far from the policy."""
        everywhere = torch.ones_like(batch.alive)
        logp = scores_of(self.actor, *decisions_at(batch, everywhere, self.instructions)).logp
        # Clamped for the exponential; the stop below ends the adjustment long before a ratio of e^3 is common.
        mask, log_ratio = batch.mask[:, 0], (logp - batch.logp_behaviour[:, 0]).clamp(-3, 3)
        divergence = torch.where(mask, log_ratio.detach().expm1() - log_ratio.detach(), 0.0)  # k3 of the whole decision
        if float(divergence.sum(-1).mean()) > self.kl_stop:
            return False
        loss = sampling_error_loss(log_ratio, mask, self.epsilon, self.kl_weight)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients(list(self.actor.trainable_parameters()), 1.0, "adjusting the sampling policy")
        optimiser.step()
        return True

    def _as_own(self, rollouts: Rollouts) -> Rollouts:
        """Recompute the actor's log-probabilities under the policy, so that the data counts as the policy's own."""
        logp, _ = recompute_log_probs(rollouts, self.policy, self.instructions)
        return replace(rollouts, logp_behaviour=torch.where(rollouts.mask, logp, 0.0))


def _marked(rollouts: Rollouts, replayed: bool, iteration: int) -> Rollouts:
    """Mark whether rows are from an earlier iteration; to the learner all rows belong to the current policy version."""
    current = replace(rollouts, policy_version=torch.full_like(rollouts.policy_version, iteration))
    return current.with_extras(replayed=torch.full_like(rollouts.terminated, replayed))
