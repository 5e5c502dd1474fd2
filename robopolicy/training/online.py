"""Online training loop of an agent with critics: act, store, update, and measure the initial performance dip.

A frozen policy acts first (warm-up; WSRL, Zhou et al. 2024, arXiv:2412.07762). Then every action chunk is followed by
updates on batches of the agent's own data, optionally mixed with a fraction of recorded data (RLPD, Ball et al. 2023,
arXiv:2302.02948). One transition is a whole chunk; its backup spans the executed steps. A time limit is not treated as
the end of the task.

Episodes are played in batches: all rows start together, and the next batch starts when all have ended. Each batch
depends only on the state before it, so a killed run resumes from its last resume point with a bit-identical result, in
any world.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.player import PlayedStep, Player
from robopolicy.core.policy import Policy, TensorObservation, to_tensors
from robopolicy.core.progress import Advance, progress
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import Observation, require_fit
from robopolicy.core.transitions import Transitions
from robopolicy.core.world import Rows, World
from robopolicy.nn.optimisers import require_finite
from robopolicy.operators.operated_world import OperatedWorld
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.rl.offline.sac import Cql
from robopolicy.training.configuration import OnlineConfig
from robopolicy.training.critics import RunsAgent, SteeredPolicy
from robopolicy.training.state import load_trainer, save_trainer

FIRST = 1024
"""Initial capacity in chunks; it doubles when full."""
Frozen = Callable[[TensorObservation, Tensor, torch.Generator], Tensor]
"""(observations [B, H, ...], states [B, S]) -> flat actions [B, A] in the agent's form, from the warm-up policy."""
Evaluate = Callable[[Policy], Mapping[str, float]]
"""Policy -> metrics, including `success` (or the metric that selects policies)."""
Begins = Literal["warm-up", "recorded", "already"]
"""Source of an agent's state normalisation: states of the warm-up, recorded states, or its earlier training."""
TRANSITION_COLUMNS = frozenset(item.name for item in fields(Transitions))
INTERVENED = "intervened"
"""Column of the replay buffer: whether an operator acted in a chunk."""
COUNTS = ("wave", "env_steps", "updates", "episodes", "basis")
"""Counters of a run."""


@dataclass
class ReplayBuffer:
    """Replay buffer of action chunks in order of collection, with all columns; nothing is ever dropped.

    columns: the tensors of `Transitions`, with spare capacity, and further ones of the policy (`RunsAgent.remembered`);
    count: number of stored chunks.
    """

    columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    count: int = 0

    def __len__(self) -> int:
        return self.count

    @property
    def transitions(self) -> Transitions:
        """All stored transitions, a view."""
        columns = {name: column[: self.count] for name, column in self.columns.items() if name in TRANSITION_COLUMNS}
        return Transitions(**columns)

    def add(self, state: Tensor, action: Tensor, played: Mapping[str, Tensor]) -> Tensor:
        """Store n chunks, states [n, S] and actions [n, A]; return their indices, [n].

        played: reward, next_state, terminated, success, episode and decay, as in `Transitions`, each [n, ...]. The rest
        of the episode is not known yet (see `tell`): outcomes are minus infinity, next actions unknown.
        """
        new_columns = {
            "state": state,
            "action": action,
            **played,
            "next_action": torch.zeros_like(action),
            "next_known": torch.zeros_like(played["terminated"]),
            "outcome": torch.full_like(played["reward"], -torch.inf),
        }
        end = self.count + len(state)
        for name, value in new_columns.items():
            column = self.columns.get(name)
            if column is None or len(column) < end:
                larger = value.new_zeros((max(FIRST, 2 * end), *value.shape[1:]))
                if column is not None:
                    larger[: self.count] = column[: self.count]
                self.columns[name] = column = larger
            column[self.count : end] = value
        places = torch.arange(self.count, end, device=state.device)
        self.count = end
        return places

    def tell(self, wave: Sequence[tuple[Tensor, Tensor]], rows: int) -> None:
        """Fill in the return from each chunk of complete episodes, and the action after it.

        wave: per policy call of the batch of episodes, the chunks' indices [n] and their `rows` [n]. The return stays
        minus infinity when a time limit, not the end of the task, ended the episode.
        """
        if not wave:
            return
        columns = self.columns
        reward, action = columns["reward"], columns["action"]
        next_return = reward.new_full((rows,), -torch.inf)
        following = action.new_zeros((rows, action.shape[1]))
        has_next = torch.zeros(rows, dtype=torch.bool, device=reward.device)
        # G_t = r_t + decay_t G_{t+1}, from the last turn back; -inf stays -inf where the end was a time limit.
        for places, of in reversed(wave):
            value = torch.where(columns["terminated"][places], 0.0, next_return[of])
            next_return[of] = reward[places] + columns["decay"][places] * value
            columns["outcome"][places] = next_return[of]
            columns["next_action"][places], columns["next_known"][places] = following[of], has_next[of]
            following[of], has_next[of] = action[places], True

    def tree(self) -> dict[str, Tensor]:
        """Return the contents in a form that can be saved."""
        return {name: column[: self.count].clone() for name, column in self.columns.items()}

    @staticmethod
    def restored(tree: Mapping[str, Tensor], device: torch.device) -> "ReplayBuffer":
        """Rebuild the buffer from `tree`."""
        columns = {name: column.to(device) for name, column in tree.items()}
        return ReplayBuffer(columns, len(columns["state"]) if columns else 0)


@dataclass(frozen=True)
class OnlineResult:
    """Result of a run: control steps, updates, episodes, and a record of every evaluation in order."""

    env_steps: int
    updates: int
    episodes: int
    evaluations: tuple[Mapping[str, Any], ...]

    def dip(self, by: str = "deterministic_success") -> float | None:
        """Return the largest drop of the metric `by` below that of the first evaluation, 0 if none; None without
        evaluations.
        """
        values = [float(record[by]) for record in self.evaluations if by in record]
        return max(values[0] - min(values), 0.0) if values else None


def plays_noise(policy: SteeredPolicy) -> Frozen:
    """Return the unsteered base of a steered policy: standard normal noise, in the agent's bounds."""
    shape = policy.base.noise_shape

    def act(seen: TensorObservation, state: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn((len(state), *shape), generator=generator, device=generator.device)
        return policy.interface.to_agent(noise.to(state.device))

    return act


def plays_policy(policy: Policy, acting: RunsAgent) -> Frozen:
    """Return a policy that acts in place of the agent of `acting`, without exploration noise."""

    def act(seen: TensorObservation, state: Tensor, generator: torch.Generator) -> Tensor:
        return acting.interface.to_agent(policy.act(seen, generator, deterministic=True).actions)

    return act


def plays_agent(agent: OfflineAgent) -> Frozen:
    """Return an agent that samples its actions with its current weights; pass a copy, so that later training does not
    change it.
    """
    return lambda seen, state, generator: agent.act(state, generator)


def explores(policy: RunsAgent) -> Frozen:
    """Return a policy that explores with its current weights; pass a copy, so that later training does not change
    it.
    """
    return lambda seen, state, generator: policy.explore(seen, state, generator, None)


class Explorer:
    """The agent as actor of a world, which also returns states and flat actions; a frozen policy can act in its place.

    share: fraction of chunks from the frozen policy; ahead: base chunks [B, K, A'] at the next observation, sampled
    already, None if there are none; seen: the last observation.
    """

    def __init__(self, policy: RunsAgent, frozen: Frozen, generators: Generators):
        self.policy = policy
        self.frozen = frozen
        self.generators = generators
        self.share = 1.0
        self.ahead: Tensor | None = None
        self.seen: TensorObservation = {}

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy for `rows` [R], or for all when None."""
        self.policy.reset(rows)

    @torch.no_grad()
    def choose(self, observation: Observation) -> tuple[Array, tuple[Tensor, Tensor]]:
        """Return the next chunk [B, C, A] in the world's units, with the states [B, S] and flat actions [B, A']."""
        tensors = self.seen = to_tensors(observation, self.generators.device)
        state = self.policy.interface.state(tensors)
        if self.share == 1:
            action = self.frozen(tensors, state, self.generators["frozen"])
        else:
            action = self.policy.explore(tensors, state, self.generators["act"], self.ahead)
            if self.share:
                draws = torch.rand(len(state), generator=self.generators["turns"], device=self.generators.device)
                use_frozen = (draws < self.share)[:, None]
                action = torch.where(use_frozen, self.frozen(tensors, state, self.generators["frozen"]), action)
        chunk = self.policy.actions_of(tensors, action).cpu().double()
        return chunk.numpy(), (state, action)  # pyright: ignore[reportUnknownMemberType]


class Online:
    """State and steps of one `learn_online` run."""

    def __init__(
        self,
        policy: RunsAgent,
        frozen: Frozen,
        config: OnlineConfig,
        generators: Generators,
        *,
        recorded: Transitions | None,
        begins: Begins,
        evaluate: Evaluate | None,
        run: RunFolder | None,
        operated: OperatedWorld | None = None,
    ):
        self.policy = policy
        self.agent = policy.agent
        self.operated = operated
        self.config = config
        self.begins = begins
        self.generators, self.recorded = generators, recorded
        self.evaluate, self.run = evaluate, run
        self.explorer = Explorer(policy, frozen, generators)
        self.experience = ReplayBuffer()
        self.wave = self.env_steps = self.updates = self.episodes = self.basis = 0
        self.owed, self.switched = 0.0, False
        self.evaluations: list[dict[str, Any]] = []
        self.figures: dict[str, Tensor] = {}

    def play(self, player: Player[tuple[Tensor, Tensor]], seed: int, advance: Advance) -> None:
        """Play a batch of episodes within the step budget; after the warm-up, update after every policy call."""
        chunk, rows = self.policy.spec.chunk, player.world.batch_size
        # As many episodes as can each take one more decision within the budget.
        count = min(rows, (self.config.steps - self.env_steps) // chunk)
        self.wave += 1
        player.start_batch(episode_seeds(seed, f"online/{self.wave}", count))
        self.explorer.ahead = None
        first, size = self.episodes, len(self.experience)
        updates = self.updates
        successes = np.zeros(rows, dtype=bool)
        self.episodes += count
        turns: list[tuple[Tensor, Tensor]] = []
        self.figures = {}  # a wave logs its own, as it would after a kill
        self.explorer.share = self.share
        for part in player:
            before = self.env_steps
            turns.append(self.keep(part, first))
            successes[part.running] = part.step.success[part.running]
            if not self.warming_up:
                self.learn(len(turns[-1][1]))
            self.explorer.share = self.share
            advance(self.env_steps - before, f"{self.updates} updates")
            # Stop before the budget is exceeded: what is not complete by then has no outcome, as behind a time limit.
            if self.env_steps + player.running.sum() * chunk > self.config.steps:
                break
        self.experience.tell(turns, rows)
        columns, generators = self.experience.columns, self.generators
        self.figures |= self.policy.learn_beside(columns, len(self.experience), self.updates - updates, generators)
        if (by_operator := columns.get(INTERVENED)) is not None:  # fraction of chunks in which an operator acted
            self.figures[INTERVENED] = by_operator[size : len(self.experience)].float().mean()
        self.log(float(successes[:count].mean()))

    @property
    def warming_up(self) -> bool:
        """Whether the frozen policy still acts alone."""
        return self.env_steps < self.config.warmup

    @property
    def share(self) -> float:
        """Current fraction of chunks from the frozen policy."""
        return 1.0 if self.warming_up else self.config.base_policy_fraction

    def keep(self, played: PlayedStep[tuple[Tensor, Tensor]], first: int) -> tuple[Tensor, Tensor]:
        """Store the executed chunks; return their indices and rows, both [n].

        first: number of the episode in row 0.
        """
        state, action = played.info
        step = played.step
        operated = self.operated
        if operated is not None:  # operators' actions are learned from, too
            executed = torch.from_numpy(operated.executed).to(action)
            action = torch.where(self.intervened[:, None], self.policy.interface.to_agent(executed), action)
        device = self.generators.device
        rows = torch.from_numpy(np.flatnonzero(played.running)).to(device)
        valid = torch.from_numpy(np.asarray(step.valid, dtype=np.float32)).to(device)
        reward = torch.from_numpy(np.asarray(step.reward, dtype=np.float32)).to(device)
        discount = self.agent.discount
        # A chunk is one decision: its rewards are discounted within it, and its backup by gamma^(executed steps).
        worth = discount ** torch.arange(valid.shape[1], device=device)
        seen = to_tensors(step.observation, device)
        columns = {
            "reward": (reward * valid * worth).sum(1),
            "next_state": self.policy.interface.state(seen),
            "terminated": torch.from_numpy(np.array(step.terminated)).to(device),
            "success": torch.from_numpy(np.array(step.success)).to(device),
            "episode": first + torch.arange(len(valid), device=device),
            "decay": discount ** valid.sum(1),
            **self.policy.remembered(self.explorer.seen, seen),
        }
        self.explorer.ahead = self.policy.propose(seen, self.generators["propose"])
        if self.explorer.ahead is not None:
            columns["next_candidates"] = self.explorer.ahead
        if operated is not None:
            columns[INTERVENED] = self.intervened
        self.env_steps += int(valid[rows].sum())
        rows_played = {name: column[rows] for name, column in columns.items()}
        return self.experience.add(state[rows], action[rows], rows_played), rows

    def learn(self, decisions: int) -> None:
        """Take the updates due for this number of new chunks, with the evaluations due in between."""
        if not self.switched:
            self.switch()
        # Fractions of an update are carried over, so `updates` may be below one a decision.
        self.owed += decisions * self.config.utd_ratio
        while self.owed >= 1:
            self.figures = self.agent.update(self.batch(), self.generators["update"])
            self.owed, self.updates = self.owed - 1, self.updates + 1
            interval = self.config.evaluate_every
            if self.updates in self.config.evaluate_at or (interval and self.updates % interval == 0):
                self.look()

    def switch(self) -> None:
        """Switch from the frozen policy to the agent, and evaluate before any update."""
        self.switched = True
        if self.begins == "warm-up":
            self.basis = len(self.experience)
            self.agent.begin(self.experience.transitions)
        if 0 in self.config.evaluate_at:
            self.look()
        self.policy.enable_agent()

    def batch(self) -> Transitions:
        """Sample a batch: own chunks, and the retained fraction of recorded ones."""
        config, draws = self.config, self.generators["batches"]
        retained = round(config.offline_ratio * config.batch_size)
        own = self.experience.transitions
        own_batch = own.draw(config.batch_size - retained, draws)
        helped = self.experience.columns.get(INTERVENED)
        if retained and helped is not None and (places := helped[: len(own)].nonzero()[:, 0]).numel():
            # What operators did is drawn from as demonstrations are (HIL-SERL), each chunk alike.
            demonstrations = 0 if self.recorded is None else len(self.recorded)
            drawn = torch.randint(demonstrations + len(places), (retained,), generator=draws, device=draws.device)
            drawn = drawn.to(places.device)
            parts = [own_batch, own.take(places[drawn[drawn >= demonstrations] - demonstrations])]
            if self.recorded is not None:
                parts.append(self.recorded.take(drawn[drawn < demonstrations]))
            return Transitions.join(parts)
        if not retained or self.recorded is None:
            return own_batch if not retained else own.draw(config.batch_size, draws)
        return Transitions.join([own_batch, self.recorded.draw(retained, draws)])

    @property
    def intervened(self) -> Tensor:
        """Rows [B] bool in whose last chunk an operator acted."""
        assert self.operated is not None
        return torch.from_numpy(self.operated.operated.any(1)).to(self.generators.device)

    @property
    def seen(self) -> bool:
        """Whether the current policy has been evaluated, or no evaluation is configured."""
        return self.evaluate is None or (bool(self.evaluations) and self.evaluations[-1]["updates"] == self.updates)

    def look(self) -> None:
        """Evaluate the current policy, unless it already has been, and record the result."""
        if self.evaluate is None or self.seen:
            return
        metrics = {f"deterministic_{name}": value for name, value in self.evaluate(self.policy).items()}
        self.evaluations.append({**self.where(), **metrics})
        if self.run is not None:
            self.run.log(self.evaluations[-1])

    def finish(self) -> None:
        """Evaluate and save at the end, in one iteration, so that a kill in between does not log a second line."""
        if not self.seen:
            self.wave += 1
            self.look()
        self.save()

    def where(self) -> dict[str, int]:
        """Return the progress counters by name."""
        return {"iteration": self.wave, "updates": self.updates, "env_steps": self.env_steps}

    def log(self, succeeded: float) -> None:
        """Log metrics of the batch of episodes; raises NonFiniteError when training has diverged."""
        for name, value in self.figures.items():
            require_finite(name, value, f"update {self.updates}")
        if self.run is not None:
            figures = {name: float(value) for name, value in self.figures.items()}
            self.run.log({**self.where(), "episodes": self.episodes, "success": succeeded, **figures})

    def save(self) -> None:
        """Write the policy and the resume point."""
        if self.run is None:
            return
        self.policy.save(self.run.checkpoint)
        counts = {name: getattr(self, name) for name in COUNTS}
        tree = {
            **counts,
            "owed": self.owed,
            "switched": self.switched,
            "evaluations": self.evaluations,
            "agent": self.agent.tree(),
            "beside": self.policy.tree_beside(),
            "experience": self.experience.tree(),
            "generators": self.generators.state(),
        }
        save_trainer(self.run.path / "resume" / "online", tree)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `save` wrote."""
        for name in COUNTS:
            setattr(self, name, int(saved[name]))
        self.owed, self.switched = float(saved["owed"]), bool(saved["switched"])
        self.evaluations = list(saved["evaluations"])
        self.experience = ReplayBuffer.restored(saved["experience"], self.generators.device)
        self.agent.restore(saved["agent"])
        self.policy.restore_beside(saved.get("beside", {}))
        if self.switched:
            self.policy.enable_agent()
        # Statistics are not saved but taken again, of the same first decisions.
        if self.basis:
            self.agent.begin(self.experience.transitions.take(torch.arange(self.basis)))
        self.generators.restore(saved["generators"])


def learn_online(
    policy: RunsAgent,
    world: World,
    frozen: Frozen,
    config: OnlineConfig,
    *,
    recorded: Transitions | None = None,
    begins: Begins = "warm-up",
    evaluate: Evaluate | None = None,
    seed: int = 0,
    run: RunFolder | None = None,
) -> OnlineResult:
    """Train the agent of `policy` on its own data in `world`, in place, until the step budget is used up.

    frozen: policy of the warm-up; recorded: transitions that `retain` samples from, in the agent's form; begins: source
    of the agent's state normalisation. run: receives lines of metrics, `checkpoint/` and a resume point; after a kill,
    the same call resumes with a bit-identical result. Raises ConfigError when recorded data is requested and missing,
    SpecError when policy and world do not match, NonFiniteError naming the update.
    """
    operated = world if isinstance(world, OperatedWorld) else None
    if operated is not None and isinstance(policy, SteeredPolicy):
        raise ConfigError(
            "Operators act in the world, and online.method=dsrl learns noise: use online.method=actions or edit."
        )
    if recorded is None and (begins == "recorded" or (config.offline_ratio and operated is None)):
        raise ConfigError(
            f"offline_ratio={config.offline_ratio:g} samples from recorded action chunks, and there are none."
        )
    require_fit(policy.spec, world.spec)
    generators = Generators(derive_seed(seed, "online"), next(policy.agent.parameters()).device)
    switch_to_online(policy.agent, config)
    parts: dict[str, Any] = {"recorded": recorded, "begins": begins, "evaluate": evaluate}
    online = Online(policy, frozen, config, generators, **parts, run=run, operated=operated)
    state = None if run is None else load_trainer(run.path / "resume" / "online")
    if state is not None:
        online.restore(state)
    if recorded is not None and begins == "recorded":
        policy.agent.begin(recorded)
    if run is not None:
        run.rewind("iteration", online.wave)
    player = Player(world, online.explorer)
    with progress("Online training", config.steps) as advance:
        advance(online.env_steps)
        while config.steps - online.env_steps >= policy.spec.chunk:
            online.play(player, seed, advance)
            if online.wave % config.checkpoint_every == 0:
                online.save()
    online.finish()
    return OnlineResult(online.env_steps, online.updates, online.episodes, tuple(online.evaluations))


def switch_to_online(agent: OfflineAgent, config: OnlineConfig) -> None:
    """Reconfigure an agent for the switch from recorded data to the world; see `OnlineConfig`."""
    if config.moments == "reset":
        for optimiser in agent.optimisers.values():
            # Adam's moments are of the recorded data's gradients, which the first online steps would follow.
            optimiser.state.clear()
    if isinstance(agent, Cql) and not config.conservative:
        # Pessimism about unrecorded actions protects offline; online it would hold back what is just being tried.
        agent.config = replace(agent.config, alpha=0.0, calibrated=False)


keep_former_names(__name__, {"Experience": "ReplayBuffer", "into_the_world": "switch_to_online"})
