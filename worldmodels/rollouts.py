"""Second stage of training an ensemble: every network learns through its own predictions of several steps.

A network that was trained on single steps from recorded states meets, in imagination, states that it has predicted
itself; its errors add up, and a bias that is too small to be seen in one step (a slow policy's push) decides episodes.
Here a network predicts up to `rollout_steps` steps from its own predictions under the recorded actions, and its errors
at all of them are minimised: overshooting (Hafner et al. 2019, arXiv:1811.04551) without samples, the form that
self-forcing (Huang et al. 2025, arXiv:2506.08009) takes in states and latents. It follows the training on single steps,
at a fifth of its learning rate: from scratch it is slower and worse.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.sequences import SequenceData
from robopolicy.core.vectors import StateVector
from robopolicy.nn.blocks import Members
from worldmodels.configuration import EnsembleConfig
from worldmodels.data import StateStructure

RATE = 0.2
"""Learning rate, as a fraction of that of single steps."""


class Dynamics(Protocol):
    """An ensemble of dynamics networks, as `EnsembleModel`: its parts that this training uses."""

    config: EnsembleConfig
    state_vector: StateVector
    dynamics: Members
    max_logvar: nn.Parameter
    min_logvar: nn.Parameter
    state_mean: Tensor
    delta_std: Tensor

    @property
    def structure(self) -> StateStructure:
        """Structure of the state's elements."""
        ...

    def predict(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return standardised mean and log-variance [M, N, F] of the change of the free elements beyond `responded`."""
        ...

    def remainder(self, state: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """Return that change [..., F], standardised, from states [..., S] to those after."""
        ...

    def advanced(self, state: Tensor, action: Tensor, remainder: Tensor) -> Tensor:
        """Return states [..., S] one step later."""
        ...

    def likelihood(self, mean: Tensor, logvar: Tensor, target: Tensor) -> Tensor:
        """Return the loss [N] of standardised changes [M, N, F]."""
        ...


class RolloutStage(nn.Module):
    """Fits the dynamics of `model` through their own predictions; a `Regression` that divides its batches itself.

    Rewards, success and, unless the model samples, the predicted variances are not trained.
    """

    learning_rate_scale = RATE

    def __init__(self, model: Dynamics):
        super().__init__()
        self.dynamics = model.dynamics
        if model.config.sample:
            self.max_logvar, self.min_logvar = model.max_logvar, model.min_logvar
        self._model = (model,)  # in a tuple, so that its heads are no parameters of this stage

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield batches indefinitely: states [M, N, T + 1, S], actions [M, N, T, A], both in the world's units, and
        valid [M, N, T] bool, for M members, N = half of config.batch_size and T drawn between half of
        config.rollout_steps and all of it; the only state is `generator`.

        Raises DataError when rewards, success or final frames are missing.
        """
        (model,) = self._model
        data, config = SequenceData(episodes, model.state_vector.keys), model.config
        rows, device = max(1, config.batch_size // 2), model.state_mean.device
        draw = {"generator": generator, "device": generator.device}
        while True:
            steps = int(torch.randint((config.rollout_steps + 1) // 2, config.rollout_steps + 1, (), **draw))
            first = torch.randint(len(data), (config.members * rows,), **draw).cpu()
            cut = data.cut(first, 0, steps)
            batch = {"states": model.state_vector.pack(cut.frames), "actions": cut.actions, "valid": cut.valid}
            yield {name: value.unflatten(0, (config.members, rows)).to(device) for name, value in batch.items()}

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"rollouts": [N]} for a batch of `batches`: the Huber loss of the free elements after 1 to T steps, in
        standard deviations of a step's change, summed over the steps of the episode and divided by T.

        A model that samples adds {"likelihood": [N]}, the `EnsembleModel.loss` of the first step.
        """
        (model,) = self._model
        states, actions = batch["states"], batch["actions"]
        structure, steps = model.structure, actions.shape[-2]
        state, losses = states[..., 0, :], dict[str, Tensor]()
        total = torch.zeros(states.shape[:2], device=states.device)
        for step in range(steps):
            mean, logvar = model.predict(state, actions[..., step, :])
            if step == 0 and model.config.sample:
                target = model.remainder(state, actions[..., 0, :], states[..., 1, :])
                losses["likelihood"] = model.likelihood(mean, logvar, target)
            state = model.advanced(state, actions[..., step, :], mean)
            error = (state - states[..., step + 1, :])[..., structure.free] / model.delta_std
            each = functional.huber_loss(error, torch.zeros_like(error), reduction="none").mean(-1)
            total = total + torch.where(batch["valid"][..., step], each, 0.0)
        return {"rollouts": (total / steps).mean(0), **losses}

    def rows(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of rows N of a batch, valid [M, N, T]."""
        return batch["valid"].shape[1]

    def divided(self, batch: Mapping[str, Tensor], own: slice) -> dict[str, Tensor]:
        """Return the rows `own` of a batch: n of N, in tensors [M, n, ...]."""
        return {name: value[:, own] for name, value in batch.items()}
