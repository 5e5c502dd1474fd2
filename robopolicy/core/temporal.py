"""Signal temporal logic: how well an episode fulfils a formula about its observations over time (`Specification`).

    specification = Specification("G[0,8](abs(cube_y) < 0.4) & F[0,5](cube_x > 0.2)", fields, fps=10)
    robustness = specification.robustness(frames, lengths)  # positive: fulfilled, by how much; negative: violated

Comparisons are of vector elements by name (or `state[3]`, an index into observation.state), numbers, + - * /, abs, min,
max and hypot. `F[a,b](p)`: p at some time in [a, b]; `G[a,b](p)`: at all; `(p) U[a,b] (q)`: q at some time in [a, b],
and p until then; `&`, `|`, `!`. Times are seconds from where the operator stands, closed intervals, rounded to control
steps; without them, the rest of the episode. After an episode's end its last frame holds.

Robustness is that of Donze and Maler 2010 (Robust satisfaction of temporal logic over real-valued signals): the margin
of a comparison, the minimum over conjunctions and `G`, the maximum over disjunctions and `F`. Axes: E episode, T frame.
"""

import ast
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, cast

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, Observation
from robopolicy.core.world import Step, World

ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {"abs": np.abs, "hypot": np.hypot, "min": np.minimum, "max": np.maximum}
UNTIL = re.compile(r"\bU\s*(\[[^\]]*\])")
LONGEST = 10_000
"""Maximum control steps that a formula may look ahead."""


class Specification:
    """A formula about the vectors of a world.

    text: the formula; fields: observation fields by key; fps: control steps per second. Raises ConfigError on a syntax
    error, an unknown element, and an interval that is not 0 <= a <= b.
    """

    def __init__(self, text: str, fields: Mapping[str, Field], fps: float):
        self.text, self._fps = text, fps
        self._places = _places(fields)
        # Python's grammar reads all but the infix U and the exclamation mark.
        python = re.sub(r"!(?!=)", "~", UNTIL.sub(r" @U\1@ ", text))
        try:
            self.tree = ast.parse(python.strip(), mode="eval").body
        except SyntaxError as error:
            raise self.error(f"it cannot be read ({error.msg})") from None
        if not self._is_formula(self.tree):
            raise self.error("it compares nothing, e.g. F[0,3](x > 1)")
        one = {key: np.zeros((1, 1, *field.shape)) for key, field in fields.items() if _is_vector(key)}
        self.margins(self.tree, one, 1)  # names and intervals are checked before an hour of episodes

    def robustness(self, frames: Mapping[str, Array], lengths: Array) -> Array:
        """Return the robustness [E] at the first frame; it is fulfilled where this is at least 0.

        frames: key -> [E, T, *shape]; lengths: number of frames of each episode, [E].
        """
        last = np.minimum(np.arange(max(map(int, lengths))), np.asarray(lengths)[:, None] - 1)  # [E, T]
        held = {key: value[np.arange(len(value))[:, None], last] for key, value in frames.items()}
        return self.margins(self.tree, held, last.shape[1])[:, 0]

    def margins(self, node: ast.expr, frames: Mapping[str, Array], count: int) -> Array:
        """Return the robustness of a part of the formula (a node of `tree`) at every frame, [E, T].

        frames: key -> [E, T, *shape]; count: T.
        """
        match node:
            case ast.BinOp(
                left=ast.BinOp(left=first, op=ast.MatMult(), right=operator), op=ast.MatMult(), right=second
            ):
                low, high = self.interval(operator, "U", count)
                return until(self.margins(first, frames, count), self.margins(second, frames, count), low, high)
            case ast.BinOp(op=ast.BitAnd()):
                return np.minimum(self.margins(node.left, frames, count), self.margins(node.right, frames, count))
            case ast.BinOp(op=ast.BitOr()):
                return np.maximum(self.margins(node.left, frames, count), self.margins(node.right, frames, count))
            case ast.UnaryOp(op=ast.Invert()):
                return -self.margins(node.operand, frames, count)
            case ast.Call(func=operator, args=[part]) if (name := temporal_operator(operator)) is not None:
                low, high = self.interval(operator, name, count)
                margins = self.margins(part, frames, count)
                return eventually(margins, low, high) if name == "F" else -eventually(-margins, low, high)
            case ast.Compare():
                return self._compared(node, frames)
            case _:
                part = ast.unparse(node)
                raise self.error(f"'{part}' is not a comparison; put comparisons in parentheses: (x > 1) & (y < 2)")

    def _compared(self, node: ast.Compare, frames: Mapping[str, Array]) -> Array:
        values = [self._value(each, frames) for each in (node.left, *node.comparators)]
        margins: list[Array] = []
        for operator, low, high in zip(node.ops, values[:-1], values[1:], strict=True):
            if not isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                raise self.error("values are compared with <, <=, > and >=")
            margins.append(high - low if isinstance(operator, ast.Lt | ast.LtE) else low - high)
        shape = next(iter(frames.values())).shape[:2]
        return np.broadcast_to(reduce(np.minimum, margins), shape)

    def _value(self, node: ast.expr, frames: Mapping[str, Array]) -> Any:
        """Return the value of an expression, [E, T] or a number."""
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return float(number)
            case ast.UnaryOp(op=ast.USub()):
                return -self._value(node.operand, frames)
            case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
                return ARITHMETIC[type(operator)](self._value(node.left, frames), self._value(node.right, frames))
            case ast.Call(func=ast.Name(id=name), args=[_, *_]) if name in FUNCTIONS:
                values = [self._value(each, frames) for each in node.args]
                return FUNCTIONS[name](values[0]) if name == "abs" else reduce(FUNCTIONS[name], values)
            case ast.Name() | ast.Subscript():
                name = ast.unparse(node)
                if name not in self._places:
                    raise self.error(f"there is no element '{name}'.{did_you_mean(name, self._places)} Elements")
                key, place = self._places[name]
                return frames[key].reshape(*frames[key].shape[:2], -1)[..., place]
            case _:
                part = ast.unparse(node)
                raise self.error(f"'{part}' is not a number; put comparisons in parentheses: (x > 1) & (y < 2)")

    def interval(self, node: ast.expr, name: str, count: int) -> tuple[int, int]:
        """Return an operator's interval in control steps; without one, up to the last frame."""
        if isinstance(node, ast.Name):
            return 0, count - 1
        assert isinstance(node, ast.Subscript)
        try:
            low, high = (float(each) * self._fps for each in ast.literal_eval(node.slice))
        except (ValueError, TypeError):
            raise self.error(f"{name} needs an interval of two numbers in seconds, e.g. {name}[0,3]") from None
        if not 0 <= low <= high <= LONGEST:
            raise self.error(f"{ast.unparse(node)} must begin at 0 or later and end after its begin")
        return round(low), round(high)

    def _is_formula(self, node: ast.expr) -> bool:
        return any(isinstance(each, ast.Compare) for each in ast.walk(node))

    def error(self, text: str) -> ConfigError:
        """Return the error that names the formula."""
        names = ", ".join(self._places)
        return ConfigError(f"The formula '{self.text}': {text}. Elements: {names[:600]}.")


class SpecifiedWorld:
    """A world whose episodes are measured by a formula (`specification_of`); everything else is that of `world`."""

    def __init__(self, world: World, specification: Specification):
        self.world, self.specification = world, specification

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)


def with_specification(world: World, text: str) -> World:
    """Return `world` with a formula that measures its episodes; the world itself for "". Raises as `Specification`."""
    if not text:
        return world
    return cast(World, SpecifiedWorld(world, Specification(text, world.spec.observation, world.spec.fps)))


def specification_of(world: object) -> Specification | None:
    """Return the formula that measures the episodes of a world, or of one that it wraps; None without one."""
    inner: Any = world
    while not isinstance(inner, SpecifiedWorld):
        if not hasattr(inner, "world"):
            return None
        inner = inner.world
    return inner.specification


class SeenFrames:
    """Vectors of the episodes of a batch, which `specification` measures. observation: of all rows, [B, H, ...]."""

    def __init__(self, specification: Specification, observation: Observation):
        self._specification = specification
        self._parts = {key: [value[:, -1:]] for key, value in observation.items() if key != TASK and _is_vector(key)}

    def add(self, step: Step) -> None:
        """Add the frames after every control step of a chunk."""
        for key, parts in self._parts.items():
            parts.append(step.trace[key])

    def robustness(self, lengths: Array) -> Array:
        """Return the robustness of the first n rows, given their control steps [n]."""
        frames = {key: np.concatenate(parts, axis=1)[: len(lengths)] for key, parts in self._parts.items()}
        return self._specification.robustness(frames, lengths + 1)


def eventually(margins: Array, low: int, high: int) -> Array:
    """Return the maximum of `margins` [E, T] over the frames t + low to t + high; the last frame holds, [E, T]."""
    held = _held(margins, high)
    return np.lib.stride_tricks.sliding_window_view(held[:, low:], high - low + 1, axis=1).max(-1)


def until(first: Array, second: Array, low: int, high: int) -> Array:
    """Return max over d in [low, high] of min(second[t + d], min of first[t .. t + d - 1]), [E, T]."""
    frames = first.shape[1]
    first, second = _held(first, high), _held(second, high)
    so_far = np.full((len(first), frames), np.inf)
    best = np.full((len(first), frames), -np.inf)
    for offset in range(high + 1):
        if offset >= low:
            best = np.maximum(best, np.minimum(second[:, offset : offset + frames], so_far))
        so_far = np.minimum(so_far, first[:, offset : offset + frames])
    return best


def _held(values: Array, steps: int) -> Array:
    return np.concatenate([values, np.repeat(values[:, -1:], steps, axis=1)], axis=1)


def temporal_operator(node: ast.expr) -> str | None:
    """Return F or G if a node is this operator, with or without an interval."""
    name = node.value if isinstance(node, ast.Subscript) else node
    return name.id if isinstance(name, ast.Name) and name.id in ("F", "G") else None


def _is_vector(key: str) -> bool:
    return not key.startswith(IMAGE_PREFIX)


def _places(fields: Mapping[str, Field]) -> dict[str, tuple[str, int]]:
    """Return element -> key and index, by name (unless two fields share it) and by index."""
    places: dict[str, tuple[str, int]] = {}
    shared: set[str] = set()
    for key, field in fields.items():
        if _is_vector(key):
            for index, name in enumerate(field.names):
                shared |= {name} & places.keys()
                places[name] = key, index
    places = {name: place for name, place in places.items() if name not in shared and name.isidentifier()}
    for key, field in fields.items():
        if _is_vector(key):
            last = key.rpartition(".")[2]
            places |= {f"{last}[{index}]": (key, index) for index in range(field.size)}
    return places
