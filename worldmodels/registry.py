"""The kinds of world models, by name; the next one is one line here, an entry point, or a dotted path.

The class of a kind is a `LearnedModel` (worldmodels.protocol) with `build(config, spec, episodes, seed)`, which returns
an untrained one, and `restore(description, spec, weights)`, which rebuilds what `description()` describes.
"""

from robopolicy.core.registry import Kinds

WORLD_MODELS = Kinds(
    "world model",
    "robopolicy.worldmodels",
    {
        "ensemble": "worldmodels.configuration:EnsembleConfig",
        "latent_ensemble": "worldmodels.configuration:LatentEnsembleConfig",
        "rssm": "worldmodels.rssm.configuration:RssmConfig",
        "pixel_diffusion": "worldmodels.pixel_diffusion.configuration:PixelDiffusionConfig",
        "video": "worldmodels.video.configuration:VideoConfig",
    },
)
