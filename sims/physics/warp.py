"""Physics on a GPU: mujoco-warp steps all rows at once, in single precision.

It needs the extra `gpu-physics` and is meant for thousands of rows: a step of few rows costs as much as one of many.
States differ from MuJoCo's by rounding, as those of a start 1e-7 away do; on a GPU also from one run to the next, since
contacts are found in no fixed order. On a CUDA device a chunk is one CUDA graph, and only the states after control
steps are copied back. Without one, everything runs on the CPU, 20 to 300 times as slow as native physics: for tests.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs, and mujoco-warp is optional.)

import copy
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mujoco
import numpy as np

from robopolicy.core.errors import ConfigError, RobopolicyWarning, did_you_mean, require_extra
from robopolicy.core.progress import console
from sims.physics.protocol import OPTIONS, state_layout

EXTRA = "gpu-physics"
NOTICE_AFTER = 2.0
"""Seconds after which the compilation of a scene's kernels is announced."""
CONSTRAINTS = 128
"""Default constraint rows of an environment: in the built-in tasks at most 61 were seen (`tidy`)."""


@dataclass(frozen=True)
class _Chunk:
    """Arrays of a chunk on the device. controls: [C, B, nu]; outputs: (field of the data, copies of it [C, B, n])."""

    controls: Any
    outputs: tuple[tuple[Any, Any], ...]


class WarpPhysics:
    """Physics engine that runs on a GPU with mujoco-warp; implements `Physics`.

    Rows beyond the running ones are simulated as copies of the first, so every call takes the time of B rows. device:
    "cuda:0", "cpu", ..., by default the first CUDA device, else the CPU with a warning; contacts: capacity for contacts
    per environment, shared by all rows, by default mujoco-warp's estimate; constraints: capacity for constraint rows of
    each environment. Raises ConfigError when the extra is missing, for a scene that mujoco-warp does not support, and
    on an unknown device.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        batch_size: int,
        *,
        threads: int = 1,
        device: str = "",
        contacts: int | None = None,
        constraints: int | None = None,
    ):
        for name, value in {"contacts": contacts, "constraints": constraints}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{OPTIONS}{name} is {value}, but must be at least 1.")
        self._warp, self._mjw = _modules()
        self._layout = state_layout(model)
        self._timestep = float(model.opt.timestep)
        self._rows = batch_size
        self.device = _device(self._warp, device)
        self._chunks: dict[tuple[int, int], tuple[_Chunk, Any]] = {}
        with self._warp.ScopedDevice(self.device), _announced():
            try:
                self._model = self._mjw.put_model(_without_autoreset(model))
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(
                    f"mujoco-warp cannot simulate this scene: {error} Use world.options.physics=native."
                ) from error
            # Overflows are reported here, as errors.
            self._model.opt.warn_overflow = False
            rows = CONSTRAINTS if constraints is None else constraints
            self._data = self._mjw.make_data(model, nworld=batch_size, nconmax=contacts, njmax=rows)
            self._mjw.step(self._model, self._data)  # compiles what this scene needs
            self._warp.synchronize_device(self.device)

    def advance(self, state: np.ndarray, control: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
        """Simulate C control steps: state [R, nstate], control [R, C, nu] -> [R, C, nstate], [R, C, nsensordata].

        Raises ConfigError, naming the setting, when the scene has more contacts or constraints than were allocated.
        """
        count, steps = control.shape[:2]
        layout = self._layout
        with self._warp.ScopedDevice(self.device):
            complete = self._filled(state)
            parts = {"qpos": layout.qpos, "qvel": layout.qvel, "act": layout.activation}
            self._data.time.assign(complete[:, 0])
            for name, part in parts.items():
                if part.stop > part.start:
                    getattr(self._data, name).assign(complete[:, part])
            self._data.overflow.zero_()
            chunk = self._run(np.swapaxes(self._filled(control), 0, 1), steps, every)
            self._require_room(self._data.overflow.numpy()[:count])
            arrays = [np.swapaxes(copies.numpy()[:, :count], 0, 1) for _, copies in chunk.outputs]
        # The clock is summed in double precision, as MuJoCo's: a task may read it.
        elapsed = np.full((count, steps + 1), self._timestep * every)
        elapsed[:, 0] = state[:, 0]
        time = np.cumsum(elapsed, axis=1)[:, 1:, None]
        states = np.concatenate([time, *arrays[:3]], axis=2, dtype=np.float64)
        return states, np.array(arrays[3], dtype=np.float64, order="C")

    def close(self) -> None:
        """Free the arrays of chunks; their graphs refer to them."""
        self._chunks.clear()

    def _filled(self, rows: np.ndarray) -> np.ndarray:
        """Return float32 rows [R, ...] with the first one repeated up to [B, ...]."""
        missing = self._rows - len(rows)
        complete = np.concatenate([rows, np.repeat(rows[:1], missing, axis=0)]) if missing else rows
        return np.ascontiguousarray(complete, dtype=np.float32)

    def _run(self, controls: np.ndarray, steps: int, every: int) -> _Chunk:
        """Simulate controls [C, B, nu] from the state on the device: as a CUDA graph, recorded at the first call."""
        warp = self._warp
        if (steps, every) not in self._chunks:
            data = self._data
            fields = (data.qpos, data.qvel, data.act, data.sensordata)
            copies = [warp.zeros((steps, *field.shape), dtype=float) for field in fields]
            chunk = _Chunk(warp.zeros(controls.shape, dtype=float), tuple(zip(fields, copies, strict=True)))
            graph = None
            if self.device.is_cuda:
                with warp.ScopedCapture(device=self.device) as capture:
                    self._steps(chunk, steps, every)
                graph = capture.graph
            self._chunks[steps, every] = chunk, graph
        chunk, graph = self._chunks[steps, every]
        if controls.size:
            chunk.controls.assign(np.ascontiguousarray(controls))
        if graph is None:
            self._steps(chunk, steps, every)
        else:
            warp.capture_launch(graph)
        return chunk

    def _steps(self, chunk: _Chunk, steps: int, every: int) -> None:
        """Launch C control steps of `every` physics steps; each copies its outputs."""
        data, controls = self._data, chunk.controls
        size = data.ctrl.size
        for step in range(steps):
            if size:
                self._warp.copy(data.ctrl, controls, src_offset=step * size, count=size)
            for _ in range(every):
                self._mjw.step(self._model, data)
            for field, copies in chunk.outputs:
                if field.size:
                    self._warp.copy(copies, field, dest_offset=step * field.size, count=field.size)

    def _require_room(self, overflow: np.ndarray) -> None:
        """Raise ConfigError if a row [R] has exceeded a capacity: forces of the excess contacts would be missing."""
        bits = int(np.bitwise_or.reduce(overflow, initial=0))
        if not bits:
            return
        kinds = require_extra("mujoco_warp._src.types", EXTRA).OverflowType
        names = {each.name for each in kinds if bits & each}
        rows = np.flatnonzero(overflow)[:5].tolist()
        contacts, constraints = self._data.naconmax // self._rows, self._data.njmax
        if names & {"NEFC", "NJMAX_NNZ"}:
            advice = f"set {OPTIONS}constraints to more than {constraints}, such as {2 * constraints}"
        elif names & {"BROADPHASE", "NARROWPHASE", "CCD", "HFIELD", "CONTACT_MATCH"}:
            advice = f"set {OPTIONS}contacts to more than {contacts}, such as {2 * contacts}"
        else:
            advice = "use world.options.physics=native"
        raise ConfigError(f"mujoco-warp ran out of room ({', '.join(sorted(names))}) in row(s) {rows}: {advice}.")


def _modules() -> tuple[ModuleType, ModuleType]:
    """Import warp and mujoco_warp; raises ConfigError when the extra is missing."""
    warp = require_extra("warp", EXTRA)
    # A line per compiled kernel would go to standard output, which belongs to results.
    if hasattr(warp.config, "log_level"):
        warp.config.log_level = warp.LOG_WARNING
    else:
        warp.config.quiet = True  # before warp 1.15
    return warp, require_extra("mujoco_warp", EXTRA)


def _device(warp: Any, name: str) -> Any:
    """Return the device `name`; "": the first CUDA device, else the CPU, with a warning."""
    known = [str(each) for each in warp.get_devices()]
    if name:
        wanted = "cuda:0" if name == "cuda" else name
        if wanted not in known:
            raise ConfigError(
                f"{OPTIONS}device is '{name}', which is not available.{did_you_mean(name, known)} Available: "
                f"{', '.join(known)}."
            )
        return warp.get_device(wanted)
    if warp.is_cuda_available():
        return warp.get_device("cuda:0")
    warnings.warn(
        "There is no CUDA device: world.options.physics=warp runs on the CPU, 20 to 300 times as slow as "
        f"physics=native. If you want that, set {OPTIONS}device=cpu.",
        RobopolicyWarning,
        stacklevel=2,
    )
    return warp.get_device("cpu")


def _without_autoreset(model: mujoco.MjModel) -> mujoco.MjModel:
    """Return a copy of the model without the flag that mujoco-warp refuses: it has no automatic reset to disable."""
    copied = copy.copy(model)
    copied.opt.disableflags &= ~mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    return copied


@contextmanager
def _announced() -> Generator[None]:
    """Print a line if the block takes seconds: kernels are compiled once per kind of scene, then read from a cache."""
    text = "Compiling GPU physics for this scene: up to a minute, once per machine."
    timer = threading.Timer(NOTICE_AFTER, lambda: console.print(text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
