"""Progress reward and success of single steps, predicted from the state vectors before and after them.

The heads read (state, action, next state), so that the goal boundary stays sharp. If recorded progress is the increase
of a potential, so is the predicted reward, and going in circles earns none. Without a potential, a policy of pick_place
collected progress without reaching the goal, and its success fell from .37 to 0. Axes: N steps, S states, A actions.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.transitions import Transitions
from robopolicy.core.vectors import StateVector
from robopolicy.nn.blocks import Members
from worldmodels.data import Standardised, means_and_deviations, recorded_transitions
from worldmodels.heads.goal import GoalPotential, episode_threshold, pairs_of
from worldmodels.heads.outputs import calibrated_threshold, potential_explains_rewards
from worldmodels.heads.success import make_success_head

BATCH = 256
POSITIVE_SHARE = 0.25
"""Fraction of successful steps in a batch of the success head."""

PART = 8192
"""Number of steps calibrated at a time."""


class StepHeads(Standardised):
    """Heads of one world, a `Regression`; `bonus` is the reward for success, `success_head` names the type of success
    head. by_potential: a `GoalPotential` decides success instead of that head, which is trained beside it.
    """

    reward_mean: Tensor
    reward_std: Tensor
    success_threshold: Tensor
    pays_potential: Tensor

    def __init__(
        self,
        state_vector: StateVector,
        actions: int,
        width: int,
        bonus: float,
        success_head: str = "logistic",
        by_potential: bool = False,
    ):
        super().__init__()
        self.state_vector, self.bonus = state_vector, bonus
        states = state_vector.size
        self.reward = Members(1, 2 * states + actions, width, 2, 1)
        self.success = make_success_head(success_head, states, width, 2)
        self.potential = Members(1, states, width, 2, 1)
        self.goal = GoalPotential(states, width) if by_potential else None
        self.register_statistics(state=states, action=actions, change=states, reward=1)
        self.register_buffer("success_threshold", torch.zeros(()))
        self.register_buffer("pays_potential", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def fit_statistics(self, data: Transitions) -> None:
        """Fit the standardisation of inputs and targets: means and deviations [S], [A] and [1] over the steps."""
        change = data.next_state - data.state
        values = {"state": data.state, "action": data.action, "change": change, "reward": data.reward[:, None]}
        self.keep_statistics(means_and_deviations(values))
        if self.goal is not None:
            self.goal.fit_scale(data)

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield batches for `loss` indefinitely; the only state is `generator`.

        state, next_state, success_state: [N, S]; action: [N, A]; reward: [N]; success_label: [N] bool; in the world's
        units, with N = BATCH. Raises DataError when rewards, success or final frames are missing.
        """
        data, device = recorded_transitions(episodes, self.state_vector), self.state_mean.device
        successes = data.won.nonzero()[:, 0]
        while True:
            rows = torch.randint(len(data), (BATCH,), generator=generator, device=generator.device).cpu()
            batch = {name: getattr(data, name)[rows] for name in ("state", "action", "next_state", "reward")}
            batch |= success_batch(data, rows, successes, POSITIVE_SHARE, generator)
            if self.goal is not None:
                batch |= pairs_of(data, rows, generator)
            yield {name: value.to(device) for name, value in batch.items()}

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"reward", "potential", "success"} and, where a potential decides success, {"goal"}: each [N].

        batch: state, action, next_state, reward of steps; success_state [N, S] and success_label [N] of others; for a
        potential that decides success also the outputs of `pairs_of`.
        """
        state = batch["state"]
        action = batch["action"]
        after = batch["next_state"]
        reward = self.standard("reward", batch["reward"][:, None])[:, 0]
        predicted = self.reward(self._reward_input(state, action, after)[None])[0, :, 0]
        success_state = self.standard("state", batch["success_state"])
        losses = dict[str, Tensor]()
        if self.goal is not None:
            first, second = (self.standard("state", batch[name]) for name in ("success_first", "success_second"))
            gain = batch["success_gain"]
            losses["goal"] = self.goal.loss(first, second, gain, success_state, batch["success_label"])
        return {
            "reward": (predicted - reward).square(),
            # In the world's units: increases of a potential sum to 0 around a circle. Standardised rewards, which are
            # shifted by their mean, do not.
            "potential": (self._increase(state, after) - batch["reward"]).square() / self.reward_std.square(),
            "success": self.success.loss(success_state, batch["success_label"]),
            **losses,
        }

    def success_logit(self, state: Tensor) -> Tensor:
        """Return the logit [N] of success in states [N, S], or the potential that decides it, before calibration."""
        return self._decides(self.standard("state", state))

    def _decides(self, standard_state: Tensor) -> Tensor:
        """Return the value [...] of standardised states [..., S] that is compared with the threshold of success."""
        return self.success(standard_state) if self.goal is None else self.goal(standard_state)

    def succeeded(self, state: Tensor) -> Tensor:
        """Return whether states [N, S] are successful."""
        return self.success_logit(state) > self.success_threshold

    def progress(self, state: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """Return the reward [N] without the bonus for success."""
        return self._increase(state, after) if self.pays_potential else self._predicted(state, action, after)

    def judge(self, path: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `progress` [T, N] of N rows with actions [T, N, A] along path [T + 1, N, S], and `succeeded` [T, N];
        all steps are computed together, and every state is processed once.
        """
        states = self.standard("state", path)
        success = self._decides(states[1:]) > self.success_threshold
        if self.pays_potential:
            value = self.potential(states.flatten(0, 1)[None]).reshape(path.shape[:2])
            return self.reward_std * value.diff(dim=0), success
        steps = (part.flatten(0, 1) for part in (path[:-1], actions, path[1:]))
        return self._predicted(*steps).reshape(success.shape), success

    @torch.no_grad()
    def calibrate(self, data: Transitions) -> None:
        """Calibrate the success threshold and the choice of reward head on held-out steps."""
        device = self.state_mean.device
        logits = torch.cat([self.success_logit(part.to(device)) for part in data.next_state.split(PART)])
        if self.goal is None:
            self.success_threshold.copy_(calibrated_threshold(logits, data.won))
        else:
            assert data.episode is not None
            self.success_threshold.copy_(episode_threshold(logits.cpu(), data.won.cpu(), data.episode.cpu()))
        rewards = []
        for rows in torch.arange(len(data)).split(PART):
            state, action, after = (value[rows].to(device) for value in (data.state, data.action, data.next_state))
            rewards.append(torch.stack([self._increase(state, after), self._predicted(state, action, after)]))
        increase, predicted = torch.cat(rewards, 1)
        self.pays_potential.fill_(potential_explains_rewards(increase, data.reward.to(device), predicted))

    def _increase(self, state: Tensor, after: Tensor) -> Tensor:
        """Return the increase [N] of the learned potential."""
        before, later = (self.potential(self.standard("state", each)[None])[0, :, 0] for each in (state, after))
        return self.reward_std * (later - before)

    def _predicted(self, state: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """Return the reward [N] of the unconstrained reward head."""
        output = self.reward(self._reward_input(state, action, after)[None])[0, :, 0]
        return self.reward_mean + self.reward_std * output

    def _reward_input(self, state: Tensor, action: Tensor, after: Tensor) -> Tensor:
        parts = ("state", state), ("action", action), ("change", after - state)
        return torch.cat([self.standard(name, value) for name, value in parts], -1)


def success_batch(
    data: Transitions, rows: Tensor, won: Tensor, share: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return {"success_state", "success_label"} after steps `rows` [N], a fraction of them replaced by random
    successful steps from `won`.

    won: indices [W] of successful steps; success_state: [N, S], in the world's units; success_label: [N] bool.
    """
    count, indices = round(share * len(rows)) if len(won) else 0, rows.clone()
    if count:
        positives = torch.randint(len(won), (count,), generator=generator, device=generator.device).cpu()
        indices[:count] = won[positives]
    return {"success_state": data.next_state[indices], "success_label": data.won[indices]}
