"""Random numbers for some rows of a minibatch, equal to those that one process draws for them in the whole minibatch.

    with RowDraws(rows=64, own=slice(1, None, 2)) as draws:
        torch.randn((32, 7), generator=generator)  # rows 1, 3, ... of torch.randn((64, 7), generator=generator)

So every process of a data-parallel run advances its generators alike, and no two draw the same noise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from robopolicy.core.randomness import ROW_DRAWS


class RowDraws(TorchFunctionMode):
    """Context in which tensors [n, ...] of random numbers are drawn for all N rows, of which the own n are returned.

    rows: N; own: slice of the own rows. Draws whose first axis is not n (or, for `randomness.normal` and its like,
    whose row axis is not) are left as they are, equal in all processes, and listed in `shared`.
    """

    def __init__(self, rows: int, own: slice):
        super().__init__()
        self.rows, self.own = rows, own
        self.count = len(range(rows)[own])
        self.shared: list[str] = []
        self._paused = False

    def __enter__(self) -> "RowDraws":
        """Start replacing draws in this thread."""
        self._token = ROW_DRAWS.set(self.draw)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop replacing draws."""
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]
        ROW_DRAWS.reset(self._token)

    def draw(self, function: Callable[[tuple[int, ...]], Tensor], shape: Sequence[int], axis: int = 0) -> Tensor:
        """Return the own rows [n, ...] of `function(shape)`, which draws [N, ...]; shape: that of the own rows."""
        sizes = list(shape)
        before, self._paused = self._paused, True
        try:
            if not sizes or sizes[axis] != self.count:
                self.shared.append(str(sizes))
                return function(tuple(sizes))
            sizes[axis] = self.rows
            index = (slice(None),) * (axis % len(sizes)) + (self.own,)
            return function(tuple(sizes))[index].contiguous()
        finally:
            self._paused = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, drawing for all rows where it is a random one."""
        keywords = dict(kwargs or {})
        if self._paused or func not in RANDOM:
            return func(*args, **keywords)
        if func in (torch.randn, torch.rand, torch.randint):
            *first, shape = _with_size(func, args, keywords)
            return self.draw(lambda sizes: func(*first, sizes, **keywords), shape)
        if func in (torch.randn_like, torch.rand_like):
            like, *_ = args
            made = torch.randn if func is torch.randn_like else torch.rand
            keywords = {"dtype": like.dtype, "device": like.device, **keywords}
            return self.draw(lambda sizes: made(sizes, **keywords), like.shape)
        if func is torch.multinomial and args and args[0].ndim == 1:
            names = dict(zip(("input", "num_samples", "replacement"), args, strict=False)) | keywords
            return self.draw(lambda sizes: func(**{**names, "num_samples": sizes[0]}), (names["num_samples"],))
        self.shared.append(getattr(func, "__name__", str(func)))
        return func(*args, **keywords)


def _with_size(func: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Return a factory's positional arguments, of which the last is the size; takes it from the keywords if there."""
    if "size" in keywords:
        return (*args, tuple(keywords.pop("size")))
    if func is torch.randint:
        return (*args[:-1], tuple(args[-1]))
    (first, *rest) = args
    return (tuple(args) if rest or isinstance(first, int) else tuple(first),)


RANDOM = frozenset(
    {
        torch.randn,
        torch.rand,
        torch.randint,
        torch.randn_like,
        torch.rand_like,
        torch.multinomial,
        torch.randperm,
        torch.normal,
        torch.bernoulli,
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.exponential_,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.multinomial,
    }
)
"""Random functions of torch; only the first six are drawn for all rows."""
