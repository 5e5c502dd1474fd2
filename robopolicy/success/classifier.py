"""A calibrated success classifier: network, probabilities, threshold, and what was measured on held-out episodes.

Its checkpoint is a folder of config.json and model.safetensors that describes itself; nothing is pickled. Axes: N
frame.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.arrays import Array
from robopolicy.core.checkpoints import (
    Checkpoint,
    load_weights,
    read_weights,
    require_format,
    restoring,
    write_checkpoint,
)
from robopolicy.core.errors import CheckpointError, RobopolicyNote, RobopolicyWarning, SpecError, did_you_mean
from robopolicy.core.spec import IMAGE_PREFIX, Field, check_finite, image_sizes_of
from robopolicy.core.tensors import file_hash
from robopolicy.nn.normalizer import Normalizer
from robopolicy.success.calibration import probabilities
from robopolicy.success.configuration import CLASSIFIERS

PREFIX = "success_classifier/"
AT_ONCE = 256
"""Number of frames per forward pass."""


class SuccessNetwork(Protocol):
    """An nn.Module that classifies frames, constructed as cls(config, fields); fields: its inputs, key -> Field.

    `configuration` is the dataclass of its settings. A custom kind is selected by its import path, success.kind.
    """

    def __call__(self, inputs: Mapping[str, Tensor], /) -> Tensor:
        """Return logits [N] of `prepare`d frames, its `forward`."""
        ...

    def normalizers(self) -> Mapping[str, Normalizer]:
        """Return normalisers by key, which are fitted on the training frames."""
        ...

    def prepare(self, observation: Mapping[str, Tensor], /) -> Mapping[str, Tensor]:
        """Return the inputs of `forward` and `loss`, each [N, ...], of an observation, key -> [N, *shape]."""
        ...

    def loss(self, inputs: Mapping[str, Tensor], label: Tensor, generator: torch.Generator, /) -> Tensor:
        """Return losses [N] of `prepare`d frames with labels [N] bool."""
        ...

    def description(self) -> Mapping[str, Any]:
        """Return JSON-ready inputs of `restore`."""
        ...

    @classmethod
    def restore(cls, description: Mapping[str, Any], fields: Mapping[str, Field], /) -> "SuccessNetwork":
        """Rebuild an untrained network; raises CheckpointError for parts that may not be imported."""
        ...


@dataclass
class SuccessClassifier:
    """A network with its calibration.

    kind: registered name or import path; fields: its inputs, by key; calibration: see `fit_calibration`; threshold:
    on logits; hold: number of consecutive frames above the threshold before success counts; measured: metrics on test
    episodes and of the threshold; trained_on: datasets, labels and instruction, as text.
    """

    network: Any
    kind: str
    fields: Mapping[str, Field]
    calibration: dict[str, Any]
    threshold: float
    hold: int
    measured: dict[str, Any]
    trained_on: dict[str, Any]

    @property
    def image_sizes(self) -> dict[str, tuple[int, int]]:
        """Sizes (height, width) of the images that it reads, by camera."""
        return image_sizes_of(self.fields)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.network.parameters()).device

    def fitted(self, observation: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return frames, key -> [N, *shape], as the network reads them: only its fields, images in its size.

        Raises SpecError for a missing field or another shape, NonFiniteError for NaN or infinity.
        """
        frames: dict[str, Tensor] = {}
        for key, field in self.fields.items():
            if key not in observation:
                require_input(key, observation)
            value = torch.as_tensor(observation[key])
            if key.startswith(IMAGE_PREFIX) and tuple(value.shape[1:]) != field.shape:
                value = resized(value, field.shape, key)
            elif tuple(value.shape[1:]) != field.shape:
                raise SpecError(
                    f"The success classifier reads '{key}' with shape {list(field.shape)}, but it has shape "
                    f"{list(value.shape[1:])} here: train a classifier on this data."
                )
            if value.is_floating_point():
                check_finite(f"'{key}' of the success classifier", value)
            frames[key] = value
        return frames

    @torch.no_grad()
    def logits(self, observation: Mapping[str, Any]) -> Array:
        """Return logits [N] float64 of frames, key -> [N, *shape]; raises as `fitted`."""
        self.network.eval()
        parts: list[Tensor] = []
        for part in chunks(self.fitted(observation)):
            moved = {key: value.to(self.device) for key, value in part.items()}
            parts.append(self.network(self.network.prepare(moved)).double().cpu())
        return torch.cat(parts).numpy() if parts else np.zeros(0)

    def probabilities(self, logits: Array) -> Array:
        """Return calibrated probabilities of success of logits [...]."""
        return probabilities(self.calibration, logits)

    @property
    def false_accepts(self) -> dict[str, Any]:
        """The measured false-accept rate on test episodes: rate, low, high, count and total."""
        return dict(self.measured["false_accepts"])

    def save(self, folder: Path) -> None:
        """Write the classifier to `folder`, atomically."""
        description = {
            "kind": PREFIX + self.kind,
            "spec": {"observation": {key: field.to_json() for key, field in self.fields.items()}},
            "network": dict(self.network.description()),
            "calibration": self.calibration,
            "threshold": self.threshold,
            "hold": self.hold,
            "measured": self.measured,
            "trained_on": self.trained_on,
        }
        write_checkpoint(folder, description, self.network)


def resized(images: Tensor, shape: tuple[int, ...], key: str) -> Tensor:
    """Return uint8 images [N, height, width, 3] in the size of `shape`; prints a note once."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise SpecError(f"'{key}' has shape {list(images.shape)}: images are [N, height, width, 3].")
    sizes = f"{images.shape[1]} x {images.shape[2]}", f"{shape[0]} x {shape[1]}"
    warnings.warn(
        f"Images of '{key.removeprefix(IMAGE_PREFIX)}' have {sizes[0]} pixels and are resized to the {sizes[1]} that "
        "the success classifier reads; its error rates were measured without resizing.",
        RobopolicyNote,
        stacklevel=2,
    )
    pixels = functional.interpolate(images.permute(0, 3, 1, 2).float(), shape[:2], mode="bilinear", antialias=True)
    return pixels.permute(0, 2, 3, 1).round().clamp(0, 255).to(torch.uint8)


def require_one_task(classifier: SuccessClassifier, tasks: Sequence[str], where: str, way_out: str) -> None:
    """Raise SpecError, ending with `way_out`, when there are several tasks at `where`, because a classifier reads no
    instruction; warn when the only one is not the task that it was trained on.
    """
    if len(tasks) > 1:
        raise SpecError(
            f"{where} has {len(tasks)} instructions, but a success classifier reads none and would judge them all "
            f"alike: {way_out}."
        )
    trained = classifier.trained_on.get("instruction")
    if trained and tasks and trained != tasks[0]:
        warnings.warn(
            f"The success classifier was trained on '{trained}', but the task of {where} is '{tasks[0]}': its error "
            "rates do not hold there.",
            RobopolicyWarning,
            stacklevel=3,
        )


def require_input(key: str, available: Mapping[str, Any]) -> None:
    """Raise SpecError when the field `key` is not among `available`."""
    if key in available:
        return
    image = key.startswith(IMAGE_PREFIX)
    what = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if image else f"field '{key}'"
    names = [name for name in available if name.startswith(IMAGE_PREFIX) == image]
    listing = ", ".join(name.removeprefix(IMAGE_PREFIX) for name in names) or "none"
    raise SpecError(
        f"The success classifier reads the {what}, which is missing here (there are: {listing})."
        f"{did_you_mean(key, names)} Add it, or train a classifier that reads what there is: success.inputs=[NAME]."
    )


def chunks(frames: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield frames, key -> [N, ...], in parts of at most `AT_ONCE`."""
    count = len(next(iter(frames.values())))
    for first in range(0, count, AT_ONCE):
        yield {key: value[first : first + AT_ONCE] for key, value in frames.items()}


def new_network(kind: str, config: Any, fields: Mapping[str, Field]) -> Any:
    """Build the untrained network of `kind`, a registered name or an import path."""
    network = CLASSIFIERS.builds(kind)(config, fields)
    lacks = [
        name for name in ("prepare", "loss", "normalizers", "description", "restore") if not hasattr(network, name)
    ]
    if not isinstance(network, nn.Module) or lacks:
        raise SpecError(
            f"The success classifier '{kind}' must be a torch.nn.Module with {', '.join(lacks) or 'parameters'}: see "
            "SuccessNetwork in robopolicy/success/classifier.py."
        )
    return network


def load_classifier(folder: Path, device: torch.device | str = "cpu") -> SuccessClassifier:
    """Load a classifier; raises CheckpointError when `folder` contains none, or a damaged or untrusted one."""
    checkpoint = Checkpoint.open(folder)
    folder, description = checkpoint.folder, checkpoint.description
    kind = str(description.get("kind"))
    if not kind.startswith(PREFIX):
        raise CheckpointError(
            f"{folder} contains '{kind}', not a success classifier: train one with robopolicy success DATASET."
        )
    name = kind.removeprefix(PREFIX)
    require_format(folder, description)
    network_class = CLASSIFIERS.saved(name, folder)
    weights = load_weights(folder, device)
    with restoring(folder, "a success classifier"):
        fields = {key: Field.from_json(each) for key, each in description["spec"]["observation"].items()}
        network = network_class.restore(description["network"], fields)
        classifier = SuccessClassifier(
            network,
            name,
            fields,
            dict(description["calibration"]),
            float(description["threshold"]),
            int(description["hold"]),
            dict(description["measured"]),
            dict(description["trained_on"]),
        )
        if classifier.hold < 1 or not np.isfinite(classifier.threshold):
            raise ValueError(f"hold {classifier.hold} and threshold {classifier.threshold}")
        classifier.probabilities(np.zeros(1))
        if not 0 <= float(classifier.measured["false_accepts"]["rate"]) <= 1:
            raise ValueError("its false-accept rate is not a rate")
    read_weights(network, folder, device, weights).eval()
    return classifier


@lru_cache(maxsize=4)
def _loaded(folder: Path, device: str, weights_hash: str) -> SuccessClassifier:
    return load_classifier(folder, device)


def shared_classifier(folder: Path, device: torch.device | str = "cpu") -> SuccessClassifier:
    """Return the classifier in `folder`, loaded once per process for all worlds of a command."""
    weights = Checkpoint.open(folder).folder / "model.safetensors"
    if not weights.is_file():
        return load_classifier(folder, device)
    return _loaded(Path(folder), str(device), file_hash(weights))
