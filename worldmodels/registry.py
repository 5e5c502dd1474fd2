"""Registry of world model kinds and success heads; extend it by a line here, an entry point, or an import path.

The class of a kind is a `LearnedModel` (worldmodels.protocol) with `build(config, spec, episodes, seed)`, which returns
an untrained model, and `restore(description, spec, weights)`, which rebuilds the model from `description()`. A success
head is a `SuccessHead` (worldmodels.heads.success), a torch.nn.Module constructed as cls(inputs, width, depth).
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
"""Name of the setting that selects the success head, in the configuration of every model that has one."""

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

    description: "config" contains plain values of `kind`; a description without a success head means the default.
    Raises CheckpointError when the head is not built in, not installed and was not named by the user, and the errors of
    `from_plain`.
    """
    configuration = description["config"]
    if SETTING in configuration:
        SUCCESS_HEADS.load_saved(configuration[SETTING], "its world model")
    return from_plain(kind, configuration)
