"""Finds mechanisms in source files by reading them, so that a list of all imports none of them (nor torch)."""

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DECORATOR = "mechanism"
ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Declared:
    """One decorated function or class: where it is, "package.module:Name", what its decorator says, its docstring, and
    its options, the keyword-only parameters, with their defaults. slot, needs and gives are names of enum members.
    """

    path: str
    slot: str
    name: str
    source: str
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    text: str
    options: dict[str, Any]


@cache
def declared() -> tuple[Declared, ...]:
    """Return everything decorated with `@mechanism(Slot.X, "name", ...)` below this package."""
    found: list[Declared] = []
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if f"@{DECORATOR}(" in text:
            module = ".".join(("robopolicy.rl", *file.relative_to(ROOT).with_suffix("").parts))
            found += _of_module(ast.parse(text), module.removesuffix(".__init__"))
    return tuple(found)


def declared_in(module: str) -> tuple[Declared, ...]:
    """Return what another package's module declares, () where its source has no decorator or cannot be found."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return ()
    return tuple(_of_module(ast.parse(Path(found.origin).read_text(encoding="utf-8")), module))


def _of_module(tree: ast.Module, module: str) -> Iterator[Declared]:
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == DECORATOR:
                keywords = {item.arg: item.value for item in call.keywords}
                yield Declared(
                    f"{module}:{node.name}",
                    _member(call.args[0]),
                    ast.literal_eval(call.args[1]),
                    ast.literal_eval(keywords["source"]) if "source" in keywords else "",
                    _members(keywords.get("needs")),
                    _members(keywords.get("gives")),
                    inspect.cleandoc(ast.get_docstring(node) or ""),
                    _options(_call_of(node, classes), constants),
                )


def _member(node: ast.expr) -> str:
    """Return X of the expression `Slot.X`."""
    if not isinstance(node, ast.Attribute):
        raise TypeError(f"line {node.lineno}: write slots and needs as Slot.NAME and Need.NAME, they are read as text.")
    return node.attr


def _members(node: ast.expr | None) -> tuple[str, ...]:
    return tuple(_member(item) for item in node.elts) if isinstance(node, ast.Tuple) else ()


def _call_of(node: ast.FunctionDef | ast.ClassDef, classes: dict[str, ast.ClassDef]) -> ast.FunctionDef | None:
    """Return what is called: the function itself, or the `__init__` of a class or of a base in the same module."""
    if isinstance(node, ast.FunctionDef):
        return node
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return item
    bases = (classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes)
    return next((found for base in bases if (found := _call_of(base, classes)) is not None), None)


def _options(function: ast.FunctionDef | None, constants: dict[str, ast.expr]) -> dict[str, Any]:
    if function is None:
        return {}
    found: dict[str, Any] = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        value = constants.get(default.id, default) if isinstance(default, ast.Name) else default
        found[argument.arg] = inspect.Parameter.empty if value is None else ast.literal_eval(value)
    return found
