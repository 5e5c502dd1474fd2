"""Compiled engine: the lean engine compiled by torch.compile; on a GPU each policy call is one CUDA graph.

The compiled program covers everything from encoded observation and noise to clean latents, unrolled over the K steps;
for long chains only the network, whose code serves every step. Programs are specific to the number of rows: other
numbers are padded to the next power of four, so that few are compiled. The first decision of each takes seconds to a
minute.
"""

import shutil
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import CONDITION, Policy
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.lean import LeanDenoising, Prepared, denoiser_in, prepared
from robopolicy.inference.samplers import Predicts
from robopolicy.nn.branches import Caching
from robopolicy.policies.denoising import DenoisingPolicy, require_denoising
from robopolicy.policies.network import ChunkNetwork, Condition, DenoisingNetwork, rows_in
from robopolicy.policies.sampler import NoiseDraws

UNROLLED = 20
"""Maximum number of steps compiled as one program; compile time grows with them."""
COMPILERS = ("g++", "clang++", "c++", "cl")


def compiled(policy: Policy, config: InferenceConfig, caching: Caching | None = None) -> Policy:
    """Return `policy` computed by compiled code; see `robopolicy.inference.engine.Engine`."""
    denoising = require_denoising(
        policy, f"engine=compiled supports denoising policies only, and this is a {type(policy).__name__}."
    )
    device = denoising.action_low.device.type
    if device == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            f"engine=compiled needs a C++ compiler, and there is none ({', '.join(COMPILERS)}): install one (Debian: "
            "apt install g++), or use engine=lean."
        )
    if not isinstance(caching, CachePlan | None):
        raise ConfigError(
            f"engine=compiled requires a fixed cache plan, but {type(caching).__name__} selects blocks at run time: "
            "use engine=lean, or a cache plan."
        )
    engine = CompiledDenoising(denoising, config, caching)
    steps = len(engine.samplers[True].steps)
    if caching is not None and steps > UNROLLED:
        raise ConfigError(
            f"engine=compiled caches blocks only in chains of at most {UNROLLED} steps, which it unrolls, but this "
            f"chain has {steps}: use engine=lean."
        )
    return engine


class CompiledDenoising(LeanDenoising):
    """A `LeanDenoising` with a compiled chain for each bucket of rows and each kind of noise."""

    memoryless = False  # compiling for the few rows that are left would cost more than leaving out the others saves

    def __init__(self, policy: DenoisingPolicy, config: InferenceConfig, caching: Caching | None = None):
        super().__init__(policy, config, caching)
        self._programs: dict[tuple[Any, ...], Program] = {}

    def sizes(self, most: int) -> tuple[int, ...]:
        """Return the buckets of up to `most` rows; see `engine.CompilesForRows`."""
        return tuple(dict.fromkeys(map(row_bucket, range(1, most + 1))))

    def _is_long(self, quiet: bool) -> bool:
        """Whether such a chain, noise-free or not, has too many steps to be unrolled."""
        return len(self.samplers[quiet].steps) > UNROLLED

    def _prepare(self) -> None:
        version_before = self._known
        super()._prepare()
        if self._known == version_before:
            return
        self._programs.clear()
        policy = self.policy
        for flag, (_, _, first) in self._at.items():
            if self._is_long(flag):
                times = self.samplers[flag].times.to(policy.action_low.device)
                late_steps = self._each_step(policy.network, times)
                early_steps = self._each_step(policy.base, times) if first and policy.base is not None else late_steps
                self._at[flag] = early_steps, late_steps, first

    def _each_step(self, network: DenoisingNetwork, times: Tensor) -> Prepared:
        """Return a network with a compiled single step, prepared for times [K]; custom networks are returned
        unchanged.
        """
        if not isinstance(network, ChunkNetwork):
            return prepared(network, times, self.config.precision)
        denoiser, table = denoiser_in(self.config.precision, network, times)
        programs: dict[int, Program] = {}

        def step_of(x: Tensor, time: Tensor, features: Tensor) -> Tensor:
            return denoiser.denoise(x.to(time.dtype), time, features).float()

        def at_work(condition: Condition) -> Predicts:
            features = denoiser.encode_condition(condition[CONDITION].to(table.dtype))

            def predict(x: Tensor, step: int) -> Tensor:
                inputs = [x, table[step], features]
                if len(x) not in programs:
                    programs[len(x)] = program(step_of, inputs)
                return programs[len(x)](inputs)

            return predict

        return at_work

    def _chain(self, quiet: bool, condition: Condition, before: Condition, draws: NoiseDraws) -> Tensor:
        if draws.quiet is not None:  # which rows are noise-free is drawn: nothing to unroll
            return super()._chain(quiet, condition, before, draws)
        rows, same_condition = rows_in(condition), before is condition
        size = row_bucket(rows)
        if self._is_long(quiet):
            late_condition = {name: pad_rows(value, size) for name, value in condition.items()}
            early_condition = (
                late_condition if same_condition else {name: pad_rows(value, size) for name, value in before.items()}
            )
            steps = None if draws.steps is None else pad_rows(draws.steps, size, 1)
            return super()._chain(
                quiet, late_condition, early_condition, NoiseDraws(pad_rows(draws.start, size), steps)
            )[:rows]
        values = [*condition.values(), *(() if same_condition else before.values()), draws.start]
        inputs = [pad_rows(value, size) for value in values]
        if draws.steps is not None:
            inputs.append(pad_rows(draws.steps, size, 1))
        key = quiet, same_condition, size
        if key not in self._programs:
            names = tuple(condition), () if same_condition else tuple(before)
            self._programs[key] = program(self._of_tensors(quiet, names), inputs)
        return self._programs[key](inputs)[:rows]

    def _of_tensors(self, quiet: bool, names: tuple[tuple[str, ...], tuple[str, ...]]) -> Callable[..., Tensor]:
        """Return the chain as a function of tensors only: both conditions by name, the noise, its steps."""
        lean = super()._chain

        def chain(*inputs: Tensor) -> Tensor:
            arguments = iter(inputs)
            condition = {name: next(arguments) for name in names[0]}
            before = {name: next(arguments) for name in names[1]} or condition
            return lean(quiet, condition, before, NoiseDraws(next(arguments), next(arguments, None)))

        return chain


Program = Callable[[list[Tensor]], Tensor]
"""Compiled program: input tensors -> result."""


def program(function: Callable[..., Tensor], inputs: list[Tensor]) -> Program:
    """Compile `function` for tensors with the shapes and device of `inputs`.

    Traced explicitly rather than with torch.compile, whose guards check for changes at every call and cost more than a
    small policy's whole decision. Here nothing can change: weights are constants of the program, and new weights
    trigger recompilation.
    """
    import torch._inductor  # seconds, so only where something is compiled

    compiled_function = cast(Callable[..., Any], torch._inductor.compile(make_fx(function)(*inputs), list[Any](inputs)))
    if not inputs[0].is_cuda:
        return lambda given: _only(compiled_function(*given))
    return capture_cuda_graph(lambda given: _only(compiled_function(*given)), inputs)


def capture_cuda_graph(function: Program, inputs: list[Tensor]) -> Program:
    """Record `function` as one CUDA graph, so that its hundreds of small kernels are launched at once.

    The graph reads and writes fixed memory, so inputs are copied in and the result is copied out.
    """
    static_inputs = [value.clone() for value in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what is set up at the first calls must not be part of the graph
            function(static_inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(static_inputs)

    def replay(given: list[Tensor]) -> Tensor:
        for target, source in zip(static_inputs, given, strict=True):
            target.copy_(source)
        graph.replay()
        return result.clone()

    return replay


def _only(found: Tensor | Sequence[Tensor]) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def row_bucket(rows: int) -> int:
    """Return the number of rows to compile for: the next power of four, and above 1024 the number itself."""
    size = 1
    while size < rows and size < 1024:
        size *= 4
    return max(size, rows)


def pad_rows(value: Tensor, rows: int, axis: int = 0) -> Tensor:
    """Pad `value` to `rows` by repeating its last row along `axis`."""
    padding = rows - value.shape[axis]
    if not padding:
        return value
    last = value.narrow(axis, value.shape[axis] - 1, 1)
    shape = list(value.shape)
    shape[axis] = padding
    return torch.cat([value, last.expand(shape)], axis)


keep_former_names(__name__, {"filled": "pad_rows", "graphed": "capture_cuda_graph", "bucket": "row_bucket"})
