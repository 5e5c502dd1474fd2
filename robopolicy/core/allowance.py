"""How much memory a description from outside may ask for while modules are made of it."""

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
            asked = {key: value for key, value in given.items() if key not in _NOT_ON_META}
            self._count(func(*args, **{**asked, "device": "meta"}).numel())
        elif func is Tensor.clone:
            self._count(args[0].numel())
        return func(*args, **given)

    def _count(self, elements: int) -> None:
        self.elements -= elements
        self.tensors -= 1
        if self.elements < 0 or self.tensors < 0:
            raise MemoryError("it asks for far more memory than its weights fill")
