"""The transformer of the policy with memory: its sink by hand, rotary positions, causality, and a slow reference."""

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.nn.memory import Memory, MemoryLayer, attend, rotate


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
    layer(torch.randn(2, 6, 16), last=True).square().sum().backward()
    assert all(bool(layer.get_parameter(name).grad.abs().sum() > 0) for name in names)
    # Before training all sinks are zeros: a softmax with 1 added to its denominator, which no sink at all is not.
    plain = MemoryLayer(16, 2, "K0V0")
    plain.load_state_dict(layer.state_dict(), strict=False)
    tokens = torch.randn(2, 6, 16)
    assert torch.allclose(plain(tokens, last=True), layer(tokens, last=True)) == (variant is not None)


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
    whole = layer(tokens, last=False)
    torch.testing.assert_close(layer(tokens, last=True), whole[:, -1:])
    changed = tokens.clone()
    changed[:, 4:] = 0
    torch.testing.assert_close(layer(changed, last=False)[:, :4], whole[:, :4])
    assert not torch.allclose(layer(changed, last=False)[:, 4:], whole[:, 4:])


def test_every_frame_of_the_window_reaches_the_summary():
    torch.manual_seed(0)
    memory = Memory(3, 16, 2, 2, sink="KV0")
    frames = torch.randn(1, 7, 3, requires_grad=True)
    memory(frames).sum().backward()
    assert (frames.grad.abs().sum(-1) > 0).all()
    with pytest.raises(ConfigError, match="multiple"):
        Memory(3, 10, 1, 4, sink=None)
