"""Success of any policy from an initial state, predicted from other results of that policy: V0, arXiv:2602.03584.

The model reads pairs (initial state, outcome) of one policy, its context, and predicts the success rate of this policy
from other initial states, without being fitted to it. It is trained on many policies: synthetic ones, whose success
rates are random functions of the initial state, and measured ones if there are any. `sampler=value` takes it as
predictor (budgets by allocators), and `robopolicy route` sends each initial state to the policy that is most likely to
succeed. The paper reads instructions with a language model and tunes what TabPFN, a transformer that was trained on
synthetic tables, gets to read; here initial states are vectors, and the transformer itself is small and trained for
one world. Axes: B policy, n result in the context, m initial state to predict, D element of an initial state.
"""

import math
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.arrays import Array
from robopolicy.core.checkpoints import Checkpoint, read_weights, require_format, restoring, write_checkpoint
from robopolicy.core.errors import CheckpointError, ConfigError

KIND = "in_context_value"
"""Kind name in checkpoints."""
CONTEXT = 256
"""Largest number of results in a context, as in the authors' script."""
PAIRS = 0.25
"""Weight of the pairwise loss, as in the authors' script."""


class ContextLayer(nn.Module):
    """Attention of results and queries to the results, then an MLP, each on normalised inputs and added to them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * width)
        self.hidden = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, results: int, mask: Tensor) -> Tensor:
        """Return tokens [B, n + m, W], all attending to the first n = `results` where mask [B, n] is True."""
        normal = self.before(tokens)
        split = "b k (h d) -> b h k d"
        keys, values = (
            rearrange(part, split, h=self.heads) for part in self.keys_values(normal[:, :results]).chunk(2, -1)
        )
        query = rearrange(self.query(normal), split, h=self.heads)
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None, None])
        tokens = tokens + self.out(rearrange(mixed, "b h k d -> b k (h d)"))
        return tokens + self.hidden(self.between(tokens))


class InContextValue(nn.Module):
    """Set transformer from results of one policy and initial states to its success rates there.

    Results have no order, and initial states do not read each other. dimension: D; width, depth, heads: its size.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, dimension: int, width: int = 48, depth: int = 3, heads: int = 4):
        super().__init__()
        self.sizes = {"dimension": dimension, "width": width, "depth": depth, "heads": heads}
        self.register_buffer("mean", torch.zeros(dimension))
        self.register_buffer("scale", torch.ones(dimension))
        self.start = nn.Sequential(nn.Linear(dimension, width), nn.GELU(), nn.Linear(width, width))
        self.outcome = nn.Linear(2, width)
        # Attended to by all, so that a policy without any result has a prediction as well.
        self.first, self.asked = nn.Parameter(0.02 * torch.randn(width)), nn.Parameter(0.02 * torch.randn(width))
        self.layers = nn.ModuleList([ContextLayer(width, heads) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, context: Tensor, successes: Tensor, episodes: Tensor, starts: Tensor) -> Tensor:
        """Return logits [B, m] of the success rates from `starts` [B, m, D].

        context: initial states [B, n, D] with `successes` out of `episodes` [B, n]; results of 0 episodes are padding.
        """
        rates = successes / episodes.clamp(min=1)
        outcome = self.outcome(torch.stack([2 * rates - 1, episodes.clamp(min=1).log2() / 4], -1))
        results = self.start((context - self.mean) / self.scale) + outcome
        queries = self.start((starts - self.mean) / self.scale) + self.asked
        tokens = torch.cat([self.first.expand(len(context), 1, -1), results, queries], 1)
        mask = functional.pad(episodes > 0, (1, 0), value=True)
        for layer in self.layers:
            tokens = layer(tokens, mask.shape[1], mask)
        return self.head(tokens[:, mask.shape[1] :]).squeeze(-1)

    @torch.no_grad()
    def predict(self, context: Array, successes: Array, episodes: Array, starts: Array) -> Array:
        """Return a policy's success rates [m] from `starts` [m, D], given its results [n, D], [n], [n]; the last
        `CONTEXT` are read. Raises ConfigError for initial states of another dimension.
        """
        dimension = self.sizes["dimension"]
        if starts.shape[1] != dimension:
            raise ConfigError(
                f"The value model reads initial states of {dimension} numbers, but here they have {starts.shape[1]}: "
                "train one in this world with robopolicy route."
            )
        recent = (context[-CONTEXT:], successes[-CONTEXT:], episodes[-CONTEXT:], starts)
        inputs = (torch.as_tensor(each, dtype=torch.float32)[None] for each in recent)
        return self(*inputs)[0].sigmoid().double().numpy()

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors atomically."""
        write_checkpoint(folder, {"kind": KIND, "sizes": self.sizes}, self)


def load_value_model(folder: Path | str) -> InContextValue:
    """Load what `InContextValue.save` wrote; raises CheckpointError for anything else."""
    opened = Checkpoint.open(folder)
    path, description = opened.folder, opened.description
    if description.get("kind") != KIND:
        raise CheckpointError(f"{folder} contains '{description.get('kind')}', not a value model of robopolicy route.")
    require_format(path, description)
    with restoring(path, "a value model"):
        model = InContextValue(**description["sizes"])
    return read_weights(model, path).eval()


def value_loss(logits: Tensor, rates: Tensor, pairs: float = PAIRS) -> Tensor:
    """Return (1 - pairs) times the cross-entropy of success rates [B, m], plus `pairs` times -log sigmoid(z_i - z_j).

    The second is the mean over all pairs of one policy's initial states with rates from 1/2 on (i) and below (j), 0
    without any; the authors draw each initial state into pairs, as often as the rarer kind needs.
    """
    entropy = functional.binary_cross_entropy_with_logits(logits, rates)
    better = (rates[:, :, None] >= 0.5) & (rates[:, None, :] < 0.5)
    margins = (logits[:, :, None] - logits[:, None, :])[better]
    ranked = functional.softplus(-margins).mean() if len(margins) else logits.sum() * 0.0
    return (1 - pairs) * entropy + pairs * ranked


def success_curves(starts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return success rates [count, N] of synthetic policies from standardised initial states [N, D].

    Rate = sigmoid(a g + b), with a and b drawn per policy, and g a standardised mixture of a direction, the distance to
    a point, and a random network, of a random half of the elements.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dimension = starts.shape[1]
    relevant = (torch.rand((count, 1, dimension), generator=generator) < 0.5).float()
    relevant[torch.arange(count), 0, torch.randint(dimension, (count,), generator=generator)] = 1.0
    inputs = starts * relevant / relevant.sum(-1, keepdim=True).sqrt()
    line = (inputs @ normal(count, dimension, 1)).squeeze(-1)
    place = normal(count, 1, dimension) * relevant / relevant.sum(-1, keepdim=True).sqrt()
    distance = (inputs - place).square().sum(-1).sqrt()
    network = ((2 * inputs @ normal(count, dimension, 16) + normal(count, 1, 16)).tanh() @ normal(count, 16, 1))[..., 0]
    parts = torch.stack([line, -distance, network])
    parts = (parts - parts.mean(-1, keepdim=True)) / (parts.std(-1, keepdim=True) + 1e-6)
    mixture = (torch.rand((3, count, 1), generator=generator).clamp(min=1e-3).log().neg() * parts).sum(0)
    mixture = (mixture - mixture.mean(-1, keepdim=True)) / (mixture.std(-1, keepdim=True) + 1e-6)
    return ((normal(count, 1) + 0.5).exp() * mixture + 1.5 * normal(count, 1)).sigmoid()


def train_value_model(
    starts: Array,
    outcomes: Array | None = None,
    *,
    steps: int = 1500,
    batch: int = 32,
    context: int = 64,
    queries: int = 24,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> InContextValue:
    """Return a model trained on policies that play from initial states [N, D] of a world.

    outcomes: success of measured policies from all of them, [K, N] bool; half of each batch are these, the others are
    synthetic (`success_curves`). A policy's context has up to `context` results of 1 to 16 episodes each (of measured
    policies of one), and its outcomes from `queries` others are the target. Deterministic by seed.
    """
    draws = torch.Generator().manual_seed(seed)
    points = torch.as_tensor(starts, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        model = InContextValue(points.shape[1])
    deviation = points.std(0)
    model.mean.copy_(points.mean(0))
    model.scale.copy_(torch.where(deviation > 1e-6, deviation, 1.0))
    standard = (points - model.mean) / model.scale
    results = None if outcomes is None else torch.as_tensor(outcomes, dtype=torch.float32)
    context = min(context, len(points) // 2)
    queries = min(queries, len(points) - context)
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    with torch.enable_grad():
        for step in range(steps):
            rows = torch.stack(
                [torch.randperm(len(points), generator=draws)[: context + queries] for _ in range(batch)]
            )
            rates = success_curves(standard, batch, draws)
            episodes = 2.0 ** torch.randint(5, (batch, 1), generator=draws).expand(-1, context + queries)
            if results is not None:
                policies = torch.randint(len(results), (batch // 2,), generator=draws)
                rates = torch.cat([results[policies], rates[len(policies) :]])
                episodes = torch.cat([torch.ones_like(episodes[: len(policies)]), episodes[len(policies) :]])
            successes = torch.binomial(episodes, rates.gather(1, rows), generator=draws)
            size = torch.randint(context + 1, (batch, 1), generator=draws)
            read = torch.where(torch.arange(context) < size, episodes[:, :context], 0.0)
            logits = model(points[rows[:, :context]], successes[:, :context], read, points[rows[:, context:]])
            rate = learning_rate * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimiser.param_groups[0]["lr"] = rate
            optimiser.zero_grad()
            value_loss(logits, (successes / episodes)[:, context:]).backward()  # pyright: ignore[reportUnknownMemberType]
            optimiser.step()  # pyright: ignore[reportUnknownMemberType]
    return model.eval()


def routes(success: Array, costs: Array) -> Array:
    """Return the policy of each initial state, [m]: the largest predicted success [K, m] minus cost [K], ties to the
    first. costs: in units of success.
    """
    return np.argmax(success - costs[:, None], 0)


def brier_score(predicted: Array, outcomes: Array) -> float:
    """Return the mean squared difference between predicted success [...] and outcomes of 0 and 1 [...]."""
    return float(np.square(predicted - outcomes.astype(float)).mean())
