"""Faults as they happen to recordings, each planted in a sound one, with what a doctor's finding must say of it.

Faults are planted in `Episodes` before they are written, in the files after that, or in the world.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import broken_data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE
from robopolicy.core.world import World

TOP, FRONT = IMAGE_PREFIX + "top", IMAGE_PREFIX + "front"
DEGREES = 57.29578


@dataclass(frozen=True)
class Fault:
    """A fault in a recording of `world`, and the check and text (a pattern) of the finding that names it."""

    world: str
    check: str
    text: str
    plant: Callable[[Episodes], Episodes] = lambda data: data
    damage: Callable[[Path], None] = lambda folder: None
    disturb: Callable[[World], World] = lambda world: world


def column(data, key, index):
    return data.observation[key][:, index]


def with_column(data, key, index, change):
    """Apply `change` to element `index` [L + 1] of an observation in every episode."""

    def changed(frames):
        frames[:, index] = change(frames[:, index].clone())
        return frames

    return broken_data.with_frames(data, key, changed)


def noise(count):
    return 0.05 * torch.randn(count, generator=torch.Generator().manual_seed(count))


def lagging(data, key, index, steps):
    return with_column(data, key, index, lambda values: torch.cat([values[:1].repeat(steps), values])[: len(values)])


def spiky(data, key, index, episodes=(1, 3), at=5):
    """One wild number in some episodes."""
    values = data.observation[key].clone()
    for episode in episodes:
        values[int(data.frame_starts[episode]) + at, index] += 40 * values[:, index].std()
    return replace(data, observation={**data.observation, key: values})


def spiky_action(data, episode=2, step=4, index=0):
    actions = data.actions.clone()
    place = int(data.starts[episode]) + step
    actions[place, index] = -torch.sign(actions[place, index])
    return replace(data, actions=actions)


def clipped(data, limit=0.3):
    return replace(data, actions=data.actions.clamp(-limit, limit))


def dead_action(data, index):
    return broken_data.with_actions(data, lambda actions: actions.index_fill_(1, torch.tensor([index]), 0.0))


def truncated(data, share=0.6):
    """Keep the first part of every episode, with the labels of its steps."""
    lengths = (data.lengths * share).long().clamp(min=2)
    steps = torch.cat([torch.arange(int(n)) + int(s) for n, s in zip(lengths, data.starts, strict=True)])
    frames = torch.cat([torch.arange(int(n) + 1) + int(s) for n, s in zip(lengths, data.frame_starts, strict=True)])
    return replace(
        data,
        lengths=lengths,
        actions=data.actions[steps],
        observation={key: values[frames] for key, values in data.observation.items()},
        rewards={key: values[steps] for key, values in (data.rewards or {}).items()},
        step_success=data.step_success[steps],
        terminated=torch.zeros(len(data), dtype=torch.bool),
    )


def mislabelled(data):
    """Some episodes carry the instruction of another."""
    tasks = list(data.tasks)
    for index in range(0, len(tasks), 2):
        tasks[index] = next(task for task in data.tasks if task != tasks[index])
    return replace(data, tasks=tuple(tasks))


def targets(data):
    """Absolute positions of the tip where the world takes velocities."""
    steps = torch.arange(data.step_count) + data.episode_of_step
    return replace(data, actions=data.observation[STATE][steps][:, :2] + 0.04 * data.actions)


def running_sums(data):
    return broken_data.with_actions(data, lambda actions: actions.cumsum(0))


def differences(data):
    return broken_data.with_actions(data, lambda actions: torch.diff(actions, dim=0, prepend=torch.zeros(1, 2)))


def never_successful(data):
    return replace(data, step_success=torch.zeros_like(data.step_success), terminated=torch.zeros_like(data.terminated))


def images_as(change, key=TOP):
    """Pass the images through `change` as numbers and store what comes out as bytes."""

    def changed(images):
        return torch.from_numpy(change(images.numpy().astype(np.float64)).astype(np.int64).astype(np.uint8))

    return lambda data: broken_data.with_frames(data, key, changed)


def frozen(data):
    """The stream of the camera hangs from the sixth frame of every other episode on."""
    images = data.observation[TOP].clone()
    for episode in range(0, len(data), 2):
        start, end = int(data.frame_starts[episode]), int(data.frame_starts[episode] + data.lengths[episode])
        images[start + 5 : end + 1] = images[start + 5]
    return replace(data, observation={**data.observation, TOP: images})


def late_images(data, steps=3):
    def change(images):
        return torch.cat([images[:1].repeat(steps, 1, 1, 1), images])[: len(images)]

    return broken_data.with_frames(data, TOP, change)


def swapped_cameras(data):
    images = {TOP: data.observation[FRONT], FRONT: data.observation[TOP]}
    return replace(data, observation={**data.observation, **images})


def one_camera_twice(data):
    return replace(data, observation={**data.observation, FRONT: data.observation[TOP]})


def stale_statistics(folder):
    path = folder / "meta" / "stats.json"
    stored = json.loads(path.read_text())
    stored["action"]["std"] = [2 * value for value in stored["action"]["std"]]
    path.write_text(json.dumps(stored))


def not_a_number(folder):
    """A program that does not look writes NaN into one row of the state."""
    path = next((folder / "data").glob("*/*.parquet"))
    table = pq.read_table(path)
    place = table.column_names.index(STATE)
    rows = np.array(table.column(STATE).to_pylist(), dtype=np.float32)
    rows[table.column("episode_index").to_pylist().index(2) + 1, 1] = np.nan
    kind = table.schema.field(place).type
    table = table.set_column(place, table.schema.field(place), pa.array(rows.tolist(), type=kind))
    pq.write_table(table, path)


class Unseeded:
    """A world that begins anew each time, whatever the seeds."""

    def __init__(self, world):
        self.world, self.calls = world, 0
        self.spec, self.batch_size = world.spec, world.batch_size

    def reset(self, rows=None, seeds=None, options=None):
        self.calls += 1
        return self.world.reset(rows, np.asarray(seeds) + 1000 * self.calls, options)

    def step(self, actions):
        return self.world.step(actions)

    def close(self):
        self.world.close()


class Silent(Unseeded):
    """A world that never says which episodes succeed."""

    def __init__(self, world):
        super().__init__(world)
        self.spec = replace(world.spec, reports_success=False)

    def reset(self, rows=None, seeds=None, options=None):
        return self.world.reset(rows, seeds, options)


FAULTS = {
    "degrees instead of radians": Fault(
        "reach_planar",
        "observation scale",
        r"57.3 times too large \(degrees instead of radians",
        lambda data: broken_data.with_frames(data, STATE, lambda frames: frames * DEGREES),
    ),
    "millimetres instead of metres": Fault(
        "push_cube",
        "observation scale",
        r"'cube_x' is 1000 times too large \(millimetres instead of metres",
        lambda data: with_column(data, ENVIRONMENT_STATE, 0, lambda values: 1000 * values),
    ),
    "swapped state": Fault(
        "push_cube",
        "observation order",
        "'x' and 'y' are swapped",
        lambda data: broken_data.swapped_elements(data, STATE, 0, 1),
    ),
    "swapped actions": Fault(
        "pick_place",
        "action order",
        "'x' and 'z' are swapped",
        lambda data: broken_data.permuted(data, 2, 1, 0, 3),
    ),
    "actions one step late": Fault("push_cube", "time shift", "actions are stored one step too late", broken_data.late),
    "actions five steps late": Fault(
        "push_cube",
        "time shift",
        "actions are stored 5 steps too late",
        lambda data: broken_data.late(data, 5),
    ),
    "frames three steps late": Fault(
        "push_cube",
        "time shift",
        "observations are stored 3 steps too late",
        lambda data: broken_data.frames_moved(broken_data.frames_moved(broken_data.frames_moved(data, 1), 1), 1),
    ),
    "clipped actions": Fault("push_cube", "clipped actions", r"'velocity_x' is clipped to -0.3 to 0.3", clipped),
    "wrong fps": Fault(
        "push_cube", "control rate", "dataset 30 steps/s, world 10", lambda data: replace(data, fps=30.0)
    ),
    "every step recorded twice": Fault(
        "reach_planar", "control rate", "as if recorded at 20 steps/s", broken_data.doubled
    ),
    "stale statistics": Fault("reach_planar", "statistics", "'action': std of 'shoulder' is", damage=stale_statistics),
    "no success": Fault("reach_planar", "success", "never reports success", disturb=Silent),
    "success not labelled": Fault(
        "reach_planar", "success labels", "labelled as failed, but they succeed: episodes 0, 1", never_successful
    ),
    "unseeded world": Fault(
        "reach_planar", "start of episodes", "starts differently each time with the same seeds", disturb=Unseeded
    ),
    "images from 0 to 1": Fault(
        "seen_cube", "image range", "'top'.*images from 0 to 1", images_as(lambda images: images / 255)
    ),
    "images scaled twice": Fault(
        "seen_cube", "image range", "'top'.* multiplied by 255", images_as(lambda images: images * 255)
    ),
    "swapped cameras": Fault(
        "seen_cube", "camera order", "'top': it shows the view of the world's camera 'front'", swapped_cameras
    ),
    "one camera twice": Fault("seen_cube", "camera order", "'top' and 'front' show the same", one_camera_twice),
    "frozen images": Fault("seen_cube", "camera 'top'", r"is frozen while.*\(episodes 0, 2", frozen),
    "late images": Fault("seen_cube", "image timing", "'top'.*3 frames late", late_images),
    "dead sensor": Fault(
        "push_cube",
        "dead sensor",
        "'cube_x'",
        lambda data: with_column(data, ENVIRONMENT_STATE, 0, lambda values: 0 * values + 0.1),
    ),
    "dead action": Fault("pick_place", "dead action", "'gripper' never changes", lambda data: dead_action(data, 3)),
    "not a number": Fault("reach_planar", "finite values", r"observation.state.*episodes 2\)", damage=not_a_number),
    "episodes twice": Fault(
        "reach_planar",
        "duplicate episodes",
        "2 of .*0 = .*1 = ",
        lambda data: Episodes.concatenate([data, data.select([0, 1])]),
    ),
    "gripper reversed": Fault(
        "pick_place",
        "action sign",
        "'gripper' has the opposite sign",
        lambda data: broken_data.flipped(data, 3),
    ),
    "targets for velocities": Fault("push_cube", "action kind", "'velocity_x' .*'x'.*absolute", targets),
    "sums for deltas": Fault("reach_planar", "action kind", "'shoulder' contains a running sum", running_sums),
    "deltas for absolutes": Fault(
        "reach_planar", "action kind", "'shoulder' contains differences from the previous action", differences
    ),
    "truncated episodes": Fault("push_cube", "ends of episodes", "episodes are truncated", truncated),
    "lagging sensor": Fault("push_cube", "late sensor", "'x' by 2 steps", lambda data: lagging(data, STATE, 0, 2)),
    "stuck sensor": Fault(
        "push_cube",
        "stuck sensor",
        "'y'",
        lambda data: with_column(
            data, STATE, 1, lambda values: torch.cat([values[:3], values[2].repeat(len(values) - 3)])
        ),
    ),
    "spikes": Fault(
        "push_cube", "spikes", "'cube_y' in 2 frames of 2 episodes", lambda data: spiky(data, ENVIRONMENT_STATE, 1)
    ),
    "action spike": Fault("push_cube", "action spikes", "'velocity_x' of episode 2 at step 4", spiky_action),
    "noisy sensor": Fault(
        "push_cube",
        "inconsistent sensor",
        "'y' by",
        lambda data: with_column(data, STATE, 1, lambda values: values + noise(len(values))),
    ),
    "mislabelled instructions": Fault(
        "push_choice", "instructions", "another instruction than the world.*episodes 0, 2", mislabelled
    ),
}
