"""What mechanisms may count on in a run of fine-tuning: the policy's kind, the world, and what else was given."""

from robopolicy.core.policy import FinishesChain, MatchesNoise, RecordsMeans, Trainable
from robopolicy.core.world import World
from robopolicy.rl.critic import Critic
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.guidance import Guidance
from robopolicy.training.providers import provided

ALWAYS = frozenset({Need.EPISODES, Need.WHOLE_EPISODES, Need.BASE, Need.REFERENCE_SCORES})


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
    all_of_it = frozenset(have) | guidance.gives(policy.spec)
    return all_of_it | provided(all_of_it)
