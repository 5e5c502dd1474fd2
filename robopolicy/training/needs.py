"""Needs of mechanisms in fine-tuning: which are satisfied by the policy type, the world and the other inputs.

One table maps each need to the function that adds its extra to the rollouts. A need in the table is available whenever
`requires` is satisfied. A mechanism in any slot declares the need and reads the named extra. Extras are added once per
iteration, before side models, rewards and advantages are computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.images import black_out
from robopolicy.core.policy import (
    AnswersInTokens,
    CachesCondition,
    FinishesChain,
    MatchingLikelihood,
    Policy,
    RecordsMeans,
    ScoredPolicy,
    Trainable,
    recovers_latents,
)
from robopolicy.core.randomness import Generators
from robopolicy.core.rollouts import HELPED_GROUPS, Rollouts
from robopolicy.core.segments import Segments
from robopolicy.core.world import World
from robopolicy.nn.micro_batches import rows_at_once, scores_of
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.context import latents_for_other_policy
from robopolicy.rl.critic import Critic
from robopolicy.rl.objective import distribution_overlap, divergence_between, score_norm
from robopolicy.rl.registry import Need
from robopolicy.rl.rewards import last_chunk
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import (
    SCORED_AT_ONCE,
    decisions_at,
    reads_images,
    recompute_log_probs,
    slices_of,
)
from robopolicy.training.guidance import Guidance

ALWAYS = frozenset(
    {
        Need.EPISODES,
        Need.WHOLE_EPISODES,
        Need.WHOLE_MINIBATCHES,
        Need.BASE,
        Need.REFERENCE_SCORES,
        Need.SEQUENCE_RATIOS,
    }
)
READS_IMAGES = frozenset({Need.IMAGES, Need.BLACKOUT_SCORES, Need.BLACKOUT_DIVERGENCE})
"""Needs of mechanisms that read camera images again."""


@dataclass(frozen=True)
class Sources:
    """Inputs of providers: the policy before the update, and the teacher.

    instructions: of the world; generators: of the run, for providers that sample; iteration: counted from 0.
    """

    policy: ScoredPolicy
    teacher: Policy | None
    instructions: tuple[str, ...]
    generators: Generators
    iteration: int


@dataclass(frozen=True)
class Provider:
    """Provider of an extra column of rollouts. add: (rollouts, sources) -> rollouts with the extra; requires: needs
    that must be satisfied first.
    """

    add: Callable[[Rollouts, Sources], Rollouts]
    requires: frozenset[Need] = frozenset()


def add_entropy(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add the `entropy` [B, T, K] of every step under the policy before the update."""
    return rollouts.with_extras(entropy=recompute_log_probs(rollouts, sources.policy, sources.instructions)[1])


def _current_logp(rollouts: Rollouts, sources: Sources) -> Tensor:
    """Return the log-probabilities under the policy before the update [B, T, K], computed where another one acted, or
    the same one under other words.
    """
    is_own = rollouts.policy_version == sources.iteration
    if rollouts.extras.helped is not None:
        is_own = is_own & ~rollouts.extras.helped
    if not bool((rollouts.alive & ~is_own).any()):
        return rollouts.logp_behaviour
    logp, _ = recompute_log_probs(rollouts, sources.policy, sources.instructions)
    return torch.where(is_own[..., None], rollouts.logp_behaviour, logp.to(rollouts.logp_behaviour.dtype))


def add_blackout_scores(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `blackout_logp` [B, T, K]: log-probabilities with half of the images blacked out, lower for steps that depend
    on them; and `current_logp`, those of the same policy that sees.
    """
    logp, _ = recompute_log_probs(rollouts, sources.policy, sources.instructions, sources.generators["blackout"])
    return rollouts.with_extras(blackout_logp=logp, current_logp=_current_logp(rollouts, sources))


@torch.no_grad()
def add_blackout_divergence(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `blackout_divergence` [B, T, K]: KL(seeing || blind) of the policy before the update, from its distributions
    of every step with the images and with half of them blacked out.
    """
    divergence = torch.zeros_like(rollouts.logp_behaviour)
    for part in slices_of(rollouts.alive, rows_at_once(SCORED_AT_ONCE)):
        observation, latents = decisions_at(rollouts, part, sources.instructions)
        latents = latents_for_other_policy(latents)  # a cached condition would be of the whole image
        darkened = {key: black_out(key, value, sources.generators["blackout"]) for key, value in observation.items()}
        seeing, blind = (scores_of(sources.policy, each, latents) for each in (observation, darkened))
        divergence[part] = divergence_between(seeing, blind, rollouts.valid[part]).to(divergence.dtype)
    return rollouts.with_extras(blackout_divergence=divergence)


def add_contrast_scores(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `contrast_logp` [B, T, K] under another instruction, which rotates from iteration to iteration, and
    `current_logp` under the own one.
    """
    count = len(sources.instructions)
    # Offsets 1 to n - 1 modulo n: never the instruction itself, and all others in turn.
    other = replace(rollouts, task=(rollouts.task + 1 + sources.iteration % (count - 1)) % count)
    logp, _ = recompute_log_probs(other, sources.policy, sources.instructions)
    return rollouts.with_extras(contrast_logp=logp, current_logp=_current_logp(rollouts, sources))


def add_teacher_scores(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `teacher_logp` [B, T, K] of the same steps under the teacher, which encodes the observation itself."""
    assert isinstance(sources.teacher, ScoredPolicy)  # which Need.SAME_STEPS asks for
    logp, _ = recompute_log_probs(rollouts, sources.teacher, sources.instructions, another=True)
    return rollouts.with_extras(teacher_logp=logp)


@torch.no_grad()
def add_current_scores(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `current_logp` and `score_norm` [B, T, K] of every step under the policy before the update."""
    alive, policy = rollouts.alive, sources.policy
    logp, norm = (torch.zeros_like(rollouts.logp_behaviour) for _ in range(2))
    for part in slices_of(alive, rows_at_once(SCORED_AT_ONCE)):
        images = reads_images(policy, rollouts)
        observation, latents = decisions_at(rollouts, part, sources.instructions, images=images)
        scores = scores_of(policy, observation, latents)
        logp[part] = scores.logp.to(logp.dtype)
        norm[part] = score_norm(scores, latents, rollouts.valid[part]).to(norm.dtype)
    return rollouts.with_extras(current_logp=logp, score_norm=norm)


@torch.no_grad()
def add_teacher_overlap(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `teacher_overlap` [B, T, K] of the policy's and the teacher's distributions of every step."""
    assert isinstance(sources.teacher, ScoredPolicy)  # which Need.SAME_STEPS asks for
    overlap = torch.zeros_like(rollouts.logp_behaviour)
    for part in slices_of(rollouts.alive, rows_at_once(SCORED_AT_ONCE)):
        observation, latents = decisions_at(rollouts, part, sources.instructions)
        latents = latents_for_other_policy(latents)
        own_scores, teacher_scores = (
            scores_of(each, observation, latents) for each in (sources.policy, sources.teacher)
        )
        overlap[part] = distribution_overlap(own_scores, teacher_scores, rollouts.valid[part]).to(overlap.dtype)
    return rollouts.with_extras(teacher_overlap=overlap)


def add_position(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `position` [B, T] of every chunk in its row, (t + 1/2) / number of chunks."""
    place = torch.arange(rollouts.shape[1], device=rollouts.mask.device) + 0.5
    position = place / rollouts.alive.sum(1, keepdim=True).clamp(min=1)
    return rollouts.with_extras(position=torch.where(rollouts.alive, position, 0.0))


def add_group_rates(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `group_rate` [B, T], the success rate of the episode's group.

    Helped episodes that are compared among themselves have the rate of the group that they help, if it was played.
    """
    success, own = rollouts.row_success.float(), Segments.of(rollouts.group)
    helped = rollouts.extras.helped
    rate = own.mean(success)[own.index]
    if helped is not None:
        apart = helped[:, 0] & (rollouts.group >= HELPED_GROUPS)
        groups = Segments.of(rollouts.group - apart * HELPED_GROUPS)
        rate = torch.where(
            apart & (groups.size(~apart) > 0)[groups.index], groups.mean(success, ~apart)[groups.index], rate
        )
    return rollouts.with_extras(group_rate=rate[:, None].expand(rollouts.shape).contiguous())


def add_outcomes(rollouts: Rollouts, sources: Sources) -> Rollouts:
    """Add `outcome` [B, T]: whether an episode succeeded, at its last chunk, and -1 elsewhere."""
    success = rollouts.row_success.long()[:, None]
    return rollouts.with_extras(outcome=torch.where(last_chunk(rollouts), success, -1))


PROVIDERS: Mapping[Need, Provider] = {
    Need.ENTROPY: Provider(add_entropy),
    Need.BLACKOUT_SCORES: Provider(add_blackout_scores, frozenset({Need.IMAGES})),
    Need.BLACKOUT_DIVERGENCE: Provider(add_blackout_divergence, frozenset({Need.IMAGES})),
    Need.CONTRAST_SCORES: Provider(add_contrast_scores, frozenset({Need.INSTRUCTIONS})),
    Need.TEACHER_SCORES: Provider(add_teacher_scores, frozenset({Need.SAME_STEPS})),
    Need.CURRENT_SCORES: Provider(add_current_scores),
    Need.TEACHER_OVERLAP: Provider(add_teacher_overlap, frozenset({Need.SAME_STEPS})),
    Need.POSITION: Provider(add_position),
    Need.GROUP_RATES: Provider(add_group_rates, frozenset({Need.GROUPS})),
    Need.OUTCOMES: Provider(add_outcomes, frozenset({Need.EPISODES})),
}


def derivable_needs(have: frozenset[Need]) -> frozenset[Need]:
    """Return the needs that can be satisfied in addition to those in `have`."""
    return frozenset(need for need, provider in PROVIDERS.items() if provider.requires <= have)


def add_extras(rollouts: Rollouts, needs: frozenset[Need], sources: Sources) -> Rollouts:
    """Add the extras for `needs`, in table order, so that random draws do not depend on the requester."""
    for need, provider in PROVIDERS.items():
        if need in needs:
            rollouts = provider.add(rollouts, sources)
    return rollouts


def with_reference(
    prepared: Rollouts, needs: frozenset[Need], reference: ScoredPolicy | None, instructions: tuple[str, ...]
) -> Rollouts:
    """Add `reference_logp` [B, T, K] for Need.REFERENCE_SCORES, of all rows, replayed ones included.

    reference: the frozen base policy; features cached by a frozen encoder equal those that its own encoder would give.
    """
    if Need.REFERENCE_SCORES not in needs or reference is None:
        return prepared
    return prepared.with_extras(reference_logp=recompute_log_probs(prepared, reference, instructions)[0])


def needs_images(policy: Trainable, critic: Critic | None, algorithm: Algorithm, *, others: bool) -> bool:
    """Whether camera images are needed after acting, so that rollouts have to store them.

    The policy does not need them when it reads no images or caches the features of its frozen encoder. Auxiliary losses
    and side models may need them; other mechanisms declare it among their needs. others: whether another component,
    such as a teacher, needs them.
    """
    encoded = isinstance(policy, CachesCondition) and policy.caches_condition
    return (
        others
        or (bool(policy.spec.cameras) and not encoded)
        or (critic is not None and critic.reads_images)
        or bool(algorithm.auxiliaries or algorithm.models or algorithm.needs & READS_IMAGES)
    )


def satisfied_needs(
    policy: Trainable, critic: Critic | None, world: World, config: FinetuneConfig, guidance: Guidance
) -> frozenset[Need]:
    """Return all satisfied needs, including those that the trainer satisfies by adding extras."""
    have = {*ALWAYS, Need.CATEGORICAL if policy.spec.categorical else Need.GAUSSIAN}
    if critic is not None:
        have |= {Need.CRITIC, Need.FINISHED}
    if isinstance(policy, MatchingLikelihood) and policy.scored_by_matching:
        have.add(Need.MATCHING)  # such decisions hold no chain
    else:
        have |= {Need.MEANS} if isinstance(policy, RecordsMeans) else set()
        have |= {Need.FINISHES} if isinstance(policy, FinishesChain) else set()
    if isinstance(policy, AnswersInTokens) and policy.answers_in_tokens:
        have.add(Need.FURTHER_TOKENS)
    if recovers_latents(policy):
        have.add(Need.SCORES_ACTIONS)
    if config.group_size > 1 or config.branch_at:  # the leaves of one root are a group
        have |= {Need.GROUPS, Need.WHOLE_GROUPS}
    if config.num_initial_states:
        have.add(Need.STARTS)
    if len(world.spec.instructions) > 1:
        have.add(Need.INSTRUCTIONS)
    if len(world.spec.goals) < len(world.spec.instructions):
        have |= {Need.PARAPHRASES, Need.WORDINGS}  # the former also makes groups hear all wordings
    if policy.spec.cameras:
        have.add(Need.IMAGES)
    if world.spec.shows_vectors:
        have.add(Need.VECTORS)
    all_of_it = frozenset(have) | guidance.gives(policy)
    return all_of_it | derivable_needs(all_of_it)


keep_former_names(
    __name__,
    {
        "counted_on": "satisfied_needs",
        "provided": "derivable_needs",
        "provide": "add_extras",
        "keeps_images": "needs_images",
    },
)
