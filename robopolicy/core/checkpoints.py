"""Module checkpoints: a folder with config.json (description) and model.safetensors (weights).

Shared by policies and world models; each selects the class that a checkpoint needs.
"""

import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.overrides import TorchFunctionMode

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.errors import CheckpointError, in_one_line
from robopolicy.core.file_types import describe_path
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.modules import Module, Weights
from robopolicy.core.spec import LONGEST_HISTORY
from robopolicy.core.storage import read_text, recover_folder, storage_errors, write_folder_atomic, write_json
from robopolicy.core.tensors import file_hash, load_tensors, require_hash

if TYPE_CHECKING:
    from typing_extensions import TypeIs


FORMAT = 2
"""Checkpoint format version; increased by every change that older versions cannot read."""
WEIGHTS = "model.safetensors"
HASH = "sha256"
"""Key in config.json of the hash of the weights file; older checkpoints lack it."""
LARGEST_DESCRIPTION = 2**22
"""Maximum size of config.json in bytes; bounds of ten thousand elements take a tenth of it."""
YOUNG = 50_000_000
"""Nanoseconds: file systems round modification times, so a file changed again within this time may keep the same
one.
"""
LARGEST_COUNT = 2**31
"""Maximum number of elements of a field, and of steps."""
LONGEST_NAME = 200
INFINITE = ("inf", "-inf")
DTYPES = (
    "bool",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
ELEMENTS = 2**23
"""Elements that every description may allocate in addition to its weights: tables, placeholders, values overwritten
later.
"""
TENSORS = 4000
"""Tensors that every description may allocate in addition to its weights."""
_FACTORIES = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.logspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.zeros,
}
_NOT_ON_META = ("generator", "out", "pin_memory", "requires_grad")


def write_checkpoint(
    folder: Path, description: Mapping[str, Any], module: Weights, more: Callable[[Path], None] | None = None
) -> None:
    """Write `description` and the weights of `module` to `folder`, atomically, with the hash of the weights file.

    description: JSON with at least "kind", which identifies the class; more: called with the folder to write additional
    files. Raises StorageError if the folder cannot be written.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}

    def fill(inside: Path) -> None:
        with storage_errors(inside):
            save_file(tensors, inside / WEIGHTS)
            header = {"kind": description["kind"], "format": FORMAT, HASH: file_hash(inside / WEIGHTS)}
            write_json(inside / "config.json", {**header, **description})
            if more is not None:
                more(inside)

    write_folder_atomic(Path(folder), fill)


class Checkpoint:
    """An opened checkpoint: its folder and the content of its config.json, read on first access.

    One command needs a checkpoint's origin, kind, description and weight hash in several places; `open` returns the
    same object to all of them.
    """

    def __init__(self, folder: Path):
        self.folder = recover_folder(folder)
        self._description: Mapping[str, Any] | None = None
        self._file: tuple[int, ...] | None = None

    @staticmethod
    def open(folder: "Path | str | Checkpoint") -> "Checkpoint":
        """Open the checkpoint in `folder`, restoring it first if a crash left it moved aside. Returns the cached object
        while its config.json is the same file.
        """
        if isinstance(folder, Checkpoint):
            return folder
        path = Path(folder)
        checkpoint = _opened.get(path)
        if (
            checkpoint is None
            or checkpoint._file is None
            or checkpoint._file != _identity(checkpoint.folder / "config.json")
        ):
            _opened.pop(path, None)
            while len(_opened) >= MOST_OPEN:
                _opened.pop(next(iter(_opened)))
            checkpoint = _opened[path] = Checkpoint(path)
        return checkpoint

    @property
    def description(self) -> Mapping[str, Any]:
        """Content of config.json; {} if it is not a JSON object.

        Raises CheckpointError on invalid JSON, when its kind is not a string, or when its spec contains invalid values.
        """
        if self._description is None:
            path = self.folder / "config.json"
            file = _identity(path)
            if file is None and (description := describe_path(self.folder)):
                raise CheckpointError(
                    f"{self.folder} is {description}. A checkpoint is a folder with config.json and model.safetensors."
                )
            self._description = _described_in(read_text(path, limit=LARGEST_DESCRIPTION), path)
            self._file = file if file is not None and time.time_ns() - file[-1] > YOUNG else None
        return self._description


MOST_OPEN = 8
_opened: dict[Path, Checkpoint] = {}


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return device, inode, size and modification time of a file (modification time last); None if it does not
    exist.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_description(folder: Path) -> Mapping[str, Any]:
    """Return the content of config.json in `folder`; raises CheckpointError as `Checkpoint.description` does."""
    return Checkpoint.open(folder).description


@lru_cache(maxsize=MOST_OPEN)
def _described_in(text: str, path: Path) -> Mapping[str, Any]:
    """Parse and validate `text`, the content of config.json at `path`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error
    if not isinstance(content, Mapping):
        return {}
    description = cast(Mapping[str, Any], content)
    kind = description.get("kind", "")
    if not isinstance(kind, str) or not kind.isprintable() or len(kind) > LONGEST_NAME:
        kind_text = (
            f"text of {len(kind)} characters"
            if isinstance(kind, str)
            else (f"a {type(kind).__name__} instead of a text")
        )
        raise CheckpointError(f"{path} is corrupt: its kind is {kind_text}.")
    if "spec" in description:
        problem = _wrong_in(description["spec"])
        if problem:
            raise CheckpointError(f"{path} is corrupt: {problem}.")
    return description


def require_format(folder: Path, description: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless this version reads the format of the checkpoint in `folder`."""
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {in_one_line(description.get('format'))}, but this version reads format {FORMAT}: "
            "use the version of robopolicy that wrote it, or train again."
        )


@contextmanager
def restoring(folder: Path, what: str) -> Generator[None, None, None]:
    """Convert any error while building `what` from config.json into a one-line CheckpointError.

    A description is untrusted input: it may allocate little more memory than the weights next to it occupy
    (`AllocationLimit`).
    """
    weights = Path(folder) / WEIGHTS
    # A float32 is 4 bytes, so a file has 4 times as many bytes as elements: room for what is overwritten later
    size = weights.stat().st_size if weights.is_file() else 0
    try:
        with AllocationLimit(elements=size, tensors=size // 1024):
            yield
    except CheckpointError:  # of a part, which says what it needs
        raise
    except Exception as error:  # whatever a constructor does with numbers and texts that nobody has checked
        reason = in_one_line(error)
        raise CheckpointError(f"{Path(folder) / 'config.json'} does not describe {what}: {reason}.") from error


def load_weights(folder: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Load the weights in `folder` as name -> tensor [...], with the saved dtypes.

    Raises CheckpointError when the file is missing, corrupt, or does not match the hash in config.json; older
    checkpoints without a hash are accepted.
    """
    path = Path(folder) / WEIGHTS
    require_hash(path, read_description(folder).get(HASH), "config.json")
    return load_tensors(path, device)


def read_weights[Trained: Module](
    module: Trained, folder: Path, device: torch.device | str = "cpu", tensors: Mapping[str, Tensor] | None = None
) -> Trained:
    """Return `module` on `device` with the weights from `folder`; tensors: name -> [...], if they are already loaded.

    Raises CheckpointError unless all weights match the module and, when loaded here, as `load_weights` does.
    """
    weights = load_weights(folder) if tensors is None else tensors
    require_dtypes(Path(folder) / WEIGHTS, {name: each.dtype for name, each in weights.items()}, module)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{Path(folder) / WEIGHTS} does not match its config.json: {in_one_line(error, 1000)}. Restore both from "
            "a copy."
        ) from error
    return module.to(device)


def require_dtypes(path: Path, saved: Mapping[str, torch.dtype], module: Weights, rounded: bool = False) -> None:
    """Raise CheckpointError if loading the weights at `path` into `module` would round or reinterpret them.

    saved: dtype by name. Half precision widens to float32 without loss; rounded: the configuration sets a precision, so
    floats of up to 32 bits may be converted to it.
    """
    small = (torch.float16, torch.bfloat16, torch.float32)
    for name, value in module.state_dict().items():
        dtype = saved.get(name, value.dtype)
        widened = dtype in small and (value.dtype == torch.float32 or (rounded and value.dtype in small))
        if dtype != value.dtype and not widened:
            raise CheckpointError(
                f"{path} contains '{name}' as {str(dtype).removeprefix('torch.')}, but it is used as "
                f"{str(value.dtype).removeprefix('torch.')}: convert the file, or train again."
            )


def _wrong_in(spec: object) -> str:
    """Return the first invalid value in a policy's or world's spec, "" if there is none; missing entries are checked by
    the reader.
    """
    if not is_mapping(spec):
        return "its spec is not a mapping"
    rate, texts = spec.get("fps", 1.0), spec.get("instructions", ())
    if not _is_number(rate) or not 0 < rate < math.inf:
        return f"its fps is {in_one_line(rate)}, not a positive number"
    for key, limit in (("horizon", LARGEST_COUNT), ("history", LONGEST_HISTORY)):
        count = spec.get(key, 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= limit:
            return f"its {key} is {in_one_line(count)}, not a valid number of steps"
    if not is_sequence(texts) or not all(isinstance(text, str) for text in texts):
        return "its instructions are not a list of texts"
    fields = spec.get("observation", {})
    if not is_mapping(fields):
        return "its observation is not a mapping of fields"
    all_fields = {**fields, "action": spec["action"]} if "action" in spec else fields
    return next(
        (
            f"its field '{in_one_line(key)}' has an invalid value: {problem}"
            for key, field in all_fields.items()
            if (problem := invalid_field_entry(field))
        ),
        "",
    )


def invalid_field_entry(field: object) -> str:
    """Return the first invalid value in the JSON of a `core.spec.Field`, "" if there is none."""
    if not is_mapping(field):
        return "no entries"
    shape, names = field.get("shape", ()), field.get("names", ())
    if not is_sequence(shape) or not all(isinstance(size, int) and 0 < size <= LARGEST_COUNT for size in shape):
        return f"shape {in_one_line(shape)}"
    if math.prod(shape) > LARGEST_COUNT:
        return f"shape {in_one_line(shape)}"
    if not is_sequence(names) or not all(isinstance(name, str) for name in names):
        return f"names {in_one_line(names)}"
    if not isinstance(field.get("unit", ""), str) or field.get("dtype", "float32") not in DTYPES:
        return f"unit {in_one_line(field.get('unit', ''))} and dtype {in_one_line(field.get('dtype'))}"
    ends: list[list[float]] = []
    for key, default in (("low", "-inf"), ("high", "inf")):
        bound = field.get(key, default)
        bounds = bound if is_sequence(bound) else [bound]
        if len(bounds) not in (1, math.prod(shape)) or not all(_is_number(each) or each in INFINITE for each in bounds):
            return f"{key} {in_one_line(bound)}"
        ends.append([float(each) for each in bounds])
    lows, highs = ends
    pairs = zip(
        lows * (len(highs) if len(lows) == 1 else 1), highs * (len(lows) if len(highs) == 1 else 1), strict=True
    )
    if any(low > high or low == math.inf or high == -math.inf for low, high in pairs):
        return (
            f"low {in_one_line(field.get('low'))} and high {in_one_line(field.get('high'))}, which leave no values "
            "in between"
        )
    return ""


def _is_number(value: object) -> "TypeIs[int | float]":
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e300


class AllocationLimit(TorchFunctionMode):
    """Context that limits how many elements and tensors torch's factories and clones may allocate in total.

    elements, tensors: e.g. a few times the size of the weights file, since a description that needs more cannot match
    it; `ELEMENTS` and `TENSORS` are added. Raises MemoryError before the memory is allocated.
    """

    def __init__(self, elements: int, tensors: int):
        super().__init__()
        self.elements, self.tensors = elements + ELEMENTS, tensors + TENSORS

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function after counting the elements that it is about to allocate; shapes are those of the
        function.
        """
        keywords = dict(kwargs or {})
        if func in _FACTORIES:
            self._count(_elements(func, args, keywords))
        elif func is Tensor.clone:
            self._count(args[0].numel())
        return func(*args, **keywords)

    def _count(self, elements: int) -> None:
        self.elements -= elements
        self.tensors -= 1
        if self.elements < 0 or self.tensors < 0:
            raise MemoryError("it allocates far more memory than its weights occupy")


def _elements(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the number of elements that a torch factory call would allocate."""
    # Ranges by hand: on the meta device torch imports sympy or its whole compiler for them, which takes seconds.
    if func is torch.arange:
        places = ("end",) if len(args) == 1 else ("start", "end", "step")
        arguments = {"start": 0, "step": 1, **dict(zip(places, args, strict=False)), **kwargs}
        steps = (float(arguments["end"]) - float(arguments["start"])) / (float(arguments["step"]) or math.inf)
        return math.ceil(steps) if 0 < steps < math.inf else 0  # what is no range, torch refuses itself
    if func in (torch.linspace, torch.logspace):
        return int(args[2] if len(args) > 2 else kwargs.get("steps", 0))
    if func is torch.eye:
        rows = int(args[0] if args else kwargs.get("n", 0))
        columns = args[1] if len(args) > 1 else kwargs.get("m")
        return rows * (rows if columns is None else int(columns))
    arguments = {key: value for key, value in kwargs.items() if key not in _NOT_ON_META}
    return func(*args, **{**arguments, "device": "meta"}).numel()


keep_former_names(__name__, {"Allowance": "AllocationLimit", "wrong_in_field": "invalid_field_entry"})
