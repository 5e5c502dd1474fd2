"""Checks of a recording by itself: duplicate episodes, constant elements, truncated episodes, instructions, success.

Axes: E episode, F observation frame (one more than steps in each episode), D element of a column.
"""

from collections.abc import Mapping

import numpy as np

from robopolicy.core.episodes import Episodes
from robopolicy.core.finite_values import element_names, join_names
from robopolicy.core.spec import IMAGE_PREFIX, TASK, WorldSpec
from robopolicy.core.world import World
from robopolicy.doctor.findings import Finding, Health

SPIKE = 2.0
"""Minimum distance of a spike beyond the range of all other values, as a multiple of that range."""
MANY = 0.2
"""Fraction of the episodes above which a fault of single episodes counts as a fault of the data."""


def check_duplicates(episodes: Episodes) -> list[Finding]:
    """Check for episodes whose actions and observations are identical."""
    vectors = [value for key, value in episodes.observation.items() if not key.startswith(IMAGE_PREFIX)]
    frames = [value.cpu().split((episodes.lengths.cpu() + 1).tolist()) for value in vectors]
    actions = episodes.actions.cpu().split(episodes.lengths.tolist())
    episodes_of_content: dict[tuple[bytes, ...], list[int]] = {}
    for index, part in enumerate(actions):
        content = (part.numpy().tobytes(), *(each[index].numpy().tobytes() for each in frames))
        episodes_of_content.setdefault(content, []).append(index)
    groups = [" = ".join(map(str, duplicates)) for duplicates in episodes_of_content.values() if len(duplicates) > 1]
    if not groups:
        return [Finding("duplicate episodes", Health.GOOD, "no episode is duplicated")]
    surplus = len(episodes) - len(episodes_of_content)
    text = f"{surplus} of {len(episodes)} episodes repeat another one exactly (episodes {join_names(groups)})"
    remedy = "Exclude the duplicates: they count double in training, and held-out episodes are not held out."
    return [Finding("duplicate episodes", _health(surplus, len(episodes)), text, remedy)]


def check_constant_elements(episodes: Episodes) -> list[Finding]:
    """List observation elements that never change; only a replay can tell whether they should."""
    constant_names = [
        name
        for key, values in episodes.observation.items()
        if not key.startswith(IMAGE_PREFIX) and len(values) > 1
        for name, span in zip(
            element_names(episodes.observation_fields[key], key),
            np.ptp(values.cpu().numpy().reshape(len(values), -1), axis=0),
            strict=True,
        )
        if span == 0
    ]
    text = f"constant in the data: {join_names(constant_names, 8)}"
    return [Finding("constant observations", Health.UNKNOWN, text)] if constant_names else []


def spikes(episodes: Episodes) -> dict[str, list[int]]:
    """Return element name -> episodes in which it leaves the range of its other values for a single frame.

    The frames before and after must lie in that range, and the one between at least SPIKE times its width beyond it.
    """
    owner = np.repeat(np.arange(len(episodes)), episodes.lengths.cpu().numpy())
    spike_episodes = _isolated(episodes.actions.cpu().numpy(), owner, element_names(episodes.action_field, "action"))
    frames = np.repeat(np.arange(len(episodes)), episodes.lengths.cpu().numpy() + 1)
    for key, values in episodes.observation.items():
        if not key.startswith(IMAGE_PREFIX):
            rows = values.cpu().numpy().reshape(len(values), -1)
            spike_episodes |= _isolated(rows, frames, element_names(episodes.observation_fields[key], key))
    return spike_episodes


def check_spikes(episodes: Episodes) -> list[Finding]:
    """Check for single-frame values far from all others, when no replay is possible."""
    spike_episodes = spikes(episodes)
    texts = [f"'{name}' (episodes {join_names(list(map(str, indices)))})" for name, indices in spike_episodes.items()]
    text = f"single frames are outliers: {join_names(texts)}"
    remedy = "A sensor or driver wrote invalid numbers there: exclude or repair these episodes."
    return [Finding("spikes", Health.WARNING, text, remedy)] if spike_episodes else []


def stopped_short(episodes: Episodes, horizon: int) -> np.ndarray:
    """Return [E] bool: episodes that stop before `horizon` steps without labelled success or task end."""
    if episodes.success is None or not horizon:
        return np.zeros(len(episodes), dtype=bool)
    short = ~episodes.success.cpu().numpy() & (episodes.lengths.cpu().numpy() < horizon)
    return short if episodes.terminated is None else short & ~episodes.terminated.cpu().numpy()


def check_truncation(episodes: Episodes, spec: WorldSpec) -> list[Finding]:
    """Check for episodes that stop before the world's time limit without success and without a task end."""
    short = stopped_short(episodes, spec.horizon)
    if not short.any():
        return []
    return [truncated(np.flatnonzero(short), episodes.lengths.cpu().numpy(), len(episodes), spec.horizon)]


def truncated(which: np.ndarray, lengths: np.ndarray, count: int, horizon: int) -> Finding:
    """Return the finding that the episodes `which`, of `count` checked, are truncated; lengths: of all episodes."""
    stops = sorted({int(length) for length in lengths[which]})
    steps_text = f"step {stops[0]}" if len(stops) == 1 else f"steps {stops[0]} to {stops[-1]}"
    text = (
        f"{len(which)} of {count} episodes are truncated (episodes {join_names(list(map(str, which)))}): they stop at "
        f"{steps_text} without success, but the world's time limit is {horizon}"
    )
    remedy = "Record complete episodes, or exclude these; if the recorder has another time limit, set it in the world."
    return Finding("ends of episodes", _health(len(which), count), text, remedy)


def check_instructions(episodes: Episodes, world: World, reads_text: bool | None = None) -> list[Finding]:
    """Compare the data's instructions with the texts that the world accepts and those that it gives at the same seeds.

    If both have a single one, or the policy reads none (reads_text False), different wording does not matter.
    """
    known_texts = set(world.spec.instructions)
    if known_texts == {""}:
        return []
    remedy = "Correct the instructions of these episodes (task_index in the data, meta/tasks.parquet)."
    indices = [str(index) for index, task in enumerate(episodes.tasks) if task not in known_texts]
    if indices:
        first = episodes.tasks[int(indices[0])]
        example = f"'{first}'" if first else "none"
        single = len(set(episodes.tasks)) == 1 and len(world.spec.goals) == 1
        if reads_text is False or (single and not reads_text):
            data_text, its = example if single else "others", f"'{world.spec.goals[0]}'"
            text = f"{data_text} in the data, {its} in the world: no effect on a policy that reads no instructions"
            return [Finding("instructions", Health.UNKNOWN, text)]
        text = (
            f"{len(indices)} of {len(episodes)} episodes (episodes {join_names(indices)}) have an instruction that the "
        )
        return [Finding("instructions", Health.BAD, f"{text}world does not know: {example}", remedy)]
    if episodes.seeds is None:
        return [Finding("instructions", Health.UNKNOWN, "known to the world; without seeds they cannot be compared")]
    world_texts = _instructions_given(world, episodes.seeds.cpu().numpy())
    differing = [
        index
        for index, (text_in_data, text_in_world) in enumerate(zip(episodes.tasks, world_texts, strict=True))
        if text_in_data != text_in_world
    ]
    if not differing:
        return [Finding("instructions", Health.GOOD, "as in the world at the same seeds")]
    text = (
        f"{len(differing)} of {len(episodes)} episodes have another instruction than the world at their seeds "
        f"(episodes {join_names(list(map(str, differing)))}; episode {differing[0]}: '{episodes.tasks[differing[0]]}', "
        f"not '{world_texts[differing[0]]}')"
    )
    return [Finding("instructions", _health(len(differing), len(episodes)), text, remedy)]


def _instructions_given(world: World, seeds: np.ndarray) -> list[str]:
    rows, texts = world.batch_size, []
    for begin in range(0, len(seeds), rows):
        part = seeds[begin : begin + rows]
        observation: Mapping[str, np.ndarray] = world.reset(seeds=np.resize(part, rows))
        texts += [str(text) for text in observation[TASK][: len(part)]]
    return texts


def _isolated(values: np.ndarray, owner: np.ndarray, names: tuple[str, ...]) -> dict[str, list[int]]:
    """Return name -> episodes with a spike in an element of values [n, D]; owner: [n], the episode of each row."""
    if len(values) < 8:
        return {}
    inner = (owner[1:-1] == owner[:-2]) & (owner[1:-1] == owner[2:])
    before = values[:-2]
    current = values[1:-1]
    after = values[2:]
    beyond = ((current > before) & (current > after)) | ((current < before) & (current < after))
    jump = np.minimum(np.abs(current - before), np.abs(current - after))
    usual_range = np.ptp(np.quantile(values, [0.005, 0.995], axis=0), axis=0)
    suspicious = np.zeros(values.shape, dtype=bool)
    suspicious[1:-1] = inner[:, None] & beyond & (jump > SPIKE * usual_range)
    spike_episodes: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        other_values = values[~suspicious[:, index], index]
        if not suspicious[:, index].any() or not np.ptp(other_values) > 0:
            continue
        height = np.maximum(values[:, index] - other_values.max(), other_values.min() - values[:, index])
        rows = suspicious[:, index] & (height > SPIKE * np.ptp(other_values))
        if rows.any():
            spike_episodes[name] = sorted({int(episode) for episode in owner[rows]})
    return spike_episodes


def _health(wrong: int, count: int) -> Health:
    return Health.BAD if wrong > MANY * count else Health.WARNING


def check_success(episodes: Episodes, spec: WorldSpec | None) -> list[Finding]:
    """Report whether the world, if known, reports success, and the number of recorded successes."""
    if spec is not None and not spec.reports_success:
        text = f"'{spec.name}' never reports success: every success rate is 0"
        remedy = (
            "Define success: world.options.success=package.module:function, \"world.options.success='return >= "
            "NUMBER'\", world.options.success=terminated, or world.options.success_key=NAME."
        )
        return [Finding("success", Health.BAD, text, remedy)]
    if episodes.success is None:
        text = "the dataset does not record which episodes succeeded"
        return [
            Finding("success", Health.UNKNOWN, text, "Success-weighted losses and world models need success labels.")
        ]
    success_rate = float(episodes.success.float().mean())
    text = f"{success_rate:.0%} of {len(episodes)} recorded episodes succeeded"
    if success_rate == 0:
        return [Finding("success", Health.WARNING, text, "A policy imitates its data: record episodes that succeed.")]
    return [Finding("success", Health.GOOD, text)]
