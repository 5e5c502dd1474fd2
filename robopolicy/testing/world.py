"""Conformance test for worlds: `check_world` verifies the `World` contract and is used by every world's tests.

A failure is an `AssertionError` whose text names the world and the violated requirement. The checks do not depend on
the implementation, so they apply to simulators, world models and custom adapters.
"""

from collections.abc import Callable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import NonFiniteError, RobopolicyError, SpecError
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, Observation, WorldSpec, validate_observation
from robopolicy.core.world import Snapshots, Step, World, can_render

MakeWorld = Callable[[int], World]
"""Function from batch size to a new world, not yet reset."""


def check_world(
    make_world: MakeWorld,
    *,
    batch_size: int = 4,
    chunk: int = 3,
    deterministic: bool = True,
    snapshots: bool = True,
    renders: bool = True,
    tolerance: float = 0.0,
    first_seed: int = 1000,
) -> None:
    """Check every requirement of `World`, and of `Snapshots` and `Renders` if requested.

    deterministic: the same seeds and actions give the same episode (False for worlds with sampled dynamics); snapshots,
    renders: whether the world declares these interfaces; tolerance: allowed absolute difference between equal episodes
    run in other rows, batches or chunk sizes (0 is bitwise; a world model needs about 1e-5); first_seed: episode seeds
    count up from it. Raises AssertionError naming the violated requirement, and ValueError on batch_size < 3 or chunk <
    2.
    """
    if batch_size < 3 or chunk < 2:
        raise ValueError("check_world needs batch_size >= 3 and chunk >= 2 to distinguish rows and steps.")
    seeds = first_seed + np.arange(batch_size)
    check_starts(make_world, seeds, tolerance)
    check_partial_reset(make_world, seeds, chunk, deterministic, tolerance)
    check_episode(make_world, seeds, chunk)
    check_bad_actions(make_world, seeds, chunk, deterministic, tolerance)
    if deterministic:
        check_repeats(make_world, seeds, chunk, tolerance)
        check_chunks(make_world, seeds, chunk, tolerance)
    if snapshots:
        check_snapshots(make_world, seeds, chunk, deterministic, tolerance)
    if renders:
        check_render(make_world, seeds)


def check_starts(make_world: MakeWorld, seeds: Array, tolerance: float) -> None:
    """Check that an initial state is valid and depends only on its seed: not on row, batch size or earlier episodes.

    seeds: [B], of the episodes. Raises AssertionError naming the violated requirement.
    """
    world = make_world(len(seeds))
    spec = world.spec
    promise(
        world, world.batch_size == len(seeds), f"batch_size must be the requested {len(seeds)}, not {world.batch_size}"
    )
    initial = world.reset(seeds=seeds)
    start = copy(initial)
    check_observation(world, start)
    reversed_start = world.reset(seeds=seeds[::-1])
    check_same(world, start, initial, "a returned observation is never modified later", 0.0)
    reverse = {key: value[::-1] for key, value in reversed_start.items()}
    check_same(world, start, reverse, "an initial state depends only on its seed, not on its row", tolerance)
    world.step(sample_actions(spec, len(seeds), 2, 0))
    second_start = world.reset(seeds=seeds)
    check_same(
        world, start, second_start, "an initial state depends only on its seed, not on earlier episodes", tolerance
    )
    unseeded, other = world.reset(), world.reset()
    check_observation(world, unseeded)
    varied = any(not np.array_equal(unseeded[key], other[key]) for key in spec.observation)
    text = (
        "reset without seeds draws new initial states each time: identical episodes would count as one (if only the "
        "images differ, check with world.cameras=[NAME]; some environments randomize only with an option, "
        "world.options.env_options.NAME=true)"
    )
    promise(world, varied, text)
    world.close()
    single_world = make_world(1)
    single_start = single_world.reset(seeds=seeds[1:2])
    expected = {key: value[1:2] for key, value in start.items()}
    check_same(
        single_world,
        expected,
        single_start,
        "an initial state depends only on its seed, not on the batch size",
        tolerance,
    )
    single_world.close()


def check_partial_reset(make_world: MakeWorld, seeds: Array, chunk: int, deterministic: bool, tolerance: float) -> None:
    """Check that reset(rows) starts these rows and affects no others, now or later.

    seeds: [B], of the episodes; chunk: C steps, of actions [B, C, A]. Raises AssertionError naming the violated
    requirement.
    """
    world, twin = make_world(len(seeds)), make_world(len(seeds))
    actions = sample_actions(world.spec, len(seeds), chunk, 1)
    twin.reset(seeds=seeds)
    twin.step(actions)
    world.reset(seeds=seeds)
    before = copy(world.step(actions).observation)
    after = world.reset(rows=[1], seeds=seeds[:1])
    check_observation(world, after)
    other_rows = np.arange(len(seeds)) != 1
    check_same(
        world, take(before, other_rows), take(after, other_rows), "reset(rows) leaves other rows unchanged", tolerance
    )
    new_world = make_world(1)
    start = new_world.reset(seeds=seeds[:1])
    check_same(world, start, take(after, ~other_rows), "reset(rows) resets the given rows", tolerance)
    new_world.close()
    if deterministic:
        actions = sample_actions(world.spec, len(seeds), chunk, 2)
        step, its = world.step(actions), twin.step(actions)
        text = "reset(rows) does not change the future of other rows"
        check_same_step(world, its, step, text, tolerance, rows=other_rows)
    world.close()
    twin.close()


def check_episode(make_world: MakeWorld, seeds: Array, chunk: int) -> None:
    """Run episodes to the end and check shapes, endings, latched success, the time limit at the horizon, and ended rows
    staying unchanged.

    seeds: [B], of the episodes; chunk: C steps, of actions [B, C, A]. Raises AssertionError naming the violated
    requirement.
    """
    world = make_world(len(seeds))
    spec, count = world.spec, np.zeros(len(seeds), dtype=np.int64)
    observation = world.reset(seeds=seeds)
    ended_rows, success = np.zeros(len(seeds), dtype=bool), np.zeros(len(seeds), dtype=bool)
    flags = (ended_rows, ended_rows, success)
    for index in range(-(-spec.horizon // chunk)):
        step = world.step(sample_actions(spec, len(seeds), chunk, 100 + index))
        check_step(world, step, len(seeds), chunk)
        promise(world, not step.valid[ended_rows].any(), "an ended row has no valid step: step never resets")
        promise(world, bool((step.success | ~success).all()), "success, once reached, stays until the reset")
        count += step.valid.sum(axis=1)
        check_endings(world, step, count, ended_rows, chunk)
        check_same(
            world,
            take(observation, ended_rows),
            take(step.observation, ended_rows),
            "an ended row no longer changes",
            0.0,
        )
        observation = copy(step.observation)
        ended_rows = step.ended
        success = step.success
        flags = (step.terminated, step.truncated, step.success)
    promise(world, bool(ended_rows.all()), f"every row has ended after the horizon of {spec.horizon} control steps")
    last = world.step(sample_actions(spec, len(seeds), chunk, 99))
    check_step(world, last, len(seeds), chunk)
    promise(world, not last.valid.any(), "an ended row has no valid step: step never resets")
    pairs = zip(flags, (last.terminated, last.truncated, last.success), strict=True)
    promise(world, all(np.array_equal(before, after) for before, after in pairs), "an ended row keeps its flags")
    check_same(world, observation, last.observation, "an ended row no longer changes", 0.0)
    world.close()


def check_endings(world: World, step: Step, count: Array, before: Array, chunk: int) -> None:
    """Check that terminated, truncated and success are consistent with the number of control steps [B] so far."""
    spec, ended_rows = world.spec, step.ended
    promise(world, not (step.terminated & step.truncated).any(), "a row is not both terminated and truncated")
    promise(world, bool((count <= spec.horizon).all()), f"no episode exceeds the horizon of {spec.horizon}")
    promise(world, bool(ended_rows[count == spec.horizon].all()), "a row at the horizon has ended")
    short = (step.valid.sum(axis=1) < chunk) & ~before
    promise(world, bool(ended_rows[short].all()), "a chunk is executed partially only in a row that ended")
    if spec.terminate_on_success:
        promise(world, bool(ended_rows[step.success].all()), "success ends the episode (terminate_on_success)")
        promise(world, not (step.success & step.truncated).any(), "an episode that succeeds is not truncated")


def check_step(world: World, step: Step, batch: int, chunk: int) -> None:
    """Check shape, dtype and meaning of every array of a `Step`."""
    spec = world.spec
    check_observation(world, step.observation)
    flags = {"terminated": step.terminated, "truncated": step.truncated, "success": step.success}
    if step.horizon_end is not None:
        flags["horizon_end"] = step.horizon_end
    for name, flag in flags.items():
        is_right = flag.shape == (batch,) and flag.dtype == np.bool_
        promise(world, is_right, f"Step.{name} is bool [B], not {flag.dtype} {list(flag.shape)}")
    valid = step.valid
    promise(world, valid.shape == (batch, chunk) and valid.dtype == np.bool_, "Step.valid is bool [B, C]")
    promise(world, not (valid[:, 1:] & ~valid[:, :-1]).any(), "valid steps come first in a chunk")
    promise(world, tuple(step.rewards) == spec.rewards, f"rewards are named {spec.rewards}, not {tuple(step.rewards)}")
    for name, reward in step.rewards.items():
        is_right = reward.shape == (batch, chunk) and bool(np.isfinite(reward).all())
        promise(world, is_right, f"reward '{name}' is finite [B, C]")
        promise(world, not reward[~valid].any(), f"reward '{name}' is zero where not valid")
    fields = {key: field for key, field in spec.observation.items() if not key.startswith(IMAGE_PREFIX)}
    promise(world, set(fields) <= set(step.trace), "Step.trace has every field that is not an image")
    final = np.maximum(valid.sum(axis=1) - 1, 0)
    for key, field in fields.items():
        trace = step.trace[key]
        promise(world, trace.shape == (batch, chunk, *field.shape), f"the trace of '{key}' is [B, C, ...]")
        has_steps = valid.any(axis=1)
        at_end = trace[np.arange(batch), final][has_steps]
        is_same = np.array_equal(at_end, step.observation[key][has_steps, -1])
        promise(world, is_same, f"the observation of '{key}' is the one at the end of the chunk, before any reset")


def check_observation(world: World, observation: Observation) -> None:
    """Check that every field of the spec is present with its shape [B, H, ...] and dtype; `task` is text [B] from the
    spec.
    """
    spec = world.spec
    try:
        validate_observation(observation, spec.observation, batch=world.batch_size, history=spec.history)
    except RobopolicyError as error:
        promise(world, False, f"observations fit the spec: {error}")
    for key, field in spec.observation.items():
        got = str(observation[key].dtype)
        promise(world, got == field.dtype, f"'{key}' has the spec's dtype {field.dtype}, not {got}")
    promise(world, TASK in observation, f"the observation has the instruction under '{TASK}'")
    task = np.asarray(observation[TASK])
    promise(world, task.shape == (world.batch_size,), f"'{TASK}' is one text per row")
    unknown_texts = {str(text) for text in task} - set(spec.instructions)
    promise(world, not unknown_texts, f"'{TASK}' is one of the spec's instructions, not {sorted(unknown_texts)}")


def check_bad_actions(make_world: MakeWorld, seeds: Array, chunk: int, deterministic: bool, tolerance: float) -> None:
    """Check that wrong shapes and non-finite actions are rejected without changing the world, and out-of-range values
    are clipped if the spec clips actions.

    seeds: [B], of the episodes; chunk: C steps, of actions [B, C, A]. Raises AssertionError naming the violated
    requirement.
    """
    world, batch = make_world(len(seeds)), len(seeds)
    world.reset(seeds=seeds)
    good_actions = sample_actions(world.spec, batch, chunk, 3)
    bad_actions = {
        "a missing chunk axis": good_actions[:, 0],
        "too few rows": good_actions[:-1],
        "too many action dimensions": np.concatenate([good_actions, good_actions], axis=-1),
        "an empty chunk": good_actions[:, :0],
    }
    for name, actions in bad_actions.items():
        expect_error(world, actions, SpecError, f"actions with {name}")
    for name, value in {"NaN": np.nan, "infinity": np.inf}.items():
        actions = good_actions.copy()
        actions[1, -1, 0] = value
        expect_error(world, actions, NonFiniteError, f"actions with {name}")
    low, high = action_bounds(world.spec.action)
    beyond = good_actions + 3.0 * np.where(np.arange(chunk)[:, None] % 2, high - low, low - high)
    bounded = bool(np.isfinite(world.spec.action.low).all() and np.isfinite(world.spec.action.high).all())
    clips = bounded and world.spec.clips_actions
    if deterministic:
        twin = make_world(batch)
        twin.reset(seeds=seeds)
        check_same_step(
            world, twin.step(good_actions), world.step(good_actions), "rejected actions have no effect", tolerance
        )
        if clips:
            text = "actions out of range are clipped"
            check_same_step(world, twin.step(np.clip(beyond, low, high)), world.step(beyond), text, tolerance)
        twin.close()
    world.close()


def check_repeats(make_world: MakeWorld, seeds: Array, chunk: int, tolerance: float) -> None:
    """Check that the same seeds and actions give the same episode in any row.

    seeds: [B], of the episodes; chunk: C steps, of actions [B, C, A]. Raises AssertionError naming the violated
    requirement.
    """
    world, twin = make_world(len(seeds)), make_world(len(seeds))
    world.reset(seeds=seeds)
    twin.reset(seeds=seeds[::-1])
    for index in range(3):
        actions = sample_actions(world.spec, len(seeds), chunk, 10 + index)
        step, its = world.step(actions), twin.step(actions[::-1].copy())
        text = "the same seed and actions give the same episode in any row"
        check_same_step(world, step, reorder(its, np.arange(len(seeds))[::-1]), text, tolerance)
    world.close()
    twin.close()


def check_chunks(make_world: MakeWorld, seeds: Array, chunk: int, tolerance: float) -> None:
    """Check that a chunk of C steps equals C chunks of one step, to the end of the episode.

    seeds: [B], of the episodes; chunk: C steps, of actions [B, C, A]. Raises AssertionError naming the violated
    requirement.
    """
    world, single = make_world(len(seeds)), make_world(len(seeds))
    world.reset(seeds=seeds)
    single.reset(seeds=seeds)
    text = "a chunk of C steps equals C single steps"
    for index in range(-(-world.spec.horizon // chunk)):
        actions = sample_actions(world.spec, len(seeds), chunk, 20 + index)
        step = world.step(actions)
        ones = [single.step(actions[:, c : c + 1]) for c in range(chunk)]
        joined_step = Step(
            observation=ones[-1].observation,
            trace={key: np.concatenate([part.trace[key] for part in ones], axis=1) for key in step.trace},
            rewards={name: np.concatenate([part.rewards[name] for part in ones], axis=1) for name in step.rewards},
            valid=np.concatenate([part.valid for part in ones], axis=1),
            terminated=ones[-1].terminated,
            truncated=ones[-1].truncated,
            success=ones[-1].success,
        )
        check_same_step(world, joined_step, step, text, tolerance)
    world.close()
    single.close()


def check_snapshots(make_world: MakeWorld, seeds: Array, chunk: int, deterministic: bool, tolerance: float) -> None:
    """Check that a restored row reproduces observation and future, also in another row, without affecting other rows.

    seeds: [B], of the episodes; chunk: C steps, of actions [B, C, A]. Raises AssertionError naming the violated
    requirement.
    """
    world, batch = make_world(len(seeds)), len(seeds)
    if not isinstance(world, Snapshots):
        promise(world, False, "the world has snapshot and restore (or pass snapshots=False)")
        return
    world.reset(seeds=seeds)
    start = copy(world.step(sample_actions(world.spec, batch, chunk, 30)).observation)
    snapshot = world.snapshot()
    promise(world, len(snapshot) == batch, "a snapshot of all rows has B rows")
    actions = [
        np.repeat(sample_actions(world.spec, 1, chunk, 200 + index), batch, axis=0)
        for index in range(-(-world.spec.horizon // chunk))
    ]
    first = [world.step(each) for each in actions]
    world.reset(seeds=seeds + batch)
    check_same(world, start, world.restore(snapshot), "restore returns the observation of the snapshot", 0.0)
    if deterministic:
        for before, each in zip(first, actions, strict=True):
            check_same_step(world, before, world.step(each), "a restored row repeats its later steps", tolerance)
    zero = np.zeros(batch, dtype=np.int64)
    branched = world.restore(snapshot.take(zero))
    check_same(world, take(start, zero), branched, "a snapshot can be restored into several rows", 0.0)
    if deterministic:
        text = "branches of one snapshot with the same actions are equal"
        check_same_step(world, reorder(first[0], zero), world.step(actions[0]), text, tolerance)
    world.restore(snapshot)
    world.restore(snapshot.take([0]), rows=[batch - 1])
    mixed = np.concatenate([np.arange(batch - 1), [0]])
    part = world.snapshot(rows=[batch - 1])
    promise(world, len(part) == 1, "a snapshot of one row has one row")
    observation = world.restore(part, rows=[batch - 1])
    check_same(world, take(start, mixed), observation, "restore(rows) touches only these rows", 0.0)
    world.close()


def check_render(make_world: MakeWorld, seeds: Array) -> None:
    """Check that images are uint8 [R, height, width, 3] of the requested rows.

    seeds: [B], of the episodes. Raises AssertionError naming the violated requirement.
    """
    world = make_world(len(seeds))
    if not can_render(world):
        promise(world, False, "the world has render (or pass renders=False)")
        return
    world.reset(seeds=seeds)
    all_images, row_images = world.render(), world.render(rows=[1], height=48, width=64)
    is_right = all_images.shape == (len(seeds), 240, 240, 3) and all_images.dtype == np.uint8
    promise(world, is_right, f"render() is uint8 [B, 240, 240, 3], not {all_images.dtype} {list(all_images.shape)}")
    is_right = row_images.shape == (1, 48, 64, 3) and row_images.dtype == np.uint8
    promise(
        world, is_right, f"render(rows, height, width) is uint8 [R, height, width, 3], not {list(row_images.shape)}"
    )
    world.close()


def sample_actions(spec: WorldSpec, batch: int, chunk: int, seed: int) -> Array:
    """Return uniform actions [batch, chunk, A] within the spec's bounds (-1 to 1 if unbounded)."""
    low, high = action_bounds(spec.action)
    return low + (high - low) * np.random.default_rng(seed).random((batch, chunk, *spec.action.shape))


def action_bounds(action: Field) -> tuple[Array, Array]:
    """Return lower and upper bound of one control step, [A] each, in the field's units; -1 and 1 where it is
    unbounded.
    """
    low, high = np.broadcast_to(action.low, action.shape), np.broadcast_to(action.high, action.shape)
    return np.where(np.isfinite(low), low, -1.0), np.where(np.isfinite(high), high, 1.0)


def expect_error(world: World, actions: Array, error: type[RobopolicyError], what: str) -> None:
    """Check that `step` raises `error` on `actions` that are not [B, C, A] or not finite; raises AssertionError
    otherwise.
    """
    try:
        world.step(actions)
    except error:
        return
    promise(world, False, f"{what} must raise {error.__name__}")


def check_same_step(
    world: World, expected: Step, got: Step, text: str, tolerance: float, rows: Array | None = None
) -> None:
    """Compare everything in two steps, on `rows` (a mask [B]) or all."""
    rows = np.ones(len(expected.valid), dtype=bool) if rows is None else rows
    check_same(world, take(expected.observation, rows), take(got.observation, rows), text, tolerance)
    check_same(world, take(expected.trace, rows), take(got.trace, rows), text, tolerance)
    check_same(world, take(dict(expected.rewards), rows), take(dict(got.rewards), rows), text, tolerance)
    for name in ("valid", "terminated", "truncated", "success"):
        is_same = np.array_equal(getattr(expected, name)[rows], getattr(got, name)[rows])
        promise(world, is_same, f"{text} ('{name}' differs)")


def check_same(world: World, expected: Observation, got: Observation, text: str, tolerance: float) -> None:
    """Compare two dictionaries of arrays: strings and integers exactly, floats within `tolerance`.

    The tolerance is absolute up to magnitude 1 and relative above, because float32 rounding grows with values imagined
    by an untrained model.
    """
    for key, value in expected.items():
        if value.dtype.kind == "f" and tolerance > 0:
            expectation = np.asarray(value, np.float64)
            worst = float((np.abs(expectation - got[key]) / np.abs(expectation).clip(1.0)).max(initial=0.0))
            promise(world, worst <= tolerance, f"{text} ('{key}' differs by {worst:.3g})")
        else:
            promise(world, np.array_equal(value, got[key]), f"{text} ('{key}' differs)")


def promise(world: World, kept: bool, text: str) -> None:
    """Raise AssertionError unless the requirement is fulfilled."""
    if not kept:
        raise AssertionError(
            f"World '{world.spec.name}' ({type(world).__name__}) violates the World interface, which requires: {text}."
        )


def copy(observation: Observation) -> Observation:
    """Copy every array."""
    return {key: np.array(value) for key, value in observation.items()}


def take(observation: Observation, rows: Array) -> Observation:
    """Select rows of every array [B, ...], by indices [n] or a mask [B]."""
    return {key: np.asarray(value)[rows] for key, value in observation.items()}


def reorder(step: Step, rows: Array) -> Step:
    """Select rows of every array [B, ...] in a step, by indices [n] or a mask [B]; horizon_end is dropped."""
    return Step(
        observation=take(step.observation, rows),
        trace=take(step.trace, rows),
        rewards=take(dict(step.rewards), rows),
        valid=step.valid[rows],
        terminated=step.terminated[rows],
        truncated=step.truncated[rows],
        success=step.success[rows],
    )
