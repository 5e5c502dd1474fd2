"""Security and consistency checks of LeRobot processors: no arbitrary imports or files, and agreement with
config.json.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.errors import CheckpointError, RobopolicyWarning, in_one_line
from robopolicy.core.registry import is_trusted
from robopolicy.core.storage import read_object
from robopolicy.core.tensors import load_tensors

PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")

ASKED: Mapping[str, tuple[str, ...]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""LeRobot normalisation mode -> required statistics; older datasets have no quantiles."""
STEPS = (
    "absolute_actions_processor",
    "device_processor",
    "image_crop_resize_processor",
    "normalizer_processor",
    "observation_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "pi0_fast_prepare_state_tokenizer_processor_step",
    "pi0_new_line_processor",
    "relative_actions_processor",
    "rename_observations_processor",
    "smolvla_new_line_processor",
    "to_batch_processor",
    "tokenizer_processor",
    "unnormalizer_processor",
    "xvla_add_domain_id",
    "xvla_image_scale",
    "xvla_image_to_float",
    "xvla_imagenet_normalize",
)
"""LeRobot processing steps that a checkpoint may use. Other LeRobot steps load further models, may run code stored with
them, or open devices.
"""
ACTION_TOKENIZER = "action_tokenizer_processor"
"""Step allowed for pi0_fast only: it receives the policy's own tokenizer, which is read as data."""


LARGEST_NUMBERS = {
    "layers": 1000,
    "depth": 1000,
    "chunk_size": 10_000,
    "horizon": 10_000,
    "steps": 10_000,
    "resize": 4096,
    "crop": 4096,
    "resolution": 4096,
    "max_length": 65_536,
}
"""Substring of a size's name -> its maximum; LeRobot loops over some sizes in Python."""
LARGEST_NUMBER = 2**20
"""Maximum of other integers, such as vocabulary sizes."""
OF_TRAINING = ("optimizer_", "scheduler_", "n_vqvae_training_steps")
"""Prefixes of training-only numbers, which do not affect construction."""


def check_numbers(path: Path, described: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the JSON file `path`, already parsed, contains an unrealistic size."""
    for key, value in described.items():
        values = value if is_sequence(value) else (value,)
        for each in values:
            if is_mapping(each):
                check_numbers(path, each)
                continue
            if isinstance(each, str) and key.endswith(("_name", "_path")):
                _check_model(path, key, each)
            # Only NaN differs from itself.
            if isinstance(each, float) and each != each:
                raise CheckpointError(f"{path} has {key}=NaN: correct it, or restore it from a copy.")
            if key == "eps" and (not isinstance(each, float | int) or not 0 <= each <= 1):
                raise CheckpointError(
                    f"{path} has {key}={in_one_line(each, 40)}, which is added to a divisor and must be between 0 "
                    "and 1. Restore it from a copy."
                )
            bound = next((largest for part, largest in LARGEST_NUMBERS.items() if part in key), LARGEST_NUMBER)
            if key.startswith(OF_TRAINING) or not isinstance(each, int) or abs(each) <= bound:
                continue
            raise CheckpointError(
                f"{path} has {key}={in_one_line(each, 40)}, but at most {bound} is plausible: correct it, or restore "
                "it from a copy."
            )


LARGEST_VOCABULARY = 2**27
"""Maximum bytes of tokenizer and similar files; the largest, Gemma's, has 34 MB."""


def _check_model(path: Path, key: str, name: str) -> None:
    """Raise CheckpointError if a model or tokenizer folder `name`, referenced by `path`, contains oversized text files,
    pipes or devices.
    """
    folder = Path(name)
    if len(name) > 1000 or not folder.is_dir():  # a name on the hub
        return
    for file in sorted(folder.iterdir()):
        text = file.suffix in (".json", ".txt", ".model", ".jinja")
        if file.exists() and not file.is_dir() and not file.is_file():
            raise CheckpointError(f"{path} sets {key}={folder}, but {file} is a pipe or device, not a file.")
        if text and file.is_file() and file.stat().st_size > LARGEST_VOCABULARY:
            raise CheckpointError(
                f"{path} sets {key}={folder}, but {file} is larger than {LARGEST_VOCABULARY} bytes, more than any "
                "valid file of this kind: it is not read."
            )


def check_processor(folder: Path, name: str, kind: str) -> None:
    """Raise CheckpointError unless a processor and its tensors exist and import nothing but LeRobot.

    kind: LeRobot type of its policy.
    """
    path = folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: without it inputs and actions cannot be normalised. Convert a checkpoint of an "
            "older LeRobot with: python -m lerobot.processor.migrate_policy_normalization --pretrained-path FOLDER"
        )
    steps = read_object(path).get("steps")
    if not is_sequence(steps) or not all(is_mapping(step) for step in steps):
        raise CheckpointError(f"{path} is corrupt: it lists no steps. Restore it from a copy.")
    allowed_steps = (*STEPS, ACTION_TOKENIZER) if kind == "pi0_fast" else STEPS
    for step in steps:
        _check_step(path, step, allowed_steps)
        check_numbers(path, step)
        state = step.get("state_file")
        if state is not None and not (isinstance(state, str) and Path(state).name == state):
            raise CheckpointError(f"{path} refers to the file {state!r}, which is not next to it.")
        if state is not None and not (folder / state).is_file():
            raise CheckpointError(f"{folder / state} does not exist, which {name} needs.")


def _check_step(path: Path, step: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise CheckpointError unless a processor step is a known one, or was imported or named by the user."""
    if "registry_name" in step:  # LeRobot then ignores "class"
        name = str(step["registry_name"])
        if name not in known and not _registered_elsewhere(name):
            raise CheckpointError(
                f"{path} uses the processor step '{name}', which a checkpoint may not select. Allowed: "
                f"{', '.join(known)}. For a custom step, register it with LeRobot's ProcessorStepRegistry in a "
                "module and allow that module: run.plugins=[module]."
            )
        return
    module, _, kind = str(step.get("class")).rpartition(".")
    if not is_trusted(f"{module}:{kind}"):
        raise CheckpointError(
            f"{path} uses the class {step.get('class')}, but a checkpoint may not choose what is imported. If you "
            f"trust it, allow its module: run.plugins=[{module}] (in Python: robopolicy.core.registry.import_plugins)."
        )


AS_IT_IS = "IDENTITY"
"""LeRobot normalisation mode without effect."""
PICTURES_OTHERWISE = "xvla_imagenet_normalize"
"""Step that normalises images without a normaliser."""


def check_normalisation(folder: Path) -> None:
    """Check the processors of a checkpoint against the normalisation declared in its config.json
    (normalization_mapping).

    Raises CheckpointError when a feature is not normalised, normalised twice, or only on one side of the policy. Warns
    if only the method differs: processors are saved with the method used in training, and LeRobot follows them.
    """
    config = read_object(folder / "config.json")
    mapping = config.get("normalization_mapping")
    inputs, outputs = config.get("input_features"), config.get("output_features")
    if not (is_mapping(mapping) and is_mapping(inputs) and is_mapping(outputs)):
        return
    before, after = (_steps(folder, name) for name in PROCESSORS)
    normalisers = [step for step in before if _name(step).startswith("normalizer")]
    inverses = [step for step in after if _name(step).startswith("unnormalizer")]
    for name, steps in ((PROCESSORS[0], normalisers), (PROCESSORS[1], inverses)):
        if len(steps) > 1:
            raise CheckpointError(f"{folder / name} normalises {len(steps)} times. {_SAVED_TOGETHER}")
    pictures_done = any(_name(step) == PICTURES_OTHERWISE for step in before)
    notes = [
        _compared(folder, name, feature, mapping, normalisers, PROCESSORS[0])
        for name, feature in inputs.items()
        if not (pictures_done and _type_of(feature) == "VISUAL")
    ]
    notes += [_compared(folder, name, each, mapping, inverses, PROCESSORS[1]) for name, each in outputs.items()]
    for name in outputs:
        _require_inverse(folder, name, normalisers, inverses)
    notes += _unread(before, inputs, folder / PROCESSORS[0])
    if message := " ".join(note for note in notes if note):
        warnings.warn(f"{folder}: {message} The processors' normalisation is used.", RobopolicyWarning, stacklevel=2)


_SAVED_TOGETHER = (
    "Use the processors that were saved with these weights, or save new ones with LeRobot's "
    "make_pre_post_processors(config, dataset_stats=...)."
)


def _steps(folder: Path, name: str) -> list[Mapping[str, Any]]:
    return [step for step in read_object(folder / name)["steps"] if is_mapping(step)]


def _name(step: Mapping[str, Any]) -> str:
    return str(step.get("registry_name", ""))


def _type_of(feature: Any) -> str:
    return str(feature.get("type", "")) if is_mapping(feature) else ""


def _way(steps: list[Mapping[str, Any]], name: str) -> str:
    """Return the normalisation method of the first of `steps` that normalises feature `name`."""
    config = steps[0].get("config") if steps else None
    if not is_mapping(config):
        return AS_IT_IS
    features, ways = config.get("features"), config.get("norm_map")
    normalised_names = config.get("normalize_observation_keys")
    if not (is_mapping(features) and is_mapping(ways)) or name not in features:
        return AS_IT_IS
    if is_sequence(normalised_names) and name not in normalised_names and _type_of(features[name]) != "ACTION":
        return AS_IT_IS
    return str(ways.get(_type_of(features[name]), AS_IT_IS))


def _compared(
    folder: Path, name: str, feature: Any, mapping: Mapping[str, Any], steps: list[Mapping[str, Any]], file: str
) -> str:
    """Return a note if a processor normalises a feature with another method than config.json declares, "" otherwise.

    Raises CheckpointError when it does not normalise the feature at all.
    """
    expected, done = str(mapping.get(_type_of(feature), AS_IT_IS)), _way(steps, name)
    if done == AS_IT_IS and expected != AS_IT_IS:
        has = "leaves it unchanged" if steps else "does not normalise it"
        raise CheckpointError(
            f"{folder / 'config.json'} normalises '{name}' by {expected} (normalization_mapping), but {file} {has}. "
            f"{_SAVED_TOGETHER}"
        )
    if expected == done:
        return ""
    return f"config.json normalises '{name}' by {expected} (normalization_mapping), but {file} by {done}."


def _require_inverse(
    folder: Path, name: str, normalisers: list[Mapping[str, Any]], inverses: list[Mapping[str, Any]]
) -> None:
    """Raise CheckpointError if an output is unnormalised with another method than used in training."""
    forward_method, back = _way(normalisers, name), _way(inverses, name)
    both_normalise = is_mapping(config := normalisers[0].get("config") if normalisers else None) and name in config.get(
        "features", {}
    )
    if both_normalise and forward_method != back:
        raise CheckpointError(
            f"{folder}: '{name}' is normalised by {forward_method} in training ({PROCESSORS[0]}) but unnormalised by "
            f"{back} ({PROCESSORS[1]}). {_SAVED_TOGETHER}"
        )
    files = [step.get("state_file") for step in (*normalisers, *inverses)]
    if not both_normalise or back == AS_IT_IS or len(files) != 2 or None in files:
        return
    first, second = (load_tensors(folder / str(file)) for file in files)
    for key in (f"{name}.{each}" for each in ASKED.get(back, ())):
        if key in first and key in second and not torch.allclose(first[key].float(), second[key].float(), atol=1e-5):
            raise CheckpointError(
                f"{folder}: '{name}' is normalised with other statistics in training ({files[0]}) than it is "
                f"unnormalised with ({files[1]}): they differ in {key}. {_SAVED_TOGETHER}"
            )


def _unread(before: list[Mapping[str, Any]], inputs: Mapping[str, Any], path: Path) -> list[str]:
    """Return a note for each feature name that a step produces but the policy does not read.

    Raises CheckpointError when a step of the processor at `path` renames an input of the policy without replacement, or
    maps two features to one name.
    """
    configs = [step.get("config") for step in before if _name(step) == "rename_observations_processor"]
    notes: list[str] = []
    for pairs in (each.get("rename_map", {}) for each in configs if is_mapping(each)):
        if not is_mapping(pairs) or not all(isinstance(new, str) for new in pairs.values()):
            raise CheckpointError(f"{path} has an invalid rename_map: it must be {{NAME: NAME}}.")
        new_names = list(pairs.values())
        if duplicates := [new for new in new_names if new_names.count(new) > 1]:
            raise CheckpointError(
                f"{path} renames two observations to '{duplicates[0]}': keep the one that the policy reads."
            )
        if unreadable := [old for old in pairs if old in inputs and old not in new_names]:
            raise CheckpointError(
                f"{path} renames '{unreadable[0]}' to '{pairs[unreadable[0]]}', but config.json reads it as "
                f"'{unreadable[0]}': remove it from rename_map."
            )
        notes += [
            f"{PROCESSORS[0]} renames '{old}' to '{new}', which config.json does not read."
            for old, new in pairs.items()
            if new not in inputs
        ]
    return notes


def _registered_elsewhere(name: str) -> bool:
    """Whether this step is registered in LeRobot by an already imported external module."""
    from lerobot.processor import ProcessorStepRegistry

    return name in ProcessorStepRegistry.list() and not ProcessorStepRegistry.get(name).__module__.startswith(
        "lerobot."
    )
