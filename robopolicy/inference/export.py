"""Export a policy as one program, ONNX or TorchScript, that runs without robopolicy.

The program covers everything between a robot's observation and its actions: normalisation, encoders, the whole
denoising chain from given noise (or the most likely tokens), conversion to the robot's units and clipping. It is
traced, because decoding and checks contain Python that torch.export refuses: its number of steps and, for policies that
read an instruction, its instruction and number of rows are fixed. Not in the program: history, resizing of images, and
the check for NaN. Axes: B row, H history, P predicted step, C executed step, A action element.
"""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, in_one_line, require_extra
from robopolicy.core.policy import DecidesFromNoise, Policy
from robopolicy.core.randomness import EpisodeGenerator
from robopolicy.core.spec import IMAGE_PREFIX, TASK
from robopolicy.core.storage import write_atomic, write_json
from robopolicy.inference.configuration import ExportFormat
from robopolicy.policies.training_ranges import known_ranges

NOISE, ACTIONS = "noise", "actions"
TOLERANCE = 1e-5
"""Maximum difference between the program's actions and the policy's, as a fraction of their size beyond 1."""
OPSET = 18


class _NoNoise(EpisodeGenerator):
    """Generator of policies that decide without noise: what they draw and do not use is zero."""

    def uniform(self, shape: Any, axis: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return zeros of `shape`."""
        return torch.zeros(*shape, dtype=dtype)

    def normal(self, shape: Any, axis: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Raise ConfigError: actions would depend on these numbers."""
        raise ConfigError("it draws noise that cannot be given to it")


class Program(nn.Module):
    """A policy as a function of tensors: its fields [B, H, *shape] in order, then noise [B, P, A] if it denoises.

    instruction: of every row; rows: B of the example inputs.
    """

    def __init__(self, policy: Policy, instruction: str, rows: int):
        super().__init__()
        self.policy = policy
        self.instruction, self.rows = instruction, rows
        self.keys = tuple(policy.spec.observation)
        self.noise_shape = policy.noise_shape if isinstance(policy, DecidesFromNoise) else None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return (*self.keys, NOISE) if self.noise_shape else self.keys

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return actions [B, C, A] in the robot's units."""
        fields = dict(zip(self.keys, inputs, strict=False))
        observation: dict[str, Any] = {**fields, TASK: [self.instruction] * len(inputs[0])}
        if isinstance(self.policy, DecidesFromNoise):
            return self.policy.to_actions(self.policy.trajectory(observation, inputs[-1])[:, -1])
        return self.policy.act(observation, _NoNoise(0), deterministic=True).actions

    def examples(self, seed: int) -> tuple[Tensor, ...]:
        """Draw inputs: vectors within the ranges of the training data, standard normal ones where they are unknown."""
        spec, generator = self.policy.spec, torch.Generator().manual_seed(seed)
        ranges, inputs = known_ranges(self.policy), []
        for key, field in spec.observation.items():
            shape = (self.rows, spec.history, *field.shape)
            if key.startswith(IMAGE_PREFIX):
                inputs.append(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
            elif key in ranges:
                low, high = (torch.from_numpy(bound).float().reshape(field.shape) for bound in ranges[key])
                inputs.append(low + (high - low) * torch.rand(shape, generator=generator))
            else:
                inputs.append(torch.randn(shape, generator=generator))
        if self.noise_shape:
            inputs.append(torch.randn((self.rows, *self.noise_shape), generator=generator))
        return tuple(inputs)


class _FixedText(nn.Module):
    """Stands for a text encoder whose text never changes: features [1, F]."""

    def __init__(self, features: Tensor):
        super().__init__()
        self.register_buffer("features", features)

    def forward(self, texts: list[str], generator: torch.Generator | None = None) -> Tensor:
        """Return the features of `texts`, [N, F]."""
        return cast(Tensor, self.features).expand(len(texts), -1)


def program_of(policy: Policy, instruction: str = "", rows: int = 1) -> Program:
    """Return `policy` as a function of tensors, on the CPU and separate from it.

    instruction: for policies that read one; "" is the policy's only one. Raises ConfigError when a policy with several
    instructions gets none of them, and when it cannot decide by tensors alone.
    """
    if not isinstance(policy, nn.Module):
        raise ConfigError(
            f"A {type(policy).__name__} cannot be exported, because its pre- and postprocessing is not torch code of "
            "one module: only robopolicy's own diffusion, flow and token policies can."
        )
    known = policy.spec.instructions
    reads_text = bool(getattr(policy, "reads_instructions", False))
    if reads_text and not instruction and len(known) != 1:
        raise ConfigError(
            f"The policy knows {len(known)} instructions: set export.instruction to one of {list(known)}."
        )
    program = Program(copy.deepcopy(policy).to("cpu").eval(), instruction or known[0], rows)
    with torch.no_grad():
        for module in list(program.modules()):
            if isinstance(encoder := getattr(module, "text_encoder", None), nn.Module):
                module.text_encoder = _FixedText(encoder([program.instruction]))
        try:
            program(*program.examples(0))
        except ConfigError as error:
            raise ConfigError(f"A {type(policy).__name__} cannot be exported: {error}.") from error
    return program


def export(policy: Policy, path: Path, kind: ExportFormat, instruction: str = "", rows: int = 1) -> dict[str, Any]:
    """Write a policy's program to `path` and its description beside it (.json); return the description.

    rows: B of policies that read an instruction; others take any number. Raises ConfigError as `program_of`, when the
    policy cannot be traced, and when the program's actions differ from the policy's by more than `TOLERANCE`.
    """
    if kind is ExportFormat.ONNX:
        require_extra("onnx", "export")
        require_extra("onnxruntime", "export")
    program = program_of(policy, instruction, rows)
    fixed = bool(getattr(policy, "reads_instructions", False))
    axes = {} if fixed else {name: {0: "rows"} for name in (*program.names, ACTIONS)}
    examples = program.examples(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of everything that a trace makes constant, which is meant
        try:
            if kind is ExportFormat.ONNX:
                torch._C._jit_set_onnx_log_enabled(False)  # or a failure prints the whole graph
                names: dict[str, Any] = {"input_names": list(program.names), "output_names": [ACTIONS]}
                torch.onnx.export(
                    program, examples, str(path), dynamo=False, opset_version=OPSET, dynamic_axes=axes, **names
                )
            else:
                cast(Any, torch.jit.trace(program, examples, check_trace=False)).save(str(path))
        except Exception as error:  # whatever of a policy's code a trace cannot follow
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"A {type(policy).__name__} cannot be exported to {kind.value}: {in_one_line(error, 200)}."
            ) from error
    error = max(difference(program, path, kind, seed) for seed in range(1, 4))
    if error > TOLERANCE:
        path.unlink()
        raise ConfigError(
            f"The program's actions differ from the policy's by {error:.2g}, more than {TOLERANCE:g}: it was not "
            "written."
        )
    description = describe(program, path, kind, rows if fixed else None, error)
    description = json.loads(json.dumps(description))
    write_json(path.with_suffix(".json"), description)
    write_atomic(path.with_name(f"{path.stem}.md"), report(description))
    return description


def difference(program: Program, path: Path, kind: ExportFormat, seed: int) -> float:
    """Return the largest difference between a file's actions and the program's at inputs drawn with `seed`, as a
    fraction of their size beyond 1.
    """
    inputs = program.examples(seed)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch prefers torch.export, which refuses policies
        expected = program(*inputs)
        if kind is ExportFormat.ONNX:
            session = require_extra("onnxruntime", "export").InferenceSession(str(path))
            values = {name: value.numpy() for name, value in zip(program.names, inputs, strict=True)}
            actions = torch.from_numpy(session.run(None, values)[0])
        else:
            actions = torch.jit.load(str(path))(*inputs)
    return float(((actions - expected).abs() / expected.abs().clamp_min(1.0)).max())


def describe(program: Program, path: Path, kind: ExportFormat, rows: int | None, error: float) -> dict[str, Any]:
    """Return the JSON-ready description of an exported program: everything that a caller must know."""
    spec = program.policy.spec
    inputs: dict[str, Any] = {}
    for key, field in spec.observation.items():
        inputs[key] = {**field.to_json(), "shape": [rows, spec.history, *field.shape]}
    if program.noise_shape:
        inputs[NOISE] = {"shape": [rows, *program.noise_shape], "dtype": "float32", "unit": "standard normal"}
    return {
        "file": path.name,
        "format": kind.value,
        "inputs": inputs,
        "outputs": {ACTIONS: {**spec.action.to_json(), "shape": [rows, spec.chunk, *spec.action.shape]}},
        "fps": spec.fps,
        "chunk": spec.chunk,
        "history": spec.history,
        "instruction": program.instruction if rows else None,
        "largest_difference": error,
    }


def report(description: Mapping[str, Any]) -> str:
    """Return the description as a page for the person who calls the program."""
    return "\n".join(_report_lines(description)) + "\n"


def _report_lines(description: Mapping[str, Any]) -> Iterator[str]:
    inputs, (output,) = description["inputs"], description["outputs"].values()
    yield f"# {description['file']}\n"
    yield f"Executes {description['chunk']} actions at {description['fps']:g} control steps per second.\n"
    yield "| input or output | shape | dtype | unit | elements |\n|---|---|---|---|---|"
    for name, field in [*inputs.items(), (ACTIONS, output)]:
        shape = ["rows" if size is None else size for size in field["shape"]]
        elements = ", ".join(field.get("names", ()))
        cells = [str(shape).replace("'", ""), field["dtype"], field.get("unit", ""), elements]
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield f"\nHistory: {description['history']} frames, the oldest first; at an episode's start the first frame is"
    yield "repeated. Images are RGB, in exactly this size. Inputs must be finite: the program does not check them."
    if description["instruction"] is not None:
        yield f"The instruction is fixed: {description['instruction']!r}."
    if NOISE in inputs:
        yield "Draw new standard normal noise for every call; zeros give one fixed choice."
    yield f"Actions differ from the policy's by at most {description['largest_difference']:.1g}.\n"
    feed = ", ".join(f'"{name}": {name.rpartition(".")[2]}' for name in inputs)
    call = ", ".join(name.rpartition(".")[2] for name in inputs)
    if description["format"] == ExportFormat.ONNX.value:
        code = f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{description["file"]}")\n'
        code += f"(actions,) = session.run(None, {{{feed}}})"
    else:
        code = f'import torch\n\nprogram = torch.jit.load("{description["file"]}")\nactions = program({call})'
    yield f"```python\n{code}\n```"
