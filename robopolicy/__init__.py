"""Fine-tune diffusion, flow and vision-language-action policies with RL, in simulators and learned world models.

Importing this package loads nothing heavy (it only chooses how to draw without a display and how threads wait); the ten
names below come from `robopolicy.library` when they are first used.
"""

from typing import TYPE_CHECKING, Any

from robopolicy.core.former_modules import keep_former_modules
from robopolicy.core.machine import configure_rendering, configure_thread_waiting

if TYPE_CHECKING:
    from robopolicy.library import (
        collect,
        evaluate,
        finetune,
        imagine,
        load_policy,
        make_world,
        rank,
        report,
        serve,
        train,
    )

__version__ = "0.2.0"
__all__ = [
    "collect",
    "evaluate",
    "finetune",
    "imagine",
    "load_policy",
    "make_world",
    "rank",
    "report",
    "serve",
    "train",
]

configure_rendering()
configure_thread_waiting()
keep_former_modules()


def __getattr__(name: str) -> Any:
    """Load one of the ten names."""
    if name in __all__:
        import robopolicy.library

        return getattr(robopolicy.library, name)
    raise AttributeError(f"module 'robopolicy' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the names for completion."""
    return [*globals(), *__all__]
