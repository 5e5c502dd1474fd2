"""The kinds of success heads, by name; the next one is one line here, an entry point, or a dotted path.

A success head is a `SuccessHead` (worldmodels.heads.success), a torch.nn.Module made as cls(inputs, width, depth).
"""

from collections.abc import Mapping
from typing import Any

from robopolicy.core.registry import Registry
from robopolicy.core.structured import from_plain

SETTING = "success_head"
"""The setting that names the head, in the configuration of every model that has one."""

SUCCESS_HEADS = Registry(
    "success head",
    "robopolicy.success_heads",
    {
        "contrastive": "worldmodels.heads.success:ContrastiveHead",
        "logistic": "worldmodels.heads.success:LogisticHead",
    },
)


def saved_configuration[Configuration](kind: type[Configuration], description: Mapping[str, Any]) -> Configuration:
    """Return the configuration that a checkpoint describes, if its success head may be imported.

    description: "config" holds plain values of `kind`; without a success head, from before there was a choice, the
    default is meant. Raises CheckpointError where the head neither ships with us nor is installed nor was named by the
    user, and what `from_plain` raises.
    """
    plain = description["config"]
    if SETTING in plain:
        SUCCESS_HEADS.load_saved(plain[SETTING], "its world model")
    return from_plain(kind, plain)
