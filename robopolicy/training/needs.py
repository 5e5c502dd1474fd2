"""What mechanisms may count on in a run of fine-tuning: the policy's kind, the world, and what else was given."""

from robopolicy.core.policy import CachesCondition, FinishesChain, MatchesNoise, RecordsMeans, Trainable
from robopolicy.core.world import World
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.critic import Critic
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.guidance import Guidance
from robopolicy.training.providers import provided

ALWAYS = frozenset({Need.EPISODES, Need.WHOLE_EPISODES, Need.BASE, Need.REFERENCE_SCORES})


READS_IMAGES = frozenset({Need.IMAGES, Need.BLACKOUT_SCORES})
"""Needs of what looks at camera images again."""


def keeps_images(policy: Trainable, critic: Critic | None, algorithm: Algorithm, *, others: bool) -> bool:
    """Whether anybody may look at camera images once decisions are taken, so that rollouts have to keep them.

    The policy does not where it reads none, or where its frozen encoder is asked once a decision. Losses that ask
    policies for decisions of their own do, and so may side models; other mechanisms declare it among their needs.
    others: whether somebody else is there who does, such as a teacher.
    """
    encoded = isinstance(policy, CachesCondition) and policy.caches_condition
    return (
        others
        or (bool(policy.spec.cameras) and not encoded)
        or (critic is not None and critic.reads_images)
        or bool(algorithm.auxiliaries or algorithm.models or algorithm.needs & READS_IMAGES)
    )


def counted_on(
    policy: Trainable, critic: Critic | None, world: World, config: FinetuneConfig, guidance: Guidance
) -> frozenset[Need]:
    """Return the needs that are met, those that the trainer meets by adding to rollouts included."""
    have = {*ALWAYS, Need.CATEGORICAL if policy.spec.categorical else Need.GAUSSIAN}
    if critic is not None:
        have |= {Need.CRITIC, Need.FINISHED}
    if isinstance(policy, MatchesNoise) and policy.scored_by_matching:
        have.add(Need.MATCHING)  # such decisions hold no chain
    else:
        have |= {Need.MEANS} if isinstance(policy, RecordsMeans) else set()
        have |= {Need.FINISHES} if isinstance(policy, FinishesChain) else set()
    if config.group_size > 1 or config.branch_at:  # the leaves of one root are a group
        have |= {Need.GROUPS, Need.WHOLE_GROUPS}
    if config.starts:
        have.add(Need.STARTS)
    if len(world.spec.instructions) > 1:
        have.add(Need.INSTRUCTIONS)
    if policy.spec.cameras:
        have.add(Need.IMAGES)
    all_of_it = frozenset(have) | guidance.gives(policy)
    return all_of_it | provided(all_of_it)
