"""Normalisation statistics of LeRobot processors: find missing ones and fill them from data.

A pretrained checkpoint may have no statistics for the data at hand; LeRobot then leaves values unnormalised:
radians or pixels would be treated as normalised actions. Axes: N value.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.policies.lerobot.checks import ASKED
from robopolicy.policies.lerobot.features import LeRobotReader

FRAMES = 500
"""Maximum number of images used for statistics."""

REMEDY = (
    "Train on data first, which computes them: robopolicy train DATASET policy.kind=lerobot policy.path=FOLDER. Or "
    "save the processors with make_pre_post_processors(config, dataset_stats=...)."
)


def missing_statistics(policy: LeRobotReader) -> tuple[str, ...]:
    """Return the LeRobot features whose normalisation statistics are incomplete."""
    return tuple(dict.fromkeys(name for step in _normalisers(policy) for name in _lacking_in(step)))


def require_statistics(policy: LeRobotReader) -> None:
    """Raise ConfigError if a policy to be trained lacks normalisation statistics.

    Raises CheckpointError when their sizes do not match the features, or as `check_acting`.
    """
    _require_sizes(policy)
    _require_types(policy)
    if missing_names := missing_statistics(policy):
        raise ConfigError(f"{_said(policy, missing_names)} {REMEDY}")


def check_acting(policy: LeRobotReader) -> None:
    """Warn if a policy lacks normalisation statistics for acting, because LeRobot then skips normalisation.

    Raises ConfigError when its statistics do not suit its normalisation mode, which LeRobot rejects; CheckpointError
    when their sizes do not match the features, or processors output a dtype that no weight has.
    """
    _require_sizes(policy)
    _require_types(policy)
    if not (missing_names := missing_statistics(policy)):
        return
    if any((step.stats or {}).get(name) for step in _normalisers(policy) for name in missing_names):
        raise ConfigError(f"{_said(policy, missing_names)} {REMEDY}")
    warnings.warn(
        f"{_said(policy, missing_names)} LeRobot leaves such values unnormalised, so the policy acts on them, most "
        f"likely not as it was trained. {REMEDY}",
        RobopolicyWarning,
        stacklevel=2,
    )


def _require_types(policy: LeRobotReader) -> None:
    """Raise CheckpointError if observations are cast to a dtype that no weight has; warn if actions are.

    LeRobot would fail inside its network: "mat1 and mat2 must have the same dtype".
    """
    weights = sorted({str(each.dtype).removeprefix("torch.") for each in policy.policy.parameters()})
    names = {"half": "float16", "float": "float32", "double": "float64"}
    before, after = (
        [names.get(cast, cast) for step in part.steps if (cast := getattr(step, "float_dtype", None))]
        for part in (policy.preprocess, policy.postprocess)
    )
    if before and before[-1] not in weights:
        raise CheckpointError(
            f"{policy.folder}: policy_preprocessor.json casts observations to {before[-1]} (float_dtype of its "
            f"device_processor), but the weights are {', '.join(weights)}: set float_dtype there to null."
        )
    if coarse := [cast for cast in after if cast in ("bfloat16", "float16")]:
        warnings.warn(
            f"{policy.folder}: policy_postprocessor.json rounds actions to {coarse[0]}, two or three digits "
            "(float_dtype of its device_processor): set it to null to keep full precision.",
            RobopolicyWarning,
            stacklevel=3,
        )


def _require_sizes(policy: LeRobotReader) -> None:
    """Raise CheckpointError if the statistics of a vector have a different number of elements than the policy reads."""
    config: Any = policy.policy.config
    features = {**config.input_features, **config.output_features}
    sizes = {name: int(each.shape[0]) for name, each in features.items() if len(each.shape) == 1}
    for step in _normalisers(policy):
        for name, size in sizes.items():
            statistics = (step.stats or {}).get(name) or {}
            for each in _asked(step, name):
                shape = tuple(torch.as_tensor(statistics[each]).shape) if each in statistics else (size,)
                if shape != (size,) and not math.prod(shape) == size == 1:
                    raise CheckpointError(
                        f"The processors of this checkpoint normalise '{name}' with statistics of shape "
                        f"{list(shape)} ({each}), but its config.json declares {[size]}: they belong to another "
                        f"robot or dataset. {_TAKE}"
                    )
            _require_sense(
                name, {each: torch.as_tensor(statistics[each]) for each in _asked(step, name) if each in statistics}
            )


_TAKE = "Use the processors that were saved with these weights."


def _require_sense(name: str, asked: dict[str, Tensor]) -> None:
    """Raise CheckpointError if statistics [N] of one feature, by name, are impossible for any data."""
    values = list(asked.values())
    spread = values[1] if "std" in asked else values[1] - values[0] if len(values) == 2 else torch.zeros(())
    problem = "NaN or infinite" if not all(bool(each.isfinite().all()) for each in values) else ""
    if problem or bool((spread < 0).any()):
        raise CheckpointError(
            f"The processors of this checkpoint normalise '{name}' with invalid statistics: {' or '.join(asked)} "
            f"{problem or 'negative'}. {_TAKE}"
        )


def _said(policy: LeRobotReader, missing: tuple[str, ...]) -> str:
    statistic_names = sorted({each for step in _normalisers(policy) for name in missing for each in _asked(step, name)})
    return (
        f"The processors of this checkpoint lack the statistics of {', '.join(missing)} that they normalise with "
        f"({', '.join(statistic_names)})."
    )


def fill_in(policy: LeRobotReader, episodes: Episodes) -> None:
    """Compute missing statistics of the policy's processors from `episodes`, with a warning that names them.

    Raises ConfigError when the episodes lack such a field.
    """
    missing_names = missing_statistics(policy)
    if not missing_names:
        return
    statistics = {name: _statistics(_values(policy, episodes, name)) for name in missing_names}
    for step in _normalisers(policy):
        step.stats = {**(step.stats or {}), **{name: statistics[name] for name in _lacking_in(step)}}
        step.to(device=policy.device)
    warnings.warn(
        f"The checkpoint's processors lacked statistics of {', '.join(missing_names)}: the data's statistics are "
        "used now.",
        RobopolicyWarning,
        stacklevel=2,
    )


def _normalisers(policy: LeRobotReader) -> Iterator[Any]:
    from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep

    for step in (*policy.preprocess.steps, *policy.postprocess.steps):
        if isinstance(step, NormalizerProcessorStep | UnnormalizerProcessorStep):
            yield step


def _lacking_in(step: Any) -> list[str]:
    statistics = step.stats or {}
    return [name for name in step.features if not {*_asked(step, name)} <= {*(statistics.get(name) or ())}]


def _asked(step: Any, name: str) -> tuple[str, ...]:
    """Return the statistics with which a step normalises feature `name`."""
    feature = step.features.get(name)
    mode = None if feature is None else step.norm_map.get(feature.type)
    return () if mode is None else ASKED.get(mode.value, ())


def _values(policy: LeRobotReader, episodes: Episodes, name: str) -> Tensor:
    """Return the episodes' values of LeRobot feature `name`, [N, *shape], with images preprocessed."""
    if name == "action":
        return episodes.actions
    key = policy.key_of(name)
    if key not in episodes.observation:
        raise ConfigError(f"The processors need statistics of '{name}', but the data has no '{key}'.")
    values = episodes.observation[key]
    if not key.startswith(IMAGE_PREFIX):
        return values
    samples = values[:: max(1, len(values) // FRAMES)]
    return samples.movedim(-1, 0).flatten(1).T.float() / 255  # a value a pixel, a column a channel


def _statistics(values: Tensor) -> dict[str, Any]:
    """Return all statistics of values [N, *shape] that a LeRobot normalisation mode requires, [*shape]."""
    values = values.float().cpu()
    # torch.quantile takes 16 million elements at most: quantiles are of rows evenly spaced over the data.
    rows = values[:: max(1, len(values) // 100_000)]
    quantiles = {f"q{share:02d}": torch.quantile(rows, share / 100, dim=0) for share in (1, 10, 50, 90, 99)}
    moments = {"min": values.amin(0), "max": values.amax(0), "mean": values.mean(0), "std": values.std(0, correction=0)}
    return {name: value.numpy() for name, value in {**moments, **quantiles}.items()}


keep_former_names(__name__, {"lacking": "missing_statistics"})
