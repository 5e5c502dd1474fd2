"""How much memory a description from outside may ask for while modules are made of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ELEMENTS = 2**23
"""What every description may ask for beside what its weights hold: tables, places, what is overwritten later."""
TENSORS = 4000
"""The same, of tensors."""
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


class Allowance(TorchFunctionMode):
    """While it is entered, torch's factories and clones give at most so many elements and tensors, counted together.

    elements, tensors: e.g. a few times what the weights file holds, since a description that asks for more cannot fit
    it; `ELEMENTS` and `TENSORS` are added.
    Raises MemoryError before the memory is taken.
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
        """Call a function of torch, after counting what it is about to allocate; shapes are the function's own."""
        given = dict(kwargs or {})
        if func in _FACTORIES:
            self._count(_elements(func, args, given))
        elif func is Tensor.clone:
            self._count(args[0].numel())
        return func(*args, **given)

    def _count(self, elements: int) -> None:
        self.elements -= elements
        self.tensors -= 1
        if self.elements < 0 or self.tensors < 0:
            raise MemoryError("it asks for far more memory than its weights fill")


def _elements(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many elements a factory of torch would give."""
    # Ranges by hand: on the meta device torch imports sympy or its whole compiler for them, which takes seconds.
    if func is torch.arange:
        places = ("end",) if len(args) == 1 else ("start", "end", "step")
        asked = {"start": 0, "step": 1, **dict(zip(places, args, strict=False)), **kwargs}
        steps = (float(asked["end"]) - float(asked["start"])) / (float(asked["step"]) or math.inf)
        return math.ceil(steps) if 0 < steps < math.inf else 0  # what is no range, torch refuses itself
    if func in (torch.linspace, torch.logspace):
        return int(args[2] if len(args) > 2 else kwargs.get("steps", 0))
    if func is torch.eye:
        rows = int(args[0] if args else kwargs.get("n", 0))
        columns = args[1] if len(args) > 1 else kwargs.get("m")
        return rows * (rows if columns is None else int(columns))
    asked = {key: value for key, value in kwargs.items() if key not in _NOT_ON_META}
    return func(*args, **{**asked, "device": "meta"}).numel()
