"""Recorded episodes as transitions of complete action chunks, the training data of critics of chunk policies.

A chunk may start at every recorded step: it is the next C actions, executed up to the end of the episode. Its backup is
R + discount^h V(s_h) with R = sum_{j < h} discount^j r_j over the h <= C steps executed (Q-chunking, arXiv:2507.07969;
RL-100, arXiv:2510.14830), not C one-step backups.

At a handover between policy and operator (`core.interventions`) only the chunk ends. The policy's chunk gets no reward
of the operator's steps and no end of the task; it is bootstrapped from the value at the handover. The outcome of steps
before an intervention is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError, SpecError, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.interventions import before_intervention, last_step_of_turn
from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.core.returns import returns_to_go
from robopolicy.core.segments import distinct
from robopolicy.core.spec import TASK
from robopolicy.core.transitions import Transitions
from robopolicy.nn.normalizer import in_deviations
from robopolicy.rl.offline.interface import Interface

ROWS = 4096
"""Maximum number of observations processed at once."""


@dataclass(frozen=True)
class Decisions:
    """N action chunks of recorded episodes; see the module.

    transitions: training data of critics; step: [N] int64, the recorded step at which each chunk starts; frame,
    next_frame: [N] int64, indices in `episodes` of the observations before and after it.
    """

    episodes: Episodes
    transitions: Transitions
    step: Tensor
    frame: Tensor
    next_frame: Tensor

    def __len__(self) -> int:
        return len(self.step)


def observations_at(episodes: Episodes, frames: Tensor, history: int, keys: Sequence[str]) -> TensorObservation:
    """Return the observations that end with recorded `frames` [n]: key -> [n, H, ...], and `task` texts.

    Before an episode's first frame that frame is repeated. Raises SpecError if the episodes lack a key.
    """
    for key in keys:
        if key not in episodes.observation:
            raise SpecError(f"The episodes do not contain '{key}'.{did_you_mean(key, episodes.observation)}")
    device = episodes.device
    bounds = episodes.frame_starts + episodes.lengths
    episode = torch.searchsorted(bounds, frames)
    back = torch.arange(1 - history, 1, device=device)
    indices = torch.maximum(frames[:, None] + back, episodes.frame_starts[episode][:, None])
    observation: TensorObservation = {key: episodes.observation[key][indices] for key in keys}
    observation[TASK] = [episodes.tasks[index] for index in integers(episode)]
    return observation


def frame_states(episodes: Episodes, interface: Interface) -> Tensor:
    """Return the state of every observation frame [F, S], with the history before it; raises SpecError."""
    count = episodes.step_count + len(episodes)
    parts = torch.split(torch.arange(count, device=episodes.device), ROWS)
    return torch.cat(
        [interface.state(observations_at(episodes, part, interface.history, interface.keys)) for part in parts]
    )


@torch.no_grad()
def actions_at(
    policy: Policy,
    episodes: Episodes,
    frames: Tensor,
    generator: torch.Generator,
    *,
    samples: int = 1,
    deterministic: bool = False,
) -> Tensor:
    """Sample a policy `samples` times at recorded `frames` [n]: chunks [n, samples, C, A].

    Raises SpecError if the episodes lack a field that the policy reads.
    """
    spec = policy.spec
    chunks: list[Tensor] = []
    for part in torch.split(frames, max(1, ROWS // samples)):
        observation = observations_at(episodes, part.repeat_interleave(samples), spec.history, list(spec.observation))
        actions = policy.act(observation, generator, deterministic=deterministic).actions
        chunks.append(actions.reshape(len(part), samples, *actions.shape[1:]))
    return torch.cat(chunks)


def recorded_decisions(
    episodes: Episodes, interface: Interface, discount: float, reward: Tensor | None = None
) -> Decisions:
    """Return every action chunk in `episodes`, in order of time; see the module.

    reward: [N] replaces the recorded one, such as a success head's. Chunks shortened by the end of an episode or of a
    turn are padded with the last action, which was not executed. A chunk is left out if it ends in an observation that
    was not recorded, unless the task ended there. Raises DataError if rewards or the end of the task are not recorded.
    """
    rewards = episodes.reward if reward is None else reward
    if rewards is None or episodes.terminated is None:
        gap = "rewards" if rewards is None else "task ends"
        raise DataError(f"Critics need rewards and task ends, and this dataset lacks {gap}.")
    chunk, steps = interface.chunk, torch.arange(episodes.step_count, device=episodes.device)
    episode = episodes.episode_of_step
    last, until = (episodes.starts + episodes.lengths - 1)[episode], last_step_of_turn(episodes)
    # A decision ends with its chunk, its episode or its turn, whatever comes first.
    step_counts = (until - steps + 1).clamp(max=chunk)
    actions = interface.to_agent(_chunks(episodes, steps, until, chunk))
    chunk_reward = torch.zeros_like(rewards)
    for offset in range(chunk):
        within_chunk = offset < step_counts
        chunk_reward[within_chunk] += discount**offset * rewards[steps[within_chunk] + offset]
    # `>`: what it leads to lies behind the episode's last step.
    ends = steps + step_counts > last
    terminated = ends & episodes.terminated[episode]
    states, frame = frame_states(episodes, interface), steps + episode
    # At an episode's end only a valid index: `next_known` is False there.
    following = torch.minimum(steps + step_counts, last)
    outcome = returns_to_go(rewards.cpu(), episodes.to("cpu"), discount).to(rewards.device)
    # Cut by a time limit: what would have followed is not known.
    outcome = torch.where(episodes.terminated[episode], outcome, -torch.inf)
    if (before := before_intervention(episodes)) is not None:
        outcome = outcome.masked_fill(before, -torch.inf)
    transitions = Transitions(
        state=states[frame],
        action=actions,
        reward=chunk_reward.float(),
        next_state=states[frame + step_counts],
        terminated=terminated,
        success=None if episodes.step_success is None else episodes.step_success[steps + step_counts - 1],
        episode=episode,
        decay=discount ** step_counts.float(),
        next_action=actions[following],
        next_known=~ends,
        outcome=outcome,
    )
    final_known = torch.ones_like(ends) if episodes.final_known is None else episodes.final_known[episode]
    indices = (~ends | terminated | final_known).nonzero().squeeze(1)
    return Decisions(
        episodes, transitions.take(indices), steps[indices], frame[indices], (frame + step_counts)[indices]
    )


def _chunks(episodes: Episodes, steps: Tensor, last: Tensor, chunk: int) -> Tensor:
    """Return the actions [N, C, A] from each step on, padded with that of `last` [N]."""
    offsets = torch.arange(chunk, device=steps.device)
    return episodes.actions[torch.minimum(steps[:, None] + offsets, last[:, None])]


def value_bound(reward: Tensor, discount: float) -> tuple[float, float]:
    """Return the minimum and maximum value possible with these rewards: an episode may end at any time.

    reward: [N], one per step; discount: per step, below 1.
    """
    return min(float(reward.min()), 0.0) / (1 - discount), max(float(reward.max()), 0.0) / (1 - discount)


def edge_of_reach(batch: Transitions, resolution: float = 0.25) -> Tensor:
    """Return a mask of transitions [N] to states from which no transition starts: their value is used but never
    learned.

    States are discretised to `resolution` standard deviations. Source: the edge-of-reach problem, Sims et al. 2024,
    arXiv:2402.12527. There it is a state first reachable at the last imagined step; here states are counted.
    """
    start_cells, end_cells = (
        (in_deviations(value, batch.state) / resolution).round().long() for value in (batch.state, batch.next_state)
    )
    cells, inverse = distinct(torch.cat([start_cells, end_cells]))
    is_start = torch.zeros(len(cells), dtype=torch.bool, device=inverse.device)
    is_start[inverse[: len(start_cells)]] = True
    return ~is_start[inverse[len(start_cells) :]] & ~batch.terminated


keep_former_names(__name__, {"observed_at": "observations_at"})
