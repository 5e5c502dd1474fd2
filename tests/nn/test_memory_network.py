"""The transformer of the policy with memory: sink by hand, causality, slow references, cached keys, gradients."""

import copy

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.history import initial_window, shift_window
from robopolicy.nn.memory import KeysValues, Memory, MemoryCache, MemoryLayer, attend, first_readings, rotate


def whole(layer: MemoryLayer, tokens: torch.Tensor, queries: slice = slice(None)) -> torch.Tensor:
    """All tokens [N, H, W] of a layer, or some, each of which reads itself and those before."""
    places = torch.arange(tokens.shape[1]).expand(tokens.shape[:2])
    mask = (places[:, :, None] >= places[:, None])[:, None]
    read = layer.keys_values_of(tokens, places)
    return layer(tokens[:, queries], places[:, queries], read, mask[:, :, queries])


@pytest.mark.checks("ReLIC")
def test_the_sink_by_hand():
    """Two equal scores of 0 and a key of 0: each weighs 1/3, so the output is 2/3 of softmax's."""
    query, keys = torch.zeros(1, 1, 1, 4), torch.randn(1, 1, 2, 4)
    values = torch.tensor([[1.0, 0, 0, 0], [0, 3, 0, 0]]).expand(1, 1, 2, 4)
    plain, resting = attend(query, keys, values, None), attend(query, keys, values, torch.zeros(1, 4))
    assert plain[0, 0, 0].tolist() == [0.5, 1.5, 0, 0]
    torch.testing.assert_close(resting, plain * 2 / 3)


@pytest.mark.checks("ReLIC")
def test_nothing_to_look_for_reads_nothing():
    """Scores of -20 beside a key of 0: the output vanishes, and that of softmax has length 1."""
    query, keys = torch.full((1, 1, 1, 4), 1.0), torch.full((1, 1, 3, 4), -10.0)  # -40 / sqrt(4)
    values = torch.eye(4)[:1].expand(1, 1, 3, 4)
    assert attend(query, keys, values, torch.zeros(1, 4)).norm() < 1e-8
    torch.testing.assert_close(attend(query, keys, values, None).norm(), torch.tensor(1.0))


@pytest.mark.checks("ReLIC")
def test_a_learned_sink_agrees_with_one_more_key_of_value_zero():
    draw = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(3, 2, 5, 4, generator=draw) for _ in range(3))
    sink, mask = torch.randn(2, 4, generator=draw), torch.ones(5, 5).tril().bool()
    scores = query @ torch.cat([sink.expand(3, 2, 4)[:, :, None], keys], 2).transpose(-1, -2) / 2
    scores = scores.masked_fill(~torch.cat([torch.ones(5, 1).bool(), mask], 1), -torch.inf)
    slow = scores.softmax(-1) @ torch.cat([torch.zeros(3, 2, 1, 4), values], 2)
    torch.testing.assert_close(attend(query, keys, values, sink, mask), slow)


@pytest.mark.checks("ReLIC")
def test_a_sink_with_a_value_agrees_with_one_more_key_and_value():
    draw = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(3, 2, 5, 4, generator=draw) for _ in range(3))
    for sink in (torch.randn(2, 4, generator=draw), torch.zeros(2, 4)):
        value = torch.randn(2, 4, generator=draw)
        all_keys, all_values = (
            torch.cat([first.expand(3, 2, 4)[:, :, None], rest], 2) for first, rest in ((sink, keys), (value, values))
        )
        slow = (query @ all_keys.transpose(-1, -2) / 2).softmax(-1) @ all_values
        torch.testing.assert_close(attend(query, keys, values, sink, None, value), slow)


@pytest.mark.checks("ReLIC")
@pytest.mark.parametrize(("variant", "learned"), [("KV", 2), ("KV0", 1), ("K0V", 1), ("K0V0", 0), (None, 0)])
def test_variants_of_the_sink_learn_what_they_are_named_for(variant, learned):
    torch.manual_seed(0)
    layer = MemoryLayer(16, 2, variant)
    names = [name for name, _ in layer.named_parameters() if name.startswith("sink")]
    assert len(names) == learned
    whole(layer, torch.randn(2, 6, 16)).square().sum().backward()
    assert all(bool(layer.get_parameter(name).grad.abs().sum() > 0) for name in names)
    # Before training all sinks are zeros: a softmax with 1 added to its denominator, which no sink at all is not.
    plain = MemoryLayer(16, 2, "K0V0")
    plain.load_state_dict(layer.state_dict(), strict=False)
    tokens = torch.randn(2, 6, 16)
    assert torch.allclose(whole(plain, tokens), whole(layer, tokens)) == (variant is not None)


def test_rotated_products_depend_on_distances_alone():
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(1, 1, 1, 8, generator=draw), torch.randn(1, 1, 1, 8, generator=draw)

    def product(one, other):
        return float((rotate(first, torch.tensor([one])) * rotate(second, torch.tensor([other]))).sum())

    assert product(3, 5) == pytest.approx(product(40, 42), abs=1e-4)
    assert abs(product(3, 5) - product(3, 6)) > 1e-3


def test_a_frame_reads_no_later_one_and_the_last_layer_alone_is_the_whole_pass():
    torch.manual_seed(0)
    layer = MemoryLayer(16, 2, sink="KV0")
    tokens = torch.randn(2, 6, 16)
    everything = whole(layer, tokens)
    torch.testing.assert_close(whole(layer, tokens, slice(-1, None)), everything[:, -1:])
    changed = tokens.clone()
    changed[:, 4:] = 0
    torch.testing.assert_close(whole(layer, changed)[:, :4], everything[:, :4])
    assert not torch.allclose(whole(layer, changed)[:, 4:], everything[:, 4:])


def test_every_frame_of_the_window_reaches_the_summary():
    torch.manual_seed(0)
    memory = Memory(3, 16, 2, 2, sink="KV0")
    frames = torch.randn(1, 7, 3, requires_grad=True)
    memory(frames).sum().backward()
    assert (frames.grad.abs().sum(-1) > 0).all()
    with pytest.raises(ConfigError, match="multiple"):
        Memory(3, 10, 1, 4, sink=None)


@pytest.mark.checks("ReLIC")
@pytest.mark.parametrize("sink", ["KV0", None])
def test_a_first_frame_that_is_repeated_is_read_once(sink):
    torch.manual_seed(0)
    memory, frames = Memory(3, 16, 2, 2, sink), torch.randn(2, 4, 3)
    repeated = torch.cat([frames[:, :1].expand(-1, 3, -1), frames], 1)
    assert first_readings(repeated).tolist() == [[False] * 3 + [True] * 4] * 2
    torch.testing.assert_close(memory(repeated), memory(frames), atol=1e-5, rtol=0)
    later = frames[:, [0, 1, 2, 2]]  # what stands still later has been seen, twice
    assert not torch.allclose(memory(later), memory(frames[:, :3]), atol=1e-3)


@pytest.mark.checks("ReLIC")
@pytest.mark.parametrize("sink", ["KV", "KV0", None])
def test_cached_keys_and_values_are_those_of_the_whole_pass(sink):
    """Rows begin anew one by one, go back to an earlier step, get several frames at once, and outgrow the window."""
    torch.manual_seed(0)
    memory, cache, draws = Memory(3, 16, 3, 2, sink), MemoryCache(), np.random.default_rng(0)

    def frames(*shape):
        return draws.normal(size=(*shape, 3)).astype(np.float32)

    window, computed = initial_window(frames(3, 1), 12), []
    memory.embed.register_forward_hook(lambda module, inputs, output: computed.append(inputs[0].shape[1]))

    def check(expected):
        computed.clear()
        torch.testing.assert_close(
            cache.read(memory, torch.tensor(window)), memory(torch.tensor(window)), atol=1e-5, rtol=0
        )
        assert computed[0] == expected

    check(1)
    for _ in range(4):
        window = shift_window(window, frames(3, 1))
        check(1)
    earlier = window.copy()
    window[1] = initial_window(frames(1, 1), 12)[0]  # row 1 begins anew, between two steps of the others
    window[[0, 2]] = shift_window(window, frames(3, 1))[[0, 2]]
    check(1)
    window = shift_window(window, frames(3, 2))  # a chunk of two control steps
    check(2)
    window[2] = earlier[2]  # row 2 goes back to a snapshot
    check(1)
    window[2, -1] += 1  # and another way from there
    check(1)
    window = window[[2, 0, 1]]  # rows in another order know nothing of each other
    check(8)
    with torch.no_grad():
        memory.layers[1].keys_values.weight += 0.1
    check(8)
    check(1)
    for step in range(3, 8):
        window = shift_window(window, frames(3, 1))
        check(1 if step < 7 else 12)  # 8 to 12 frames; then the window moves, and all of it is read
    window = initial_window(frames(2, 1), 12)
    check(1)
    window = shift_window(window, frames(2, 1))
    with torch.inference_mode():
        check(2)
    assert copy.deepcopy(cache).frames is None
    cache.clear()
    check(2)


@pytest.mark.checks("replay/partial_updates", "ReLIC")
@pytest.mark.parametrize("sink", ["KV", None])
def test_gradients_of_the_past_are_exactly_zero(sink):
    """The weights' gradients are those of one pass in which the past's keys and values are detached."""
    torch.manual_seed(0)
    memory, frames = Memory(3, 16, 3, 2, sink), torch.randn(3, 6, 3)
    frames[1, :2] = frames[1, 2]  # a window whose episode is young
    recent, frames = torch.tensor([2, 3, 9]), frames.requires_grad_()
    limited = memory(frames, recent)
    torch.testing.assert_close(limited, memory(frames))
    (reached,) = torch.autograd.grad(limited.square().sum(), frames, retain_graph=True)
    assert (reached.abs().sum(-1) > 0).tolist() == [[False] * 4 + [True] * 2, [False] * 3 + [True] * 3, [True] * 6]

    is_read = first_readings(frames)
    order = torch.arange(6)
    mask = ((order[:, None] >= order) & is_read[:, None] | (order[:, None] == order))[:, None]
    is_recent = (order >= 6 - recent[:, None])[:, None, :, None]

    def detached(number, own):
        return KeysValues(*(torch.where(is_recent, each, each.detach()) for each in own))

    slow = memory.summary(frames, (is_read.cumsum(1) - 1).clamp_min(0), mask, detached)
    weights = list(memory.parameters())
    gradients, expected, full = (
        torch.autograd.grad(each.square().sum(), weights) for each in (limited, slow, memory(frames))
    )
    torch.testing.assert_close(gradients, expected)
    assert not torch.allclose(gradients[0], full[0])
    torch.testing.assert_close(memory(frames, torch.full((3,), 6)), memory(frames), atol=0, rtol=0)
