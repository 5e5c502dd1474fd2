"""The loop in which an agent with critics learns from its own decisions: play, keep, update, and look at the dip.

A frozen policy plays first (WSRL, Zhou et al. 2024, arXiv:2412.07762); then every decision is followed by updates on
batches of the agent's own decisions, with or without a share of recorded ones (RLPD, Ball et al. 2023,
arXiv:2302.02948). A decision is a whole chunk, and its backup reaches over as many steps as were executed. A time limit
is no end of the task.

Episodes are played in waves: all rows begin together, and the next wave begins when all have ended. Everything in a
wave follows from what there was before it, so a run that is killed goes on from its last resume point and ends bit for
bit in the same place, whatever the world is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.player import PlayedStep, Player
from robopolicy.core.policy import Policy, TensorObservation, to_tensors
from robopolicy.core.progress import Advance, progress
from robopolicy.core.randomness import Generators, derive, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import Observation, require_fit
from robopolicy.core.transitions import Transitions
from robopolicy.core.world import Rows, World
from robopolicy.nn.optimisers import require_finite
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.rl.offline.sac import Cql
from robopolicy.training.configuration import OnlineConfig
from robopolicy.training.critics import Acts, SteeredPolicy
from robopolicy.training.state import load_trainer, save_trainer

FIRST = 1024
"""Decisions that there is room for at first; the room doubles."""
Frozen = Callable[[TensorObservation, Tensor, torch.Generator], Tensor]
"""(observations [B, H, ...], states [B, S]) -> flat actions [B, A] as the agent has them, by who plays the warm-up."""
Evaluate = Callable[[Policy], Mapping[str, float]]
"""Policy -> figures, among them `success` (or what else it is judged by)."""
Begins = Literal["warm-up", "recorded", "already"]
"""What an agent standardises states by: those of the warm-up, recorded ones, or what it did before it came here."""
COUNTS = ("wave", "env_steps", "updates", "episodes", "basis")
"""What a run counts."""


@dataclass
class Experience:
    """Decisions in the order in which they were made, every column known; nothing is ever dropped.

    columns: the tensors of `Transitions`, longer than what is held; count: decisions held.
    """

    columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    count: int = 0

    def __len__(self) -> int:
        return self.count

    @property
    def transitions(self) -> Transitions:
        """All that is held, a view."""
        return Transitions(**{name: column[: self.count] for name, column in self.columns.items()})

    def add(self, state: Tensor, action: Tensor, played: Mapping[str, Tensor]) -> Tensor:
        """Keep n decisions, states [n, S] and actions [n, A]; return where they are, [n].

        played: reward, next_state, terminated, success, episode and decay, as in `Transitions`, each [n, ...]. What
        follows in the episode is not known yet (see `tell`): outcomes are minus infinity, next actions unknown.
        """
        fresh = {
            "state": state,
            "action": action,
            **played,
            "next_action": torch.zeros_like(action),
            "next_known": torch.zeros_like(played["terminated"]),
            "outcome": torch.full_like(played["reward"], -torch.inf),
        }
        end = self.count + len(state)
        for name, value in fresh.items():
            column = self.columns.get(name)
            if column is None or len(column) < end:
                grown = value.new_zeros((max(FIRST, 2 * end), *value.shape[1:]))
                if column is not None:
                    grown[: self.count] = column[: self.count]
                self.columns[name] = column = grown
            column[self.count : end] = value
        places = torch.arange(self.count, end, device=state.device)
        self.count = end
        return places

    def tell(self, wave: Sequence[tuple[Tensor, Tensor]], rows: int) -> None:
        """Fill in what decisions of whole episodes led to: the return from each on, and the action after it.

        wave: of every turn, where its decisions are [n] and in which of the `rows` they were made [n]. The return stays
        minus infinity where a time limit, not the end of the task, ended the episode.
        """
        if not wave:
            return
        columns = self.columns
        reward, action = columns["reward"], columns["action"]
        ahead = reward.new_full((rows,), -torch.inf)
        following = action.new_zeros((rows, action.shape[1]))
        known = torch.zeros(rows, dtype=torch.bool, device=reward.device)
        # G_t = r_t + decay_t G_{t+1}, from the last turn back; -inf stays -inf where the end was a time limit.
        for places, of in reversed(wave):
            value = torch.where(columns["terminated"][places], 0.0, ahead[of])
            ahead[of] = reward[places] + columns["decay"][places] * value
            columns["outcome"][places] = ahead[of]
            columns["next_action"][places], columns["next_known"][places] = following[of], known[of]
            following[of], known[of] = action[places], True

    def tree(self) -> dict[str, Tensor]:
        """Return what is held, as files can hold it."""
        return {name: column[: self.count].clone() for name, column in self.columns.items()}

    @staticmethod
    def restored(tree: Mapping[str, Tensor], device: torch.device) -> "Experience":
        """Rebuild from `tree`."""
        columns = {name: column.to(device) for name, column in tree.items()}
        return Experience(columns, len(columns["state"]) if columns else 0)


@dataclass(frozen=True)
class OnlineResult:
    """What came of it: control steps, updates and episodes, and a record of every evaluation, in order."""

    env_steps: int
    updates: int
    episodes: int
    evaluations: tuple[Mapping[str, Any], ...]

    def dip(self, by: str = "deterministic_success") -> float | None:
        """Return how far the figure `by` fell below that of the first evaluation, 0 for not; None without any."""
        found = [float(record[by]) for record in self.evaluations if by in record]
        return max(found[0] - min(found), 0.0) if found else None


def plays_noise(policy: SteeredPolicy) -> Frozen:
    """Return the base of a steered policy as it is: standard normal noise, in the agent's box."""
    shape = policy.base.noise_shape

    def act(seen: TensorObservation, state: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn((len(state), *shape), generator=generator, device=generator.device)
        return policy.interface.to_agent(noise.to(state.device))

    return act


def plays_policy(policy: Policy, acting: Acts) -> Frozen:
    """Return a policy that decides in the place of the agent of `acting`, without exploration noise."""

    def act(seen: TensorObservation, state: Tensor, generator: torch.Generator) -> Tensor:
        return acting.interface.to_agent(policy.act(seen, generator, deterministic=True).actions)

    return act


def plays_agent(agent: OfflineAgent) -> Frozen:
    """Return an agent as it is now, drawing, whatever becomes of it later: give a copy."""
    return lambda seen, state, generator: agent.act(state, generator)


class Explorer:
    """The agent as an actor of a world, which tells states and flat actions; a frozen policy decides in its place.

    share: of decisions that are the frozen policy's.
    """

    def __init__(self, policy: Acts, frozen: Frozen, generators: Generators):
        self.policy = policy
        self.frozen = frozen
        self.generators = generators
        self.share = 1.0

    def reset(self, rows: Rows = None) -> None:
        """Let the policy forget `rows` [R], all of them for None."""
        self.policy.reset(rows)

    @torch.no_grad()
    def choose(self, observation: Observation) -> tuple[Array, tuple[Tensor, Tensor]]:
        """Return the next chunk [B, C, A] in the world's units, and the states [B, S] and flat actions [B, A']."""
        seen = to_tensors(observation, self.generators.device)
        state = self.policy.interface.state(seen)
        if self.share == 1:
            action = self.frozen(seen, state, self.generators["frozen"])
        else:
            action = self.policy.agent.act(state, self.generators["act"])
            if self.share:
                draws = torch.rand(len(state), generator=self.generators["turns"], device=self.generators.device)
                theirs = (draws < self.share)[:, None]
                action = torch.where(theirs, self.frozen(seen, state, self.generators["frozen"]), action)
        chunk = self.policy.actions_of(seen, action).cpu().double()
        return chunk.numpy(), (state, action)  # pyright: ignore[reportUnknownMemberType]


class Online:
    """One run of `learn_online`: what there is at any moment, and how it goes on."""

    def __init__(
        self,
        policy: Acts,
        frozen: Frozen,
        config: OnlineConfig,
        generators: Generators,
        *,
        recorded: Transitions | None,
        begins: Begins,
        evaluate: Evaluate | None,
        run: RunFolder | None,
    ):
        self.policy = policy
        self.agent = policy.agent
        self.config = config
        self.begins = begins
        self.generators, self.recorded = generators, recorded
        self.evaluate, self.run = evaluate, run
        self.explorer = Explorer(policy, frozen, generators)
        self.experience = Experience()
        self.wave = self.env_steps = self.updates = self.episodes = self.basis = 0
        self.owed, self.switched = 0.0, False
        self.evaluations: list[dict[str, Any]] = []
        self.figures: dict[str, Tensor] = {}

    def play(self, player: Player[tuple[Tensor, Tensor]], seed: int, advance: Advance) -> None:
        """Play a wave of episodes, as far as the budget goes, and learn after every decision from the switch on."""
        chunk, rows = self.policy.spec.chunk, player.world.batch_size
        # As many episodes as can each take one more decision within the budget.
        count = min(rows, (self.config.steps - self.env_steps) // chunk)
        self.wave += 1
        player.start_wave(episode_seeds(seed, f"online/{self.wave}", count))
        first, won = self.episodes, np.zeros(rows, dtype=bool)
        self.episodes += count
        turns: list[tuple[Tensor, Tensor]] = []
        self.figures = {}  # a wave logs its own, as it would after a kill
        self.explorer.share = self.share
        for played in player:
            before = self.env_steps
            turns.append(self.keep(played, first))
            won[played.running] = played.step.success[played.running]
            if not self.warming_up:
                self.learn(len(turns[-1][1]))
            self.explorer.share = self.share
            advance(self.env_steps - before, f"{self.updates} updates")
            # Stop before the budget is exceeded: what is not complete by then has no outcome, as behind a time limit.
            if self.env_steps + player.running.sum() * chunk > self.config.steps:
                break
        self.experience.tell(turns, rows)
        self.log(float(won[:count].mean()))

    @property
    def warming_up(self) -> bool:
        """Whether the frozen policy still plays alone."""
        return self.env_steps < self.config.warmup

    @property
    def share(self) -> float:
        """Share of decisions that are the frozen policy's by now."""
        return 1.0 if self.warming_up else self.config.base_share

    def keep(self, played: PlayedStep[tuple[Tensor, Tensor]], first: int) -> tuple[Tensor, Tensor]:
        """Keep the decisions that were executed; return where they are and their rows, both [n].

        first: number of the episode in row 0.
        """
        state, action = played.info
        step = played.step
        device = self.generators.device
        rows = torch.from_numpy(np.flatnonzero(played.running)).to(device)
        valid = torch.from_numpy(np.asarray(step.valid, dtype=np.float32)).to(device)
        reward = torch.from_numpy(np.asarray(step.reward, dtype=np.float32)).to(device)
        discount = self.agent.discount
        # A chunk is one decision: its rewards are discounted within it, and its backup by gamma^(executed steps).
        worth = discount ** torch.arange(valid.shape[1], device=device)
        columns = {
            "reward": (reward * valid * worth).sum(1),
            "next_state": self.policy.interface.state(to_tensors(step.observation, device)),
            "terminated": torch.from_numpy(np.array(step.terminated)).to(device),
            "success": torch.from_numpy(np.array(step.success)).to(device),
            "episode": first + torch.arange(len(valid), device=device),
            "decay": discount ** valid.sum(1),
        }
        self.env_steps += int(valid[rows].sum())
        kept = {name: column[rows] for name, column in columns.items()}
        return self.experience.add(state[rows], action[rows], kept), rows

    def learn(self, decisions: int) -> None:
        """Take the updates that so many new decisions ask for, evaluating on the way."""
        if not self.switched:
            self.switch()
        # Fractions of an update are carried over, so `updates` may be below one a decision.
        self.owed += decisions * self.config.updates
        while self.owed >= 1:
            self.figures = self.agent.update(self.batch(), self.generators["update"])
            self.owed, self.updates = self.owed - 1, self.updates + 1
            every = self.config.evaluate_every
            if self.updates in self.config.evaluate_at or (every and self.updates % every == 0):
                self.look()

    def switch(self) -> None:
        """Turn from the frozen policy to the agent, and evaluate before any update."""
        self.switched = True
        if self.begins == "warm-up":
            self.basis = len(self.experience)
            self.agent.begin(self.experience.transitions)
        if 0 in self.config.evaluate_at:
            self.look()
        self.policy.begin_to_act()

    def batch(self) -> Transitions:
        """Draw a batch: own decisions, and the share of recorded ones that is retained."""
        config, draws = self.config, self.generators["batches"]
        retained = round(config.retain * config.batch_size)
        own = self.experience.transitions.draw(config.batch_size - retained, draws)
        if not retained or self.recorded is None:
            return own
        return Transitions.join([own, self.recorded.draw(retained, draws)])

    @property
    def seen(self) -> bool:
        """Whether the policy as it is has been evaluated, or nobody asks."""
        return self.evaluate is None or (bool(self.evaluations) and self.evaluations[-1]["updates"] == self.updates)

    def look(self) -> None:
        """Evaluate the policy as it is, unless it has been, and note what was found."""
        if self.evaluate is None or self.seen:
            return
        found = {f"deterministic_{name}": value for name, value in self.evaluate(self.policy).items()}
        self.evaluations.append({**self.where(), **found})
        if self.run is not None:
            self.run.log(self.evaluations[-1])

    def finish(self) -> None:
        """Evaluate and save at the end, an iteration of its own: a kill between the two leaves no second line."""
        if not self.seen:
            self.wave += 1
            self.look()
        self.save()

    def where(self) -> dict[str, int]:
        """Return how far it is, by name."""
        return {"iteration": self.wave, "updates": self.updates, "env_steps": self.env_steps}

    def log(self, succeeded: float) -> None:
        """Write a line of metrics about the wave; raises NonFiniteError where learning has broken."""
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
            "experience": self.experience.tree(),
            "generators": self.generators.state(),
        }
        save_trainer(self.run.path / "resume" / "online", tree)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` left."""
        for name in COUNTS:
            setattr(self, name, int(saved[name]))
        self.owed, self.switched = float(saved["owed"]), bool(saved["switched"])
        self.evaluations = list(saved["evaluations"])
        self.experience = Experience.restored(saved["experience"], self.generators.device)
        self.agent.restore(saved["agent"])
        if self.switched:
            self.policy.begin_to_act()
        # Statistics are not saved but taken again, of the same first decisions.
        if self.basis:
            self.agent.begin(self.experience.transitions.take(torch.arange(self.basis)))
        self.generators.restore(saved["generators"])


def learn_online(
    policy: Acts,
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
    """Let the agent of `policy` learn from its own decisions in `world`, in place, until the steps are used up.

    frozen: plays the warm-up; recorded: what `retain` draws from, as the agent sees it; begins: what the agent
    standardises states by. run: gets lines of metrics, `checkpoint/` and a resume point: the same call after a kill
    goes on from there and ends bit for bit in the same place. Raises ConfigError where recorded data is asked for and
    there is none, SpecError where policy and world do not fit, NonFiniteError naming the update.
    """
    if recorded is None and (config.retain or begins == "recorded"):
        raise ConfigError(f"retain={config.retain:g} draws from recorded decisions, and there are none.")
    require_fit(policy.spec, world.spec)
    generators = Generators(derive(seed, "online"), next(policy.agent.parameters()).device)
    into_the_world(policy.agent, config)
    online = Online(policy, frozen, config, generators, recorded=recorded, begins=begins, evaluate=evaluate, run=run)
    saved = None if run is None else load_trainer(run.path / "resume" / "online")
    if saved is not None:
        online.restore(saved)
    if recorded is not None and begins == "recorded":
        policy.agent.begin(recorded)
    if run is not None:
        run.rewind("iteration", online.wave)
    player = Player(world, online.explorer)
    with progress("Learning in the world", config.steps) as advance:
        advance(online.env_steps)
        while config.steps - online.env_steps >= policy.spec.chunk:
            online.play(player, seed, advance)
            if online.wave % config.checkpoint_every == 0:
                online.save()
    online.finish()
    return OnlineResult(online.env_steps, online.updates, online.episodes, tuple(online.evaluations))


def into_the_world(agent: OfflineAgent, config: OnlineConfig) -> None:
    """Do to an agent what the switch from recorded data to the world asks for; see `OnlineConfig`."""
    if config.moments == "reset":
        for optimiser in agent.optimisers.values():
            # Adam's moments are of the recorded data's gradients, which the first online steps would follow.
            optimiser.state.clear()
    if isinstance(agent, Cql) and not config.conservative:
        # Pessimism about unrecorded actions protects offline; online it would hold back what is just being tried.
        agent.config = replace(agent.config, alpha=0.0, calibrated=False)
