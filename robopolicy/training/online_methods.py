"""Methods of online learning: what the agent chooses, and from what it starts.

A method is built from its settings and returns the initial state of a run, whose policy (`RunsAgent`) explores, learns
and is saved. Another package adds one as a dataclass of settings whose `builds` names the class, by its import path or
under the entry-point group robopolicy.online_methods.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.core.registry import Kinds
from robopolicy.core.spec import WorldSpec, require_fit
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.rl.offline.configuration import AGENTS
from robopolicy.rl.offline.decisions import actions_at, recorded_decisions
from robopolicy.rl.offline.edit import Edit
from robopolicy.rl.offline.interface import Interface, recorded_range
from robopolicy.training.base_imitation import BaseImitation
from robopolicy.training.configuration import ActionsOnlineConfig, DsrlOnlineConfig, EditOnlineConfig
from robopolicy.training.critics import AgentPolicy, RunsAgent, SteeredPolicy, critic_interface, interface_of, steer
from robopolicy.training.editing import EditedPolicy, require_sac
from robopolicy.training.online import Begins, Frozen, explores, plays_agent, plays_noise, plays_policy


@dataclass(frozen=True)
class InitialState:
    """Initial state of online learning: the learner, the policy of the warm-up, and the recorded action chunks."""

    policy: RunsAgent
    frozen: Frozen
    begins: Begins
    recorded: Transitions | None = None


@dataclass(frozen=True)
class OnlineStart:
    """What a method starts from.

    given: the given policy, None for none; world: spec of the world; agent, agent_config: kind and settings of
    online.agent; section: all settings of `online`; seed: of the run; episodes: loads the recorded episodes, None if
    there are none; fit: trains an agent on recorded action chunks, as often as online.pretrain_steps says.
    """

    given: Policy | None
    world: WorldSpec
    agent: str
    agent_config: Any
    section: Any
    seed: int
    device: torch.device
    episodes: Callable[[], Episodes | None]
    fit: Callable[[OfflineAgent, Transitions], None]

    def require_policy(self, method: str) -> Policy:
        """Return the given policy; raises ConfigError if there is none."""
        if self.given is None:
            raise ConfigError(f"online.method={method} starts from a policy: set online.policy=CHECKPOINT.")
        return self.given


class OnlineMethod[Learner: RunsAgent](ABC):
    """One method of online learning; `config` has its settings.

    learns: class of the policies that it trains, `Learner`; needs_policy: whether there must be a policy to start from.
    """

    learns: ClassVar[type]
    needs_policy: ClassVar[bool] = True

    def __init__(self, config: Any):
        self.config = config

    @abstractmethod
    def start(self, start: OnlineStart) -> InitialState:
        """Return the initial state for a policy that no online method has trained yet; raises ConfigError when the
        method cannot improve it.
        """

    def resume(self, policy: Learner, start: OnlineStart) -> InitialState:
        """Return the initial state for a policy that this method has trained before."""
        episodes = start.episodes()
        recorded = None if episodes is None else self.recorded(policy, episodes, start)
        return InitialState(policy, self.frozen(policy), "already", recorded)

    def frozen(self, policy: Learner) -> Frozen:
        """Return the exploring policy of one that this method has trained, unchanged by later training."""
        return plays_agent(copy.deepcopy(policy.agent))

    def recorded(self, policy: Learner, episodes: Episodes, start: OnlineStart) -> Transitions:
        """Return the action chunks of recorded episodes as the policy's agent learns from them."""
        return recorded_decisions(episodes, policy.interface, policy.agent.discount).transitions


class SteersNoise(OnlineMethod[SteeredPolicy]):
    """DSRL: the agent chooses the initial noise of a frozen diffusion or flow policy."""

    learns: ClassVar[type] = SteeredPolicy
    config: DsrlOnlineConfig

    def start(self, start: OnlineStart) -> InitialState:
        """Implement `OnlineMethod.start`."""
        base, world = start.require_policy("dsrl"), start.world
        steering = steer(
            base,
            start.agent_config,
            world.observation,
            world.instructions,
            bound=start.section.noise_bound,
            seed=derive_seed(start.seed, "agent"),
            kind=start.agent,
            steers=False,
        ).to(start.device)
        return InitialState(steering, plays_noise(steering), "warm-up")

    def frozen(self, policy: SteeredPolicy) -> Frozen:
        """Implement `OnlineMethod.frozen`."""
        return super().frozen(policy) if bool(policy.steers) else plays_noise(policy)


class ChoosesActions(OnlineMethod[AgentPolicy]):
    """RLPD and WSRL: the agent chooses the actions itself."""

    learns: ClassVar[type] = AgentPolicy
    needs_policy: ClassVar[bool] = False
    config: ActionsOnlineConfig

    def start(self, start: OnlineStart) -> InitialState:
        """Implement `OnlineMethod.start`."""
        episodes = start.episodes()
        interface = interface_for(start.given, start.world, episodes, start.section.chunk)
        seed = derive_seed(start.seed, "agent")
        agent = AGENTS.builds(start.agent)(start.agent_config, interface.size, interface.actions, seed).to(start.device)
        acting = AgentPolicy(agent, interface, start.world.fps)
        require_fit(acting.spec, start.world)  # before it learns anything of recorded data
        other = plays_agent(copy.deepcopy(agent)) if start.given is None else plays_policy(start.given, acting)
        if episodes is None:
            return InitialState(acting, other, "warm-up")
        data = self.recorded(acting, episodes, start)
        if not start.section.pretrain_steps:
            return InitialState(acting, other, "recorded", data)
        start.fit(agent, data)
        return InitialState(acting, plays_agent(copy.deepcopy(agent)), "recorded", data)


class EditsChunks(OnlineMethod[EditedPolicy]):
    """EXPO: an edit actor changes the chunks of a base policy, frozen or trained by imitation; the best by Q of all
    acts.
    """

    learns: ClassVar[type] = EditedPolicy
    config: EditOnlineConfig

    def start(self, start: OnlineStart) -> InitialState:
        """Implement `OnlineMethod.start`."""
        base, settings = start.require_policy("edit"), require_sac(start.agent_config)
        episodes = start.episodes()
        # A copy: the critics' inputs must not move while the base learns.
        reader = copy.deepcopy(base) if self.config.base_utd_ratio and base.spec.cameras else base
        interface = interface_for(reader, start.world, episodes, base.spec.chunk)
        seed = derive_seed(start.seed, "agent")
        agent = Edit(settings, interface.size, interface.actions, seed, self.config.edit_scale).to(start.device)
        policy = EditedPolicy(base, agent, interface, self.config.candidates, acts=False)
        policy.imitation = self.imitates(policy, start)
        require_fit(policy.spec, start.world)
        if episodes is None:
            return InitialState(policy, plays_base(policy), "warm-up")
        data = self.recorded(policy, episodes, start)
        if not start.section.pretrain_steps:
            return InitialState(policy, plays_base(policy), "recorded", data)
        start.fit(agent, data)
        return InitialState(policy, explores(policy.frozen_copy()), "recorded", data)

    def resume(self, policy: EditedPolicy, start: OnlineStart) -> InitialState:
        """Implement `OnlineMethod.resume`."""
        policy.agent.scale = self.config.edit_scale
        policy.count.fill_(self.config.candidates)
        policy.imitation = self.imitates(policy, start)
        return super().resume(policy, start)

    def imitates(self, policy: EditedPolicy, start: OnlineStart) -> BaseImitation | None:
        """Return the trainer of the base, None if it is frozen; raises ConfigError if it cannot be trained."""
        config = self.config
        if not config.base_utd_ratio:
            return None
        weights, rows = policy.learnable, start.section.batch_size
        return BaseImitation(
            policy.base, policy.interface, weights, config.base_learning_rate, config.base_utd_ratio, rows
        )

    def frozen(self, policy: EditedPolicy) -> Frozen:
        """Implement `OnlineMethod.frozen`."""
        return explores(policy.frozen_copy()) if bool(policy.acts) else plays_base(policy)

    def recorded(self, policy: EditedPolicy, episodes: Episodes, start: OnlineStart) -> Transitions:
        """Return the recorded action chunks, with chunks that the base policy samples in the next states."""
        decisions = recorded_decisions(episodes, policy.interface, policy.agent.discount)
        draws = Generators(derive_seed(start.seed, "online/recorded candidates"), start.device)["propose"]
        samples = int(policy.count)
        chunks = actions_at(policy.base, episodes, decisions.next_frame, draws, samples=samples)
        flat = policy.interface.to_agent(chunks.flatten(0, 1)).reshape(-1, samples, policy.interface.actions)
        data = replace(decisions.transitions, next_candidates=flat)
        if policy.imitation is not None:
            policy.imitation.demonstrate(replace(decisions, transitions=data))
        return data


def plays_base(policy: EditedPolicy) -> Frozen:
    """Return the base of a policy that edits chunks, with its own exploration noise."""
    return lambda seen, state, generator: policy.interface.to_agent(policy.base.act(seen, generator).actions)


def interface_for(given: Policy | None, world: WorldSpec, episodes: Episodes | None, chunk: int) -> Interface:
    """Return the agent's interface: fields of the data if there are any, else of the world, in chunks of the given
    policy, or of `chunk` control steps.
    """
    if given is not None and episodes is not None:
        return critic_interface(given, episodes)
    if given is not None:
        return interface_of(given, world.observation, world.action, world.instructions)
    if episodes is None:
        return Interface.of(world, chunk)
    tasks, bounds = tuple(sorted(set(episodes.tasks))), recorded_range(episodes)
    return Interface(episodes.observation_fields, episodes.action_field, chunk=chunk, instructions=tasks, bounds=bounds)


def method_of(policy: Policy | None, methods: Kinds) -> str:
    """Return the name of the registered method that trains policies of this class, "" if there is none."""
    return next((name for name in methods if type(policy) is methods.builds(name).learns), "")
