"""Regression loop shared by policies (BC), world models, critics and heads.

Models may be fitted in stages, for example an autoencoder first and then the predictor of its latents.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core import replicas
from robopolicy.core.episodes import Episodes
from robopolicy.core.exchange import add_gradients, broadcast, divided, require_equal
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators
from robopolicy.core.regression import Regressor, ScalesLearningRate, Staged
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import current, to_plain
from robopolicy.nn.configuration import LearningPrecision
from robopolicy.nn.micro_batches import micro_batches, take
from robopolicy.nn.optimisers import (
    clip_gradients,
    make_optimiser,
    optimiser_tree,
    require_finite,
    restore_optimiser,
    set_learning_rate,
)
from robopolicy.nn.precision import backward_precision, training_precision
from robopolicy.training.configuration import FitConfig
from robopolicy.training.state import load_trainer, require_same_config, save_trainer


@dataclass(frozen=True)
class FitResult:
    """Total steps done; last logged mean of each loss."""

    steps: int
    losses: Mapping[str, float]


def learning_rate_at(step: int, config: FitConfig) -> float:
    """Return the learning rate of update number `step` (from 0): linear warm-up, then cosine (Loshchilov and Hutter
    2017).
    """
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    # The rate of the last step is a little above the final one: the cosine ends at step `steps`, which is never taken.
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * cosine)


def ema_decay_at(step: int, config: FitConfig) -> float:
    """Return the EMA decay after update number `step`: min(decay, 1 - (1 + step)^-power), 0 at first.

    The EMA warm-up of Diffusion Policy and diffusers, which forgets the random initialisation.
    """
    return min(config.ema_decay, 1 - (1 + step) ** -config.ema_power)


def fit(
    model: Regressor,
    batches: Iterator[Any],
    config: FitConfig,
    generators: Generators,
    *,
    run: RunFolder | None = None,
    label: str = "train",
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    precision: LearningPrecision = "fp32",
    micro_batch: int = 0,
) -> FitResult:
    """Minimise `model.loss` over `batches`; at the end the model has the moving average (EMA) of its weights.

    model: on its final device. batches: iterator whose only state is in `generators`, so a killed run resumes
    bit-identically. run: target of metrics and the resume point; None saves nothing. evaluate: called at every log step
    with the EMA weights; its metrics are logged. precision: of the loss computation; evaluations use fp32. micro_batch:
    rows per gradient computation, 0 for the whole batch; a batch then contains [N, ...] by name, including `actions`.
    Raises NonFiniteError naming the step of a non-finite loss or gradient.
    """
    return _Fit(model, config, generators, run, precision, micro_batch).run(batches, label, evaluate)


class _Fit:
    """The state of one regression run."""

    def __init__(
        self,
        model: Regressor,
        config: FitConfig,
        generators: Generators,
        run: RunFolder | None,
        precision: LearningPrecision,
        micro_batch: int,
    ):
        self.model = model
        self.config = config
        self.generators = generators
        self.run_folder = run if replicas.leads() else None
        self.precision: LearningPrecision = precision
        self.micro_batch = micro_batch
        # Taken once: the order names the moving averages in resume points.
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rate, decay = config.learning_rate, config.weight_decay
        self.optimiser = make_optimiser(config.optimiser, self.parameters, rate, decay)
        # In fp32 whatever the weights are: an average in bfloat16 stays where it is.
        self.average = [parameter.detach().to(torch.float32, copy=True) for parameter in self.parameters]
        self.aside: list[Tensor] | None = None
        self.step = 0
        self.losses: dict[str, float] = {}
        self.history: list[dict[str, Tensor]] = []
        self._resume(run)

    def run(self, batches: Iterator[Any], label: str, evaluate: Callable[[], Mapping[str, float]] | None) -> FitResult:
        self.model.train()
        with progress(label, self.config.steps) as advance:
            advance(self.step)
            for _ in range(self.step, self.config.steps):
                self.history.append(self._update(next(batches)))
                done = self.step == self.config.steps
                if self.step % self.config.log_every == 0 or done:
                    self._log(evaluate)
                advance(note=" ".join(f"{name} {value:.4g}" for name, value in self.losses.items()))
                # After the log line, so that a resumed run neither repeats nor loses it.
                if self.step % self.config.checkpoint_every == 0 or done:
                    self._save()
        # The average is what is kept of the run; an evaluation above has put the raw weights back.
        self._exchange()
        self.model.eval()
        return FitResult(self.step, self.losses)

    def _update(self, batch: Any) -> dict[str, Tensor]:
        place = f"training step {self.step}"
        self.optimiser.zero_grad(set_to_none=True)
        means: dict[str, Tensor] = {}
        for piece, fraction in self._pieces(batch):
            part, rows = divided(piece, self.model)
            share = fraction * part.share
            with training_precision(self.precision), part.drawing():
                losses = self.model.loss(rows, part.noise(self.generators["loss"]))
            # Each piece counts by its share of the rows, so the summed gradients are those of the whole batch's mean.
            parts = {name: share * value.mean() for name, value in losses.items()}
            with backward_precision(self.precision):
                torch.stack(list(parts.values())).sum().backward()
            means = {name: means.get(name, 0.0) + value.detach() for name, value in parts.items()}
        means = dict(zip(means, add_gradients(self.parameters, means.values()), strict=True))
        require_finite("the loss", torch.stack(list(means.values())).sum(), place)
        clip_gradients(self.parameters, self.config.gradient_clip, place)
        set_learning_rate(self.optimiser, learning_rate_at(self.step, self.config))
        self.optimiser.step()
        with torch.no_grad():
            # By hand beside torch's swa_utils and lr_scheduler: a rate and a decay that depend on the step alone,
            # and plain tensors for the average, are what makes a resumed run end bit for bit in the same place.
            weight = 1 - ema_decay_at(self.step, self.config)
            for average, parameter in zip(self.average, self.parameters, strict=True):
                average.lerp_(parameter.to(average.dtype), weight)
        self.step += 1
        return means

    def _pieces(self, batch: Any) -> list[tuple[Any, float]]:
        """Return the micro-batches and each one's fraction of the batch."""
        if not self.micro_batch:
            return [(batch, 1.0)]
        rows = len(batch["actions"])
        parts = [take(batch, part) for part in micro_batches(rows, self.micro_batch)]
        return [(part, len(part["actions"]) / rows) for part in parts]

    def _log(self, evaluate: Callable[[], Mapping[str, float]] | None) -> None:
        """Log the mean losses of the steps since the last line."""
        self.losses = {name: float(values.mean()) for name, values in self._history().items()}
        self.history = []
        extra: dict[str, float] = {}
        if evaluate is not None:
            self._exchange()
            self.model.eval()
            extra = self._evaluated(evaluate)
            self.model.train()
            self._exchange()
        require_equal([*self.model.state_dict().values(), *self.average], "weights", f"training step {self.step}")
        if self.run_folder is not None:
            rate = learning_rate_at(self.step - 1, self.config)
            self.run_folder.log({"step": self.step, "learning_rate": rate, **self.losses, **extra})

    def _evaluated(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return the metrics of an evaluation, which the leader of a data-parallel run makes."""
        result = broadcast(lambda: {"metrics": dict(evaluate()), "generators": self.generators.state()})
        self.generators.restore(result["generators"])
        return dict(result["metrics"])

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the weights with their moving average; a second call swaps back."""
        # The raw weights set aside double as the sign of which of the two is in place.
        swapped_out = None if self.aside else [parameter.clone() for parameter in self.parameters]
        for parameter, value in zip(self.parameters, self.aside or self.average, strict=True):
            parameter.copy_(value)
        self.aside = swapped_out

    def _save(self) -> None:
        if self.run_folder is None:
            return
        tree = {
            "step": self.step,
            "config": to_plain(self.config),
            "losses": self.losses,
            "history": self._history(),
            "model": self.model.state_dict(),
            "average": {str(number): value for number, value in enumerate(self.average)},
            "optimiser": optimiser_tree(self.optimiser),
            "generators": self.generators.state(),
        }
        save_trainer(self.run_folder.resume_point, tree)

    def _history(self) -> dict[str, Tensor]:
        """Return the losses of the steps since the last log line, name -> [n]."""
        return {name: torch.stack([row[name].cpu() for row in self.history]) for name in (self.history or [{}])[0]}

    def _resume(self, run: RunFolder | None) -> None:
        if run is None:
            return
        tree = broadcast(lambda: load_trainer(run.resume_point))
        if tree is None:  # killed before its first checkpoint, a run begins anew, and so do its metrics
            self._rewind(0)
            return
        saved_config = current(type(self.config), tree["config"], "fit")
        require_same_config(saved_config, to_plain(self.config), may_change=("log_every", "checkpoint_every"))
        self.step, self.losses = tree["step"], tree["losses"]
        self.model.load_state_dict(tree["model"])
        for number, average in enumerate(self.average):
            average.copy_(tree["average"][str(number)])
        # After the weights: the generators come last, when nothing draws from them any more.
        restore_optimiser(self.optimiser, tree["optimiser"])
        self.generators.restore(tree["generators"])
        rows = zip(*tree.get("history", {}).values(), strict=True)
        self.history = [dict(zip(tree["history"], values, strict=True)) for values in rows]
        self._rewind(self.step)

    def _rewind(self, step: int) -> None:
        if self.run_folder is not None:
            self.run_folder.rewind("step", step)


def fit_stages(
    model: Staged, episodes: Episodes, config: FitConfig, generators: Generators, folder: RunFolder | None = None
) -> list[FitResult]:
    """Fit every stage of a model on `episodes`, each for its fraction of the steps.

    folder: the last stage saves metrics and resume point there, earlier stages in subfolders with their names.
    """
    stages, results = model.stages(), []
    for place, (name, (part, share)) in enumerate(stages.items(), 1):
        run = folder if folder is None or place == len(stages) else RunFolder(folder.path / name)
        batches = part.batches(episodes, generators[f"{name} batches"])
        rate = config.learning_rate * (part.learning_rate_scale if isinstance(part, ScalesLearningRate) else 1.0)
        settings = replace(config, steps=max(1, round(share * config.steps)), learning_rate=rate)
        results.append(fit(part, batches, settings, generators, run=run, label=name))
    return results
