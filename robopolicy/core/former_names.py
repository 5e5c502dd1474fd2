"""Former names: public names that were renamed work for one more release, with a warning that says the new name.

A module ends with a table of its own:

    keep_former_names(__name__, {"ask_for": "import_plugins"})

`from module import ask_for` and `module.ask_for` then return `import_plugins`. A class keeps a former name of a member
by `share = FormerName("progress")`, and a function or constructor keeps former names of its arguments by

    @accept_former_arguments({"oversight": "stopping"})

The tables of one release are removed in the next.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast


def keep_former_names(module: str, names: Mapping[str, str]) -> None:
    """Let `module` return its public names also under their former `names`, former name -> present name.

    Each use of a former name issues a DeprecationWarning; any other unknown name raises AttributeError. Type checkers
    do not accept former names, because the module's `__getattr__` is set at run time.
    """

    def look_up(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        warnings.warn(_note(f"{module}.{name}", names[name]), DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    sys.modules[module].__dict__["__getattr__"] = look_up


class FormerName:
    """Class attribute that returns the member called `present` under its former name, with a DeprecationWarning."""

    def __init__(self, present: str):
        self.present = present

    def __set_name__(self, owner: type, name: str) -> None:
        self.former = name

    def __get__(self, instance: Any, owner: type) -> Any:
        warnings.warn(_note(f"{owner.__name__}.{self.former}", self.present), DeprecationWarning, stacklevel=2)
        return getattr(owner if instance is None else instance, self.present)


def accept_former_arguments[**P, R](names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let the decorated function accept keyword arguments under their former `names`, former name -> present name.

    Each former name issues a DeprecationWarning. Raises TypeError if an argument is passed under both names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(Any, function)(*args, **with_present_arguments(function.__qualname__, names, kwargs))

        return call

    return decorate


def with_present_arguments(function: str, names: Mapping[str, str], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword `arguments` of a call of `function` under their present names; raises TypeError if an argument
    is given under both.
    """
    if names.keys().isdisjoint(arguments):
        return arguments
    result = dict(arguments)
    for former in names.keys() & arguments.keys():
        if names[former] in result:
            raise TypeError(f"{function}: '{former}' is the former name of '{names[former]}', and both are given")
        warnings.warn(_note(f"{function}({former}=)", names[former]), DeprecationWarning, stacklevel=3)
        result[names[former]] = result.pop(former)
    return result


def _note(former: str, present: str) -> str:
    return f"{former} is now called {present}. The former name works until the next minor version."
