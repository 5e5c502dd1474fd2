"""Registry of mechanisms: small functions with a slot, a name and a source, selected and combined by name.

A mechanism's options are the keyword-only parameters of its function, so that its signature is its configuration. Its
needs of steps or rollouts are declared next to its name; `require` turns an incompatible combination into a clear
error. Built-in mechanisms, and those of installed packages with the entry point `robopolicy.mechanisms`, are parsed
from source files: listing them imports none of them (nor torch); they are imported when used. Others are given by
import path, "package.module:name".
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from robopolicy.core.errors import ConfigError, RobopolicyWarning, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.registry import is_dotted, load_dotted

DECORATOR = "mechanism"
ROOT = Path(__file__).resolve().parent
"""Folder of the built-in mechanisms."""
EXPERIMENTAL = "robopolicy.rl.experimental."
"""Package of built-in mechanisms whose effect is not measured."""
GROUP = "robopolicy.mechanisms"
"""Entry point group for modules with mechanisms in installed packages."""
_functions: dict[str, Callable[..., Any]] = {}
"""Mapping from import path to the function registered on import."""


@dataclass(frozen=True)
class Declared:
    """One decorated function or class: its location "package.module:Name", the decorator's arguments, its docstring,
    and its options (the keyword-only parameters) with their defaults. slot, needs and gives are names of enum members.
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
    """Return all functions and classes decorated with `@mechanism(Slot.X, "name", ...)` below this package."""
    declarations: list[Declared] = []
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if f"@{DECORATOR}(" in text:
            module = ".".join(("robopolicy.rl", *file.relative_to(ROOT).with_suffix("").parts))
            declarations += _of_module(ast.parse(text), module.removesuffix(".__init__"))
    return tuple(declarations)


def declared_in(module: str) -> tuple[Declared, ...]:
    """Return the declarations in another package's module, () if its source has no decorator or cannot be found."""
    try:
        module_spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        module_spec = None
    if module_spec is None or module_spec.origin is None or not module_spec.origin.endswith(".py"):
        return ()
    return tuple(_of_module(ast.parse(Path(module_spec.origin).read_text(encoding="utf-8")), module))


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
    """Parse X from the expression `Slot.X`."""
    if not isinstance(node, ast.Attribute):
        raise TypeError(
            f"line {node.lineno}: write slots and needs as Slot.NAME and Need.NAME, because they are parsed from "
            "the source."
        )
    return node.attr


def _members(node: ast.expr | None) -> tuple[str, ...]:
    return tuple(_member(item) for item in node.elts) if isinstance(node, ast.Tuple) else ()


def _call_of(node: ast.FunctionDef | ast.ClassDef, classes: dict[str, ast.ClassDef]) -> ast.FunctionDef | None:
    """Return the function that is called: the function itself, or the `__init__` of a class or of a base in the same
    module.
    """
    if isinstance(node, ast.FunctionDef):
        return node
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return item
    bases = (classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes)
    return next((inherited for base in bases if (inherited := _call_of(base, classes)) is not None), None)


def _options(function: ast.FunctionDef | None, constants: dict[str, ast.expr]) -> dict[str, Any]:
    if function is None:
        return {}
    options: dict[str, Any] = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        value = constants.get(default.id, default) if isinstance(default, ast.Name) else default
        options[argument.arg] = inspect.Parameter.empty if value is None else ast.literal_eval(value)
    return options


class Slot(Enum):
    """Stage of an iteration at which a mechanism is used; the values are the configuration keys."""

    SAMPLER = "sampler"
    HINT = "hint"
    ALLOCATOR = "allocator"
    SELECTION = "selection"
    MODEL = "models"
    REWARD = "rewards"
    ADVANTAGE = "advantage"
    CREDIT = "credit"
    REPLAY = "replay"
    COEFFICIENT = "coefficient"
    WEIGHT = "weight"
    AUXILIARY = "auxiliaries"
    CONTROLLER = "controllers"


SEVERAL = (Slot.SELECTION, Slot.MODEL, Slot.REWARD, Slot.CREDIT, Slot.AUXILIARY, Slot.CONTROLLER)
"""Slots that accept a list of mechanisms."""

CALLED_WITH: dict[Slot, tuple[str, ...]] = {
    Slot.SELECTION: ("rollouts", "context"),
    Slot.REWARD: ("rollouts", "context"),
    Slot.ADVANTAGE: ("rollouts", "context"),
    Slot.CREDIT: ("rollouts", "advantage", "context"),
    Slot.COEFFICIENT: ("scored",),
    Slot.WEIGHT: ("mask", "rollouts"),
    Slot.AUXILIARY: ("inputs",),
    Slot.MODEL: ("tools",),
    **dict.fromkeys((Slot.SAMPLER, Slot.HINT, Slot.ALLOCATOR, Slot.REPLAY, Slot.CONTROLLER), ()),
}
"""Arguments of the functions of each slot, and constructor arguments of its classes."""


class Need(Enum):
    """Requirement of a mechanism."""

    STARTS = "a pool of initial states that repeat (num_initial_states=N)"
    GROUPS = "several complete episodes from the same initial state (a group advantage, group_size >= 2)"
    EPISODES = "rollouts of complete episodes"
    WHOLE_EPISODES = "minibatches of complete episodes"
    WHOLE_GROUPS = "minibatches of complete groups (group_size >= 2)"
    WHOLE_MINIBATCHES = "minibatches that the processes of a data-parallel run do not divide"
    CATEGORICAL = "steps drawn from categorical distributions (a token policy)"
    GAUSSIAN = "steps drawn from Gaussians (a denoising policy)"
    MEANS = (
        "the mean of every denoising step under the acting policy (a denoising policy with likelihood=chain, which "
        "then stores it)"
    )
    FINISHES = (
        "a policy that can complete a partial denoising chain without noise (a denoising policy with likelihood=chain)"
    )
    MATCHING = "log-probabilities computed by denoising the action itself (a denoising policy with likelihood=matching)"
    CRITIC = "a critic"
    IMAGES = "camera images in the observation"
    VECTORS = (
        "vector fields in the world's observation (with images alone choose another sampler, such as sampler=vade)"
    )
    INSTRUCTIONS = "a world with several instructions"
    PARAPHRASES = "a world whose instructions contain several wordings of a goal (world.options.phrasing=all)"
    WORDINGS = "a world with another wording of an instruction (world.options.phrasing=all, in tasks with paraphrases)"
    TEACHER = "a teacher (teacher=CHECKPOINT)"
    SAME_STEPS = "a teacher of the policy's kind, with the same steps (auxiliaries=[dagger] works with any teacher)"
    FINISHED = "a critic trained on finished episodes only"
    PREFERENCE = "a model that distinguishes the teacher's actions (models=[discriminator])"
    BASE = "the frozen base policy"
    IMPLICIT = "a model that rewards every step (models=[prime] or [oprl])"
    VALUES = "a model of action values (models=[q_ensemble])"
    OWN_TEACHER = "a copy of the policy that sees more (models=[own_teacher])"
    FLOW_VALUES = "a critic of noisy actions (models=[flow_critic])"
    ENTROPY = "the entropy of every step under the acting policy"
    BLACKOUT_SCORES = "log-probabilities of the same steps with blacked-out patches in the camera images (cameras)"
    BLACKOUT_DIVERGENCE = (
        "the KL divergence of steps from those with blacked-out patches in the camera images (cameras)"
    )
    CONTRAST_SCORES = (
        "log-probabilities of the same steps under another instruction (a world with several instructions)"
    )
    TEACHER_SCORES = "the teacher's log-probabilities of the same steps (a teacher of the policy's kind)"
    REFERENCE_SCORES = "the frozen base policy's log-probabilities of the same steps"
    CURRENT_SCORES = "log-probabilities of the same steps before the update, and the size of their gradients"
    SEQUENCE_RATIOS = "log-probabilities of old rows before the update, whatever the proximal policy"
    TEACHER_OVERLAP = "the agreement of the teacher's and the policy's distributions (a teacher of the policy's kind)"
    GROUP_RATES = "the success rate of every episode's group (a group advantage, group_size >= 2)"
    POSITION = "the position of every action chunk in its episode"
    SCORES_ACTIONS = (
        "a policy that can compute log-probabilities of given actions (a token policy, or a denoising policy with "
        "likelihood=matching)"
    )
    EXPERTS = "recorded episodes of experts (expert_datasets=[DATASET])"
    IMITATION = "a loss of imitation of experts (auxiliaries=[experts])"
    STEP_RATIOS = "a separate ratio for every step (ratio_level=step)"
    FIRST_ERRORS = "the first wrong decision of failed episodes (models=[q_ensemble,first_error])"
    BUDGETS = "episodes with budgets of time (allocator=budgets)"
    ANSWER_SCORES = "log-probabilities of the same steps given a right and a wrong answer (models=[answers])"
    ACTING_POLICY = "a copy of the policy as it acted (models=[acting_policy])"
    FURTHER_TOKENS = "a policy that can go on after an action chunk's tokens (a token policy with decoding=causal)"
    OUTCOMES = "the outcome of every episode at its last chunk"
    CHANGES = "what every chunk changed in the observation (models=[changes])"
    BRANCHING_SCORES = "scores of action chunks by which episodes branch (models=[past_policy])"
    DEMONSTRATED = "the state of a demonstration after the first chunk (allocator=one_chunk)"
    DEMONSTRATIONS = (
        "demonstrated states as initial states (num_initial_states=N and a world with an expert and snapshots)"
    )


@dataclass(frozen=True)
class Mechanism:
    """One registry entry. path: "package.module:Name" of its slot's type; source: paper or project; needs:
    requirements; gives: requirements of other mechanisms that it satisfies; text: its docstring; options: with their
    defaults.
    """

    slot: Slot
    name: str
    path: str
    source: str = ""
    needs: frozenset[Need] = frozenset()
    gives: frozenset[Need] = frozenset()
    text: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def function(self) -> Callable[..., Any]:
        """The function or class itself; its module is imported on access."""
        target = _functions.get(self.path)
        return load_dotted(self.path, "Mechanism") if target is None else target

    def require_options(self, options: Iterable[str]) -> None:
        """Raise ConfigError, with the closest name, if the mechanism has no such option."""
        for option in options:
            if option not in self.options:
                raise ConfigError(
                    f"options.{self.name}.{option}: '{self.name}' has no such option."
                    f"{did_you_mean(option, self.options)}"
                )

    @property
    def measured(self) -> bool:
        """Whether a recipe or a benchmark uses the mechanism, or another package provides it; the others are in
        rl/experimental.
        """
        return not self.path.startswith(EXPERIMENTAL)

    @property
    def line(self) -> str:
        """First sentence of the mechanism's docstring."""
        return " ".join(self.text.split("\n\n")[0].split())


_registered: dict[tuple[Slot, str], Mechanism] = {}


def mechanism[F: Callable[..., Any]](
    slot: Slot, name: str, *, source: str = "", needs: tuple[Need, ...] = (), gives: tuple[Need, ...] = ()
) -> Callable[[F], F]:
    """Register a function (or a class, if it has state) in a slot; raises ValueError if the name is taken."""

    def register(function: F) -> F:
        entry = _described(slot, name, function, _path_of(function), source, frozenset(needs), frozenset(gives))
        existing = _ours().get((slot, name), _registered.get((slot, name)))
        if existing is not None and existing.path != entry.path:
            raise ValueError(f"Two mechanisms are named {slot.value} '{name}': {existing.path} and {entry.path}.")
        _registered[slot, name], _functions[entry.path] = entry, function
        return function

    return register


def mechanisms(slot: Slot | None = None) -> list[Mechanism]:
    """Return all mechanisms, or those of one slot, by slot and name."""
    order, entries = list(Slot), {**_installed(), **_registered, **_ours()}
    selection = [entry for entry in entries.values() if slot in (None, entry.slot)]
    return sorted(selection, key=lambda entry: (order.index(entry.slot), entry.name))


def get_mechanism(slot: Slot, name: str) -> Mechanism:
    """Return the mechanism with this name or import path; raises ConfigError with the closest name if there is none."""
    if is_dotted(name):
        return _at(slot, name)
    entries = {entry.name: entry for entry in mechanisms(slot)}
    if name not in entries:
        raise ConfigError(
            f"{slot.value}: there is no mechanism '{name}'.{did_you_mean(name, entries)} 'robopolicy algorithms' "
            "lists them; for a custom one pass its import path, package.module:name."
        )
    return entries[name]


def declared_at(path: str) -> list[Mechanism]:
    """Return the mechanism declarations at an import path, [] if there are none; raises ConfigError as
    `get_mechanism`.
    """
    function = load_dotted(path, "Mechanism")
    entries = {**_installed(), **_registered, **_ours()}.values()
    return [entry for entry in entries if callable(function) and entry.path == _path_of(function)]


def setting_for(slot: Slot, name: str) -> str:
    """Return the setting that selects a mechanism in its slot, a list if the slot takes several."""
    return f"{slot.value}=[{name}]" if slot in SEVERAL else f"{slot.value}={name}"


def bind_options(slot: Slot, name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the mechanism's function with bound options; a class is bound as well, not yet constructed.

    Raises ConfigError for an unknown name or option.
    """
    entry = get_mechanism(slot, name)
    entry.require_options(options or {})
    return partial(entry.function, **(options or {}))


def _described(
    slot: Slot,
    name: str,
    function: Callable[..., Any],
    path: str,
    source: str = "",
    needs: frozenset[Need] = frozenset(),
    gives: frozenset[Need] = frozenset(),
) -> Mechanism:
    parameters = inspect.signature(function).parameters.values()
    options = {item.name: item.default for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}
    return Mechanism(slot, name, path, source, needs, gives, inspect.getdoc(function) or "", options)


def _path_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', '')}"


@cache
def _ours() -> dict[tuple[Slot, str], Mechanism]:
    """Return the declarations in robopolicy's source files; raises ValueError for a duplicate name in a slot."""
    entries: dict[tuple[Slot, str], Mechanism] = {}
    for item in declared():
        entry = _entry(item)
        if (entry.slot, entry.name) in entries:
            raise ValueError(f"Two mechanisms are named {entry.slot.value} '{entry.name}'.")
        entries[entry.slot, entry.name] = entry
    return entries


@cache
def _installed() -> dict[tuple[Slot, str], Mechanism]:
    """Return the declarations in modules of other packages; a module without declarations in its source is imported.

    Modules that cannot be read cause a warning and are skipped, since this run may not need them.
    """
    by_slot: dict[tuple[Slot, str], Mechanism] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            entries = [_entry(item) for item in declared_in(point.module)]
            if not entries:
                load_dotted(point.value if point.attr else f"{point.module}:__name__", "Mechanism")
        except Exception as error:  # it is not our code: it may raise anything
            package = f"package {point.dist.name}" if point.dist else "an installed package"
            reason = error if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            warnings.warn(
                f"The mechanisms of {package} are not available (entry point {point.name} = {point.value}): {reason} "
                "Fix or uninstall the package.",
                RobopolicyWarning,
                stacklevel=2,
            )
        else:
            by_slot.update({(entry.slot, entry.name): entry for entry in entries})
    return by_slot


def _entry(item: Declared) -> Mechanism:
    needs, gives = (frozenset(Need[name] for name in names) for names in (item.needs, item.gives))
    return Mechanism(Slot[item.slot], item.name, item.path, item.source, needs, gives, item.text, item.options)


def _at(slot: Slot, path: str) -> Mechanism:
    """Return the declaration at an import path, or a plain function under its own name."""
    function = load_dotted(path, f"Mechanism for {slot.value}")
    if not callable(function):
        raise ConfigError(f"{slot.value}: '{path}' is {function!r}, which is not a function or class.")
    decorated = [entry for entry in {**_registered, **_ours()}.values() if entry.path == _path_of(function)]
    if decorated and slot not in {entry.slot for entry in decorated}:
        raise ConfigError(f"{slot.value}: '{path}' is a mechanism for the slot {decorated[0].slot.value}.")
    declaration = _described(slot, path.rpartition(":")[2].rpartition(".")[2], function, path)
    return next((entry for entry in decorated if entry.slot is slot), declaration)


def require(entries: list[Mechanism], have: frozenset[Need]) -> None:
    """Raise ConfigError naming the first mechanism whose needs this combination does not satisfy."""
    have = have.union(*(entry.gives for entry in entries))
    for entry in entries:
        for need in sorted(entry.needs - have, key=lambda item: item.name):
            raise ConfigError(
                f"{entry.slot.value}={entry.name} needs {need.value}, which this combination does not have."
            )


def unknown_option(option: str, value: str, known: Iterable[str]) -> ConfigError:
    """Build the error for an invalid `value` of a mechanism's `option` (mechanism.name), with the closest of
    `known`.
    """
    names = tuple(known)
    return ConfigError(f"options.{option}={value} is not known.{did_you_mean(value, names)}")


keep_former_names(__name__, {"written": "setting_for", "find": "get_mechanism", "choose": "bind_options"})
