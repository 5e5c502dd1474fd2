"""Things of the user's own, named in a configuration by their dotted path: "package.module:name"."""

import importlib
import os
import sys
from typing import Any

from robopolicy.core.errors import ConfigError, did_you_mean


def add_working_folder() -> None:
    """Let imports find modules in the working folder, as they do under `python -m`."""
    folder = os.getcwd()  # noqa: PTH109 (sys.path holds text)
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def load_dotted(path: str, what: str) -> Any:
    """Return the object at `path`, "package.module:name"; `what` says in errors what it is for.

    Raises ConfigError on a malformed path, a module that cannot be imported, or a name it lacks.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name or ":" in name:
        raise ConfigError(f"{what} '{path}' is not a dotted path: write package.module:name.")
    add_working_folder()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise ConfigError(f"{what} '{path}': importing {module_name} failed: {error}.") from error
        raise ConfigError(
            f"{what} '{path}': there is no module '{error.name}'. It must be installed, or lie in the working folder "
            f"({os.getcwd()})."  # noqa: PTH109
        ) from error
    except Exception as error:
        raise ConfigError(f"{what} '{path}': importing {module_name} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{what} '{path}': the module has no '{name}'.{did_you_mean(name, public)}")
    return getattr(module, name)
