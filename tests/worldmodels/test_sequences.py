"""Subsequences of episodes hold what the episodes hold, and nothing of their neighbours."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robopolicy.core.episodes import Episodes
from robopolicy.core.sequences import SequenceData
from robopolicy.core.spec import STATE, Field


def numbered(lengths):
    """Episodes whose frames, actions and rewards tell where they are from: 100 * episode + place."""
    frames = torch.cat([100.0 * e + torch.arange(n + 1) for e, n in enumerate(lengths)])
    steps = torch.cat([100.0 * e + torch.arange(n) for e, n in enumerate(lengths)])
    success = torch.cat([torch.arange(n) == n - 1 for n in lengths])
    return Episodes(
        {STATE: Field((1,))},
        Field((1,)),
        10.0,
        {STATE: frames[:, None]},
        steps[:, None] + 0.5,
        torch.tensor(lengths),
        ("",) * len(lengths),
        rewards={"progress": steps, "success": success.float()},
        step_success=success,
        terminated=torch.arange(len(lengths)) % 2 == 0,
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 5), st.data())
def test_cuts_agree_with_counting(lengths, past, future, data):
    episodes = numbered(lengths)
    step = data.draw(st.integers(0, episodes.step_count - 1))
    episode = int(episodes.episode_of_step[step])
    place = step - int(episodes.starts[episode])
    subsequence = SequenceData(episodes).cut(torch.tensor([step]), past, future)
    length = lengths[episode]
    for column, offset in enumerate(range(-past, future + 1)):
        expected = 100 * episode + min(max(place + offset, 0), length)
        assert float(subsequence.frames[STATE][0, column, 0]) == expected
    for column, offset in enumerate(range(-past, future)):
        at = place + offset
        inside = 0 <= at < length
        assert bool(subsequence.valid[0, column]) == inside
        assert float(subsequence.actions[0, column, 0]) == (100 * episode + at + 0.5 if inside else 0.0)
        assert float(subsequence.reward[0, column]) == (100 * episode + at if inside else 0.0)
        assert bool(subsequence.success[0, column]) == (at >= length - 1)
        assert bool(subsequence.terminated[0, column]) == (at == length - 1 and episode % 2 == 0)


def test_sampling_repeats_with_its_generator():
    data = SequenceData(numbered([5, 6]))
    first, second = (next(data.sampler(1, 2, 8, torch.Generator().manual_seed(0))) for _ in range(2))
    assert torch.equal(first.actions, second.actions)
