"""Experimental sampler that predicts success from the first observation of an initial state, also of new ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.rl.in_context_value import load_value_model
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option

STEPS, WIDTH = 300, 32
"""Training steps and units of the network, which is fitted afresh to the results of recent rounds."""


def kernel_rates(known: Array, successes: Array, episodes: Array, wanted: Array, prior: float) -> Array:
    """Return (a / 2 + sum_i K s_i) / (a + sum_i K n_i), the success rates [m] at `wanted` [m, D].

    K = exp(-d^2 / 2) of the distances to the n points known [n, D] with s_i successes in n_i episodes; a: prior.
    """
    near = np.exp(-0.5 * np.square(wanted[:, None] - known[None]).sum(-1))
    return (prior / 2 + near @ successes) / (prior + near @ episodes)


def network_rates(known: Array, successes: Array, episodes: Array, wanted: Array) -> Array:
    """Return the success rates [m] at `wanted` [m, D] of a network fitted to the rates s_i / n_i at n points [n, D]."""
    inputs, points = (torch.as_tensor(each, dtype=torch.float32) for each in (known, wanted))
    rates = torch.as_tensor(successes / episodes, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        first, last = nn.Linear(inputs.shape[1], WIDTH), nn.Linear(WIDTH, 1)
    network = nn.Sequential(first, nn.Mish(), last, nn.Sigmoid())
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.01)
    with torch.enable_grad():
        for _ in range(STEPS):
            optimiser.zero_grad()
            functional.mse_loss(network(inputs)[:, 0], rates).backward()  # pyright: ignore[reportUnknownMemberType]
            optimiser.step()  # pyright: ignore[reportUnknownMemberType]
    with torch.no_grad():
        return network(points)[:, 0].double().numpy()


@mechanism(Slot.SAMPLER, "value", source="PCL, arXiv:2510.01135; V0, arXiv:2602.03584", needs=(Need.VECTORS,))
class ValueSampler:
    """Look at several times as many initial states as are needed, and play those whose predicted success is nearest to
    `target`.

    The prediction is a function of the first observation (vector fields and the instruction), so it holds for initial
    states that were never played. predictor: network (PCL), fitted to the mean outcomes of the last `rounds` rounds;
    kernel, (a / 2 + sum K s) / (a + sum K n) with K = exp(-d^2 / 2) over observations in units of `bandwidth` standard
    deviations and a = prior, which needs no fitting; or context (V0), the checkpoint `model` of a value model that
    reads the results in its context and was trained on other policies (`robopolicy route`). candidates: initial states
    looked at per one that is played. Deviation: PCL updates one network in each iteration. look: (index [n]) -> first
    observations [n, D], set by the collector. Raises ConfigError for an unknown predictor, and for context without a
    model.
    """

    def __init__(
        self,
        *,
        predictor: str = "network",
        target: float = 0.5,
        candidates: int = 4,
        rounds: int = 20,
        prior: float = 1.0,
        bandwidth: float = 1.0,
        model: str = "",
    ):
        predictors = "network", "kernel", "context"
        if predictor not in predictors:
            raise unknown_option("value.predictor", predictor, predictors)
        if (predictor == "context") != bool(model):
            raise ConfigError(
                "options.value.predictor=context and options.value.model=CHECKPOINT belong together: robopolicy route "
                "trains such a model."
            )
        self.model = load_value_model(model) if model else None
        self.predictor, self.target = predictor, target
        self.candidates, self.rounds = candidates, rounds
        self.prior, self.bandwidth = prior, bandwidth
        self.look: Callable[[Array], Array] | None = None
        self.seen: dict[int, list[float]] = {}
        self.results: list[list[list[float]]] = []

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` initial states [n] nearest to the target among the candidates."""
        order = generator.permutation(pool)[: self.candidates * count]
        new = np.array([number for number in order.tolist() if number not in self.seen], dtype=int)
        if self.look is not None and len(new):
            self.seen |= dict(zip(new.tolist(), self.look(new).tolist(), strict=True))
        return order[np.argsort(np.abs(self.predict(order) - self.target), kind="stable")[:count]]

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Add the results of a round, each [n]; those of the oldest round are forgotten."""
        self.results.append(np.stack([index, successes, episodes], 1).astype(float).tolist())
        self.results = self.results[-self.rounds :]

    def predict(self, index: Array) -> Array:
        """Return the predicted success rates [n]; 1/2 for initial states that were not seen, or before any result."""
        rates = np.full(len(index), 0.5)
        recent_results = [result for part in self.results for result in part if int(result[0]) in self.seen]
        places = [place for place, number in enumerate(index.tolist()) if number in self.seen]
        if not recent_results or not places:
            return rates
        numbers, successes, episodes = np.array(recent_results).T
        if self.model is not None:
            context = np.array([self.seen[int(number)] for number in numbers])
            wanted = np.array([self.seen[int(number)] for number in index[places]])
            rates[places] = self.model.predict(context, successes, episodes, wanted)
            return rates
        all_points = np.array(list(self.seen.values()))
        scale = self.bandwidth * all_points.std(0) + 1e-6
        known_points, points = (
            np.array([self.seen[int(number)] for number in part]) / scale for part in (numbers, index[places])
        )
        if self.predictor == "kernel":
            rates[places] = kernel_rates(known_points, successes, episodes, points, self.prior)
        else:
            middle = known_points.mean(0)
            rates[places] = network_rates(known_points - middle, successes, episodes, points - middle)
        return rates

    def state(self) -> dict[str, Any]:
        """Return the first observations and the results so far."""
        return {"seen": {str(number): value for number, value in self.seen.items()}, "results": self.results}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the first observations and the results."""
        self.seen = {int(number): list(value) for number, value in state["seen"].items()}
        self.results = state["results"]
