"""Cached blocks: plans are executed as a slow reference executes them; extrapolation and the first block by hand."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.inference.caching import CachedSteps, CachePlan, FirstBlockCaching
from robopolicy.nn.branches import Caching, Memory
from robopolicy.nn.configuration import DenoiserKind
from robopolicy.nn.denoisers import Denoiser, make_denoiser
from robopolicy.policies.network import SharedSteps

P, A, D, K = 4, 3, 5, 6
Kept = dict[int, Tensor]
PLAN = CachePlan(("a", "b"), ((True, False, True, False), (True, False, False, False)), "uniform", 2, 1)


def _make(kind: DenoiserKind) -> Denoiser:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_denoiser(kind, P, A, D, width=16, depth=3 if kind is DenoiserKind.UNET else 4, heads=4)


def _random_plan(blocks: tuple[str, ...], seed: int) -> CachePlan:
    """Of odd seeds, one mask for all blocks."""
    updates = torch.rand(len(blocks), K, generator=torch.Generator().manual_seed(seed)) < 0.4
    updates[:, 0] = True
    if seed % 2:
        updates[:] = updates[0].clone()
    return CachePlan.of(blocks, updates)


def _chain(predict: Callable[[Tensor, int], Tensor], rows: int) -> Tensor:
    x, predictions = torch.randn(rows, P, A, generator=torch.Generator().manual_seed(1)), []
    for step in range(K):
        prediction = predict(x, step)
        predictions.append(prediction)
        x = 0.6 * x + prediction
    return torch.stack(predictions)


def _cached(denoiser: Denoiser, caching: Caching, condition: Tensor) -> CachedSteps:
    times = denoiser.encode_time(torch.linspace(1, 0.1, K))
    return CachedSteps(denoiser, times, denoiser.encode_condition(condition), caching)


def _slow_transformer(net: Any, x: Tensor, features: Tensor, now: list[bool], kept: Kept) -> Tensor:
    """A row at a time, attention written out head by head; features [N, F]."""
    rows = []
    for row in range(len(x)):
        shifts = features[row].view(-1, net.width)
        tokens = x[row] @ net.embedding.weight.T + net.embedding.bias + net.position
        for place, block in enumerate(net.blocks):
            move, scale, gate, move_fed, scale_fed, gate_fed = shifts[6 * place : 6 * place + 6]
            name = 1000 * row + 2 * place
            if now[2 * place]:
                hidden = functional.layer_norm(tokens, (net.width,)) * (1 + scale) + move
                query, key, value = block.attention_in(hidden).chunk(3, -1)
                heads = []
                for part in torch.arange(net.width).chunk(block.heads):
                    scores = query[:, part] @ key[:, part].T / len(part) ** 0.5
                    heads.append(scores.softmax(-1) @ value[:, part])
                kept[name] = block.attention_out(torch.cat(heads, -1))
            tokens = tokens + gate * kept[name]
            if now[2 * place + 1]:
                hidden = functional.layer_norm(tokens, (net.width,)) * (1 + scale_fed) + move_fed
                kept[name + 1] = block.feed_forward[2](functional.silu(block.feed_forward[0](hidden)))
            tokens = tokens + gate_fed * kept[name + 1]
        rows.append(net.head(functional.layer_norm(tokens, (net.width,)) * (1 + shifts[-1]) + shifts[-2]))
    return torch.stack(rows)


def _slow_mlp(net: Any, x: Tensor, features: Tensor, now: list[bool], kept: Kept) -> Tensor:
    rows = net.latent(x.flatten(1)) + features
    for place, layer in enumerate(net.hidden):
        if now[place]:
            kept[place] = layer(functional.silu(rows))
        rows = rows + kept[place]
    return net.head(functional.silu(rows)).view(x.shape)


def _slow_unet(net: Any, x: Tensor, features: Tensor, now: list[bool], kept: Kept) -> Tensor:
    def residual(index: int, block: Any, hidden: Tensor) -> Tensor:
        if now[index]:
            kept[index] = block(hidden, features) - block.residual_conv(hidden)  # the module's own forward
        return kept[index] + block.residual_conv(hidden)

    one = residual(0, net.down[0], x.transpose(1, 2))
    two = residual(1, net.down[1], net.shrink[0](one))
    three = residual(2, net.down[2], net.shrink[1](two))
    hidden = residual(3, net.middle, three)
    hidden = residual(4, net.up[1], torch.cat([net.grow[1](hidden), two], 1))
    hidden = residual(5, net.up[0], torch.cat([net.grow[0](hidden), one], 1))
    return net.head(hidden).transpose(1, 2)


SLOW: Mapping[DenoiserKind, Callable[[Any, Tensor, Tensor, list[bool], Kept], Tensor]] = {
    DenoiserKind.TRANSFORMER: _slow_transformer,
    DenoiserKind.MLP: _slow_mlp,
    DenoiserKind.UNET: _slow_unet,
}


@pytest.mark.checks("BAC")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", list(DenoiserKind))
@torch.no_grad()
def test_a_plan_is_executed_as_the_slow_reference_executes_it(kind: DenoiserKind, rows: int):
    denoiser = _make(kind)
    condition = torch.randn(rows, D, generator=torch.Generator().manual_seed(2))
    features = denoiser.encode_time(torch.linspace(1, 0.1, K))[:, None] + denoiser.encode_condition(condition)
    full = _chain(_cached(denoiser, _random_plan(denoiser.block_names, 0), condition).one, rows)
    for seed in range(4):
        plan, kept = _random_plan(denoiser.block_names, seed), Kept()
        now = [[row[step] for row in plan.updates] for step in range(K)]
        expected = _chain(lambda x, step: SLOW[kind](denoiser, x, features[step], now[step], kept), rows)  # noqa: B023
        predictions = _chain(_cached(denoiser, plan, condition).one, rows)
        torch.testing.assert_close(predictions, expected, atol=2e-6, rtol=1e-4)
        assert seed == 0 or not torch.allclose(predictions, full, atol=1e-4)  # plans differ in what they answer


@pytest.mark.checks("BAC")
@pytest.mark.parametrize("kind", list(DenoiserKind))
@torch.no_grad()
def test_a_plan_that_computes_everything_changes_nothing(kind: DenoiserKind):
    denoiser, condition = _make(kind), torch.randn(3, D)
    plain = SharedSteps(denoiser, torch.linspace(1, 0.1, K), denoiser.encode_condition(condition))
    every = CachePlan.of(denoiser.block_names, torch.ones(len(denoiser.block_names), K, dtype=torch.bool), order=2)
    assert (every.share, every.masks) == (1.0, 1)
    cached = _cached(denoiser, every, condition)
    torch.testing.assert_close(_chain(cached.one, 3), _chain(plain.one, 3), atol=1e-6, rtol=0)
    x = torch.randn(3, 2, P, A)
    chosen = torch.tensor([[0, 3], [1, 1], [5, 2]])
    assert torch.equal(cached.several(x, chosen), plain.several(x, chosen))
    assert torch.equal(
        cached.several(x[:, :1].expand(-1, K, -1, -1), None), plain.several(x[:, :1].repeat(1, K, 1, 1), None)
    )


@pytest.mark.parametrize("order", [0, 1, 2])
@torch.no_grad()
def test_blocks_that_are_held_together_are_those_held_one_by_one(order: int):
    denoiser, condition = _make(DenoiserKind.TRANSFORMER), torch.randn(2, D)
    table, features = denoiser.encode_time(torch.linspace(1, 0.1, K)), denoiser.encode_condition(condition)
    for seed in range(4):
        plan = replace(_random_plan(denoiser.block_names, seed), order=order)
        quiet = replace(plan, updates=tuple((*row[:3], False, False, True) for row in plan.updates))
        for each in (plan, quiet):
            memory = each.begin()
            alone = _chain(lambda x, step: denoiser.denoise(x, table[step], features, memory.at(step)), 2)  # noqa: B023
            torch.testing.assert_close(_chain(_cached(denoiser, each, condition).one, 2), alone, atol=2e-6, rtol=1e-5)


@pytest.mark.long
@torch.no_grad()
def test_a_chain_unrolls_without_a_graph_break():
    denoiser, condition = _make(DenoiserKind.MLP), torch.randn(2, D)
    plan = replace(_random_plan(denoiser.block_names, 3), order=1)

    def run(condition: Tensor, x: Tensor) -> Tensor:
        steps = _cached(denoiser, plan, condition)
        for step in range(3):
            x = 0.6 * x + steps.one(x, step)
        return x

    x = torch.randn(2, P, A)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(condition, x), run(condition, x))


class _Talks:
    """Plays blocks whose output in step k is outputs[k]; counts what is computed."""

    def __init__(self, *outputs: list[float]):
        self.outputs = [[torch.tensor(value) for value in row] for row in outputs]
        self.computed: list[tuple[int, int]] = []

    def say(self, memory: Memory, step: int) -> list[Tensor]:
        def branch(index: int) -> Tensor:
            self.computed.append((index, step))
            return self.outputs[index][step]

        blocks = memory.at(step)
        return [blocks(index, lambda index=index: branch(index)) for index in range(len(self.outputs))]


@pytest.mark.checks("BAC")
def test_blocks_are_computed_when_planned_and_held_by_reference():
    talks, memory = _Talks([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]), replace(PLAN, order=0).begin()
    outputs = [talks.say(memory, step) for step in range(4)]
    assert [[float(value) for value in row] for row in outputs] == [[1, 5], [1, 5], [3, 5], [3, 5]]
    assert talks.computed == [(0, 0), (1, 0), (0, 2)]
    assert outputs[3][0] is talks.outputs[0][2]  # no copy
    later = replace(PLAN, order=0).begin()
    assert [float(value) for value in talks.say(later, 1)] == [2, 6]  # a chain that begins late knows nothing yet
    assert [float(value) for value in talks.say(later, 3)] == [2, 6]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (0, [1, 1, 5, 5, 5, 8, 8, 8]),
        (1, [1, 1, 5, 7, 9, 8, 9, 10]),  # slopes (5 - 1) / 2 and (8 - 5) / 3
        (2, [1, 1, 5, 7, 9, 8, 9 - 1 / 6, 10 - 4 / 6]),  # the slope changes by (1 - 2) / 3 a step
    ],
)
def test_taylor_extrapolation_by_hand(order: int, expected: list[float]):
    updates = ((True, False, True, False, False, True, False, False),)
    talks, memory = _Talks([1.0, 0, 5.0, 0, 0, 8.0, 0, 0]), CachePlan(("a",), updates, order=order).begin()
    assert [float(talks.say(memory, step)[0]) for step in range(8)] == pytest.approx(expected)


def test_the_first_block_decides_by_hand():
    talks = _Talks([10.0, 10.4, 10.6, 10.9, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    memory = FirstBlockCaching(0.05).begin()
    outputs = [[float(value) for value in talks.say(memory, step)] for step in range(6)]
    # 4 % and 6 % from the remembered 10, 2.8 % from 10.6, then all; from nothing to nothing has no relative change
    assert memory.computed == [0, 2, 4, 5]
    assert outputs == [pytest.approx(pair) for pair in ([10, 1], [10.4, 1], [10.6, 3], [10.9, 3], [0, 5], [0, 6])]


@torch.no_grad()
def test_first_block_caching_between_its_extremes():
    denoiser, condition = _make(DenoiserKind.TRANSFORMER), torch.randn(2, D)
    plain = SharedSteps(denoiser, torch.linspace(1, 0.1, K), denoiser.encode_condition(condition))
    assert torch.equal(_chain(_cached(denoiser, FirstBlockCaching(0.0), condition).one, 2), _chain(plain.one, 2))
    names = denoiser.block_names
    never = torch.zeros(len(names), K, dtype=torch.bool)
    never[:, 0], never[0] = True, True
    planned = _cached(denoiser, CachePlan.of(names, never), condition)
    decided = _cached(denoiser, FirstBlockCaching(1e9), condition)
    assert torch.equal(_chain(decided.one, 2), _chain(planned.one, 2))
    with pytest.raises(ConfigError, match="threshold"):
        FirstBlockCaching(-1.0)


def test_plans_survive_json_and_say_what_they_cost():
    assert CachePlan.from_json(PLAN.to_json()) == PLAN
    assert PLAN.to_json()["updates"] == [[0, 2], [0]]
    assert (PLAN.steps, PLAN.share, PLAN.masks) == (4, 3 / 8, 3)
    table = torch.tensor(PLAN.updates)
    assert CachePlan.of(PLAN.blocks, table, "uniform", 2, 1) == PLAN


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"updates": [[0, 2], [1]]}, "first"),
        ({"updates": [[0, 2]]}, "1 rows for 2"),
        ({"updates": [[0, 4], [0]]}, "does not have"),
        ({"updates": None}, "TypeError"),
        ({"steps": "many"}, "ValueError"),
        ({"steps": 0, "updates": [[], []]}, "first"),
        ({"order": -1}, "order"),
        ({"blocks": []}, "2 rows for 0"),
    ],
)
def test_damaged_plans_are_refused(change: dict[str, Any], said: str):
    with pytest.raises(CheckpointError, match=said):
        CachePlan.from_json({**PLAN.to_json(), **change}, "plan.json")
    with pytest.raises(CheckpointError, match="KeyError"):
        CachePlan.from_json({key: value for key, value in PLAN.to_json().items() if key != next(iter(change))})


def test_a_plan_for_another_network_is_refused():
    denoiser, other = _make(DenoiserKind.TRANSFORMER), _make(DenoiserKind.MLP)
    plan = _random_plan(other.block_names, 0)
    with pytest.raises(ConfigError, match=r"another network.*0\.hidden.*0\.attention"):
        _cached(denoiser, plan, torch.zeros(1, D))
    short = CachePlan.of(other.block_names, torch.ones(len(other.block_names), K - 1, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"5 steps.*6"):
        _cached(other, short, torch.zeros(1, D))
