"""What runs on a robot's computer, `robopolicy.client`, runs on Python 3.8 and needs three packages."""

import ast
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "robopolicy" / "client"
MODULES = {path.stem: path for path in sorted(CLIENT.glob("*.py"))}
PACKAGES = {"numpy", "msgpack", "websockets", "PIL"}
"""The last one only where it is installed."""
NEWER = {
    *("typing.Annotated", "typing.ParamSpec", "typing.TypeAlias", "typing.Concatenate", "typing.TypeGuard"),
    *("typing.Self", "typing.Never", "typing.LiteralString", "typing.assert_never", "typing.reveal_type"),
    *("typing.Required", "typing.NotRequired", "typing.Unpack", "typing.TypeVarTuple", "typing.override"),
    *("typing.TypeAliasType", "typing.assert_type", "typing.dataclass_transform", "typing.get_overloads"),
    *("datetime.UTC", "enum.StrEnum", "enum.verify", "enum.member", "enum.nonmember", "enum.EnumCheck"),
    *("itertools.batched", "itertools.pairwise", "functools.cache", "math.lcm", "math.nextafter", "math.ulp"),
    *("math.cbrt", "math.exp2", "math.sumprod", "hashlib.file_digest", "contextlib.chdir", "contextlib.nullcontext"),
    *("asyncio.TaskGroup", "asyncio.timeout", "asyncio.timeout_at", "asyncio.Runner", "asyncio.Barrier"),
    *("asyncio.to_thread", "operator.call", "random.randbytes", "collections.abc.Buffer", "pkgutil.resolve_name"),
}
"""What the standard library of Python 3.9 to 3.12 brings."""
NEWER_NAMES = {"ExceptionGroup", "BaseExceptionGroup", "aiter", "anext", "EllipsisType", "UnionType"}
NEWER_MEMBERS = {"removeprefix", "removesuffix", "add_note", "is_relative_to", "readlink", "with_stem", "bit_count"}
NEWER_ARGUMENTS = {("zip", "strict"), ("shutdown", "cancel_futures"), ("dataclass", "slots"), ("dataclass", "kw_only")}
SUBSCRIPTED = {"dict", "list", "tuple", "set", "frozenset", "type", "deque", "Future", "Counter"}
"""Classes that cannot be subscripted before Python 3.9: only in annotations, which are not evaluated."""


def imports(tree: ast.Module) -> set[str]:
    """What a module imports as it is imported: names with their module, modules themselves."""
    names, waiting = set[str](), list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, (ast.If, ast.Try, ast.ClassDef, ast.With)):
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            waiting += [each for handler in getattr(node, "handlers", []) for each in handler.body]
    return names


def nested_quotes(path: Path) -> list[int]:
    """Lines with an f-string that holds its own quotes, a backslash or a line break in a field: Python 3.12's."""
    lines, open_quotes = [], list[str]()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.FSTRING_START:
                quote = token.string.lstrip("frFR")
                if open_quotes and quote in open_quotes:
                    lines.append(token.start[0])
                open_quotes.append(quote)
            elif token.type == tokenize.FSTRING_END:
                open_quotes.pop()
            elif open_quotes and token.type == tokenize.STRING:
                if any(each[0] in token.string for each in open_quotes if len(each) == 1) or "\\" in token.string:
                    lines.append(token.start[0])
            elif open_quotes and token.type == tokenize.COMMENT:
                lines.append(token.start[0])
    return lines


def annotations(tree: ast.Module) -> set[int]:
    """Ids of the nodes in annotations, which `from __future__ import annotations` leaves unevaluated."""
    roots = [
        getattr(node, name)
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if getattr(node, name, None) is not None
    ]
    return {id(part) for root in roots for part in ast.walk(root)}


def too_new(text: str) -> list[str]:
    """Return what Python 3.8 does not have in a module that it can parse."""
    tree = ast.parse(text, feature_version=(3, 8))  # type parameters, match, except*, parenthesised contexts
    unevaluated = annotations(tree)
    names = imports(tree)
    problems = []
    for node in ast.walk(tree):
        if id(node) in unevaluated:
            continue
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
            problems += [node.attr] if node.attr in NEWER_MEMBERS else []
        elif isinstance(node, ast.Name):
            problems += [node.id] if node.id in NEWER_NAMES else []
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).rpartition(".")[2]
            problems += [
                f"{function}({item.arg}=)" for item in node.keywords if (function, item.arg) in NEWER_ARGUMENTS
            ]
            if function in ("isinstance", "issubclass") and isinstance(node.args[1], ast.BinOp):
                problems.append(ast.unparse(node))
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in SUBSCRIPTED:
            problems.append(ast.unparse(node))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = (node.left, node.right)
            if any(isinstance(side, ast.Dict | ast.DictComp) or ast.unparse(side) == "None" for side in sides):
                problems.append(ast.unparse(node))
    return problems + sorted(names & NEWER)


@pytest.mark.parametrize("name", MODULES)
def test_the_client_is_written_for_python_3_8(name):
    text = MODULES[name].read_text()
    if name == "ranges":  # of settings, which are read on later versions
        text = text[: text.index("if sys.version_info")]
    assert "from __future__ import annotations" in text
    assert not too_new(text) and not nested_quotes(MODULES[name])


@pytest.mark.parametrize("name", MODULES)
def test_a_future_that_is_late_is_caught_in_python_3_8_too(name):
    """Its TimeoutError is the built-in one since 3.11 only."""
    text = MODULES[name].read_text()
    assert "except TimeoutError" not in text or ".result(" not in text


def test_the_client_imports_itself_and_three_packages():
    trees = [ast.parse(path.read_text()) for path in MODULES.values()]
    packages = {each.partition(".")[0] for tree in trees for each in imports(tree)}
    assert packages - sys.stdlib_module_names == PACKAGES
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert {node.level for node in nodes} == {1}
    assert {str(node.module).partition(".")[0] for node in nodes} <= MODULES.keys()


def test_what_is_too_new_is_seen(tmp_path):
    file = tmp_path / "new.py"
    file.write_text("""a = {'b': 1}\nprint(f'{a['b']}')\nprint(f"{a['b']:{a['b']}}")\n""")
    assert nested_quotes(file) == [2]
    with pytest.raises(SyntaxError):
        too_new("type Whole = int")
    code = """
from itertools import pairwise
Pair = tuple[int, int]
def f(a: tuple[int, int] | None) -> dict[str, int]:
    return {"b": 1} | a, zip(a, a, strict=True), isinstance(a, int | str), "a".removeprefix("b")
"""
    assert len(too_new(code)) == 6


@pytest.mark.parametrize("python", ["python3.8", "python3.9", "python3.10", "python3.11"])
def test_an_older_python_imports_the_client(python):
    """Where there is one, and as far as it has the packages."""
    interpreter = shutil.which(python)
    code = f"""if True:
        import sys
        for path in sys.argv[1:]: compile(open(path, encoding="utf-8").read(), path, "exec")
        try: import numpy, msgpack, websockets
        except ImportError: sys.exit(0)
        sys.path.insert(0, {str(CLIENT.parent)!r})
        import {", ".join(f"client.{name}" for name in MODULES if not name.startswith("__"))}
    """
    if interpreter is None:
        pytest.skip(f"there is no {python}")
    done = subprocess.run([interpreter, "-c", code, *map(str, MODULES.values())], capture_output=True, text=True)
    if done.returncode == 127:
        pytest.skip(f"{python} only leads to others")
    assert done.returncode == 0, done.stderr
