"""Checks of a dataset by itself and of its fields against the world's, without replay or policy.

Among them: do the statistics that it carries agree with its values? LeRobot's policies normalise with them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.action_bounds import OutsideBounds
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.finite_values import element_names, join_names, nonfinite_columns
from robopolicy.core.spec import IMAGE_PREFIX, Field, WorldSpec, name_conflict, same_rate, same_units
from robopolicy.core.storage import read_json
from robopolicy.data.lerobot_checks import camera_columns, file_within, is_picture, kind_in_words
from robopolicy.data.lerobot_reading import read_information
from robopolicy.doctor.findings import Finding, Health


def check_finite_values(episodes: Episodes) -> list[Finding]:
    """Check actions, observations and rewards for NaN and infinity; report the first occurrences."""
    remedy = "Exclude these episodes, and check the sensor or driver that wrote them."
    findings = [Finding("finite values", Health.BAD, text, remedy) for text in nonfinite_columns(episodes)]
    return findings or [Finding("finite values", Health.GOOD, "every number is finite")]


def check_fields(episodes: Episodes, spec: WorldSpec) -> list[Finding]:
    """Compare keys, shapes, element names, units and control rate of the data with the world's."""
    findings = []
    for key, field in spec.observation.items():
        data_field = episodes.observation_fields.get(key)
        if data_field is None:
            findings.append(_missing(key, episodes.observation_fields, "the world outputs"))
        else:
            findings.append(_compare(key, data_field, field, "world"))
    findings.append(_compare("action", episodes.action_field, spec.action, "world"))
    for camera in sorted(set(episodes.cameras) - set(spec.cameras)):
        text = "recorded, but not enabled in the world"
        findings.append(
            Finding(f"camera '{camera}'", Health.UNKNOWN, text, f"To compare it: world.cameras=[{camera}].")
        )
    findings.append(check_rate(episodes.fps, spec.fps, "world"))
    return findings


def check_rate(recorded: float, wanted: float, whose: str) -> Finding:
    """Compare the control rates declared by the data and by a world or policy, in steps per second."""
    if not wanted:
        text = f"dataset {recorded:g} steps/s, but the {whose}'s rate is unknown"
        return Finding("control rate", Health.UNKNOWN, text, 'Add "fps": N to robopolicy.json next to config.json.')
    text = f"dataset {recorded:g} steps/s, {whose} {wanted:g}"
    if same_rate(recorded, wanted):
        return Finding("control rate", Health.GOOD, text)
    remedy = f"Resample the data to {wanted:g} steps/s, or correct its fps if only the label is wrong."
    return Finding("control rate", Health.BAD, text, remedy)


def check_policy_fields(fields: Mapping[str, Field], action: Field, fps: float, episodes: Episodes) -> list[Finding]:
    """Compare the fields and control rate that a policy was built for with those of the data.

    Names or rates that could not be compared are reported as UNKNOWN, not as agreement.
    """
    findings: list[Finding] = []
    for key, field in fields.items():
        data_field = episodes.observation_fields.get(key)
        if data_field is None:
            findings.append(_missing(key, episodes.observation_fields, "the policy reads"))
        else:
            findings.append(_compare(key, data_field, field, "policy"))
    findings += [
        _compare("action", episodes.action_field, action, "policy"),
        check_rate(episodes.fps, fps, "policy"),
    ]
    unnamed = _unnamed({**fields, "action": action}, {**episodes.observation_fields, "action": episodes.action_field})
    unclear = [*unnamed, *(finding for finding in findings if finding.health is Health.UNKNOWN)]
    problems = [finding for finding in findings if finding.problem]
    compared = ["keys", "shapes", *(() if unnamed else ("names",)), *(("rate",) if fps else ())]
    text = f"{', '.join(compared[:-1])} and {compared[-1]} match the data"
    return [*(problems or [Finding("policy fields", Health.GOOD, text)]), *unclear]


def check_action_range(actions: Tensor, spec: WorldSpec) -> list[Finding]:
    """Check for actions [N, A] beyond the world's bounds, and for dimensions that use hardly any of the range."""
    field = spec.action
    low = torch.as_tensor(np.broadcast_to(field.low, field.shape).copy(), dtype=torch.float32)
    high = torch.as_tensor(np.broadcast_to(field.high, field.shape).copy(), dtype=torch.float32)
    names = element_names(field, "action")
    actions = actions.cpu()
    outside_share = ((actions < low - 1e-4) | (actions > high + 1e-4)).float().mean(0)
    worst = int(outside_share.argmax())
    health = (
        Health.BAD if outside_share[worst] > 0.05 else Health.WARNING if outside_share[worst] > 0.001 else Health.GOOD
    )
    remedy = "" if health is Health.GOOD else "The world clips these actions: check their scale and units."
    if not spec.clips_actions and health is not Health.GOOD:
        # Bounds may be a formality, but who goes several times as far most likely means another unit.
        far = (actions.abs().amax(0) > 3 * torch.maximum(low.abs(), high.abs())).any()
        health = Health.WARNING if far else Health.UNKNOWN
        remedy = (
            "The world executes these actions unclipped: unless its bounds are only nominal, check the scale and units "
            "of the actions."
        )
    outside_counts = OutsideBounds(spec)
    outside_counts.add(actions.numpy(), np.ones(len(actions), dtype=bool))
    text = outside_counts.text.partition(";")[0] if outside_share[worst] else "within bounds"
    findings = [Finding("action range", health, text, remedy)]
    findings += check_constant_actions(actions, field)
    spread, span = actions.std(0, correction=0), (high - low).clamp(min=1e-9)
    narrow = [i for i in range(len(spread)) if torch.isfinite(span[i]) and 1e-6 < spread[i] < 0.01 * span[i]]
    if narrow:
        remedy = (
            "The units differ (metres instead of millimetres, radians instead of degrees?), or the data hardly moves."
        )
        text = f"uses < 1 % of the range: {join_names([names[index] for index in narrow])}"
        findings.append(Finding("action scale", Health.WARNING, text, remedy))
    return findings


def check_constant_actions(actions: Tensor, field: Field) -> list[Finding]:
    """Check for elements of actions [N, A] that never change."""
    names, spread = element_names(field, "action"), actions.cpu().std(0, correction=0)
    constant_names = [names[index] for index in range(len(spread)) if spread[index] < 1e-6]
    if len(constant_names) == len(names):
        remedy = "The recorder did not record the actions."
        return [Finding("constant actions", Health.BAD, "no action ever changes", remedy)]
    text = f"constant in the data: {join_names(constant_names)}"
    return [Finding("constant actions", Health.UNKNOWN, text)] if constant_names else []


def _missing(key: str, recorded: Mapping[str, Field], who: str) -> Finding:
    if not key.startswith(IMAGE_PREFIX):
        return Finding(
            key, Health.BAD, f"{who} it, but the dataset lacks it", "Record again, or rename the dataset's key."
        )
    camera, present = key.removeprefix(IMAGE_PREFIX), [name for name in recorded if name.startswith(IMAGE_PREFIX)]
    have = join_names([name.removeprefix(IMAGE_PREFIX) for name in present]) or "none"
    text = f"{who} camera '{camera}', but the dataset lacks it (it has: {have})"
    remedy = "Rename the dataset's camera if it shows the same view; otherwise record again with this camera."
    return Finding("missing camera", Health.BAD, text, remedy)


def _unnamed(fields: Mapping[str, Field], recorded: Mapping[str, Field]) -> list[Finding]:
    """Name the policy's vectors whose element names cannot be compared with the data's."""
    comparable = {key: field for key, field in fields.items() if key in recorded and recorded[key].shape == field.shape}
    vectors = {key: field for key, field in comparable.items() if len(field.shape) == 1}
    silent = {
        "the policy": [key for key, field in vectors.items() if not field.names],
        "the data": [key for key, field in vectors.items() if field.names and not recorded[key].names],
    }
    remedy = "Check that the elements are in the order that the policy was trained on."
    return [
        Finding("element names", Health.UNKNOWN, f"not compared: {owner} has no names for {join_names(keys)}", remedy)
        for owner, keys in silent.items()
        if keys
    ]


def _compare(key: str, recorded: Field, wanted: Field, whose: str) -> Finding:
    """Compare one field of the data with the world's or the policy's."""
    if recorded.shape != wanted.shape:
        text = f"dataset {recorded.shape}, {whose} {wanted.shape}"
        remedy = (
            f"Data and {whose} come from different worlds, versions or image sizes: record again, or use the other one."
        )
        return Finding(key, Health.BAD, text, remedy)
    if name_conflict(recorded.names, wanted.names) is not None:
        pairs = zip(recorded.names, wanted.names, strict=False)
        different = [
            f"'{data_name}' where the {whose} has '{other}'" for data_name, other in pairs if data_name != other
        ]
        same_names = sorted(recorded.names) == sorted(wanted.names)
        kind = "action order" if key == "action" else "observation order"
        remedy = "Reorder the dataset's columns by name." if same_names else RENAME_ELEMENTS
        return Finding(
            kind if same_names else key,
            Health.BAD if same_names else Health.WARNING,
            f"{key}: {join_names(different)}",
            remedy,
        )
    if not same_units(recorded, wanted):
        text = f"dataset in '{recorded.unit}', {whose} in '{wanted.unit}'"
        return Finding(key, Health.BAD, text, "Convert the dataset, or correct its label.")
    if recorded.names and wanted.names and recorded.names != wanted.names:
        first_name, other = next((a, b) for a, b in zip(recorded.names, wanted.names, strict=False) if a != b)
        text = (
            f"matched by index: '{first_name}' where the {whose} has '{other}'; numbered names do not identify "
            "an element"
        )
        return Finding("element names", Health.UNKNOWN, f"{key}: {text}", ORDER)
    return Finding(key, Health.GOOD, f"shape {wanted.shape} on both sides")


RENAME_ELEMENTS = (
    "Rename the elements if they mean the same: doctor.rename={DATASET'S NAME: NAME}, and train.rename for training."
)
ORDER = "Check that the elements are in the same order on both sides."


COMPARED = ("mean", "std", "min", "max")
TOLERANCE = 0.02
"""Tolerance of a statistic as a fraction of the element's range; float32 sums and subsampling stay far below it."""
REMEDY = (
    "Recompute them before training with LeRobot, which uses them for normalisation; 'robopolicy train' computes "
    "its own."
)


def check_statistics(episodes: Episodes, folder: Path) -> list[Finding]:
    """Compare meta/stats.json of the dataset at `folder` with all its `episodes`, element by element."""
    path = Path(folder) / "meta" / "stats.json"
    if not os.path.lexists(path):
        text = "meta/stats.json is missing"
        return [Finding("statistics", Health.WARNING, text, REMEDY)]
    try:
        content = read_json(file_within(Path(folder), "meta/stats.json", "meta/stats.json"), DataError)
    except DataError as error:
        return [Finding("statistics", Health.BAD, f"meta/stats.json is damaged ({error})", REMEDY)]
    frames = (
        np.arange(episodes.step_count) + episodes.episode_of_step.cpu().numpy()
    )  # without those after the last step
    columns = {key: values for key, values in episodes.observation.items() if not key.startswith(IMAGE_PREFIX)}
    rows = {key: values.cpu().double().numpy()[frames] for key, values in columns.items()}
    rows["action"] = episodes.actions.cpu().double().numpy()
    fields = {**episodes.observation_fields, "action": episodes.action_field}
    findings: list[Finding] = []
    for key, values in rows.items():
        stored_statistics = content.get(key) if isinstance(content, dict) else None
        if not isinstance(stored_statistics, dict):
            findings.append(Finding("statistics", Health.WARNING, f"meta/stats.json lacks '{key}'", REMEDY))
            continue
        off = _disagreeing(stored_statistics, values.reshape(len(values), -1), element_names(fields[key], key))
        if off:
            text = f"meta/stats.json differs from the data of '{key}': {join_names(off)}"
            findings.append(Finding("statistics", Health.BAD, text, REMEDY))
    return findings or [Finding("statistics", Health.GOOD, "meta/stats.json matches the data")]


def check_columns(folder: Path) -> list[Finding]:
    """Report unread image columns: depth, and names that do not begin with "observation."."""
    features = read_information(folder)["features"]
    read_columns = camera_columns(features, Path(folder)).values()
    unread = [
        f"{name} ({kind_in_words(feature)})"
        for name, feature in features.items()
        if is_picture(feature) and name not in read_columns
    ]
    remedy = "Colour images are read as observation.NAME; depth images are not read."
    return [Finding("ignored columns", Health.UNKNOWN, f"not read: {join_names(unread)}", remedy)] if unread else []


def _disagreeing(stored: dict[str, object], values: np.ndarray, names: tuple[str, ...]) -> list[str]:
    """Return a text for each statistic of values [N, D] that disagrees, "mean of 'x' is 3, not 1".

    Rows with NaN or infinity, which are reported separately, are ignored.
    """
    values = values[np.isfinite(values).all(1)]
    if not len(values):
        return []
    span = np.ptp(values, axis=0)
    tolerance = TOLERANCE * span + 1e-4 * np.abs(values).max(0) + 1e-6
    squares = 1e-3 * np.abs(values).max(0)  # a std from sums of squares in float32 is no better, which constants show
    true_statistics = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
    texts: list[str] = []
    for name in COMPARED:
        try:
            stored_values = np.asarray(stored[name], dtype=float).reshape(-1)
        except (KeyError, TypeError, ValueError):
            texts.append(f"no {name}")
            continue
        if stored_values.shape != true_statistics[name].shape:
            texts.append(f"{name} has {stored_values.size} elements, not {true_statistics[name].size}")
            continue
        differs = ~(np.abs(stored_values - true_statistics[name]) <= tolerance + (squares if name == "std" else 0.0))
        texts += [
            f"{name} of '{names[i]}' is {stored_values[i]:.4g}, not {true_statistics[name][i]:.4g}"
            for i in np.flatnonzero(differs)
        ]
    return texts
