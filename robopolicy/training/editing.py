"""A policy that edits the action chunks of a base policy: the best by Q of base chunks and edited chunks acts.

Source: EXPO, Dong et al. 2025, arXiv:2507.07986. The formulas are in `robopolicy.rl.offline.edit`.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.candidates import repeat_observation
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import PolicySpec, validate_observation
from robopolicy.rl.offline.configuration import CqlConfig, SacConfig
from robopolicy.rl.offline.edit import Edit
from robopolicy.rl.offline.interface import Interface
from robopolicy.training.base_imitation import AHEAD, HERE, BaseImitation
from robopolicy.training.critics import (
    AgentAroundBase,
    LearnsOnline,
    SavableInside,
    load_around,
    require_chunks_of,
    save_around,
)


class EditedPolicy(LearnsOnline, AgentAroundBase[SavableInside]):
    """A `Policy` that samples `count` chunks from `base`, edits each, and executes the one that the critics prefer.

    interface: the agent's view of observations and chunks, whose length is the base's. acts: whether the agent chooses
    already; until then the base acts unchanged. learnable: weights of the base that imitation may train; imitation:
    trains them during an online run, None while the base is frozen. The checkpoint contains the base, the critics and
    the edit actor. Raises ConfigError when chunk lengths differ, count is below 1 or the base cannot be saved.
    """

    acts: Tensor
    count: Tensor

    def __init__(self, base: Policy, agent: Edit, interface: Interface, count: int = 8, acts: bool = True):
        if count < 1:
            raise ConfigError(f"online.method.candidates={count} must be at least 1.")
        # Before they are frozen: they tell which of them learn where the base is trained.
        learnable = list(base.trainable_parameters()) if isinstance(base, Trainable) else []
        super().__init__(require_chunks_of(base, interface), agent, interface)
        self.learnable = learnable
        self.register_buffer("count", torch.tensor(count))
        self.register_buffer("acts", torch.tensor(acts))
        self.imitation: BaseImitation | None = None

    @property
    def spec(self) -> PolicySpec:
        """Spec of the base plus the agent's inputs, without log-probabilities."""
        return replace(super().spec, scored_steps=0)

    def frozen_copy(self) -> "EditedPolicy":
        """Return this policy with a copy of the agent, which later training does not change; the base is shared."""
        return EditedPolicy(self.base, copy.deepcopy(self.agent), self.interface, int(self.count), bool(self.acts))

    def enable_agent(self) -> None:
        """Let the agent choose from now on."""
        self.acts.fill_(True)

    def actions_of(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Convert flat chunks [B, C * A] to the world's units, [B, C, A]."""
        return self.interface.chunks(action)

    @torch.no_grad()
    def propose(self, observation: TensorObservation, generator: torch.Generator) -> Tensor:
        """Return chunks that the base samples at observations [B, H, ...], flat in [-1, 1]: [B, count, C * A]."""
        count = int(self.count)
        chunks = self.inner.act(repeat_observation(observation, count), generator).actions
        return self.interface.to_agent(chunks).unflatten(0, (-1, count))

    def explore(
        self, observation: TensorObservation, state: Tensor, generator: torch.Generator, proposals: Tensor | None
    ) -> Tensor:
        """Return the chosen chunks [B, C * A] in states [B, S], among base chunks [B, count, C * A] and their edits."""
        chunks = self.propose(observation, generator) if proposals is None else proposals
        return self.agent.choose(state, chunks, generator)[0]

    def remembered(self, before: TensorObservation, after: TensorObservation) -> dict[str, Tensor]:
        """Return the base's observations [B, H, ...] before and after a chunk if it learns, {} if it is frozen."""
        if self.imitation is None:
            return {}
        return self.imitation.columns(HERE, before) | self.imitation.columns(AHEAD, after)

    def learn_beside(
        self, columns: Mapping[str, Tensor], count: int, updates: int, generators: Generators
    ) -> dict[str, Tensor]:
        """Train the base by imitation of the buffer's first `count` rows; returns its loss."""
        return {} if self.imitation is None else self.imitation.learn(columns, count, updates, generators)

    def tree_beside(self) -> dict[str, Any]:
        """Return the state of a base that learns, {} if it is frozen."""
        return {} if self.imitation is None else self.imitation.tree()

    def restore_beside(self, tree: Mapping[str, Any]) -> None:
        """Restore the state of a base that learns from `tree`."""
        if self.imitation is not None:
            self.imitation.restore(tree)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the best chunk [B, C, A] of the base's chunks and their edits.

        deterministic: edits are noise-free, and the base's noise-free chunk is among the candidates. Raises SpecError
        or NonFiniteError on an invalid observation.
        """
        spec = self.spec
        validate_observation(observation, spec.observation, history=spec.history)
        if not bool(self.acts):
            return Decision(self.inner.act(observation, generator, deterministic=deterministic).actions)
        state, proposals = self.interface.state(observation), self.propose(observation, generator)
        if deterministic:
            sure = self.inner.act(observation, generator, deterministic=True).actions
            proposals[:, 0] = self.interface.to_agent(sure)
        action, _ = self.agent.choose(state, proposals, None if deterministic else generator)
        return Decision(self.interface.chunks(action))

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically, including the base, the critics and the edit actor."""
        own = {"count": int(self.count), "acts": bool(self.acts), "edit_scale": self.agent.scale}
        save_around(self, folder, "edited", own)

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> "EditedPolicy":
        """Load what `save` wrote; raises CheckpointError when the files are inconsistent."""
        scale = float(description["edit_scale"])

        def new_agent(config: Any, state: int, action: int) -> Edit:
            return Edit(require_sac(config), state, action, 0, scale)

        def make(base: Policy, agent: Any, interface: Interface) -> "EditedPolicy":
            return cls(base, agent, interface, int(description["count"]), bool(description["acts"]))

        return load_around(folder, description, device, make, new_agent)


def require_sac(config: Any) -> SacConfig:
    """Return `config`, typed as settings of SAC; raises ConfigError for agents that an edit actor cannot use."""
    if not isinstance(config, SacConfig) or isinstance(config, CqlConfig):
        raise ConfigError(
            "online.method=edit trains its critics and edit actor as SAC does: use online.agent=rlpd, or edac."
        )
    return config
