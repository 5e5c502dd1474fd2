"""Recorded episodes of experts as rows of rollouts, learned from by policy gradient beside the policy's own.

Source: DynaWeb (real expert trajectories randomly interleaved with imagined rollouts). It needs a
policy that can tell the scored steps of given actions, so that they have log-probabilities: action tokens, not chains
of noise, of which many lead to one action (auxiliaries=[experts] learns from experts with any policy).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.extras import Extras
from robopolicy.core.images import Images, cameras_in
from robopolicy.core.policy import ScoredPolicy, Trainable, is_condition
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.spec import TASK
from robopolicy.rl.context import Context
from robopolicy.training.experience import conditions_of, rescored


@runtime_checkable
class TellsSteps(Protocol):
    """A policy that can tell the scored steps of actions which somebody else took."""

    def steps_of(self, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the latents [N, ...] that `act` would have kept of deciding on action chunks [N, C, A]."""
        ...


class ExpertRows:
    """Adds episodes of experts to each iteration's own, `share` of their number, drawn anew each time.

    rewards: what the policy is paid for, changes to the recorded rewards: the same functions as its own rollouts get.
    Raises ConfigError where the policy cannot tell steps of actions, and DataError where the episodes have no rewards
    or lack an observation, or the world an instruction of theirs.
    """

    def __init__(
        self,
        policy: Trainable,
        episodes: Episodes,
        instructions: tuple[str, ...],
        share: float,
        generator: torch.Generator,
        rewards: Sequence[Callable[[Rollouts, Context], Rollouts]] = (),
    ):
        if not isinstance(policy, TellsSteps):
            raise ConfigError(
                f"expert_rows={share:g}: {type(policy).__name__} cannot tell which of its steps lead to an expert's "
                "actions, as token policies can. Any policy imitates experts by auxiliaries=[experts]."
            )
        if episodes.reward is None:
            raise DataError("Experts whose episodes join the rollouts need recorded rewards, as collect writes them.")
        unknown = sorted({text for text in episodes.tasks if text not in instructions}) if len(instructions) > 1 else []
        if unknown:
            raise DataError(f"The experts follow instructions that the world does not have: {', '.join(unknown[:3])}.")
        self.policy = policy
        self.share = share
        self.rewards = rewards
        self.episodes = episodes.to(generator.device)
        self.instructions = instructions
        self.generator = generator

    def beside(self, prepared: Rollouts, context: Context) -> Rollouts:
        """Return `prepared` whole episodes with advantages, and experts' behind them, each a group of its own.

            A = (R - mean) / std   of an expert's return R, among the returns of all rows, own and experts'

        The experts' log-probabilities are those of the policy as it is: ratios begin at 1, as on its own rows. (With
        what an expert's own probability was, which nobody knows, a ratio would correct for the expert having acted.)
        """
        count = round(self.share * len(prepared.group))
        if not count or not prepared.whole:
            return prepared
        draws, total = self.generator, len(self.episodes)
        # Whole passes over the experts: no episode is drawn twice before all have been drawn once.
        order = [torch.randperm(total, generator=draws, device=draws.device) for _ in range(-(-count // total))]
        rows = expert_rollouts(self.policy, self.episodes, torch.cat(order)[:count], self.instructions, draws)
        version = torch.full_like(rows.policy_version, context.iteration)
        rows = replace(rows, policy_version=version)
        for shape in self.rewards:
            rows = shape(rows, context)
        returns = torch.cat([prepared.row_return, rows.row_return])
        # Population deviation; the floor is for returns that are all alike.
        advantage = (rows.row_return - returns.mean()) / (returns.std(unbiased=False) + 1e-6)
        if any(is_condition(name) for name in prepared.latents):  # the policy's rows keep what a frozen encoder made
            rows = replace(rows, latents={**rows.latents, **conditions_of(rows, self.policy, self.instructions)})
        rows = _like(rows, prepared, advantage)
        # As on-policy data: the ratio begins at 1 and moves with the updates.
        logp = rescored(rows, self.policy, self.instructions)[0]
        return concatenate([prepared, replace(rows, logp_behaviour=torch.where(rows.mask, logp, 0.0))])


def expert_rollouts(
    policy: ScoredPolicy, episodes: Episodes, chosen: Tensor, instructions: tuple[str, ...], generator: torch.Generator
) -> Rollouts:
    """Return the episodes `chosen` [B] as rollouts [B, T] of `policy`, not scored yet: logp_behaviour is 0.

    An episode of L actions is ceil(L / C) decisions, one after every C actions. Raises ConfigError where the policy
    cannot tell steps of actions.
    """
    if not isinstance(policy, TellsSteps):
        raise ConfigError(f"{type(policy).__name__} cannot tell the steps of an expert's actions.")
    spec, lengths = policy.spec, episodes.lengths[chosen]
    place = torch.arange(int(-(-lengths.max() // spec.chunk)), device=lengths.device) * spec.chunk
    alive = place < lengths[:, None]
    # Padding repeats the last step, so that every index is valid; `alive` hides it.
    steps = episodes.starts[chosen][:, None] + torch.minimum(place, lengths[:, None] - 1)
    found = episodes.windows(steps.flatten(), spec.history, spec.chunk, keys=list(episodes.observation))
    shape = alive.shape

    def rows(value: Tensor) -> Tensor:
        return value.reshape(*shape, *value.shape[1:])

    valid = rows(found["action_valid"]) & alive[..., None]
    executed = torch.minimum(place[:, None] + torch.arange(spec.chunk, device=place.device), lengths[:, None, None] - 1)
    executed = episodes.starts[chosen][:, None, None] + executed
    last = place + spec.chunk >= lengths[:, None]
    nothing = torch.zeros_like(alive)
    terminated = (
        torch.ones_like(chosen, dtype=torch.bool) if episodes.terminated is None else episodes.terminated[chosen]
    )
    success = nothing if episodes.step_success is None else episodes.step_success[executed[..., -1]] & alive
    known = {text: index for index, text in enumerate(instructions)}
    task = torch.tensor([known.get(episodes.tasks[index], 0) for index in chosen.tolist()], device=chosen.device)
    latents = {name: rows(value) for name, value in policy.steps_of(found["actions"], generator).items()}
    mask = alive[..., None].expand(*shape, spec.scored_steps).clone()
    alone = torch.full_like(chosen, -1)
    shown = {key: rows(value) for key, value in found["observation"].items() if key != TASK}
    return Rollouts(
        observation={key: value for key, value in shown.items() if key not in cameras_in(shown)},
        next_observation={},
        latents=latents if bool(valid[alive].all()) else {**latents, "executed": valid},
        actions=rows(found["actions"]),
        logp_behaviour=torch.zeros(mask.shape, device=mask.device),
        mask=mask,
        rewards={name: torch.where(valid, value[executed], 0.0) for name, value in (episodes.rewards or {}).items()},
        valid=valid,
        terminated=last & alive & terminated[:, None],
        truncated=last & alive & ~terminated[:, None],
        horizon_end=nothing,
        success=success,
        task=task[:, None].expand(shape).clone(),
        policy_version=torch.zeros(shape, dtype=torch.int64, device=mask.device),
        episode=torch.arange(len(chosen), device=mask.device),
        group=torch.arange(len(chosen), device=mask.device),
        parent=alone,
        branch_decision=alone,
        whole=True,
        images=Images.of(shown),
    )


def _like(rows: Rollouts, prepared: Rollouts, advantage: Tensor) -> Rollouts:
    """Give experts' rows what the policy's own have beside them; advantage: [B]. Raises DataError naming what lacks."""
    missing = sorted(set(prepared.shown) - set(rows.shown))
    if missing:
        raise DataError(f"The experts' episodes lack what the world shows: {', '.join(missing)}.")
    extras = {name: value.new_zeros((*rows.shape, *value.shape[2:])) for name, value in prepared.extras.items()}
    scored = rows.mask
    extras["advantage"] = torch.where(scored, advantage[:, None, None].float(), 0.0)
    # What normalises an episode's weight in the loss, as `prepare` gives it to own rows.
    extras["episode_steps"] = scored.sum((1, 2))[:, None].expand(rows.shape)
    names = list(prepared.rewards)
    paid = (
        rows.rewards if set(rows.rewards) == set(names) else {names[0]: torch.stack(list(rows.rewards.values())).sum(0)}
    )
    nothing = torch.zeros_like(rows.valid, dtype=torch.float32)
    return replace(
        rows,
        observation={key: rows.observation[key] for key in prepared.observation},
        images=None if rows.images is None or prepared.images is None else rows.images.only(prepared.images.frames),
        rewards={name: paid.get(name, nothing) for name in names},
        extras=Extras.of(extras),
        logp_proximal=None if prepared.logp_proximal is None else torch.zeros_like(rows.logp_behaviour),
        branch_sampling_step=None if prepared.branch_sampling_step is None else torch.zeros_like(rows.group),
    )
