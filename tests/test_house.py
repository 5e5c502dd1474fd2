"""The house keeps its shape: files and functions that fit a head, no import circles, typed policies, spoken shapes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from code_figures import (
    WITHOUT_A_NOUN,
    asks_for_a_policy_class,
    circles,
    folder_graph,
    import_graph,
    local_names,
    packed,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("robopolicy", "worldmodels", "sims")
LONGEST_FILE, LONGEST_FUNCTION = 800, 70
SHORTEST_FILE = 40
SMALL = {
    *(
        "robopolicy/__main__.py",
        "robopolicy/verbs/report.py",
        "robopolicy/verbs/watch.py",
    ),  # a command is a file, however little it has to do
    *(
        f"robopolicy/core/{name}.py" for name in ("acting", "arrays", "examples", "progress", "regression")
    ),  # shared by many
    "robopolicy/data/configuration.py",  # help reads it without torch
}
"""Shorter files that are one whole idea. Those of plugins/ have the names under which LeRobot looks for them."""
ROOMS = (
    "robopolicy/core",
    "robopolicy/rl",
    "robopolicy/nn",
    "robopolicy/policies",
    "robopolicy/testing",
    "sims",
    "worldmodels",
)
"""Where public functions over arrays say their shapes, and which errors they raise."""
ARRAYS = {"Tensor", "ndarray", "Array", "Rows"}
ACTORS = {"policy", "base", "teacher", "model", "world", "critic", "actor", "candidate", "student"}
"""Names of parameters that mean a policy, a model or a world: `Any` would say nothing about them."""


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions and methods of public classes, by dotted name."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not (node.name.startswith("_") or is_overload(node)):
            yield prefix + node.name, node


def is_overload(node: ast.FunctionDef) -> bool:
    return any("overload" in names_in(each) for each in node.decorator_list)


def names_in(node: ast.AST) -> set[str]:
    parts = list(ast.walk(node))
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


def test_files_and_functions_fit_a_head():
    long = []
    for path in sources():
        text = path.read_text()
        if (lines := text.count("\n")) > LONGEST_FILE:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert not long, "\n".join(long)


def test_files_are_worth_opening():
    """One idea in five files of twenty lines is read five times; `__init__.py` only says what a package is."""
    short = [
        f"{name}: {lines} lines: join it with what it belongs to"
        for path in sources()
        if path.name != "__init__.py"
        and (name := path.relative_to(ROOT).as_posix()) not in SMALL
        and not name.startswith("robopolicy/plugins/")
        and (lines := path.read_text().count("\n")) < SHORTEST_FILE
    ]
    assert not short, "\n".join(short)


def test_no_two_test_files_share_a_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}, "pytest imports them by name, and would refuse both"


def test_a_line_assigns_two_values_at_most():
    """`self.a, self.b, self.c = x, y, z` is read by counting commas."""
    lines = [f"{path.relative_to(ROOT)}:{line}" for path in sources() for line in packed(ast.parse(path.read_text()))]
    assert not lines, "\n".join(lines)


def test_a_local_name_says_what_it_is():
    """`found` or `kept` is anything, `matches` or `episodes` is not: at most 10 of 1,000 assignments lack a noun."""
    names = [(name, path.relative_to(ROOT)) for path in sources() for name in local_names(ast.parse(path.read_text()))]
    nounless = [f"{path}: {name}" for name, path in names if name in WITHOUT_A_NOUN]
    assert len(nounless) <= len(names) / 100, "\n".join(nounless)


def test_no_local_function_calls_itself():
    """It is a reference cycle: the tensors that it holds stay until Python's collector comes round, which is rare."""
    cycles = []
    for path in sources():
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for outer in functions:
            inner = [node for node in ast.walk(outer) if isinstance(node, ast.FunctionDef) and node is not outer]
            methods = {id(item) for node in ast.walk(outer) if isinstance(node, ast.ClassDef) for item in node.body}
            for node in inner:
                called = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                if id(node) not in methods and node.name in called:
                    cycles.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not cycles, "\n".join(cycles)


def test_no_module_imports_itself_over_others():
    """Not by an import in a function or for types alone either: who reads one of a circle has to read them all."""
    assert not [" -> ".join(each) for each in circles(import_graph())]


def test_no_folder_imports_itself_over_others():
    """A folder is a room: of two, one leans on the other (what lies in a folder belongs to it, and may use it)."""
    assert not [" -> ".join(each) for each in circles(folder_graph())]


def test_nobody_outside_policies_asks_for_a_policy_by_its_class():
    """They ask for what it can do (`policies/abilities.py`), so that the next kind of policy is nobody's business."""
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in sources()
        if "policies" not in path.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and asks_for_a_policy_class(node)
    ]
    assert not asked, "\n".join(asked)


def test_parameters_that_mean_a_policy_a_model_or_a_world_are_typed():
    untyped = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}({item.arg})"
        for path in sources()
        for name, node in functions(ast.parse(path.read_text()))
        for item in [*node.args.args, *node.args.kwonlyargs]
        if item.arg in ACTORS and (item.annotation is None or names_in(item.annotation) == {"Any"})
    ]
    assert not untyped, "\n".join(untyped)


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_say_shapes_and_errors(room: str):
    silent = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for name, node in functions(ast.parse(path.read_text())):
            text, place = ast.get_docstring(node) or "", f"{path.relative_to(ROOT)}:{node.lineno} {name}"
            annotations = [item.annotation for item in [*node.args.args, *node.args.kwonlyargs] if item.annotation]
            annotations += [node.returns] if node.returns else []
            if any(names_in(each) & ARRAYS for each in annotations) and "[" not in text:
                silent.append(f"{place}: no shape, such as [B, T]")
            raised = {
                part.id
                for each in ast.walk(node)
                if isinstance(each, ast.Raise) and each.exc is not None
                for part in [each.exc.func if isinstance(each.exc, ast.Call) else each.exc]
                if isinstance(part, ast.Name) and part.id.endswith("Error") and part.id != "AssertionError"
            }
            if raised and "aise" not in text and not any(error in text for error in raised):
                silent.append(f"{place}: raises {', '.join(sorted(raised))}, and does not say so")
    assert not silent, f"{len(silent)} of {room}:\n" + "\n".join(silent)
