"""Chooses among the decisions of a frozen policy, while it acts, by a critic of recorded data: IDQL behind the gate.

Source: Hansen-Estruch et al. 2023, arXiv:2304.10573: an expectile critic (offline.agent=iql), a policy that imitates
what was recorded, and the argmax over samples of it. Deviation: how many samples is not the user's guess. A critic errs
somewhere among many decisions and the argmax looks for it, so every round asks for more than the last accepted one, and
the gate says how far the critic is to be trusted.
"""

from typing import cast

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.training.critics.policies import BestOfPolicy
from robopolicy.training.offline.configuration import IdqlConfig
from robopolicy.training.offline.improvers import Lesson, chosen_decisions

LOOKED_AT = 1024
"""Recorded observations on which the log says what choosing gains, by the critic itself."""


class Idql:
    """See `IdqlConfig`."""

    def __init__(self, config: IdqlConfig):
        self.config = config

    def wrap(self, policy: Policy, lesson: Lesson, seed: int) -> Trainable:
        """Return the policy as the base of one that is yet to choose, by the lesson's critic; see `Wraps`."""
        made = BestOfPolicy(policy, lesson.critic, lesson.interface, 1)
        return cast(Trainable, made)  # the rounds copy, save and restore it, and nothing of it learns

    def prepare(self, policy: Trainable) -> None:
        """Nothing is to be done; raises ConfigError for a policy that was not wrapped."""
        if not isinstance(policy, BestOfPolicy):
            raise ConfigError(f"idql changes a BestOfPolicy, not {type(policy).__name__}: wrap() makes one.")

    def improve(
        self, policy: Trainable, lesson: Lesson, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Let the policy choose among more decisions; see `Improver`. step: share of the further ones."""
        choosing, data = cast(BestOfPolicy, policy), lesson.data
        now = int(choosing.count)
        further = self.config.candidates - 1 if now == 1 else now
        choosing.count.fill_(now + max(1, round(step * further)))
        frames = data.frame[:: max(1, len(data) // LOOKED_AT)][:LOOKED_AT]
        _, gain = chosen_decisions(choosing.base, lesson, frames, int(choosing.count), generators)
        return {"candidates": float(choosing.count), "gain": gain}
