"""What runs on a robot's computer, the client and the driver, runs on Python 3.10 and needs three packages."""

import ast
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROBOTS_SIDE = ("robopolicy.serving.client", "robopolicy.serving.driver")
ATTACHED = ("robopolicy.serving.lerobot_robot",)
"""Beside LeRobot, with packages of its own."""
PACKAGES = {"numpy", "msgpack", "websockets", "PIL"}
"""The last one only where it is installed."""
NEWER = {
    *("typing.Self", "typing.Never", "typing.LiteralString", "typing.assert_never", "typing.reveal_type"),
    *("typing.Required", "typing.NotRequired", "typing.Unpack", "typing.TypeVarTuple", "typing.override"),
    *("typing.TypeAliasType", "typing.assert_type", "typing.dataclass_transform", "typing.get_overloads"),
    *("datetime.UTC", "enum.StrEnum", "enum.verify", "enum.member", "enum.nonmember", "enum.EnumCheck"),
    *("itertools.batched", "math.cbrt", "math.exp2", "math.sumprod", "hashlib.file_digest", "contextlib.chdir"),
    *("asyncio.TaskGroup", "asyncio.timeout", "asyncio.timeout_at", "asyncio.Runner", "asyncio.Barrier"),
    *("operator.call", "time.sleep_until", "inspect.getmembers_static", "collections.abc.Buffer", "os.unshare"),
}
"""What the standard library of Python 3.11 or 3.12 brings."""
NEWER_NAMES = {"ExceptionGroup", "BaseExceptionGroup", "add_note", "walk_up", "aclosing_"}
NEWER_MODULES = {"tomllib", "wsgiref.types", "importlib.resources.abc"}


def imports(tree: ast.Module) -> set[str]:
    """What a module imports as it is imported: names with their module, modules themselves."""
    names, waiting = set[str](), list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, (ast.If, ast.Try, ast.ClassDef, ast.With)):
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            waiting += [each for handler in getattr(node, "handlers", []) for each in handler.body]
    return names


def path_of(module: str) -> Path | None:
    file = ROOT / Path(*module.split("."))
    return next((each for each in (file.with_suffix(".py"), file / "__init__.py") if each.is_file()), None)


def reached(names: tuple[str, ...]) -> dict[str, Path]:
    """Every module of ours that these import."""
    known, waiting = dict[str, Path](), list(names)
    while waiting:
        name = waiting.pop()
        path = path_of(name)
        if path is None or name in known:
            continue
        known[name] = path
        parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        for each in imports(ast.parse(path.read_text())):
            waiting += [each, each.rpartition(".")[0]]
        waiting += parents
    return known


MODULES, WRITTEN = reached(ROBOTS_SIDE), reached(ROBOTS_SIDE + ATTACHED)


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


def test_the_robots_side_is_known():
    assert 15 < len(MODULES) < 45
    assert {"robopolicy", "robopolicy.core.spec", "robopolicy.serving.images"} <= MODULES.keys()
    assert "robopolicy.library" not in MODULES


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_the_robots_side_is_written_for_python_3_10(name):
    text = WRITTEN[name].read_text()
    tree = ast.parse(text, feature_version=(3, 10))  # type parameters, type statements, except*
    assert not nested_quotes(WRITTEN[name])
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not (imports(tree) | used) & NEWER
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & NEWER_NAMES and not imports(tree) & NEWER_MODULES


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_future_that_is_late_is_caught_in_python_3_10_too(name):
    """Its TimeoutError is the built-in one since 3.11 only."""
    text = WRITTEN[name].read_text()
    assert "except TimeoutError" not in text or ".result(" not in text


def test_the_robots_side_needs_three_packages():
    packages = {each.partition(".")[0] for path in MODULES.values() for each in imports(ast.parse(path.read_text()))}
    assert packages - sys.stdlib_module_names - {"robopolicy"} <= PACKAGES


def test_what_is_too_new_is_seen(tmp_path):
    file = tmp_path / "new.py"
    file.write_text("""a = {'b': 1}\nprint(f'{a['b']}')\nprint(f"{a['b']:{a['b']}}")\n""")
    assert nested_quotes(file) == [2]
    with pytest.raises(SyntaxError):
        ast.parse("type Whole = int", feature_version=(3, 10))


@pytest.mark.parametrize("python", ["python3.10", "python3.11"])
def test_an_older_python_imports_the_robots_side(python):
    """Where there is one, and as far as it has the packages."""
    interpreter = shutil.which(python)
    code = f"""if True:
        import sys
        for path in sys.argv[1:]: compile(open(path, encoding="utf-8").read(), path, "exec")
        try: import numpy, msgpack, websockets
        except ImportError: sys.exit(0)
        import {", ".join(ROBOTS_SIDE)}
    """
    if interpreter is None:
        pytest.skip(f"there is no {python}")
    done = subprocess.run(
        [interpreter, "-c", code, *map(str, MODULES.values())], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode == 127:
        pytest.skip(f"{python} only leads to others")
    assert done.returncode == 0, done.stderr
