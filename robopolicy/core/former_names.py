"""Former names: public names that were renamed work for one more release, with a warning that says the new name.

A module ends with a table of its own:

    keep_former_names(__name__, {"ask_for": "import_plugins"})

`from module import ask_for` and `module.ask_for` then return `import_plugins`. A class keeps a former name of a member
by `share = FormerName("progress")`. The tables of one release are removed in the next.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import Any


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


def _note(former: str, present: str) -> str:
    return f"{former} is now called {present}. The former name works until the next minor version."
