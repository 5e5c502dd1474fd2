"""Imitation that keeps training a base policy online, on successful episodes and demonstrations in the buffer.

In EXPO (arXiv:2507.07986) the base policy gets no gradient of Q: it imitates the buffer, and so follows the chunks that
the critics chose. Deviations: only chunks of successful episodes are imitated (as EXPO-FT's code does by default), of
recordings those that `imitation_mask` selects; the updates are taken between batches of episodes, and then the base
samples the stored candidates of all next states anew.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core.arrays import integers
from robopolicy.core.candidates import repeat_observation
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.interventions import imitation_mask
from robopolicy.core.policy import Policy, TensorObservation, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import TASK
from robopolicy.nn.optimisers import adamw, clip_gradients, optimiser_tree, restore_optimiser
from robopolicy.policies.abilities import PredictsFromPast
from robopolicy.rl.offline.decisions import Decisions, observations_at
from robopolicy.rl.offline.interface import Interface

ROWS = 4096
"""Maximum number of chunks sampled at once."""
GRADIENT_CLIP = 1.0
"""Maximum global gradient norm."""
HERE, AHEAD = "seen/", "next_seen/"
"""Prefixes of the buffer's columns with the base's observation before and after a chunk."""


class BaseImitation:
    """Trains `base` by imitation during an online run.

    interface: conversion of the stored chunks; weights: those that learn, frozen between updates; rate: learning rate;
    share: imitation updates per update of the critics; batch: rows per update. Raises ConfigError when the base cannot
    be trained, or predicts steps before the first executed one.
    """

    def __init__(
        self,
        base: Policy,
        interface: Interface,
        weights: Sequence[nn.Parameter],
        rate: float,
        share: float,
        batch: int,
    ):
        if not isinstance(base, Trainable):
            raise ConfigError(
                f"{type(base).__name__} can act but cannot be trained: set online.method.base_utd_ratio=0, which "
                "freezes it."
            )
        if isinstance(base, PredictsFromPast) and base.past_steps:
            raise ConfigError(
                "The base policy also predicts steps before the first executed one, which the online buffer does not "
                "store: set online.method.base_utd_ratio=0, which freezes it."
            )
        self.base, self.interface = base, interface
        self.share, self.batch = share, batch
        self.recorded: Decisions | None = None
        self.demonstrated = torch.zeros(0, dtype=torch.int64)
        self.weights = list(weights)
        self.optimiser = adamw(self.weights, rate, 0.0)
        self.owed = 0.0

    def demonstrate(self, recorded: Decisions) -> None:
        """Also imitate recorded action chunks, whose transitions have the base's candidates."""
        self.recorded, self.demonstrated = recorded, worth_imitating(recorded)

    def columns(self, prefix: str, observation: TensorObservation) -> dict[str, Tensor]:
        """Return the base's observation [B, H, ...] as columns of the buffer; instructions as numbers [B]."""
        spec = self.base.spec
        columns: dict[str, Tensor] = {}
        for key in spec.observation:
            columns[prefix + key] = cast(Tensor, observation[key])
        places = {text: place for place, text in enumerate(spec.instructions)}
        device = next(iter(columns.values())).device
        columns[prefix + TASK] = torch.tensor([places.get(str(text), 0) for text in observation[TASK]], device=device)
        return columns

    def observation(self, prefix: str, columns: Mapping[str, Tensor], rows: Tensor) -> TensorObservation:
        """Return the observations [n, H, ...] of stored `rows` [n]."""
        spec = self.base.spec
        result: TensorObservation = {key: columns[prefix + key][rows] for key in spec.observation}
        result[TASK] = [spec.instructions[place] for place in integers(columns[prefix + TASK][rows])]
        return result

    def learn(
        self, columns: Mapping[str, Tensor], count: int, updates: int, generators: Generators
    ) -> dict[str, Tensor]:
        """Take the updates due after `updates` of the critics, on the buffer's first `count` rows, and sample the
        stored candidates anew; returns the loss, {} without an update.
        """
        self.owed += updates * self.share
        own = successful(columns["episode"][:count], columns["success"][:count])
        total = len(own) + len(self.demonstrated)
        if not total:
            self.owed = 0.0
            return {}
        loss, draws = None, generators["imitation/batches"]
        for weight in self.weights:
            weight.requires_grad_(True)
        while self.owed >= 1:
            self.owed -= 1
            rows = torch.randint(total, (self.batch,), generator=draws, device=draws.device)
            loss = self.update(columns, own, rows, generators["imitation/loss"])
        for weight in self.weights:
            weight.requires_grad_(False)
        if loss is None:
            return {}
        self.resample(columns, count, generators)
        return {"base_loss": loss}

    def update(self, columns: Mapping[str, Tensor], own: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Take one step on `rows` [n] of own chunks and demonstrations joined; returns the loss, []."""
        parts: list[dict[str, Any]] = []
        if len(rows_of_own := rows[rows < len(own)]):
            parts.append(self.own_batch(columns, own[rows_of_own]))
        if self.recorded is not None and len(rows_of_others := rows[rows >= len(own)]):
            steps = self.recorded.step[self.demonstrated[rows_of_others - len(own)]]
            spec = self.base.spec
            parts.append(
                self.recorded.episodes.windows(steps, spec.history, spec.prediction, [*spec.observation, TASK])
            )
        total = rows.new_zeros((), dtype=torch.float32)
        for part in parts:
            total = total + torch.stack(list(self.base.loss(part, generator).values())).sum(0).sum()
        loss = total / len(rows)
        self.optimiser.zero_grad()
        loss.backward()
        clip_gradients(self.weights, GRADIENT_CLIP, "the imitation of the base policy")
        self.optimiser.step()
        return loss.detach()

    def own_batch(self, columns: Mapping[str, Tensor], rows: Tensor) -> dict[str, Any]:
        """Return stored chunks `rows` [n] as input of the base's loss: predictions [n, P, A] are the chunk and the next
        one, as far as they are known.
        """
        chunk, length = self.interface.chunk, self.base.spec.prediction
        actions = torch.cat([self.interface.chunks(columns[name][rows]) for name in ("action", "next_action")], 1)
        known = torch.ones(len(rows), chunk, dtype=torch.bool, device=actions.device)
        valid = torch.cat([known, columns["next_known"][rows][:, None].expand(-1, chunk)], 1)
        short = max(0, length - 2 * chunk)
        actions = torch.cat([actions, actions[:, -1:].expand(-1, short, -1)], 1)[:, :length]
        valid = torch.cat([valid, valid.new_zeros(len(rows), short)], 1)[:, :length]
        return {"observation": self.observation(HERE, columns, rows), "actions": actions, "action_valid": valid}

    @torch.no_grad()
    def sampled(self, observation: TensorObservation, samples: int, generator: torch.Generator) -> Tensor:
        """Return flat chunks [n, samples, A'] that the base samples at observations [n, H, ...]."""
        chunks = self.base.act(repeat_observation(observation, samples), generator).actions
        return self.interface.to_agent(chunks).reshape(-1, samples, self.interface.actions)

    def resample(self, columns: Mapping[str, Tensor], count: int, generators: Generators) -> None:
        """Replace the stored candidates of the buffer's first `count` rows and of recorded chunks, in place."""
        draws, candidates = generators["imitation/candidates"], columns["next_candidates"]
        alive = (~columns["terminated"][:count]).nonzero()[:, 0]
        samples = candidates.shape[1]
        for rows in torch.split(alive, max(1, ROWS // samples)):
            candidates[rows] = self.sampled(self.observation(AHEAD, columns, rows), samples, draws)
        candidates, spec = self.recorded_candidates, self.base.spec
        if candidates is None or self.recorded is None:
            return
        for rows in torch.split(torch.arange(len(candidates), device=alive.device), max(1, ROWS // samples)):
            frames = self.recorded.next_frame[rows]
            observation = observations_at(self.recorded.episodes, frames, spec.history, list(spec.observation))
            candidates[rows] = self.sampled(observation, samples, draws)

    @property
    def recorded_candidates(self) -> Tensor | None:
        """The stored candidates [N, K, A'] of recorded chunks, None without."""
        return None if self.recorded is None else self.recorded.transitions.next_candidates

    def tree(self) -> dict[str, Any]:
        """Return weights, optimiser moments and updates owed, in a form that can be saved."""
        weights = {str(place): weight.detach().clone() for place, weight in enumerate(self.weights)}
        candidates = self.recorded_candidates
        recorded = {} if candidates is None else {"recorded_candidates": candidates.clone()}
        return {"weights": weights, "optimiser": optimiser_tree(self.optimiser), "owed": self.owed, **recorded}

    @torch.no_grad()
    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        for place, weight in enumerate(self.weights):
            weight.copy_(tree["weights"][str(place)])
        restore_optimiser(self.optimiser, tree["optimiser"])
        self.owed = float(tree["owed"])
        if (candidates := self.recorded_candidates) is not None:
            candidates.copy_(tree["recorded_candidates"])


def successful(episode: Tensor, success: Tensor) -> Tensor:
    """Return the indices of chunks whose episode succeeded: episode [N] int64, success [N] bool by the end of each."""
    return torch.isin(episode, episode[success].unique()).nonzero()[:, 0]


def worth_imitating(decisions: Decisions) -> Tensor:
    """Return the indices of recorded chunks to imitate: demonstrations, interventions, and own steps that succeeded.

    Recordings that do not say who acted are imitated where their episodes succeeded, or whole without success.
    """
    episodes: Episodes = decisions.episodes
    mask = imitation_mask(episodes)
    if mask is None:
        succeeded = episodes.success
        mask = torch.ones(episodes.step_count, dtype=torch.bool, device=decisions.step.device)
        mask = mask if succeeded is None else succeeded[episodes.episode_of_step]
    return mask[decisions.step].nonzero()[:, 0]
