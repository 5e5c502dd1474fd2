"""The kinds of world models and of success heads, by name; the next is a line here, an entry point, or a dotted path.

The class of a kind is a `LearnedModel` (worldmodels.protocol) with `build(config, spec, episodes, seed)`, which returns
an untrained one, and `restore(description, spec, weights)`, which rebuilds what `description()` describes.
A success head is a `SuccessHead` (worldmodels.heads.success), a torch.nn.Module made as cls(inputs, width, depth).
"""

from collections.abc import Mapping
from typing import Any

from robopolicy.core.registry import Kinds, Registry
from robopolicy.core.structured import from_plain

WORLD_MODELS = Kinds(
    "world model",
    "robopolicy.worldmodels",
    {
        "ensemble": "worldmodels.configuration:EnsembleConfig",
        "latent_ensemble": "worldmodels.configuration:LatentEnsembleConfig",
        "rssm": "worldmodels.configuration:RssmConfig",
        "pixel_diffusion": "worldmodels.configuration:PixelDiffusionConfig",
        "video": "worldmodels.configuration:VideoConfig",
    },
)


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
