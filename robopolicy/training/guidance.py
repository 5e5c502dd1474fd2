"""Additional inputs of fine-tuning: a teacher, demonstrations, preference pairs, recorded episodes of experts.

Expert episodes become rows of rollouts and are trained by policy gradient together with the policy's own (DynaWeb: real
expert trajectories randomly interleaved with imagined rollouts). This needs a policy that can compute log-probabilities
of given actions: action tokens, or denoising with likelihood=matching, but not denoising chains, of which many lead to
the same action (auxiliaries=[experts] imitates experts with any policy).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.extras import Extras
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.images import Images, cameras_in
from robopolicy.core.policy import (
    ConvertibleToTrainable,
    Policy,
    RecoversLatents,
    ScoredPolicy,
    Trainable,
    is_condition,
    recovers_latents,
)
from robopolicy.core.randomness import Generators
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.spec import TASK
from robopolicy.core.steps import difference_of_steps
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.context import Context
from robopolicy.rl.preferences import Pairs
from robopolicy.rl.registry import Need
from robopolicy.rl.weights import episode_sizes
from robopolicy.training.acting import Acting, DemonstratingPolicy, TakesOver, TeacherSchedule
from robopolicy.training.collection import WHOLE
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.experience import conditions_of, recompute_log_probs
from robopolicy.training.pretrain import regression_batches
from robopolicy.training.task_teachers import TaskTeachers


class ExpertMixer:
    """Adds expert episodes to each iteration's own, fraction `share` of their number, sampled again for each iteration.

    rewards: reward functions applied to the recorded rewards, the same as for the policy's own rollouts. Raises
    ConfigError when the policy cannot recover latents of actions. Raises DataError when the episodes lack rewards or an
    observation, or use an instruction that the world lacks.
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
        if not recovers_latents(policy):
            raise ConfigError(
                f"expert_episode_fraction={share:g}: {type(policy).__name__} cannot compute log-probabilities of an "
                "expert's actions; token policies can, and denoising policies with likelihood=matching. Any policy can "
                "imitate experts with auxiliaries=[experts]."
            )
        if episodes.reward is None:
            raise DataError(
                "Expert episodes that join the rollouts need recorded rewards, which 'robopolicy collect' writes."
            )
        unknown_texts = (
            sorted({text for text in episodes.tasks if text not in instructions}) if len(instructions) > 1 else []
        )
        if unknown_texts:
            raise DataError(
                f"The experts' episodes have instructions that the world does not have: {', '.join(unknown_texts[:3])}."
            )
        self.policy = policy
        self.share = share
        self.rewards = rewards
        self.episodes = episodes.to(generator.device)
        self.instructions = instructions
        self.generator = generator

    def beside(self, prepared: Rollouts, context: Context) -> Rollouts:
        """Return `prepared`, whole episodes with advantages, followed by expert episodes, each in its own group.

        A = (R - mean) / std of an expert's return R, with mean and std over all rows, own and experts'

        The experts' behaviour log-probabilities are set to those of the current policy, so ratios start at 1 as on its
        own rows. (The experts' true probabilities are unknown, so the ratios do not correct for them.)
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
        logp = recompute_log_probs(rows, self.policy, self.instructions)[0]
        return concatenate([prepared, replace(rows, logp_behaviour=torch.where(rows.mask, logp, 0.0))])


def expert_rollouts(
    policy: ScoredPolicy, episodes: Episodes, chosen: Tensor, instructions: tuple[str, ...], generator: torch.Generator
) -> Rollouts:
    """Return the episodes `chosen` [B] as rollouts [B, T] of `policy`, with logp_behaviour 0 (not computed yet).

    An episode of L actions gives ceil(L / C) chunks, one every C actions. Raises ConfigError when the policy cannot
    recover latents of actions.
    """
    if not (isinstance(policy, RecoversLatents) and recovers_latents(policy)):
        raise ConfigError(f"{type(policy).__name__} cannot compute the steps of an expert's actions.")
    spec, lengths = policy.spec, episodes.lengths[chosen]
    place = torch.arange(int(-(-lengths.max() // spec.chunk)), device=lengths.device) * spec.chunk
    alive = place < lengths[:, None]
    # Padding repeats the last step, so that every index is valid; `alive` hides it.
    steps = episodes.starts[chosen][:, None] + torch.minimum(place, lengths[:, None] - 1)
    windows = episodes.windows(steps.flatten(), spec.history, spec.chunk, keys=list(episodes.observation))
    shape = alive.shape

    def rows(value: Tensor) -> Tensor:
        return value.reshape(*shape, *value.shape[1:])

    valid = rows(windows["action_valid"]) & alive[..., None]
    executed_steps = torch.minimum(
        place[:, None] + torch.arange(spec.chunk, device=place.device), lengths[:, None, None] - 1
    )
    executed_steps = episodes.starts[chosen][:, None, None] + executed_steps
    last = place + spec.chunk >= lengths[:, None]
    zeros = torch.zeros_like(alive)
    terminated = (
        torch.ones_like(chosen, dtype=torch.bool) if episodes.terminated is None else episodes.terminated[chosen]
    )
    success = zeros if episodes.step_success is None else episodes.step_success[executed_steps[..., -1]] & alive
    index_of_text = {text: index for index, text in enumerate(instructions)}
    task = torch.tensor(
        [index_of_text.get(episodes.tasks[index], 0) for index in chosen.tolist()], device=chosen.device
    )
    latents = {name: rows(value) for name, value in policy.steps_of(windows["actions"], generator).items()}
    mask = alive[..., None].expand(*shape, spec.scored_steps).clone()
    no_parent = torch.full_like(chosen, -1)
    observation = {key: rows(value) for key, value in windows["observation"].items() if key != TASK}
    return Rollouts(
        observation={key: value for key, value in observation.items() if key not in cameras_in(observation)},
        next_observation={},
        latents=latents if bool(valid[alive].all()) else {**latents, "executed": valid},
        actions=rows(windows["actions"]),
        logp_behaviour=torch.zeros(mask.shape, device=mask.device),
        mask=mask,
        rewards={
            name: torch.where(valid, value[executed_steps], 0.0) for name, value in (episodes.rewards or {}).items()
        },
        valid=valid,
        terminated=last & alive & terminated[:, None],
        truncated=last & alive & ~terminated[:, None],
        horizon_end=zeros,
        success=success,
        task=task[:, None].expand(shape).clone(),
        policy_version=torch.zeros(shape, dtype=torch.int64, device=mask.device),
        episode=torch.arange(len(chosen), device=mask.device),
        group=torch.arange(len(chosen), device=mask.device),
        parent=no_parent,
        branch_decision=no_parent,
        whole=True,
        images=Images.of(observation),
    )


def _like(rows: Rollouts, prepared: Rollouts, advantage: Tensor) -> Rollouts:
    """Give expert rows the same extras as the policy's own rows; advantage: [B]. Raises DataError naming missing
    extras.
    """
    missing_keys = sorted(set(prepared.shown) - set(rows.shown))
    if missing_keys:
        raise DataError(f"The experts' episodes lack observations of the world: {', '.join(missing_keys)}.")
    extras = {name: value.new_zeros((*rows.shape, *value.shape[2:])) for name, value in prepared.extras.items()}
    scored_mask = rows.mask
    extras["advantage"] = torch.where(scored_mask, advantage[:, None, None].float(), 0.0)
    # What normalises an episode's weight in the loss, as `prepare` gives it to own rows.
    extras |= episode_sizes(scored_mask)
    names = list(prepared.rewards)
    rewards = (
        rows.rewards if set(rows.rewards) == set(names) else {names[0]: torch.stack(list(rows.rewards.values())).sum(0)}
    )
    zeros = torch.zeros_like(rows.valid, dtype=torch.float32)
    return replace(
        rows,
        observation={key: rows.observation[key] for key in prepared.observation},
        images=None if rows.images is None or prepared.images is None else rows.images.only(prepared.images.frames),
        rewards={name: rewards.get(name, zeros) for name in names},
        extras=Extras.of(extras),
        logp_proximal=None if prepared.logp_proximal is None else torch.zeros_like(rows.logp_behaviour),
        branch_sampling_step=None if prepared.branch_sampling_step is None else torch.zeros_like(rows.group),
    )


OF_THE_SAME_STEPS = frozenset({Need.SAME_STEPS, Need.TEACHER_SCORES, Need.TEACHER_OVERLAP})
"""Needs that require the teacher to compute log-probabilities of the policy's latents."""
EXPERT_BATCH = 256
"""Number of expert chunks per actor step."""


@dataclass(frozen=True)
class Guidance:
    """Additional inputs of fine-tuning. teacher: another policy; demonstrations: states to start from; experts:
    recorded episodes to imitate; acting: builds the policy that acts in rollouts (e.g. planning in a world model),
    None for the learner; pairs: preference pairs of episodes, learned from without collecting.
    """

    teacher: Policy | None = None
    demonstrations: Demonstrations | None = None
    experts: Episodes | None = None
    acting: Acting | None = None
    pairs: Pairs | None = None

    def expert_rows(
        self, policy: Trainable, instructions: tuple[str, ...], share: float, algorithm: Algorithm, draws: Generators
    ) -> ExpertMixer | None:
        """Return the function that adds expert episodes to an iteration's own, `share` times their number; None for 0.

        Raises ConfigError when there are no experts or rollouts are not whole episodes, and the errors of
        `ExpertMixer`.
        """
        if not share:
            return None
        if self.experts is None:
            raise ConfigError(f"expert_episode_fraction={share:g} needs expert episodes (expert_datasets=[DATASET]).")
        if not algorithm.needs & WHOLE:
            raise ConfigError(
                f"expert_episode_fraction={share:g} needs an algorithm that trains on complete episodes, such as grpo."
            )
        return ExpertMixer(policy, self.experts, instructions, share, draws["expert rows"], algorithm.rewards)

    def turns(self, first: float, until: float) -> TeacherSchedule | None:
        """Return the schedule of teacher actions, None when `first` is 0; raises ConfigError without a teacher."""
        if not first:
            return None
        if self.teacher is None:
            raise ConfigError(f"teacher_fraction={first:g} needs a teacher (teacher=CHECKPOINT).")
        return TeacherSchedule(self.teacher, first, until)

    def who_acts(
        self, turns: TeacherSchedule | None, episodes: float = 0.0, *, rows: int = 0, takes_over: bool = False
    ) -> Acting | None:
        """Return the builder of the acting policy: that of `acting`, mixed with the teacher; None when the learner acts
        alone.

        episodes: fraction of the world's `rows` in which the teacher plays, scored as own episodes; takes_over: the
        teacher plays episodes that an allocator requests. Raises ConfigError without a teacher, if another one acts,
        too, and if the fraction is less than a row.
        """
        if takes_over:
            teacher = self.teacher
            if teacher is None or episodes or turns is not None or self.acting is not None:
                raise ConfigError(
                    "An allocator that lets the teacher play needs teacher=CHECKPOINT, teacher_fraction=0, "
                    "teacher_episode_fraction=0 and no planner."
                )
            return lambda policy: TakesOver(policy, teacher)
        if episodes:
            teacher = self.teacher
            if teacher is None:
                raise ConfigError(f"teacher_episode_fraction={episodes:g} needs a teacher (teacher=CHECKPOINT).")
            if rows * episodes + 1e-9 < 1:
                raise ConfigError(
                    f"teacher_episode_fraction={episodes:g} of {rows} rows of the world that plays is less than one: "
                    f"the teacher would never play. Raise num_envs to at least {math.ceil(1 / episodes - 1e-9)} for "
                    "each shard, or raise the fraction."
                )
            return lambda policy: DemonstratingPolicy(policy, teacher, episodes)
        if turns is None or self.acting is None:
            return turns or self.acting
        acting = self.acting
        # Planning inside, turns outside: where the teacher does not act, the planned decision is executed.
        return lambda policy: turns(acting(policy))

    def check_teacher(self, policy: Policy, needs: frozenset[Need]) -> None:
        """Raise ConfigError, naming the difference, when `needs` require the latents of `policy` and the teacher's
        differ. With a difference, the teacher would decode the same latents to other actions, or they were sampled
        differently.
        """
        if self.teacher is None or not needs & OF_THE_SAME_STEPS:
            return
        if other := self._other_steps(policy):
            raise ConfigError(
                "The teacher's denoising steps or tokens differ from the policy's, so it cannot compute their "
                f"log-probabilities: {other}. Use a teacher of the same policy kind, schedule or vocabulary, and "
                "normalisation. Any teacher can be imitated by its actions: advantage=grpo, coefficient=none, "
                "auxiliaries=[dagger]."
            )

    def _other_steps(self, policy: Policy) -> str:
        teachers = self.teacher.policies if isinstance(self.teacher, TaskTeachers) else (self.teacher,)
        return next(filter(None, (self._difference(policy, teacher) for teacher in teachers)), "")

    def _difference(self, policy: Policy, teacher: Policy | None) -> str:
        if not isinstance(teacher, ScoredPolicy) or not teacher.spec.scored_steps:
            hint = (
                (" in this form; the policy returned by its to_trainable() has them")
                if isinstance(teacher, ConvertibleToTrainable)
                else ""
            )
            return f"{type(teacher).__name__} has no log-probabilities{hint}"
        return difference_of_steps(policy, teacher)

    def gives(self, policy: Policy) -> frozenset[Need]:
        """Return the needs that this guidance satisfies when `policy` is fine-tuned."""
        have = set()
        if self.teacher is not None:
            have.add(Need.TEACHER)
            if not self._other_steps(policy):
                have.add(Need.SAME_STEPS)
        if self.demonstrations is not None:
            have.add(Need.DEMONSTRATIONS)
        if self.experts is not None:
            have.add(Need.EXPERTS)
        return frozenset(have)

    def expert_batches(self, policy: Trainable, generator: torch.Generator) -> Iterator[dict[str, Any]] | None:
        """Return batches for `policy.loss`, sampled from the experts indefinitely, or None if there are no experts."""
        if self.experts is None:
            return None
        return regression_batches(policy, self.experts, EXPERT_BATCH, generator)


keep_former_names(__name__, {"TellsSteps": "RecoversLatents", "ExpertRows": "ExpertMixer"})
