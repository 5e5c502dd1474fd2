"""Critics and edit actor of EXPO: bounded edits of a base policy's action chunks, chosen by Q.

Source: EXPO, Dong et al. 2025, arXiv:2507.07986; for action chunks EXPO-FT, arXiv:2605.25477. In every state the base
policy samples K chunks a, the edit actor adds a bounded edit to each, a + scale * tanh(...), and the chunk with the
highest Q of all 2 K acts and forms the target of the TD backup (the on-the-fly policy). The edit actor maximises the
critics' mean Q of edited recorded actions, with SAC's entropy term; the base policy never gets a gradient of Q.

Deviations: the K base chunks in a next state are sampled once, when its transition is stored, not at every update. The
chunk is chosen by the expectation of the minimum over a random subset of the target critics instead of one draw of that
subset; the value in the target uses one draw, as REDQ does. Edited chunks are clipped to the action range. The entropy
is that of the edit before scaling, so that the target entropy -A / 2 can be reached at any scale.
"""

import math

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.agent import Actor
from robopolicy.rl.offline.configuration import SacConfig
from robopolicy.rl.offline.sac import Sac


class Edit(Sac):
    """Critics of action chunks and an actor that edits a base policy's chunks.

    It has no actions of its own: `choose` needs chunks of the base policy. scale: largest change of an action element,
    where its range is [-1, 1]. Raises ConfigError unless scale is in (0, 2] and for targets with entropy.
    """

    def __init__(self, config: SacConfig, state: int, action: int, seed: int, scale: float = 0.1):
        if not 0 < scale <= 2:
            raise ConfigError(f"edit_scale={scale:g} must be above 0 and at most 2, the width of the action range.")
        if config.entropy_backup:
            raise ConfigError(
                "online.method=edit backs up the best of several chunks, which has no entropy: set "
                "online.agent.entropy_backup=false."
            )
        self.scale, self.state_size = scale, state
        super().__init__(config, state, action, seed)
        self.target_entropy = -action / 2 if config.target_entropy is None else config.target_entropy
        self.edited_share = torch.zeros(())

    def new_actor(self, state: int, action: int) -> Actor:
        """Return an actor that reads a state and a chunk."""
        return super().new_actor(state + action, action)

    def fit_statistics(self, state: Tensor) -> None:
        """Fit the state standardisation of all networks on states [N, S]; chunks are in [-1, 1] already."""
        for part in (self.critics, self.slow):
            part.state.fit(state)
        self.actor.state.mean[: self.state_size] = self.critics.state.mean
        self.actor.state.std[: self.state_size] = self.critics.state.std

    def edited(self, state: Tensor, chunks: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return edited chunks [N, A] of chunks [N, A] in states [N, S], and the log densities [N] of the edits.

        Without a generator the edit is noise-free, and its density 0.
        """
        seen = torch.cat([state, chunks], -1)
        if generator is None:
            edit, density = self.actor(seen), state.new_zeros(len(state))
        else:
            edit, density = self.actor.sample(seen, generator)
        return (chunks + self.scale * edit).clamp(-1, 1), density

    def proposed(self, batch: Transitions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return edits of the batch's actions, [B, A], with gradients, and their log densities [B]."""
        return self.edited(batch.state, batch.action, generator)

    @torch.no_grad()
    def candidates(self, state: Tensor, proposals: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the base policy's proposals [B, K, A] in states [B, S] and one edit of each, [B, 2 K, A]."""
        count = proposals.shape[1]
        edits, _ = self.edited(state.repeat_interleave(count, 0), proposals.flatten(0, 1), generator)
        return torch.cat([proposals, edits.reshape(proposals.shape)], 1)

    @torch.no_grad()
    def scores(self, state: Tensor, chunks: Tensor) -> Tensor:
        """Return the score [B, M] of M chunks [B, M, A] in each state [B, S]: the expected minimum over a random subset
        of `critic_subset` target critics, or the minimum over all.
        """
        count = chunks.shape[1]
        values = self.slow(state.repeat_interleave(count, 0), chunks.flatten(0, 1))
        return expected_minimum(values, self.config.critic_subset).reshape(-1, count)

    @torch.no_grad()
    def choose(self, state: Tensor, proposals: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the chunk [B, A] with the highest score among the proposals [B, K, A] and their edits, and its index
        [B]: from K on it is an edit.
        """
        chunks = self.candidates(state, proposals, generator)
        index = self.scores(state, chunks).argmax(1)
        return chunks[torch.arange(len(chunks), device=chunks.device), index], index

    def target(self, batch: Transitions, generator: torch.Generator) -> Tensor:
        """Return r + decay (1 - terminated) min_M Q(s', a'), [B]: a' is the chosen one of the next candidates and their
        edits, the minimum is over M random target critics.

        Raises DataError if the batch lacks the base policy's chunks in the next states.
        """
        if batch.next_candidates is None:
            raise DataError("The edit agent needs the base policy's chunks in the next states, and there are none.")
        with torch.no_grad():
            action, index = self.choose(batch.next_state, batch.next_candidates, generator)
            self.edited_share = (index >= batch.next_candidates.shape[1]).float().mean()
            value = self.smallest(self.slow(batch.next_state, action), generator)
            return batch.backup(value, self.config.discount)

    def regulariser(
        self, batch: Transitions, values: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return SAC's regulariser, [], of values [N, B]; the metrics include the share of targets that are edits."""
        penalty, figures = super().regulariser(batch, values, generator)
        return penalty, {**figures, "edited": self.edited_share}

    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Raise DataError: in states [B, S] without chunks of a base policy there is nothing to edit."""
        raise DataError("The edit agent edits a base policy's chunks and has no actions of its own: use choose().")

    def value(self, state: Tensor) -> Tensor:
        """Raise DataError in all states [B, S], as `act`."""
        raise DataError("The edit agent's values are those of a base policy's chunks: use scores().")


def expected_minimum(values: Tensor, subset: int | None) -> Tensor:
    """Return the expectation [N] of the minimum over `subset` of the M values [M, N], drawn without replacement; None
    is the minimum of all.

    The i-th smallest of M (i = 1, ...) is the minimum of C(M - i, subset - 1) of the C(M, subset) subsets.
    """
    count = len(values)
    if subset is None or subset >= count:
        return values.min(0).values
    weights = [math.comb(count - place, subset - 1) / math.comb(count, subset) for place in range(1, count + 1)]
    return torch.einsum("m,mn->n", values.new_tensor(weights), values.sort(0).values)
