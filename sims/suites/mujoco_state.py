"""Save, restore and render a third-party environment that is simulated with MuJoCo, whatever its class.

Such an environment's state has three parts. MuJoCo's data: environments read derived quantities that are one physics
step old, so positions and velocities alone do not reproduce its future. The model: resets move bodies and goals in it.
Python attributes: goals, counters, random generators. All three are saved.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import copy
import types
from collections.abc import Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np

from robopolicy.core.errors import ConfigError, did_you_mean
from sims.graphics import HoldsContexts, open_renderer, without_shadows

_VARIABLE = ("bvh_", "plugin", "solver_", "warning", "timer", "maxuse_")
_MODEL_ARRAYS = [
    "body_pos",
    "body_quat",
    "body_mass",
    "body_inertia",
    "geom_pos",
    "geom_quat",
    "geom_size",
    "geom_friction",
    "geom_rgba",
    "site_pos",
    "site_quat",
    "site_size",
    "site_rgba",
    "jnt_range",
    "dof_damping",
    "dof_frictionloss",
    "eq_data",
    "actuator_gainprm",
    "actuator_biasprm",
    "mat_rgba",
    "cam_pos",
    "cam_quat",
]
_AWAKE = ("nbody_awake", "nparent_awake", "ntree_awake", "nv_awake")
"""Numbers of data that belong to its sleeping bodies, where mujoco has them."""
_IGNORED = {"render_mode", "metadata"}
_UNSAVED = object()


def has_mujoco_state(environment: gymnasium.Env) -> bool:
    """Whether the environment has `model` and `data` attributes of MuJoCo's own types."""
    inner = environment.unwrapped
    return isinstance(getattr(inner, "model", None), mujoco.MjModel) and isinstance(
        getattr(inner, "data", None), mujoco.MjData
    )


class MujocoState:
    """Reads and writes the complete state of an environment; more: further objects whose state belongs to it."""

    def __init__(self, environment: gymnasium.Env, more: Sequence[Any] = ()):
        self._wrappers, self._more = [environment], tuple(more)
        while isinstance(self._wrappers[-1], gymnasium.Wrapper):
            self._wrappers.append(self._wrappers[-1].env)
        self._inner: Any = environment.unwrapped
        self._model_arrays = getattr(self._inner, "model_arrays", _MODEL_ARRAYS)
        self._numbers = ["time", *(name for name in _AWAKE if hasattr(self.data, name))]
        self._named: tuple[mujoco.MjModel | None, list[str]] = None, []

    @property
    def model(self) -> mujoco.MjModel:
        """The environment's model; an environment with several tasks may have one for each."""
        return self._inner.model

    @property
    def data(self) -> mujoco.MjData:
        """The environment's data."""
        return self._inner.data

    def _names(self, model: mujoco.MjModel) -> list[str]:
        """Return the names of the arrays of data that are part of the state."""
        if self._named[0] is not model:
            # What is empty in fresh data depends on the current contacts and is recomputed by every physics step.
            new_data = mujoco.MjData(model)
            names = [name for name in dir(new_data) if not name.startswith(("_", *_VARIABLE))]
            sizes = {name: getattr(new_data, name) for name in names}
            arrays = [name for name, value in sizes.items() if isinstance(value, np.ndarray) and value.size]
            self._named = model, arrays
        return self._named[1]

    def _layers(self) -> list[Any]:
        """Return the objects with state attributes: wrappers, inner environments, and those in `state_holders`."""
        inner_environments = [each for each in vars(self._wrappers[-1]).values() if isinstance(each, gymnasium.Env)]
        return [*self._wrappers, *inner_environments, *getattr(self._wrappers[-1], "state_holders", ()), *self._more]

    def physics(self) -> np.ndarray:
        """Return time, data and model arrays as one float64 vector [N]; N depends on the model alone."""
        numbers = [getattr(self.data, name) for name in self._numbers]
        return np.concatenate([numbers, *(array.ravel() for array in self._arrays())], dtype=np.float64)

    def restore_physics(self, vector: np.ndarray) -> None:
        """Restore the physics from the vector that `physics` returned, [N] or longer; what follows is ignored."""
        start = len(self._numbers)
        for name, value in zip(self._numbers, vector[:start], strict=True):
            setattr(self.data, name, type(getattr(self.data, name))(value))
        for array in self._arrays():
            array[...] = vector[start : start + array.size].reshape(array.shape)
            start += array.size

    def _arrays(self) -> list[np.ndarray]:
        model, data = self.model, self.data
        return [
            *(getattr(data, name) for name in self._names(model)),
            *(getattr(model, name) for name in self._model_arrays),
        ]

    def attributes(self) -> list[dict[str, Any]]:
        """Return a copy of the plain Python attributes and random generators, one dictionary per layer or object."""
        layers = []
        for layer in self._layers():
            attributes = {name: _copied(value) for name, value in vars(layer).items() if name not in _IGNORED}
            layers.append({name: value for name, value in attributes.items() if value is not _UNSAVED})
        return layers

    def restore_attributes(self, layers: list[dict[str, Any]]) -> None:
        """Restore the attributes that `attributes` returned."""
        for layer, attributes in zip(self._layers(), layers, strict=True):
            vars(layer).update(copy.deepcopy(attributes))


def _copied(value: Any) -> Any:
    """Deep copy of plain values and generators; _UNSAVED for anything else and for views into MuJoCo's memory."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return value
    if isinstance(value, np.ndarray):
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return value.copy() if owner.base is None and value.dtype != object else _UNSAVED
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value)
    if type(value) in (list, tuple, set):
        items = [_copied(item) for item in value]
        return _UNSAVED if any(item is _UNSAVED for item in items) else type(value)(items)
    if type(value) is dict:
        entries = {key: _copied(item) for key, item in value.items()}
        return _UNSAVED if any(item is _UNSAVED for item in entries.values()) else entries
    return _UNSAVED


class MujocoCamera:
    """Images of a MuJoCo environment without shadows, reflections or multisampling, and without side effects.

    Cameras: those named in the model, and "default", the environment's own rendering view.
    """

    def __init__(self, environment: gymnasium.Env, state: MujocoState):
        self._environment, self._state = environment, state
        model = state.model
        self.names = ("default", *(model.camera(index).name for index in range(model.ncam) if model.camera(index).name))
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        self._owner: HoldsContexts = self
        # Gymnasium's convention: draw the goal marker (a site in the model) just before rendering.
        self._looks = getattr(environment.unwrapped, "scene_option", None)
        callback = getattr(environment.unwrapped, "_render_callback", None)
        self._mark_goal = callback if isinstance(callback, types.MethodType) else None

    def image(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3].

        Raises ConfigError on an unknown camera, or when MuJoCo cannot open a graphics context.
        """
        if camera not in self.names:
            raise ConfigError(f"The environment has no camera '{camera}'.{did_you_mean(camera, self.names)}")
        renderer = self._renderer(height, width)
        # Marking the goal moves a site of the model, so all is put back afterwards: images leave no trace.
        before = self._state.physics() if self._mark_goal else None
        if self._mark_goal:
            self._mark_goal()
        view = self._free_view() if camera == "default" else camera
        renderer.update_scene(self._drawn_data(), view, scene_option=self._looks)
        without_shadows(renderer)
        frame = renderer.render()
        if before is not None:
            self._state.restore_physics(before)
        return frame

    def _drawn_data(self) -> mujoco.MjData:
        return self._state.data

    def _free_view(self) -> mujoco.MjvCamera:
        view = mujoco.MjvCamera()
        mujoco.mjv_defaultFreeCamera(self._state.model, view)
        painter = getattr(self._environment.unwrapped, "mujoco_renderer", None)
        for name, value in (getattr(painter, "default_cam_config", None) or {}).items():
            if isinstance(value, np.ndarray):
                getattr(view, name)[:] = value
            else:
                setattr(view, name, value)
        return view

    def _renderer(self, height: int, width: int) -> mujoco.Renderer:
        if (height, width) not in self._renderers:
            model = self._state.model
            model.vis.quality.offsamples = 0
            self._renderers[height, width] = open_renderer(model, height, width, self._owner)
        return self._renderers[height, width]

    def close(self) -> None:
        """Free every graphics context."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
