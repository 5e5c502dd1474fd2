"""Rollouts through selection: extras stay, and images after a decision are those that the world showed."""

from dataclasses import replace

import pytest
import torch

from robopolicy.core.extras import Extras
from robopolicy.core.rollouts import FinalImages, Rollouts, concatenate, visible
from robopolicy.core.spec import IMAGE_PREFIX, STATE

CAMERA = IMAGE_PREFIX + "front"


def pictured(count: int = 3, length: int = 4, seed: int = 0) -> Rollouts:
    """Streams whose episodes end here and there; after a decision the next column's image shows, or another at ends."""
    draws = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 255, (count, length + 1, 1, 2, 2, 3), generator=draws, dtype=torch.uint8)
    ended = torch.rand((count, length), generator=draws) < 0.4
    last = torch.randint(0, 255, (count, length, 1, 2, 2, 3), generator=draws, dtype=torch.uint8)
    after = torch.where(ended[..., None, None, None, None], last, images[:, 1:])
    no = torch.zeros_like(ended)
    row = torch.arange(count)
    alone = torch.full_like(row, -1)
    state = torch.randn((count, length, 1, 2), generator=draws)
    return Rollouts(
        observation={STATE: state, CAMERA: images[:, :-1]},
        next_observation={STATE: state + 1, CAMERA: after},
        latents={},
        actions=state[:, :, :, :1],
        logp_behaviour=state[:, :, 0],
        mask=torch.ones(count, length, 2, dtype=torch.bool),
        rewards={"reward": state[:, :, 0, :1]},
        valid=torch.ones(count, length, 1, dtype=torch.bool),
        terminated=no,
        truncated=ended,
        horizon_end=no,
        success=no,
        task=torch.zeros(count, length, dtype=torch.int64),
        policy_version=torch.zeros(count, length, dtype=torch.int64),
        episode=row,
        group=row,
        parent=alone,
        branch_decision=alone,
        extras=Extras(value=state[..., 0, 0], entropy=state[:, :, 0]),
    )


def ends(rollouts: Rollouts) -> torch.Tensor:
    found = rollouts.ended.clone()
    found[:, -1] = True
    return found


def thinned(rollouts: Rollouts) -> Rollouts:
    """The same with next images only where nothing follows, as collecting makes them."""
    after, kept = rollouts.next_observation[CAMERA], ends(rollouts)
    columns = [(kept[:, t], {CAMERA: after[:, t][kept[:, t]]}) for t in range(kept.shape[1])]
    rest = {STATE: rollouts.next_observation[STATE]}
    return replace(rollouts, next_observation=rest, final_images=FinalImages.of(columns))


def test_images_where_nothing_follows_are_kept_through_selection_and_joining():
    whole = pictured()
    thin = thinned(whole)
    order = torch.tensor([2, 0])
    for full, lean in (
        (whole, thin),
        (whole.take(order), thin.take(order)),
        (whole.flat().take(torch.arange(0, 12, 2)), thin.flat().take(torch.arange(0, 12, 2))),
        (concatenate([whole, pictured(2, 6, seed=1)]), concatenate([thin, thinned(pictured(2, 6, seed=1))])),
    ):
        where = full.ended | (ends(full) & (full.shape[1] == 4))
        expected = visible(full, where, following=True, images=True)
        found = visible(lean, where, following=True, images=True)
        assert expected.keys() == found.keys() >= {STATE, CAMERA}
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_what_follows_in_the_middle_stands_in_the_next_column_and_not_here():
    thin = thinned(pictured())
    assert thin.final_images is not None
    kept = sum(value.numel() for value in thin.final_images.images.values())
    assert kept == int(ends(thin).sum()) * 12 < thin.observation[CAMERA].numel()
    with pytest.raises(LookupError, match="where an episode or its rollout ends"):
        visible(thin, ~ends(thin), following=True, images=True)
    assert CAMERA not in visible(thin, ~ends(thin), following=True)


def test_extras_stay_through_selection_and_are_required_of_all_that_is_joined():
    rollouts = pictured()
    for part in (rollouts.take(torch.tensor([1])), rollouts.flat(), rollouts.to("cpu"), concatenate([rollouts] * 2)):
        assert dict(part.extras.items()).keys() == {"value", "entropy"}
    assert torch.equal(rollouts.flat().extras["value"][:, 0], rollouts.extras["value"].flatten())
    with pytest.raises(ValueError, match="differ in q"):
        concatenate([rollouts, rollouts.with_extras(q=rollouts.extras["value"])])
