"""Inference plan of a checkpoint (inference.json), written by `robopolicy optimize` and read when the policy acts.

It contains names and numbers, no weights and no code. It is bound to the hash of the weights and rejected for others,
because measurements on those do not apply.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from robopolicy.core.checkpoints import WEIGHTS, Checkpoint
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.storage import read_object, write_json
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.tensors import file_hash
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.configuration import SYNCHRONOUS, InferenceConfig
from robopolicy.inference.engine import ENGINES
from robopolicy.inference.samplers import SAMPLERS

FILE = "inference.json"
FORMAT = 1


@dataclass(frozen=True)
class InferencePlan:
    """Inference settings chosen for a checkpoint's policy.

    weights: hash of the weights; version, device, batch: torch version, device and number of rows of the measurement;
    measured: results, for information only.
    """

    config: InferenceConfig
    weights: str
    cache: CachePlan | None = None
    version: str = field(default_factory=lambda: str(torch.__version__))
    device: str = "cpu"
    batch: int = 1
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def applied[T](
        self, plain: T, planned: Callable[[], T], folder: Path, device: torch.device, chunking: str = SYNCHRONOUS
    ) -> T:
        """Return the result of `planned`; `plain`, with a warning, if the plan in `folder` does not apply.

        A plan measured on another device or version is used, with a warning.
        """
        if problem := self.unfit(folder, chunking) or self.refusal(folder):  # the latter reads all weights
            warnings.warn(problem, RobopolicyWarning, stacklevel=3)
            return plain
        if problem := self.elsewhere(folder, device):
            warnings.warn(problem, RobopolicyWarning, stacklevel=3)
        try:
            return planned()
        except ConfigError as error:  # config.json, or this machine, is not what the plan was made for
            warnings.warn(self.useless(folder, error), RobopolicyWarning, stacklevel=3)
            return plain

    def refusal(self, folder: Path) -> str:
        """Return the reason why the plan does not apply to the checkpoint in `folder`, "" if it does."""
        if weights_hash(folder) == self.weights:
            return ""
        return self.useless(folder, "it was created for other weights than those next to it")

    def useless(self, folder: Path, why: object) -> str:
        """Return a message that the plan of the checkpoint in `folder` is not used, with reason and remedy."""
        of_model = self.cache is not None and self.config.engine == "reference"
        model, policy = "the world model uses no block cache", "the policy acts as it was trained"
        return (
            f"{folder / FILE} is not used: {str(why).rstrip('.')}. Create it again with robopolicy optimize "
            f"{folder}; until then {model if of_model else f'{policy} (inference.engine=reference)'}."
        )

    def unfit(self, folder: Path, chunking: str) -> str:
        """Return a message that the plan is not used with `chunking`, which needs more than engines compute, with the
        remedy.

        "" if it is used, or selects the reference engine.
        """
        if chunking == SYNCHRONOUS or self.config.engine == "reference":
            return ""
        return (
            f"{folder / FILE} is not used with chunking={chunking}, which needs full predictions and may "
            "differentiate the network: inference.engine=reference is used. To use an engine anyway, set it "
            "explicitly: inference.engine=lean supports prefetch, ensembling and bidirectional."
        )

    def elsewhere(self, folder: Path, device: torch.device) -> str:
        """Return a message if the plan in `folder` was measured on another device or version, where another choice may
        be faster.

        "" otherwise.
        """
        plan_setup = {"torch": self.version, "device": self.device}
        current_setup = {"torch": str(torch.__version__), "device": device_name(device)}
        differs = "; ".join(
            f"{name} {plan_setup[name]}, here {current_setup[name]}"
            for name in plan_setup
            if plan_setup[name] != current_setup[name]
        )
        return (
            (f"The plan was measured with {differs}. Measure again with robopolicy optimize {folder}.")
            if differs
            else ""
        )


def weights_hash(folder: Path) -> str:
    """Return the hash of a checkpoint's weights file; raises CheckpointError if there is none."""
    path = Checkpoint.open(folder).folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: there is no checkpoint folder to save the plan in.")
    return file_hash(path)


def device_name(device: torch.device) -> str:
    """Return "cpu", or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def save_plan(folder: Path, plan: InferencePlan) -> None:
    """Write the plan next to the checkpoint in `folder` atomically."""
    values = {name: value for name, value in vars(plan).items() if name not in ("config", "cache")}
    cache = None if plan.cache is None else plan.cache.to_json()
    write_json(folder / FILE, {"format": FORMAT, "config": to_plain(plan.config), "cache": cache, **to_plain(values)})


def load_plan(folder: Path) -> InferencePlan | None:
    """Read the plan next to a checkpoint; None if there is none.

    Raises CheckpointError when it cannot be read, or names code that the user has not named: files must not choose
    imports.
    """
    path = Checkpoint.open(folder).folder / FILE
    if not os.path.lexists(path):
        return None
    try:
        content = read_object(path)
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']!r:.20}, but this version reads format {FORMAT}")
        config = from_plain(InferenceConfig, content["config"], "config")
        ENGINES.path(config.engine)
        cache = None if content["cache"] is None else CachePlan.from_json(content["cache"])
        names = ("weights", "version", "device")
        if not all(isinstance(content[name], str) for name in names) or not isinstance(content["batch"], int):
            raise TypeError("weights, version and device must be texts, and batch a number")
        plan = InferencePlan(
            config,
            content["weights"],
            cache,
            content["version"],
            content["device"],
            content["batch"],
            dict(content["measured"]),
        )
    except Exception as error:  # whatever is done with values that nobody has checked
        raise CheckpointError(
            f"{path} is not a plan that this version of robopolicy can read ({error}): remove it, or create it again "
            f"with robopolicy optimize {folder}."
        ) from error
    ENGINES.require_saved(config.engine, path)
    if config.sampler:
        SAMPLERS.require_saved(config.sampler, path)
    return plan
