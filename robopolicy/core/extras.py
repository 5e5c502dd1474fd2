"""`Extras`: what is known of decisions beside what was played, each under a name that stands here and nowhere else."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from torch import Tensor

from robopolicy.core.errors import did_you_mean


class MissingExtraError(LookupError):
    """Nobody has added this extra, though something reads it."""


@dataclass(frozen=True)
class Extras:
    """Named tensors [B, T, ...] beside `Rollouts`, None until somebody adds them.

    extras["entropy"] is the tensor, or a MissingExtraError that says who would have added it; extras.entropy may be
    None. A name that is none of these is a KeyError at once, in reading as in adding.
    """

    episode_return: Tensor | None = None
    """[B, T] rewards since the episode's start. Added in collecting; read by the metrics."""
    uncertainty: Tensor | None = None
    """[B, T, C] a world model's uncertainty about each control step. Added in collecting, by worlds that give one."""
    start: Tensor | None = None
    """[B, T] int64, which start of the pool the episode had. Added in collecting groups; read by samplers of starts."""
    hint: Tensor | None = None
    """[B, T] share of the demonstration that the episode began after. Added in collecting groups; read by hints."""
    taught: Tensor | None = None
    """[B, T] bool, the teacher acted. Added in collecting where the two take turns; read by `Rollouts.played`."""
    replayed: Tensor | None = None
    """[B, T] bool, rows of earlier iterations that are learned from again. Added by PROPS; read by `Rollouts.fresh`."""
    state_key: Tensor | None = None
    """[B, T] int64, equal for states that count as the same. Added by collectors that know better than rounding."""
    entropy: Tensor | None = None
    """[B, T, K] entropy of every step under the policy that acted, nats. Added for Need.ENTROPY."""
    blackout_logp: Tensor | None = None
    """[B, T, K] log-probability with patches of the images made black. Added for Need.BLACKOUT_SCORES."""
    contrast_logp: Tensor | None = None
    """[B, T, K] log-probability under another instruction. Added for Need.CONTRAST_SCORES."""
    teacher_logp: Tensor | None = None
    """[B, T, K] log-probability under the teacher. Added for Need.TEACHER_SCORES."""
    reference_logp: Tensor | None = None
    """[B, T, K] log-probability under the reference, frozen. Added for Need.REFERENCE_SCORES."""
    preferred: Tensor | None = None
    """[B, T] 1 in episodes that are preferred to others of their group, -1 in those. Added by what stores pairs."""
    process: Tensor | None = None
    """[B, T, K] a reward for every step. Added by the side models prime and oprl."""
    process_accuracy: Tensor | None = None
    """[B, T] share of episodes whose outcome these rewards tell. Added with them; read by the metrics."""
    q: Tensor | None = None
    """[B, T] action value Q(s, a). Added by the side model q_ensemble."""
    v: Tensor | None = None
    """[B, T] state value V(s). Added by the side model q_ensemble."""
    flow_value: Tensor | None = None
    """[B, T, K] value of the state and the noisy action of every level. Added by the side model flow_critic."""
    flow_return: Tensor | None = None
    """[B, T] scaled return that these values are of. Added with them."""
    preference: Tensor | None = None
    """[B, T] how much the decision looks like the teacher's. Added by the side model discriminator."""
    value: Tensor | None = None
    """[B, T] the critic's value before the update. Added for Need.CRITIC; read by the diagnostics."""
    value_target: Tensor | None = None
    """[B, T] what the critic learns. Added for Need.CRITIC."""
    target_known: Tensor | None = None
    """[B, T] bool, where `value_target` may be learned. Added for Need.FINISHED; None: everywhere."""
    advantage_gae: Tensor | None = None
    """[B, T] generalised advantage estimate. Added for Need.CRITIC; read by the advantages gae and egae."""
    advantage: Tensor | None = None
    """[B, T, K] what every step's coefficient is made of. Added by `Algorithm.prepare`."""
    pruned: Tensor | None = None
    """[B, T, K] bool, steps that no gradient is taken through. Added by `Algorithm.prepare`; read by the learner."""
    episode_steps: Tensor | None = None
    """[B, T] int64, scored steps of the whole row. Added by `Algorithm.prepare`; read by the weight episode_mean."""

    @staticmethod
    def of(given: "Extras | Mapping[str, Tensor]") -> "Extras":
        """Return `given`, which may be a mapping by name as checkpoints and columns hold it; KeyError for others."""
        return given if isinstance(given, Extras) else Extras().adding(**given)

    def adding(self, **tensors: Tensor) -> "Extras":
        """Return these and `tensors`, by name; raises KeyError for a name that is none, with the nearest."""
        for name in tensors:
            _require_known(name)
        return replace(self, **tensors)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor [B, T, ...] of those that are there, in the order of their definition."""
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                yield item.name, value

    def map(self, function: Callable[[Tensor], Tensor]) -> "Extras":
        """Return what `function` makes of each [B, T, ...] that is there."""
        return Extras(**{name: function(value) for name, value in self.items()})

    def __contains__(self, name: str) -> bool:
        """Whether it is there; raises KeyError for a name that is none."""
        _require_known(name)
        return getattr(self, name) is not None

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor; raises MissingExtraError if it was never added, KeyError for a name that is none."""
        if name not in self:
            raise MissingExtraError(
                f"These rollouts have no '{name}'. A mechanism that reads it declares the need that adds it (see "
                "robopolicy.core.extras.Extras for who adds what)."
            )
        return getattr(self, name)


def _require_known(name: str) -> None:
    known = [item.name for item in fields(Extras)]
    if name not in known:
        raise KeyError(f"Rollouts know no extra '{name}'.{did_you_mean(name, known)} There are {', '.join(known)}.")
