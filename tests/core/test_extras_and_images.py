"""Rollouts through selection: extras stay, and images after a decision are those that the world showed."""

import gc

import pytest
import torch

from robopolicy.core.extras import Extras
from robopolicy.core.images import FrameStore, Images, PackedFrames, frames_of, frames_tree, joined_frames
from robopolicy.core.rollouts import Rollouts, concatenate, critic_observation
from robopolicy.core.spec import IMAGE_PREFIX, STATE, TASK
from robopolicy.core.tensors import load_tree, save_tree

CAMERA = IMAGE_PREFIX + "front"


def pictured(count: int = 3, length: int = 4, seed: int = 0, history: int = 2, packed: bool = False) -> Rollouts:
    """Streams whose episodes end here and there, and among their latents what images there are to be, copied out.

    A window moves on by one frame with every decision; one that ends shows other frames, and the next one begins anew.
    """
    draws = torch.Generator().manual_seed(seed)
    ended = torch.rand((count, length), generator=draws) < 0.4
    store, windows, after = FrameStore(packed=packed), [], []

    def fresh() -> torch.Tensor:
        return torch.randint(0, 255, (count, 1, 2, 2, 3), generator=draws, dtype=torch.uint8)

    window = fresh().repeat_interleave(history, 1)
    for column in range(length):
        windows.append(window)
        then = torch.cat([window[:, 1:], fresh()], 1)
        after.append(then)
        start = fresh().expand_as(then)
        window = torch.where(ended[:, column, None, None, None, None], start, then)
    last = ended.clone()
    last[:, -1] = True
    numbers = torch.stack([store.add({CAMERA: window}) for window in windows], 1)
    then = torch.stack([store.add({CAMERA: window}) for window in after], 1)
    kept = torch.where(last[..., None], 1 + then, 0)
    no, row = torch.zeros_like(ended), torch.arange(count)
    alone = torch.full_like(row, -1)
    state = torch.randn((count, length, 1, 2), generator=draws)
    return Rollouts(
        observation={STATE: state},
        next_observation={STATE: state + 1},
        latents={"seen": torch.stack(windows, 1), "after": torch.stack(after, 1), "kept": last},
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
        images=Images(store.frames, numbers, kept).compact(),
    )


def count_of(rollouts: Rollouts) -> int:
    assert rollouts.images is not None
    return len(rollouts.images.frames[CAMERA])


def test_selected_and_joined_rows_leave_nothing_behind(tmp_path):
    """Fine-tuning grew by some MB an iteration: what a selection held lay in a cycle until Python's collector came."""
    rollouts = pictured()
    gc.collect()
    gc.disable()
    try:
        for work in (
            lambda: rollouts.take(torch.tensor([1])).flat(),
            lambda: concatenate([rollouts, rollouts]),
            lambda: save_tree(tmp_path, "tree", rollouts.tree()),
            lambda: load_tree(tmp_path, "tree"),
        ):
            work()
            before = sum(type(item) is torch.Tensor for item in gc.get_objects())
            work()
            work()
            assert sum(type(item) is torch.Tensor for item in gc.get_objects()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("packed", [False, True])
def test_images_are_those_that_were_shown_through_selection_and_joining(packed, tmp_path):
    rollouts = pictured(packed=packed)
    save_tree(tmp_path, "kept", rollouts.take(torch.tensor([2, 0])).tree())
    order = torch.tensor([2, 0])
    for part in (
        rollouts,
        rollouts.take(order),
        rollouts.take(order).compact(),
        rollouts.flat().take(torch.arange(0, 12, 2)),
        concatenate([rollouts, pictured(2, 6, seed=1).take(torch.tensor([1]))]),
        Rollouts.of(load_tree(tmp_path, "kept")),
        rollouts.to("cpu"),
    ):
        assert part.images is not None and isinstance(part.images.frames[CAMERA], PackedFrames) == packed
        alive, kept = part.alive, part.latents["kept"]
        for where, following in ((alive, False), (kept & alive, True)):
            expected = part.latents["after" if following else "seen"][where]
            observation = critic_observation(part, where, following=following, images=True)
            assert torch.equal(observation[CAMERA], expected)
            assert set(observation) == {STATE, CAMERA, TASK}
        assert part.shown == {STATE: (1, 2), CAMERA: (2, 2, 2, 3)}


@pytest.mark.parametrize("packed", [False, True])
def test_every_frame_is_kept_once(packed):
    rollouts = pictured(packed=packed)
    ended = int(rollouts.ended[:, :-1].sum())
    windows = torch.cat([rollouts.latents["seen"].flatten(0, 1), rollouts.latents["after"].flatten(0, 1)])
    assert count_of(rollouts) == len(windows.flatten(0, 1).unique(dim=0)) == 3 * 5 + ended
    part = rollouts.take(torch.tensor([1]))
    assert count_of(part) == count_of(rollouts) > count_of(part.compact())
    assert count_of(concatenate([part, part])) == 2 * count_of(part.compact())
    assert count_of(Rollouts.of(part.tree())) == count_of(part.compact())


def test_packed_frames_are_read_as_they_were_and_take_less():
    frames = torch.arange(70, dtype=torch.uint8)[:, None, None, None].repeat(1, 8, 9, 3)
    frames[:, :4] //= 2
    packed = PackedFrames.of(frames)
    assert packed.shape == frames.shape and len(packed) == 70
    numbers = torch.tensor([[3, 69], [3, 0]])
    assert torch.equal(packed[numbers], frames[numbers]) and packed[numbers[:0]].shape == (0, 2, 8, 9, 3)
    tree = frames_tree(packed)
    assert tree["packed"].numel() < frames.numel() / 4
    assert torch.equal(frames_of(tree)[torch.arange(70)], frames)
    assert frames_of(frames_tree(PackedFrames.of(frames[:0]))).shape == (0, 8, 9, 3)
    with pytest.raises(TypeError, match="uint8"):
        PackedFrames.of(frames.float())
    # What is known is found again, wherever it stood, and joining packs what was not.
    store = FrameStore({CAMERA: frames}, packed=True)
    assert store.add({CAMERA: frames[[65, 1]][:, None]}).tolist() == [[65], [1]]
    assert store.add({CAMERA: frames[:1][:, None] + 100}).tolist() == [[70]]
    assert FrameStore.of(store.tree()).add({CAMERA: frames[:1][:, None] + 100}).tolist() == [[70]]
    assert torch.equal(joined_frames([frames, packed])[torch.arange(140)], torch.cat([frames, frames]))


@pytest.mark.parametrize("packed", [False, True])
def test_what_cameras_show_together_is_one_frame(packed):
    store, other = FrameStore(packed=packed), IMAGE_PREFIX + "wrist"
    plain = torch.zeros(2, 1, 1, 1, 3, dtype=torch.uint8)
    assert store.add({CAMERA: plain, other: plain}).tolist() == [[0], [0]]
    assert store.add({CAMERA: plain, other: plain + 1}).tolist() == [[1], [1]]
    assert FrameStore(store.frames).add({CAMERA: plain, other: plain + 1}).tolist() == [[1], [1]]
    assert store.frames[other][torch.arange(2)].flatten().tolist() == [0] * 3 + [1] * 3
    one = Images(store.frames, torch.tensor([[[1, 0]]])).only([other])
    assert one.read(one.seen)[other].flatten().tolist() == [1] * 3 + [0] * 3 and one.shapes == {other: (2, 1, 1, 3)}


def test_what_follows_in_the_middle_stands_in_the_next_column_and_not_here():
    rollouts = pictured(packed=True)
    middle = ~rollouts.latents["kept"]
    with pytest.raises(LookupError, match="at the end of an episode or rollout"):
        critic_observation(rollouts, middle, following=True, images=True)
    assert CAMERA not in critic_observation(rollouts, middle, following=True)
    with pytest.raises(LookupError):
        critic_observation(rollouts.without(following=True), ~middle, following=True, images=True)
    assert CAMERA not in critic_observation(rollouts.without(images=True), middle, images=True)


def test_images_as_earlier_versions_stored_them_are_read():
    rollouts = pictured()
    tree = rollouts.tree()
    tree = {**tree, "observation": {**tree["observation"], CAMERA: rollouts.latents["seen"]}, "final_images": None}
    del tree["images"]
    again = Rollouts.of(tree)
    assert set(again.observation) == {STATE}
    assert torch.equal(
        critic_observation(again, again.alive, images=True)[CAMERA], rollouts.latents["seen"].flatten(0, 1)
    )


def test_extras_stay_through_selection_and_are_required_of_all_that_is_joined():
    rollouts = pictured()
    for part in (rollouts.take(torch.tensor([1])), rollouts.flat(), rollouts.to("cpu"), concatenate([rollouts] * 2)):
        assert dict(part.extras.items()).keys() == {"value", "entropy"}
    assert torch.equal(rollouts.flat().extras["value"][:, 0], rollouts.extras["value"].flatten())
    with pytest.raises(ValueError, match="differ in q"):
        concatenate([rollouts, rollouts.with_extras(q=rollouts.extras["value"])])
    with pytest.raises(ValueError, match="either all contain images or none"):
        concatenate([rollouts, rollouts.without(images=True)])
