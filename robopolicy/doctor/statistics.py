"""Do the statistics that a dataset carries agree with its values? LeRobot's policies normalise with them."""

import os
from pathlib import Path

import numpy as np

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.finite_values import element_names, listed
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.core.storage import read_json
from robopolicy.data.lerobot_checks import camera_columns, file_within, is_picture, kind_in_words
from robopolicy.data.lerobot_reading import read_information
from robopolicy.doctor.findings import Finding, Health

COMPARED = ("mean", "std", "min", "max")
TOLERANCE = 0.02
"""Share of an element's range within which a statistic agrees; float32 sums and other samplings stay far below it."""
REMEDY = "Compute them again before training with LeRobot, which normalises with them; 'train' here uses its own."


def check_statistics(episodes: Episodes, folder: Path) -> list[Finding]:
    """Compare meta/stats.json of the dataset at `folder` with all its `episodes`, element by element."""
    path = Path(folder) / "meta" / "stats.json"
    if not os.path.lexists(path):
        text = "meta/stats.json is missing"
        return [Finding("statistics", Health.WARNING, text, REMEDY)]
    try:
        stored = read_json(file_within(Path(folder), "meta/stats.json", "meta/stats.json"), DataError)
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
        found = stored.get(key) if isinstance(stored, dict) else None
        if not isinstance(found, dict):
            findings.append(Finding("statistics", Health.WARNING, f"meta/stats.json lacks '{key}'", REMEDY))
            continue
        off = _disagreeing(found, values.reshape(len(values), -1), element_names(fields[key], key))
        if off:
            text = f"meta/stats.json disagrees with the data of '{key}': {listed(off)}"
            findings.append(Finding("statistics", Health.BAD, text, REMEDY))
    return findings or [Finding("statistics", Health.GOOD, "meta/stats.json agrees with the data")]


def check_columns(folder: Path) -> list[Finding]:
    """Name the columns of pictures that are not read: depth, and what does not begin with "observation."."""
    features = read_information(folder)["features"]
    read = camera_columns(features, Path(folder)).values()
    left = [
        f"{name} ({kind_in_words(what)})" for name, what in features.items() if is_picture(what) and name not in read
    ]
    remedy = "Colours are read under observation.NAME, depth is not."
    return [Finding("columns left out", Health.UNKNOWN, f"not read: {listed(left)}", remedy)] if left else []


def _disagreeing(stored: dict[str, object], values: np.ndarray, names: tuple[str, ...]) -> list[str]:
    """Return a text for each statistic of values [N, D] that lies elsewhere, "mean of 'x' is 3, not 1".

    Rows with NaN or infinity, which are reported by themselves, do not count.
    """
    values = values[np.isfinite(values).all(1)]
    if not len(values):
        return []
    span = np.ptp(values, axis=0)
    allowed = TOLERANCE * span + 1e-4 * np.abs(values).max(0) + 1e-6
    squares = 1e-3 * np.abs(values).max(0)  # a std from sums of squares in float32 is no better, which constants show
    true = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
    texts: list[str] = []
    for name in COMPARED:
        try:
            said = np.asarray(stored[name], dtype=float).reshape(-1)
        except (KeyError, TypeError, ValueError):
            texts.append(f"no {name}")
            continue
        if said.shape != true[name].shape:
            texts.append(f"{name} has {said.size} elements, not {true[name].size}")
            continue
        wrong = ~(np.abs(said - true[name]) <= allowed + (squares if name == "std" else 0.0))
        texts += [f"{name} of '{names[i]}' is {said[i]:.4g}, not {true[name][i]:.4g}" for i in np.flatnonzero(wrong)]
    return texts
