"""Named random generators derived from one seed: no global randomness, and every generator's state can be saved.

Evaluation and recording draw from an `EpisodeGenerator`, whose random numbers depend on the episode and not on the
batch. Code that draws for many rows calls `normal`, `uniform` or `integers`, which accept it and any torch.Generator.
Axes: B row, R selected rows, n random numbers per row.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from robopolicy.core.arrays import Array
from robopolicy.core.errors import RobopolicyWarning, SpecError
from robopolicy.core.former_names import keep_former_names

NOISE_VERSION = "episode-1"
"""Version of the noise, changed when equal seeds give different numbers; stored results are only joined if it
matches.
"""

# SplitMix64 (Steele et al. 2014): the increment and the multipliers, for numpy's unsigned and torch's signed integers.
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
ROW_DRAWS: ContextVar[Callable[..., Tensor] | None] = ContextVar("draws for some rows of a minibatch", default=None)
"""How `normal`, `uniform` and `integers` draw for some rows of a minibatch: (function of a shape, shape, axis); see
`core.row_draws`.
"""
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def derive_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed for `name` under the root `seed`, identical on every machine and run."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generators:
    """Torch generators by name, created on first use from one root seed.

    A new name never changes the numbers of the others.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu"):
        self.seed = seed
        self.device = torch.device(device)
        self._generators: dict[str, torch.Generator] = {}

    def __getitem__(self, name: str) -> torch.Generator:
        if name not in self._generators:
            self._generators[name] = torch.Generator(self.device).manual_seed(derive_seed(self.seed, name))
        return self._generators[name]

    def state(self) -> dict[str, Tensor]:
        """Return the state of every generator used so far, name -> [n] uint8 on the CPU."""
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly from `state`, name -> [n] uint8; generators that it does not name are unchanged."""
        for name, value in state.items():
            self[name].set_state(value.to("cpu", torch.uint8))


def numpy_generator(seed: int, name: str) -> np.random.Generator:
    """Return a numpy generator for `name` under the root `seed`."""
    return np.random.default_rng(derive_seed(seed, name))


def episode_seeds(seed: int, name: str, count: int) -> Array:
    """Return `count` distinct episode seeds [count] int64; equal names and seeds give paired evaluations."""
    start = derive_seed(seed, name) >> 12  # below 2**51, which floats and Arrow hold exactly
    return start + np.arange(count, dtype=np.int64)


def uniforms(seeds: Array, count: int) -> Array:
    """Return uniform numbers in [0, 1), [R, count] float64: row r is a pure function of seeds[r] (SplitMix64, Steele
    2014).

    A world can randomise many rows at once while each episode depends only on its own seed.
    """
    with np.errstate(over="ignore"):
        gamma = np.uint64(_GAMMA)
        mixed = _mix(np.asarray(seeds, dtype=np.int64).astype(np.uint64) * gamma + gamma)
        stream = _mix(mixed[:, None] + gamma * np.arange(1, count + 1, dtype=np.uint64)[None, :])
    return (stream >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_keys(seed: int, *parts: Array) -> Array:
    """Return keys [R] int64 derived from `seed` and from row r of every part, [R] integers each, e.g. episode and step.

    Keys of different parts are practically independent; `uniforms` accepts them as seeds.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.array(seed % 2**64, dtype=np.uint64).reshape(1) + np.uint64(_GAMMA))
        for part in parts:
            key = _mix(key + np.uint64(_GAMMA) * (np.asarray(part, dtype=np.int64).astype(np.uint64) + np.uint64(1)))
    return key.astype(np.int64)


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def normal(
    shape: Sequence[int],
    generator: torch.Generator,
    device: torch.device | None = None,
    *,
    axis: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw standard normal noise of `shape` on the generator's device and move it to `device` if given.

    axis: the axis of rows, with B rows or m numbers for each of them in turn [B * m]. An ordinary generator draws
    exactly as torch.randn; with an `EpisodeGenerator` every row draws its own numbers.
    """
    if isinstance(generator, EpisodeGenerator):
        noise = generator.normal(shape, axis, dtype)
    else:
        options: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": dtype}
        noise = _drawn(lambda sizes: torch.randn(*sizes, **options), shape, axis)
    return noise if device is None else noise.to(device)


def uniform(
    shape: Sequence[int],
    generator: torch.Generator,
    device: torch.device | None = None,
    *,
    axis: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw uniform numbers in [0, 1) of `shape`, otherwise as `normal`; an ordinary generator draws as torch.rand
    does.
    """
    if isinstance(generator, EpisodeGenerator):
        numbers = generator.uniform(shape, axis, dtype)
    else:
        options: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": dtype}
        numbers = _drawn(lambda sizes: torch.rand(*sizes, **options), shape, axis)
    return numbers if device is None else numbers.to(device)


def integers(
    high: int, shape: Sequence[int], generator: torch.Generator, device: torch.device | None = None, *, axis: int = 0
) -> Tensor:
    """Draw integers in [0, high) of `shape`, int64, otherwise as `normal`; an ordinary generator draws as torch.randint
    does.
    """
    if isinstance(generator, EpisodeGenerator):
        numbers = generator.integers(high, shape, axis)
    else:
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        numbers = _drawn(lambda sizes: torch.randint(high, tuple(sizes), **options), shape, axis)
    return numbers if device is None else numbers.to(device)


def choice_at(logp: Tensor, numbers: Tensor) -> Tensor:
    """Return one of V choices by inverting the cumulative distribution of logp [..., V] at numbers [...] in [0, 1)."""
    cumulative = logp.exp().cumsum(-1)
    # scaled by the last entry, which rounding leaves a little off 1
    return (cumulative <= (numbers[..., None] * cumulative[..., -1:])).sum(-1).clamp_max(logp.shape[-1] - 1)


def _drawn(function: Callable[[Sequence[int]], Tensor], shape: Sequence[int], axis: int) -> Tensor:
    draw = ROW_DRAWS.get()
    return function(shape) if draw is None else draw(function, shape, axis)


class EpisodeGenerator(torch.Generator):
    """Random generator for the policy calls of B rows; its numbers depend on the episodes that the rows are running.

    A row's numbers are a pure function of `seed`, its episode's seed, the number of its decisions in the episode and
    the number of values drawn in this decision. They never depend on its index, its neighbours or the number of rows.
    Counter-based (SplitMix64), so all rows draw at once. Call `begin` for episodes first, and make every decision
    inside `decision()`. seed: seed of the noise; device: device for drawing.
    """

    def __new__(cls, seed: int, device: torch.device | str = "cpu") -> "EpisodeGenerator":
        """Create a generator on `device`, the only argument that torch's constructor accepts."""
        return super().__new__(cls, device)  # pyright: ignore

    def __init__(self, seed: int, device: torch.device | str = "cpu"):
        self.manual_seed(seed)
        self._noise = seed
        self._episodes = self._decisions = np.zeros(0, dtype=np.int64)
        self._keys = self._shared = torch.zeros(0, dtype=torch.int64)
        self._drawn = 0
        self._watched, self._said = True, False

    @classmethod
    def of(cls, generator: torch.Generator) -> "EpisodeGenerator":
        """Return a generator with the same seed and device; `generator` itself if it is already an
        `EpisodeGenerator`.
        """
        return generator if isinstance(generator, cls) else cls(generator.initial_seed(), generator.device)

    @property
    def rows(self) -> int:
        """Number of rows B, 0 before the first `begin`."""
        return len(self._episodes)

    def begin(self, seeds: Sequence[int] | Array, rows: Array | Sequence[int] | None = None) -> None:
        """Start new episodes with `seeds` [R] in `rows` [R]; rows None: start R rows, all new."""
        new_seeds = np.asarray(seeds, dtype=np.int64)
        if rows is None:
            self._episodes, self._decisions = new_seeds.copy(), np.zeros(len(new_seeds), dtype=np.int64)
        else:
            self._episodes[rows], self._decisions[rows] = new_seeds, 0

    @contextmanager
    def decision(self, rows: Array | None = None) -> Generator[None]:
        """Context of one policy call: every row of `rows` (indices or [B] bool, None: all) advances to new random
        numbers.

        A policy that draws with torch's own functions, from this generator or the global one, also gets per-row numbers
        if the first axis of the drawn tensor is that of rows, or another axis has their number. Warns once if a draw
        cannot be assigned to rows. Raises SpecError before the first `begin`.
        """
        if not self.rows:
            raise SpecError("Random numbers belong to an episode: call begin() with its seed first.")
        self._decisions[slice(None) if rows is None else rows] += 1
        self._keys = torch.tensor(derive_keys(self._noise, self._episodes, self._decisions), device=self.device)
        # What no row can own is the same for all episodes, decision by decision.
        self._shared = torch.tensor(derive_keys(self._noise, self._decisions.max(keepdims=True)), device=self.device)
        self._drawn = 0
        before = self.get_state()
        if self._watched:  # at first: looking at every call of torch costs time, and most policies need not be watched
            with _DrawsByRow(self) as watch:
                yield
            self._watched = watch.drew
        else:
            yield
        if not torch.equal(before, self.get_state()):
            self._watched = True
            self._say("drew random numbers with a torch function that has no per-row replacement")

    @contextmanager
    def only(self, rows: Array) -> Generator[None]:
        """Context in which this generator has `rows` (indices [R]) alone, for a policy call that leaves out others."""
        episodes, decisions = self._episodes, self._decisions
        self._episodes, self._decisions = episodes[rows], decisions[rows]
        try:
            yield
        finally:
            decisions[rows] = self._decisions
            self._episodes, self._decisions = episodes, decisions

    @contextmanager
    def part(self, rows: Array) -> Generator["EpisodeGenerator"]:
        """Context of a policy call for `rows` (indices [R]) alone, inside `decision()`; yields their generator.

        They draw what this generator would have drawn for them next, and may draw again.
        """
        part = EpisodeGenerator(self._noise, self.device)
        part._episodes, part._decisions = self._episodes[rows], self._decisions[rows] - 1
        with part.decision():
            part._drawn = self._drawn
            yield part

    def normal(self, shape: Sequence[int], axis: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw standard normal noise [*shape] per row; axis: as in `randomness.normal`, None: shared by all rows.

        Raises SpecError if the axis does not match this generator's rows.
        """
        keys, each = self._divided(shape, axis)
        words = self._bits(keys, -(-each // 2))  # one for two numbers, by Box and Muller 1958
        radius = (_shifted(words, 32) + 1).double().mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = (words & (2**32 - 1)).double().mul_(2 * math.pi * 2.0**-32)
        noise = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :each]
        return _arranged(noise.to(dtype), shape, axis)

    def uniform(self, shape: Sequence[int], axis: int | None = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw uniform numbers in [0, 1) of `shape`, otherwise as `normal`."""
        keys, each = self._divided(shape, axis)
        return _arranged(self._fractions(keys, each, _MANTISSA[dtype]).to(dtype), shape, axis)

    def integers(self, high: int, shape: Sequence[int], axis: int | None = 0) -> Tensor:
        """Draw integers in [0, high) of `shape`, int64, otherwise as `normal`."""
        keys, each = self._divided(shape, axis)
        return _arranged(_shifted(self._bits(keys, each), 1) % high, shape, axis)

    def shared_seed(self) -> int:
        """Draw a seed in [0, 2**62) shared by all rows; it depends only on the noise seed and the index of the policy
        call.
        """
        return int(_shifted(self._bits(self._shared, 1), 2))

    def axis_of(self, shape: Sequence[int]) -> int | None:
        """Return the row axis of a shape that a policy draws on its own; None, with one warning, if there is none."""
        fitting = [axis for axis, size in enumerate(shape) if size and size % self.rows == 0]
        if 0 in fitting:
            return 0
        if fitting:
            return next((axis for axis in fitting if shape[axis] == self.rows), fitting[0])
        self._say(f"drew random numbers of shape {list(shape)} for {self.rows} rows at once")
        return None

    def _say(self, what: str) -> None:
        if not self._said:
            warnings.warn(
                f"The policy {what}, so they are not tied to episode seeds and results may depend on "
                "world.batch_size. Draw tensors [rows, ...] with normal, uniform or integers of "
                "robopolicy.core.randomness.",
                RobopolicyWarning,
                stacklevel=2,
            )
        self._said = True

    def _divided(self, shape: Sequence[int], axis: int | None) -> tuple[Tensor, int]:
        """Return the drawing keys [B or 1] and the number of values that each draws."""
        if axis is None:
            return self._shared, math.prod(shape)
        if not len(self._keys):
            raise SpecError("Random numbers of an episode can be drawn only inside EpisodeGenerator.decision().")
        if shape[axis] % self.rows:
            raise SpecError(
                f"Random numbers of shape {list(shape)} are drawn for {self.rows} rows: axis {axis} must be the "
                "row axis."
            )
        return self._keys, math.prod(shape) // self.rows

    def _bits(self, keys: Tensor, count: int) -> Tensor:
        """Return 64 random bits for each of `count` numbers of every key, [B, count] int64."""
        counter = torch.arange(self._drawn + 1, self._drawn + count + 1, device=keys.device)
        self._drawn += count
        z = keys[:, None] + counter * _signed(_GAMMA)
        z = z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
        z = z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
        return z.bitwise_xor_(_shifted(z, 31))

    def _fractions(self, keys: Tensor, count: int, digits: int) -> Tensor:
        """Return uniform numbers in [0, 1) with `digits` binary digits, [B, count] float64."""
        return _shifted(self._bits(keys, count), 64 - digits).double() * 2.0**-digits


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(z: Tensor, places: int) -> Tensor:
    """Logical (unsigned) right shift of int64."""
    return (z >> places).bitwise_and_(2 ** (64 - places) - 1)


def _arranged(drawn: Tensor, shape: Sequence[int], axis: int | None) -> Tensor:
    """Reshape the numbers drawn by rows [B, n] to `shape`, with B rows or m numbers per row [B * m] along `axis`."""
    if axis is None:
        return drawn.reshape(tuple(shape))
    other_sizes = [size for place, size in enumerate(shape) if place != axis]
    return drawn.reshape(shape[axis], *other_sizes).movedim(0, axis)


@contextmanager
def use_generator(generator: torch.Generator, device: torch.device) -> Generator[None]:
    """Make code that draws from torch's global generators, on the CPU or `device`, depend only on `generator`.

    Inside the context the global generators are seeded with one number drawn from it; afterwards they are restored.
    With an `EpisodeGenerator` every row draws its own numbers, see `EpisodeGenerator.decision`.
    """
    by_row = isinstance(generator, EpisodeGenerator)
    seed = generator.shared_seed() if by_row else int(integers(2**62, (1,), generator))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        if by_row:
            with _DrawsByRow(generator):
                yield
        else:
            yield


class _DrawsByRow(TorchFunctionMode):
    """Context in which torch's random functions draw per-row numbers, when called with `generator` or with none.

    drew: whether a random function was called.
    """

    def __init__(self, generator: EpisodeGenerator):
        super().__init__()
        self.generator, self.drew = generator, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, or its per-row replacement."""
        keywords = dict(kwargs or {})
        draw = _DRAWS.get(func)
        if draw is None or keywords.get("generator", self.generator) not in (None, self.generator):
            return func(*args, **keywords)
        self.drew = True
        keywords.pop("generator", None)
        return draw(self.generator, *args, **keywords)


def _filled(generator: EpisodeGenerator, target: Tensor, kind: str) -> Tensor:
    """Fill a tensor in place with per-row normal or uniform numbers."""
    dtype = target.dtype if target.dtype in _MANTISSA else torch.float32
    axis = generator.axis_of(target.shape)
    noise = getattr(generator, kind)(tuple(target.shape), axis, dtype)
    with torch.no_grad():
        return target.copy_(noise)


def _made(kind: str, empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the per-row replacement of a factory function; `empty` creates the uninitialised tensor."""

    def draw(generator: EpisodeGenerator, *args: Any, requires_grad: bool = False, **given: Any) -> Tensor:
        return _filled(generator, empty(*args, **given), kind).requires_grad_(requires_grad)

    return draw


def _normal_(generator: EpisodeGenerator, target: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _filled(generator, target, "normal").mul_(std).add_(mean)


def _uniform_(generator: EpisodeGenerator, target: Tensor, *bounds: float, **named: float) -> Tensor:
    low, high = (*bounds, named.get("from", 0.0), named.get("to", 1.0))[:2] if not bounds else (*bounds, 1.0)[:2]
    return _filled(generator, target, "uniform").mul_(high - low).add_(low)


def _normal(generator: EpisodeGenerator, mean: Any, std: Any = 1.0, size: Any = None, **given: Any) -> Tensor:
    """As torch.normal; mean and std may be tensors [..., ] or numbers."""
    target = torch.empty_like(mean + std) if size is None else torch.empty(size, **given)
    return _filled(generator, target, "normal").mul_(std).add_(mean)


def _integers_like(generator: EpisodeGenerator, target: Tensor, low: int, high: int) -> Tensor:
    numbers = generator.integers(high - low, tuple(target.shape), generator.axis_of(target.shape))
    return target.copy_(numbers + low)


def _randint(generator: EpisodeGenerator, *args: Any, **given: Any) -> Tensor:
    """As torch.randint(low=0, high, size)."""
    *bounds, size = (*args, given.pop("size")) if "size" in given else args
    bounds += [given.pop(name) for name in ("low", "high") if name in given]
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    target: Tensor = torch.empty(size, dtype=given.pop("dtype", torch.int64), **given)
    return _integers_like(generator, target, low, high)


def _bernoulli(generator: EpisodeGenerator, chance: Tensor, p: float | None = None) -> Tensor:
    numbers = _filled(generator, torch.empty_like(chance), "uniform")
    return (numbers < (chance if p is None else p)).to(chance.dtype)


def _bernoulli_(generator: EpisodeGenerator, target: Tensor, p: float | Tensor = 0.5) -> Tensor:
    numbers = _filled(generator, torch.empty_like(target, dtype=torch.float32), "uniform")
    return target.copy_(numbers < p)


def _exponential_(generator: EpisodeGenerator, target: Tensor, lambd: float = 1.0) -> Tensor:
    return target.copy_(-torch.log1p(-_filled(generator, torch.empty_like(target), "uniform")) / lambd)


def _multinomial(generator: EpisodeGenerator, weights: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """As torch.multinomial with weights [..., V]: by exponential clocks (without replacement) or inverse cumulative
    sums.
    """
    if not replacement:
        waits = _exponential_(generator, torch.empty_like(weights, dtype=torch.float64))
        return (waits / weights.double()).topk(num_samples, largest=False).indices
    sums = weights.double().cumsum(-1)
    numbers = _filled(generator, sums.new_empty((*weights.shape[:-1], num_samples)), "uniform") * sums[..., -1:]
    return torch.searchsorted(sums, numbers, right=True).clamp_max(weights.shape[-1] - 1)


_DRAWS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.randn: _made("normal", torch.empty),
    torch.randn_like: _made("normal", torch.empty_like),
    torch.normal: _normal,
    Tensor.normal_: _normal_,
    torch.rand: _made("uniform", torch.empty),
    torch.rand_like: _made("uniform", torch.empty_like),
    Tensor.uniform_: _uniform_,
    torch.randint: _randint,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.exponential_: _exponential_,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
}
"""torch random function -> its per-row replacement."""


keep_former_names(__name__, {"derive": "derive_seed", "keyed": "derive_keys", "drawing_from": "use_generator"})
