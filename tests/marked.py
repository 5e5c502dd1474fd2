"""Which test checks whose mathematics: the names that tests carry as `@pytest.mark.checks("slot/name", ...)`."""

import ast
from collections.abc import Iterator
from pathlib import Path

Test = ast.FunctionDef | ast.AsyncFunctionDef


def marked(root: Path) -> dict[str, list[str]]:
    """Return name -> ids of the tests under `root` (the folder tests/) that check it, both sorted.

    Ids are pytest's, from the folder above `root`: tests/rl/test_credit.py::test_name. A mark stands above a test, at
    one of its parameters (pytest.param(..., marks=...)), above a class of tests or, for a whole file, in pytestmark.
    Files are read, not imported. Raises ValueError where a mark's name is not written out or stands above no test.
    """
    marked_tests: dict[str, set[str]] = {}
    for path in sorted(root.rglob("test_*.py")):
        tree = ast.parse(path.read_text(), str(path))
        where = path.relative_to(root.parent).as_posix()
        count = 0
        for test, names in _tests(tree, _names(_assigned(tree.body))):
            count += len(names)
            for name in names:
                marked_tests.setdefault(name, set()).add(f"{where}::{test}")
        if not count and _names([tree]):
            raise ValueError(f"{where}: a mark `checks` belongs to no test.")
    return {name: sorted(marked_tests[name]) for name in sorted(marked_tests)}


def _tests(body: ast.Module | ast.ClassDef, inherited: set[str], prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield every test and the names it checks, those of its class and file included."""
    for node in body.body:
        if isinstance(node, Test) and node.name.startswith("test_"):
            yield prefix + node.name, inherited | _names(node.decorator_list)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            own = inherited | _names(node.decorator_list) | _names(_assigned(node.body))
            yield from _tests(node, own, f"{prefix}{node.name}::")


def _assigned(body: list[ast.stmt]) -> list[ast.expr]:
    """Return what is assigned to pytestmark."""
    return [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "pytestmark" for target in node.targets)
    ]


def _names(nodes: list[ast.expr] | list[ast.Module]) -> set[str]:
    """Return the arguments of every `checks(...)` inside; raises ValueError for one that is not a string."""
    names: set[str] = set()
    for node in (part for each in nodes for part in ast.walk(each)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "checks":
            for argument in node.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise ValueError(f"line {node.lineno}: a mark `checks` takes names that are written out.")
                names.add(argument.value)
    return names
