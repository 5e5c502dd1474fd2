"""What of LeRobot's processors a checkpoint may ask for: it chooses neither what is imported nor what is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.core.errors import CheckpointError
from robopolicy.core.narrowing import is_mapping, is_sequence
from robopolicy.core.registry import asked_for
from robopolicy.core.storage import read_object

PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")

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
"""LeRobot's processing steps that a checkpoint may ask for. Others of LeRobot's load further models, may run code that
lies beside those, or open devices.
"""
ACTION_TOKENIZER = "action_tokenizer_processor"
"""A step of pi0_fast alone: it is given the policy's own tokenizer, which was read as data."""


def check_processor(folder: Path, name: str, kind: str) -> None:
    """Raise CheckpointError unless a processor and its tensors are there and import nothing but LeRobot.

    kind: LeRobot's type of the policy that it belongs to.
    """
    path = folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist: without it inputs and actions cannot be scaled. A checkpoint of an older LeRobot "
            "is converted by: python -m lerobot.processor.migrate_policy_normalization --pretrained-path FOLDER"
        )
    steps = read_object(path).get("steps")
    if not is_sequence(steps) or not all(is_mapping(step) for step in steps):
        raise CheckpointError(f"{path} is corrupt: it lists no steps. Restore it from a copy.")
    known = (*STEPS, ACTION_TOKENIZER) if kind == "pi0_fast" else STEPS
    for step in steps:
        _check_step(path, step, known)
        state = step.get("state_file")
        if state is not None and not (isinstance(state, str) and Path(state).name == state):
            raise CheckpointError(f"{path} names the file {state!r}, which is none beside it.")
        if state is not None and not (folder / state).is_file():
            raise CheckpointError(f"{folder / state} does not exist, which {name} needs.")


def _check_step(path: Path, step: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise CheckpointError unless a processor's step is a known one, or the user has imported or named it."""
    if "registry_name" in step:  # LeRobot then ignores "class"
        name = str(step["registry_name"])
        if name not in known and not _registered_elsewhere(name):
            raise CheckpointError(
                f"{path} asks for the step '{name}', which is not among those that a checkpoint may choose: "
                f"{', '.join(known)}. Your own is registered with LeRobot's ProcessorStepRegistry in a module that you "
                "name: run.plugins=[module]."
            )
        return
    module, _, kind = str(step.get("class")).rpartition(".")
    if not asked_for(f"{module}:{kind}"):
        raise CheckpointError(
            f"{path} asks for the class {step.get('class')}: a checkpoint does not choose what is imported. If you "
            f"trust it, name its module: run.plugins=[{module}] (in Python: robopolicy.core.registry.ask_for)."
        )


def _registered_elsewhere(name: str) -> bool:
    """Whether a step of this name is known to LeRobot from a module of somebody else, imported already."""
    from lerobot.processor import ProcessorStepRegistry

    return name in ProcessorStepRegistry.list() and not ProcessorStepRegistry.get(name).__module__.startswith(
        "lerobot."
    )
