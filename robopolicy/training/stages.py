"""Models that are fitted in stages: an autoencoder first, say, then what predicts its latents."""

from dataclasses import replace

from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import Generators
from robopolicy.core.regression import Staged
from robopolicy.core.run import RunFolder
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import FitResult, fit


def fit_stages(
    model: Staged, episodes: Episodes, config: FitConfig, generators: Generators, folder: RunFolder | None = None
) -> list[FitResult]:
    """Fit every stage of a model on `episodes`, each for its share of the steps.

    folder: the last stage keeps metrics and resume point there, earlier ones in a folder of their name inside it.
    """
    stages, results = model.stages(), []
    for place, (name, (part, share)) in enumerate(stages.items(), 1):
        run = folder if folder is None or place == len(stages) else RunFolder(folder.path / name)
        batches = part.batches(episodes, generators[f"{name} batches"])
        steps = max(1, round(share * config.steps))
        results.append(fit(part, batches, replace(config, steps=steps), generators, run=run, label=name))
    return results
