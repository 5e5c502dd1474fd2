"""Figures of the source tree: file sizes, imports, comments, import circles. Run `python tests/code_figures.py`.

`tests/test_house.py` holds the limits; this prints what stands, so that two commits can be compared.
"""

import ast
import json
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("robopolicy", "worldmodels", "sims")
COMMENTED = ("robopolicy/rl", "robopolicy/policies", "robopolicy/training", "worldmodels", "sims/engine.py")
"""Where comments are counted apart: the parts with mathematics in them."""
POLICY_CLASS = re.compile(r"(LeRobot|Denoising|Token|Joint|Encoded|Distilled|Latent)\w*(Policy|Module|Network|Start)$")

PARTICIPLES = """
absent ahead alike announced answered apart aside asked begun beside called carried changed chosen collected counted
decided drawn driven earned everyone everything explained fed filmed fitted followed found gained gathered given gone
grown guessed guided heard held here how judged kept known lacking learned left listed logged lost made meant measured
mended met mine missing moved named needed nothing opened others ours own paid parted passed placed planned planted
played prepared promised raised read recorded refused remembered renamed required said saved scored seen sent settled
shown something spoiled spoken started stored taken taught theirs there thrown timed told tried tuned turned undone
unknown unseen untold used wanted watched what where which who whole why wished written wrong
"""
WITHOUT_A_NOUN = frozenset(PARTICIPLES.split())
"""Participles and pronouns that, as the name of a local variable, do not say what it is: `found`, `given`, `mine`."""


def sources(*roots: str) -> list[Path]:
    """Return the Python files below `roots` (all packages by default), sorted."""
    places = [ROOT / root for root in roots or PACKAGES]
    return [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]


def module_name(path: Path) -> str:
    """Return the dotted name of a file of ours."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST, modules: set[str]) -> set[str]:
    """Return the modules of ours that a file imports anywhere: at its top, in functions and under TYPE_CHECKING."""
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{item.name}" for item in node.names}
            submodules = names & modules
            # `from package import module` needs the module; the package's own __init__ only where a name is its own.
            imported |= submodules | ({node.module} if names - submodules else set())
        elif isinstance(node, ast.Import):
            imported |= {item.name for item in node.names}
    return imported & modules


def import_graph() -> dict[str, set[str]]:
    """Return module -> the modules of ours that it imports, lazily or for types too."""
    files = {module_name(path): path for path in sources()}
    return {name: imports_of(ast.parse(path.read_text()), set(files)) - {name} for name, path in files.items()}


def folder_graph() -> dict[str, set[str]]:
    """Return folder -> the folders that its modules import from, those aside that it lies in or that lie in it."""
    graph: dict[str, set[str]] = {}
    for name, others in import_graph().items():
        mine = _folder(name)
        beside = {_folder(other) for other in others}
        apart = {each for each in beside if not _within(each, mine) and not _within(mine, each)}
        graph.setdefault(mine, set()).update(apart)
        for each in apart:
            graph.setdefault(each, set())
    return graph


def _folder(module: str) -> str:
    return module if (ROOT / Path(*module.split("."))).is_dir() else module.rpartition(".")[0]


def _within(folder: str, other: str) -> bool:
    return f"{folder}.".startswith(f"{other}.")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other (strongly connected components of two and more; Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                components.append(sorted(component))

    sys.setrecursionlimit(max(10_000, sys.getrecursionlimit()))
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return components


def packed(tree: ast.AST) -> list[int]:
    """Return the lines on which three or more values are assigned at once: `a, b, c = x, y, z`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) >= 3
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    ]


def local_names(tree: ast.AST, inside: bool = False) -> Iterator[str]:
    """Yield every name that a function or a comprehension assigns, once for each place that assigns it."""
    for node in ast.iter_child_nodes(tree):
        if inside and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from local_names(node, not isinstance(node, ast.ClassDef) and (inside or isinstance(node, SCOPES)))


def comments(path: Path) -> int:
    """Return the number of comment lines, tool directives aside."""
    with path.open("rb") as file:
        tokens = [item.string for item in tokenize.tokenize(file.readline) if item.type == tokenize.COMMENT]
    return sum(not re.match(r"#\s*(pyright|noqa|type:|!)", text) for text in tokens)


def nounless_share(trees: Iterable[ast.AST]) -> float:
    """Return how many of 1,000 assignments to local names are to one that is a participle or a pronoun."""
    names = [name for tree in trees for name in local_names(tree)]
    return round(1000 * sum(name in WITHOUT_A_NOUN for name in names) / max(1, len(names)), 1)


def asks_for_a_policy_class(node: ast.AST) -> bool:
    """Return whether `node` is isinstance(.., SomePolicyClass) or is_lerobot..(..)."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id != "isinstance":
        return node.func.id.startswith("is_lerobot")
    names = {item.id for item in ast.walk(node.args[1]) if isinstance(item, ast.Name)}
    return any(POLICY_CLASS.match(name) for name in names)


def figures() -> dict[str, float]:
    """Return the figures by name."""
    texts = {path: path.read_text() for path in sources()}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lengths = [text.count("\n") for text in texts.values()]
    total = sum(lengths)
    import_lines = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )
    dense = sources(*COMMENTED)
    outside = [tree for path, tree in trees.items() if "policies" not in path.relative_to(ROOT).parts]
    return {
        "lines": total,
        "files": len(lengths),
        "median lines of a file": statistics.median(lengths),
        "longest file": max(lengths),
        "files under 40 lines": sum(lines < 40 for lines in lengths),
        "import lines, %": round(100 * import_lines / total, 1),
        "comments per 1,000 lines": round(1000 * sum(map(comments, texts)) / total, 1),
        "comments per 1,000 lines where the mathematics is": round(
            1000 * sum(map(comments, dense)) / sum(texts[path].count("\n") for path in dense), 1
        ),
        "Protocol classes": sum(
            any("Protocol" in ast.unparse(base) for base in node.bases)
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        ),
        "assignments of three or more packed": sum(len(packed(tree)) for tree in trees.values()),
        "isinstance on policy classes outside policies": sum(
            asks_for_a_policy_class(node) for tree in outside for node in ast.walk(tree)
        ),
        "local names without a noun per 1,000 assignments": nounless_share(trees.values()),
        "import circles, lazy ones counted": len(circles(import_graph())),
    }


if __name__ == "__main__":
    values = figures()
    if "--json" in sys.argv:
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(f"{value:>10,}  {name}" for name, value in values.items()))
        names = Counter(name for path in sources() for name in local_names(ast.parse(path.read_text())))
        common = [f"{name} {count}" for name, count in names.most_common() if name in WITHOUT_A_NOUN]
        print("local names without a noun:", ", ".join(common[:30]))
        for each in circles(import_graph()):
            print("circle:", ", ".join(each))
