"""Models learned beside the policy that say more than an outcome does: process rewards, progress, action values.

A model is a class with `annotate(rollouts, context) -> rollouts`, which learns from the rollouts and then adds what it
has to say to their extras or rewards; `tree()` and `restore(tree)` carry it over a restart.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.policy import Evaluation, TensorObservation
from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.core.segments import Segments
from robopolicy.core.spec import Field
from robopolicy.nn.members import follow
from robopolicy.rl.context import Context
from robopolicy.rl.critic import StateFeatures
from robopolicy.rl.mechanisms import Need, Slot, mechanism


@dataclass(frozen=True)
class Tools:
    """What a model may build on.

    policy: what is fine-tuned; base: a frozen copy of what it came from; teacher: another policy or None; fields: what
    the world shows, by key; history: H frames; instructions: of the world; observe: (rollouts, where [B, T]) -> the
    observation that a policy is given; score: (policy, rollouts, where [B, T]) -> differentiable scores of the n
    decisions `where`.
    """

    policy: Any
    base: Any
    teacher: Any
    fields: Mapping[str, Field]
    history: int
    instructions: tuple[str, ...]
    observe: Callable[[Rollouts, Tensor], TensorObservation]
    score: Callable[[Any, Rollouts, Tensor], Evaluation]


class SideModel(Protocol):
    """See the module."""

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn from the rollouts, then add to their extras or rewards."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        ...


class _Learned:
    """A network with its Adam optimiser, and minibatches of rows."""

    def __init__(self, network: nn.Module, rate: float):
        self.network = network
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        self.optimiser = torch.optim.Adam(self.weights, lr=rate)

    def step(self, loss: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()

    def tree(self) -> dict[str, Any]:
        """Return weights and the optimiser's moments."""
        moments = {str(key): value for key, value in self.optimiser.state_dict()["state"].items()}
        return {"network": self.network.state_dict(), "moments": moments}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        self.network.load_state_dict(tree["network"])
        state = self.optimiser.state_dict()
        self.optimiser.load_state_dict({**state, "state": {int(key): value for key, value in tree["moments"].items()}})


def _batches(count: int, size: int, epochs: int, context: Context) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(count, generator=context.generator, device=context.generator.device).split(size)


class _ImplicitReward(_Learned):
    """r = beta (log phi - log base) of every unit, where phi is a copy of the policy trained on outcomes alone.

    Adds extras["process"] [B, T, K]. The sum over an episode is its logit of success (Rafailov et al. 2024,
    arXiv:2404.12358: a log-ratio is an advantage). On denoising chains the same holds with transition densities.
    """

    def __init__(self, tools: Tools, beta: float, rate: float, epochs: int, minibatch: int):
        phi = copy.deepcopy(tools.policy)
        super().__init__(phi, rate)
        self.tools, self.beta, self.epochs, self.minibatch = tools, beta, epochs, minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn from the outcomes, then add the rewards of the model as it is now (PRIME's order).

        Only groups with different outcomes teach, as in PRIME's online filter: what is common to a start's episodes
        says nothing about its decisions.
        """
        with torch.no_grad():
            reference = self._logp(self.tools.base, rollouts)
        telling = mixed_groups(rollouts).nonzero().squeeze(-1)
        for places in _batches(len(telling), self.minibatch, self.epochs, context):
            index = telling[places]
            part = rollouts.take(index)
            logits = self.beta * (self._logp(self.network, part) - reference[index]).sum((1, 2))
            loss = self.loss(logits, part)
            if loss.requires_grad:
                self.step(loss)
        with torch.no_grad():
            process = self.beta * (self._logp(self.network, rollouts) - reference)
            total = process.sum((1, 2))
            won = rollouts.row_success
            right = ((total > total.mean()) == won).float().mean()
        return rollouts.with_extras(process=process, process_accuracy=right.expand(rollouts.shape))

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the loss of episode logits [b]."""
        raise NotImplementedError

    def _logp(self, policy: Any, rollouts: Rollouts) -> Tensor:
        """Log-probabilities of all that was done, copied prefixes included, [b, t, K], 0 on padding."""
        alive = rollouts.alive
        logp = self.tools.score(policy, rollouts, alive).logp
        return logp.new_zeros(rollouts.mask.shape).index_put((alive,), logp)


@mechanism(
    Slot.MODEL, "prime", source="PRIME, arXiv:2502.01456", needs=(Need.EPISODES, Need.BASE), gives=(Need.IMPLICIT,)
)
class Prime(_ImplicitReward):
    """Dense rewards from success labels alone: an implicit reward trained online with the outcomes' cross-entropy.

    L = CE(sigmoid(beta sum (log phi - log base)), success); use it with advantage=process_rloo. beta: the paper's is
    0.05 for sums over many tokens; denoising log-probabilities that are means over dimensions need more.
    """

    def __init__(self, tools: Tools, *, beta: float = 0.05, rate: float = 1e-4, epochs: int = 1, minibatch: int = 64):
        super().__init__(tools, beta, rate, epochs, minibatch)

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the cross-entropy."""
        return functional.binary_cross_entropy_with_logits(logits, rollouts.row_success.to(logits.dtype))


@mechanism(Slot.MODEL, "oprl", source="OPRL, arXiv:2509.19199", needs=(Need.GROUPS, Need.BASE), gives=(Need.IMPLICIT,))
class Oprl(_ImplicitReward):
    """Implicit rewards from preferences: the better episode of a pair with the same start gets the larger sum (DPO).

    L = -log sigmoid(sum r+ - sum r-) over all pairs of a group with different returns; use it with
    advantage=process_steps.
    """

    def __init__(self, tools: Tools, *, beta: float = 0.05, rate: float = 1e-4, epochs: int = 1, minibatch: int = 64):
        super().__init__(tools, beta, rate, epochs, minibatch)

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn with whole groups side by side."""
        order = rollouts.group.argsort(stable=True)
        back = order.argsort()
        return super().annotate(rollouts.take(order), context).take(back)

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the pairwise loss."""
        returns, group = rollouts.row_return, rollouts.group
        better = (group[:, None] == group[None]) & (returns[:, None] > returns[None] + 1e-6)
        if not bool(better.any()):
            return logits.sum().detach()
        margin = logits[:, None] - logits[None]
        return functional.softplus(-margin[better]).mean()


class _Perceptron(nn.Module):
    """`StateFeatures` and more inputs through an MLP with Mish to `outputs` numbers."""

    def __init__(self, tools: Tools, extra: int, outputs: int, width: int):
        super().__init__()
        self.features = StateFeatures(tools.fields, tools.history, tools.instructions)
        self.layers = nn.Sequential(
            nn.Linear(self.features.features + extra, width), nn.Mish(), nn.Linear(width, width), nn.Mish()
        )
        self.head = nn.Linear(width, outputs)
        self.fitted = False

    def fit(self, rollouts: Rollouts) -> None:
        if not self.fitted:
            self.features.fit(visible(rollouts, rollouts.alive))
            self.fitted = True

    def forward(self, observation: Mapping[str, Any], *extra: Tensor) -> Tensor:
        return self.head(self.layers(torch.cat([self.features(observation), *extra], -1)))


@mechanism(Slot.MODEL, "progress", source="SPA-RL, arXiv:2505.20732", needs=(Need.EPISODES,))
class Progress(_Learned):
    """Share an episode's outcome out among its decisions: contributions c_t with (sum_t c_t - success)^2 small.

    c_t is read from the states before and after the decision, and alpha c_t replaces the world's rewards (at the last
    step of the decision); use it with any advantage. On robots every decision can be executed, so SPA's grounding term
    has nothing to say.
    """

    def __init__(
        self, tools: Tools, *, alpha: float = 1.0, rate: float = 1e-3, epochs: int = 4, minibatch: int = 64,
        width: int = 128,
    ):  # fmt: skip
        features = StateFeatures(tools.fields, tools.history, tools.instructions).features
        super().__init__(_Perceptron(tools, features, 1, width).to(_device(tools)), rate)
        self.alpha, self.epochs, self.minibatch = alpha, epochs, minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn, then replace the rewards."""
        assert isinstance(self.network, _Perceptron)
        self.network.fit(rollouts)
        for index in _batches(len(rollouts.group), self.minibatch, self.epochs, context):
            part = rollouts.take(index)
            self.step((self._contributions(part).sum(1) - part.row_success.float()).square().mean())
        with torch.no_grad():
            contribution = self.alpha * self._contributions(rollouts)
        last = (rollouts.valid.sum(-1) - 1).clamp(min=0)
        reward = torch.zeros_like(rollouts.valid, dtype=torch.float32)
        return replace(rollouts, rewards={"progress": reward.scatter(-1, last[..., None], contribution[..., None])})

    def _contributions(self, rollouts: Rollouts) -> Tensor:
        """Return c [b, t], 0 on padding."""
        assert isinstance(self.network, _Perceptron)
        alive = rollouts.alive
        after = self.network.features(visible(rollouts, alive, following=True))
        found = self.network(visible(rollouts, alive), after).squeeze(-1)
        return torch.zeros(alive.shape, device=alive.device).index_put((alive,), found)

    def tree(self) -> dict[str, Any]:
        """Return weights, moments and whether the inputs are standardised."""
        assert isinstance(self.network, _Perceptron)
        return {**super().tree(), "fitted": self.network.fitted}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        assert isinstance(self.network, _Perceptron)
        self.network.fitted = tree["fitted"]


class ValueModel(nn.Module):
    """An ensemble of Q(state, action chunk) and a V(state), in units of success or of scaled return."""

    def __init__(self, tools: Tools, members: int, width: int):
        super().__init__()
        chunk = tools.policy.spec.chunk * tools.policy.spec.action.size
        self.q = nn.ModuleList(_Perceptron(tools, chunk, 1, width) for _ in range(members))
        self.v = _Perceptron(tools, 0, 1, width)

    def fit(self, rollouts: Rollouts) -> None:
        """Fit the standardisation of the inputs, once."""
        for part in (*self.q, self.v):
            part.fit(rollouts)  # type: ignore[operator]

    def values(self, observation: Mapping[str, Any]) -> Tensor:
        """V [N]."""
        return self.v(observation).squeeze(-1)

    def members(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Q of every member for action chunks [N, C, A], [M, N]."""
        flat = actions.flatten(1)
        return torch.stack([member(observation, flat).squeeze(-1) for member in self.q])

    def action_values(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """The smallest member's Q of action chunks [N, C, A], [N]."""
        return self.members(observation, actions).min(0).values


@mechanism(Slot.MODEL, "q_ensemble", source="Digi-Q, arXiv:2502.15760; PAV, arXiv:2410.08146", gives=(Need.VALUES,))
class QEnsemble(_Learned):
    """Action values of what was done: Q(s, a) by temporal differences to a V(s) (target=td), or by outcomes alone.

    td: Q -> R + discount^h V(s'), V -> Q(s, a), with a slow copy of V as target; monte_carlo: both -> 1 where the
    episode succeeded later. Adds extras["q"] and ["v"] [B, T]; advantage=q_values, rewards=[pav] and
    auxiliaries=[best_of_n, spo] use them. It sees the vectors of the state, which are the frozen features of Digi-Q
    here.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        target: str = "monte_carlo",
        members: int = 2,
        rate: float = 1e-3,
        epochs: int = 16,
        minibatch: int = 1024,
        width: int = 256,
        tau: float = 0.05,
    ):
        super().__init__(ValueModel(tools, members, width).to(_device(tools)), rate)
        if target not in ("td", "monte_carlo"):
            raise _unknown("q_ensemble.target", target, ("td", "monte_carlo"))
        self.slow = copy.deepcopy(self.network).requires_grad_(False)
        self.by_outcome, self.epochs, self.minibatch, self.tau = target == "monte_carlo", epochs, minibatch, tau

    @property
    def model(self) -> ValueModel:
        """The networks."""
        assert isinstance(self.network, ValueModel)
        return self.network

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn, then add what it thinks of every decision."""
        assert isinstance(self.slow, ValueModel)
        if not self.model.v.fitted:
            self.model.fit(rollouts)
            self.slow.load_state_dict(self.model.state_dict())
        alive = rollouts.alive
        before, after = visible(rollouts, alive), visible(rollouts, alive, following=True)
        actions, over = rollouts.actions[alive], rollouts.terminated[alive]
        reward, decay = rollouts.reward[alive], context.discount ** rollouts.duration[alive].float()
        outcome = succeeds_later(rollouts)[alive].float()
        for index in _batches(len(actions), self.minibatch, self.epochs, context):
            here, then = _take(before, index), _take(after, index)
            q, v = self.model.members(here, actions[index]), self.model.values(here)
            with torch.no_grad():
                following = self.slow.values(then) * ~over[index]
                goal = outcome[index] if self.by_outcome else reward[index] + decay[index] * following
                settled = outcome[index] if self.by_outcome else q.min(0).values
            self.step((q - goal).square().mean() + (v - settled).square().mean())
            follow(self.slow, self.network, self.tau)
        with torch.no_grad():
            q, v = self.model.action_values(before, actions), self.model.values(before)
        empty = torch.zeros(alive.shape, device=alive.device)
        return rollouts.with_extras(q=empty.index_put((alive,), q), v=empty.index_put((alive,), v))

    def tree(self) -> dict[str, Any]:
        """Return weights, moments, the slow copy and whether the inputs are standardised."""
        return {**super().tree(), "slow": self.slow.state_dict(), "fitted": self.model.v.fitted}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.slow.load_state_dict(tree["slow"])
        for part in (*self.model.q, self.model.v):
            part.fitted = tree["fitted"]  # type: ignore[assignment]


@mechanism(Slot.MODEL, "discriminator", source="AFD", needs=(Need.TEACHER,), gives=(Need.PREFERENCE,))
class Discriminator(_Learned):
    """Tell the teacher's action chunks from the student's in the states the student visits: who is preferred where.

    Bradley-Terry: -log sigmoid(D(s, teacher's) - D(s, student's)). Adds extras["preference"] [B, T] = D(s, student's),
    which advantage=discriminator turns into how teacher-like a decision was; the teacher may be any policy, and none of
    its probabilities are needed.
    """

    def __init__(self, tools: Tools, *, rate: float = 1e-3, epochs: int = 4, minibatch: int = 1024, width: int = 256):
        spec = tools.policy.spec
        super().__init__(_Perceptron(tools, spec.chunk * spec.action.size, 1, width).to(_device(tools)), rate)
        self.tools, self.epochs, self.minibatch = tools, epochs, minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Ask the teacher what it would do in every state, learn, then add the preferences."""
        assert isinstance(self.network, _Perceptron)
        self.network.fit(rollouts)
        alive = rollouts.alive
        seen, told = visible(rollouts, alive), self.tools.observe(rollouts, alive)
        chunk = rollouts.actions.shape[2]
        theirs = self.tools.teacher.act(told, context.generator, deterministic=True).actions[:, :chunk].flatten(1)
        mine = rollouts.actions[alive].flatten(1)
        for index in _batches(len(mine), self.minibatch, self.epochs, context):
            here = _take(seen, index)
            margin = self.network(here, theirs[index]) - self.network(here, mine[index])
            self.step(functional.softplus(-margin).mean())
        with torch.no_grad():
            found = self.network(seen, mine).squeeze(-1)
        return rollouts.with_extras(preference=torch.zeros(alive.shape, device=alive.device).index_put((alive,), found))

    def tree(self) -> dict[str, Any]:
        """Return weights, moments and whether the inputs are standardised."""
        assert isinstance(self.network, _Perceptron)
        return {**super().tree(), "fitted": self.network.fitted}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        assert isinstance(self.network, _Perceptron)
        self.network.fitted = tree["fitted"]


def mixed_groups(rollouts: Rollouts) -> Tensor:
    """Return which rows are of groups in which some episodes did better than others, [B] bool."""
    groups = Segments.of(rollouts.group)
    return (groups.maximum(rollouts.row_return) - groups.minimum(rollouts.row_return))[groups.index] > 1e-6


def succeeds_later(rollouts: Rollouts) -> Tensor:
    """Return whether an episode succeeds at a decision or after it, before it ends, [B, T] bool."""
    won = torch.zeros_like(rollouts.success[:, 0])
    columns = []
    for column in reversed(range(rollouts.shape[1])):
        won = (rollouts.success[:, column] & rollouts.alive[:, column]) | (won & ~rollouts.ended[:, column])
        columns.append(won)
    return torch.stack(columns[::-1], 1)


def _take(observation: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {key: value[index] for key, value in observation.items()}


def _device(tools: Tools) -> torch.device:
    return next(tools.policy.parameters()).device


def _unknown(option: str, value: str, known: tuple[str, ...]) -> Exception:
    from robopolicy.core.errors import ConfigError, did_you_mean

    return ConfigError(f"finetune.options.{option}={value} is not known.{did_you_mean(value, known)}")
