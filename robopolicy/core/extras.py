"""Optional columns of rollouts, one entry per policy call (`Extras`); every name is defined in this file only."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from torch import Tensor

from robopolicy.core.errors import did_you_mean


class MissingExtraError(LookupError):
    """A column was read that no component has added."""


@dataclass(frozen=True)
class Extras:
    """Named tensors [B, T, ...] that accompany `Rollouts`; each is None until a component adds it.

    extras["entropy"] returns the tensor, or raises a MissingExtraError that names what adds it; extras.entropy may be
    None. An undefined name raises KeyError, on reading and on adding.
    """

    episode_return: Tensor | None = None
    """[B, T] sum of rewards since the start of the episode. Added during collection; read by the metrics."""
    uncertainty: Tensor | None = None
    """[B, T, C] uncertainty of the world model about each control step. Added during collection in worlds that provide
    it.
    """
    start: Tensor | None = None
    """[B, T] int64, index of the episode's initial state in the pool. Added during group collection; read by start
    samplers.
    """
    hint: Tensor | None = None
    """[B, T] fraction of the demonstration skipped before the episode. Added during group collection; read by hints."""
    demonstrated: Tensor | None = None
    """[B, T, D] vector fields observed in the demonstration as many control steps after the episode's first state as
    its first chunk took; NaN without a demonstration. Added during group collection by the allocator one_chunk.
    """
    helped: Tensor | None = None
    """[B, T] bool, episodes played after their group, with help, by the teacher, or from a state that was chosen. Added
    during group collection by the allocators retry_*, correct, tree_search, prefixes, procedures and
    *teacher_rollouts; read by `Rollouts.unaided`.
    """
    budget: Tensor | None = None
    """[B, T, 2] control steps that the episode was asked to take at most, and the world's horizon. Added during group
    collection by the allocator budgets.
    """
    taught: Tensor | None = None
    """[B, T] bool, whether the teacher acted. Added during collection if policy and teacher take turns; read by
    `Rollouts.played`.
    """
    replayed: Tensor | None = None
    """[B, T] bool, rows of earlier iterations that are used again. Added by PROPS and success_pool; read by
    `Rollouts.fresh`.
    """
    state_key: Tensor | None = None
    """[B, T] int64, equal for states that count as the same. Added by collectors that identify states better than by
    rounding.
    """
    entropy: Tensor | None = None
    """[B, T, K] entropy of every step under the policy before the update, in nats. Added for Need.ENTROPY."""
    blackout_logp: Tensor | None = None
    """[B, T, K] log-probability with patches of the images blacked out. Added for Need.BLACKOUT_SCORES."""
    blackout_divergence: Tensor | None = None
    """[B, T, K] KL of the policy's step from the one with patches of the images blacked out, in nats. Added for
    Need.BLACKOUT_DIVERGENCE.
    """
    contrast_logp: Tensor | None = None
    """[B, T, K] log-probability under another instruction. Added for Need.CONTRAST_SCORES."""
    teacher_logp: Tensor | None = None
    """[B, T, K] log-probability under the teacher. Added for Need.TEACHER_SCORES."""
    reference_logp: Tensor | None = None
    """[B, T, K] log-probability under the frozen reference policy. Added for Need.REFERENCE_SCORES."""
    current_logp: Tensor | None = None
    """[B, T, K] log-probability under the policy before the update. Added for Need.CURRENT_SCORES, BLACKOUT_SCORES,
    CONTRAST_SCORES and, with old rows, SEQUENCE_RATIOS.
    """
    score_norm: Tensor | None = None
    """[B, T, K] squared norm of the log-probability's gradient by the step's logits or means. Added for
    Need.CURRENT_SCORES.
    """
    teacher_overlap: Tensor | None = None
    """[B, T, K] in 0..1, agreement of the policy's and the teacher's distributions. Added for Need.TEACHER_OVERLAP."""
    outcome: Tensor | None = None
    """[B, T] int64, at an episode's last chunk whether it succeeded, 0 or 1, elsewhere -1. Added for Need.OUTCOMES."""
    change: Tensor | None = None
    """[B, T, E] int64, bin of the change of E elements of the observation. Added by the side model changes."""
    right_logp: Tensor | None = None
    """[B, T, K] log-probability if the goal were where a success ended. Added by the side model answers."""
    wrong_logp: Tensor | None = None
    """[B, T, K] log-probability if the goal were where a failure ended. Added with it."""
    branching_score: Tensor | None = None
    """[B, T] score of branching after the chunk, at least 0. Added by the side model past_policy."""
    position: Tensor | None = None
    """[B, T] fraction of the episode's chunks before the middle of this one. Added for Need.POSITION."""
    group_rate: Tensor | None = None
    """[B, T] success rate of the episode's group, or of the one that it helps. Added for Need.GROUP_RATES."""
    preferred: Tensor | None = None
    """[B, T] 1 for episodes preferred to others of their group, -1 for the rejected ones. Added by mechanisms that
    store pairs.
    """
    process: Tensor | None = None
    """[B, T, K] process reward of every step. Added by the side models prime and oprl."""
    process_accuracy: Tensor | None = None
    """[B, T] fraction of episodes whose outcome the process rewards predict. Added with them; read by the metrics."""
    q: Tensor | None = None
    """[B, T] action value Q(s, a). Added by the side model q_ensemble."""
    v: Tensor | None = None
    """[B, T] state value V(s). Added by the side model q_ensemble."""
    first_error: Tensor | None = None
    """[B, T] bool, the first decision of a failed episode after which the value falls. Added by the side model
    first_error; read by the auxiliary intervene.
    """
    before_error: Tensor | None = None
    """[B, T] bool, the decisions before first_error. Added with it."""
    flow_value: Tensor | None = None
    """[B, T, K] value of the state and the noisy action at every noise level. Added by the side model flow_critic."""
    flow_return: Tensor | None = None
    """[B, T] scaled return that flow_value predicts. Added with it."""
    preference: Tensor | None = None
    """[B, T] similarity of the action chunk to the teacher's. Added by the side model discriminator."""
    value: Tensor | None = None
    """[B, T] the critic's value before the update. Added for Need.CRITIC; read by the diagnostics."""
    value_target: Tensor | None = None
    """[B, T] regression target of the critic. Added for Need.CRITIC."""
    target_known: Tensor | None = None
    """[B, T] bool, where `value_target` is valid. Added for Need.FINISHED; None: everywhere."""
    advantage_gae: Tensor | None = None
    """[B, T] generalised advantage estimate. Added for Need.CRITIC; read by the advantages gae and egae."""
    advantage: Tensor | None = None
    """[B, T, K] advantage of every step, from which its coefficient is computed. Added by `Algorithm.prepare`."""
    pruned: Tensor | None = None
    """[B, T, K] bool, steps excluded from the gradient. Added by `Algorithm.prepare`; read by the learner."""
    episode_steps: Tensor | None = None
    """[B, T] int64, number of scored steps of the complete row. Added by `Algorithm.prepare`; read by the weight
    episode_mean.
    """
    episode_decisions: Tensor | None = None
    """[B, T] int64, number of decisions with a scored step of the complete row. Added with it; read by the weight
    decision_mean.
    """

    @staticmethod
    def of(given: "Extras | Mapping[str, Tensor]") -> "Extras":
        """Return `given` as `Extras`; it may be a mapping by name, as stored in checkpoints and columns. Raises
        KeyError for undefined names.
        """
        return given if isinstance(given, Extras) else Extras().adding(**given)

    def adding(self, **tensors: Tensor) -> "Extras":
        """Return a copy with `tensors` added by name; raises KeyError, with the most similar name, for an undefined
        one.
        """
        for name in tensors:
            _require_known(name)
        return replace(self, **tensors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor [B, T, ...] of the columns that are set, in order of definition."""
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                yield item.name, value

    def map(self, function: Callable[[Tensor], Tensor]) -> "Extras":
        """Apply `function` to each column [B, T, ...] that is set."""
        return Extras(**{name: function(value) for name, value in self.items()})

    def __contains__(self, name: str) -> bool:
        """Whether the column is set; raises KeyError for an undefined name."""
        _require_known(name)
        return getattr(self, name) is not None

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor; raises MissingExtraError if it was never added, KeyError for an undefined name."""
        if name not in self:
            raise MissingExtraError(
                f"These rollouts have no column '{name}'. A mechanism that reads it must declare the matching "
                "`Need`; robopolicy.core.extras.Extras documents what adds each column."
            )
        return getattr(self, name)


def _require_known(name: str) -> None:
    names = [item.name for item in fields(Extras)]
    if name not in names:
        raise KeyError(f"Rollouts have no extra column '{name}'.{did_you_mean(name, names)}")
