"""One seed, named generators: no global randomness, and every generator's state can be saved and restored."""

import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array


def derive(seed: int, name: str) -> int:
    """Return a 63-bit seed for `name` under the root `seed`, the same on every machine and run."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generators:
    """Torch generators by name, made on first use from one root seed.

    Adding a consumer under a new name never changes what the others draw.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu"):
        self.seed = seed
        self.device = torch.device(device)
        self._generators: dict[str, torch.Generator] = {}

    def __getitem__(self, name: str) -> torch.Generator:
        if name not in self._generators:
            self._generators[name] = torch.Generator(self.device).manual_seed(derive(self.seed, name))
        return self._generators[name]

    def state(self) -> dict[str, Tensor]:
        """Return the state of every generator used so far, name -> [n] uint8 on the CPU."""
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `state`, name -> [n] uint8, was taken; generators it does not name are left alone."""
        for name, value in state.items():
            self[name].set_state(value.to("cpu", torch.uint8))


@contextmanager
def drawing_from(generator: torch.Generator, device: torch.device) -> Generator[None]:
    """Let code that draws from torch's global generators, on the CPU or `device`, depend on `generator` alone.

    Within they are seeded by one number drawn from it, and afterwards they are as they were.
    """
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        yield


def numpy_generator(seed: int, name: str) -> np.random.Generator:
    """Return a numpy generator for `name` under the root `seed`."""
    return np.random.default_rng(derive(seed, name))


def episode_seeds(seed: int, name: str, count: int) -> Array:
    """Return `count` distinct episode seeds [count] int64; equal names and seeds pair two evaluations."""
    start = derive(seed, name) >> 12  # below 2**51, which floats and Arrow hold exactly
    return start + np.arange(count, dtype=np.int64)


def uniforms(seeds: Array, count: int) -> Array:
    """Return uniforms in [0, 1), [R, count] float64: row r is a pure function of seeds[r] (SplitMix64, Steele 2014).

    Lets a world randomise many rows at once while each episode still depends on its own seed alone.
    """
    with np.errstate(over="ignore"):
        gamma = np.uint64(0x9E3779B97F4A7C15)
        mixed = _mix(np.asarray(seeds, dtype=np.int64).astype(np.uint64) * gamma + gamma)
        stream = _mix(mixed[:, None] + gamma * np.arange(1, count + 1, dtype=np.uint64)[None, :])
    return (stream >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
