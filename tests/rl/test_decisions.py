"""Recorded episodes as transitions of whole chunks, against a loop that follows each of them by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, SpecError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import TASK, Field, PolicySpec
from robopolicy.rl.offline.decisions import actions_at, frame_states, observations_at, recorded_decisions
from robopolicy.rl.offline.interface import Interface, recorded_range

LENGTHS, DISCOUNT, CHUNK = (5, 1, 3), 0.9, 2
IMAGE = "observation.images.front"


def episodes(images: bool = False) -> Episodes:
    steps, count = sum(LENGTHS), len(LENGTHS)
    draws = torch.Generator().manual_seed(0)
    fields = {"observation.state": Field((2,))}
    observation = {"observation.state": torch.randn(steps + count, 2, generator=draws)}
    if images:
        fields[IMAGE] = Field((4, 4, 3), "uint8")
        observation[IMAGE] = torch.arange(steps + count, dtype=torch.uint8)[:, None, None, None].expand(-1, 4, 4, 3)
    return Episodes(
        observation_fields=fields,
        action_field=Field((1,), low=-2.0, high=2.0),
        fps=10.0,
        observation=observation,
        actions=torch.rand(steps, 1, generator=draws) * 4 - 2,
        lengths=torch.tensor(LENGTHS),
        tasks=("push", "pull", "push"),
        rewards={"a": torch.randn(steps, generator=draws), "b": torch.ones(steps)},
        terminated=torch.tensor([True, True, False]),
    )


def interface(data: Episodes, **more) -> Interface:
    return Interface(data.observation_fields, data.action_field, chunk=CHUNK, **more)


def test_chunks_against_a_loop():
    data = episodes()
    transitions = recorded_decisions(data, interface(data), DISCOUNT).transitions
    assert len(transitions) == sum(LENGTHS)
    states = data.observation["observation.state"]
    reward = data.reward
    step = frame = 0
    for length, over in zip(LENGTHS, data.terminated.tolist(), strict=True):
        for place in range(length):
            here, last = step + place, step + length - 1
            done = min(CHUNK, length - place)
            paid = sum(DISCOUNT**ahead * float(reward[here + ahead]) for ahead in range(done))
            rest = sum(DISCOUNT**ahead * float(reward[here + ahead]) for ahead in range(length - place))
            acted = [float(data.actions[min(here + ahead, last)]) / 2 for ahead in range(CHUNK)]
            assert transitions.action[here].tolist() == pytest.approx(acted)
            assert float(transitions.reward[here]) == pytest.approx(paid, abs=1e-5)
            assert float(transitions.decay[here]) == pytest.approx(DISCOUNT**done)
            assert torch.equal(transitions.state[here], states[frame + place])
            assert torch.equal(transitions.next_state[here], states[frame + place + done])
            assert bool(transitions.terminated[here]) == (over and place + done == length)
            assert bool(transitions.next_known[here]) == (place + done < length)
            if place + done < length:
                assert torch.equal(transitions.next_action[here], transitions.action[here + done])
            assert float(transitions.outcome[here]) == (pytest.approx(rest, abs=1e-5) if over else -torch.inf)
        step, frame = step + length, frame + length + 1


def test_an_end_that_was_not_recorded_is_left_out_unless_the_task_ended():
    data = replace(episodes(), final_known=torch.zeros(3, dtype=torch.bool))
    kept = recorded_decisions(data, interface(data), DISCOUNT)
    assert kept.step.tolist() == [0, 1, 2, 3, 4, 5, 6] and kept.frame.tolist() == [0, 1, 2, 3, 4, 6, 8]
    assert kept.next_frame.tolist() == [2, 3, 4, 5, 5, 7, 10] and len(kept) == 7
    transitions = recorded_decisions(data, interface(data), DISCOUNT).transitions
    assert transitions.episode.tolist() == [0] * 5 + [1] + [
        2
    ]  # of the last episode, cut by time, only its first decision
    assert bool(transitions.next_known[-1])


def test_the_backup_of_a_chunk():
    data = episodes()
    transitions = recorded_decisions(data, interface(data), DISCOUNT).transitions
    following = torch.full((len(transitions),), 10.0)
    expected = transitions.reward + torch.where(transitions.terminated, 0.0, transitions.decay * 10)
    assert torch.allclose(transitions.backup(following, 0.5), expected)  # the transitions' own decay counts


def test_states_hold_the_instruction_and_features_of_the_history():
    data = episodes(images=True)
    shapes = []

    def features(observation):
        shapes.append(observation[IMAGE].shape)
        return observation[IMAGE].float().mean((2, 3, 4))  # one a frame of history

    inside = interface(data, instructions=("pull", "push"), features=features, feature_size=2, history=2)
    assert inside.size == 2 + 2 + 2 and set(inside.keys) == {"observation.state", IMAGE}
    states = frame_states(data, inside)
    assert shapes == [(12, 2, 4, 4, 3)]
    assert states[:, 2:4].argmax(1).tolist() == [1] * 6 + [0] * 2 + [1] * 4
    assert states[:, 4:].tolist()[5:9] == [[4, 5], [6, 6], [6, 7], [8, 8]]  # the first frame repeats
    asked = {"observation.state": np.zeros((1, 2, 2)), IMAGE: np.zeros((1, 2, 4, 4, 3), np.uint8), TASK: ["pull"]}
    assert inside.state(asked)[0].tolist() == [0, 0, 1, 0, 0, 0]
    with pytest.raises(SpecError, match="was not trained with the instruction 'lift'"):
        inside.state({**asked, TASK: ["lift"]})


def test_units_of_actions():
    data = episodes()
    inside = interface(data)
    chunks = data.actions[:4].reshape(2, 2, 1)
    flat = inside.to_agent(chunks)
    assert torch.allclose(flat, chunks.flatten(1) / 2) and torch.allclose(inside.chunks(flat), chunks)
    assert np.allclose(inside.to_world(flat), chunks)
    free = replace(data, action_field=Field((1,)))
    with pytest.raises(ConfigError, match="have no bounds"):
        interface(free)
    low, high = recorded_range(free)
    assert float(low) < float(data.actions.min()) and float(high) > float(data.actions.max())
    assert interface(free, bounds=(low, high)).to_agent(chunks).abs().max() <= 1
    assert [float(bound) for bound in recorded_range(data)] == [-2.0, 2.0]


def test_what_a_dataset_lacks_is_named():
    data = episodes()
    with pytest.raises(DataError, match="lacks rewards"):
        recorded_decisions(replace(data, rewards=None), interface(data), DISCOUNT)
    with pytest.raises(DataError, match="lacks task ends"):
        recorded_decisions(replace(data, terminated=None), interface(data), DISCOUNT)
    labelled = recorded_decisions(replace(data, rewards=None), interface(data), DISCOUNT, torch.ones(9)).transitions
    assert labelled.reward.tolist()[:2] == pytest.approx([1.9, 1.9])
    with pytest.raises(ConfigError, match="this data has neither"):
        Interface({IMAGE: Field((4, 4, 3), "uint8")}, data.action_field)


class Echo:
    """Answers with the newest state, and one more with every draw."""

    spec = PolicySpec(
        {"observation.state": Field((2,))}, Field((1,), low=-2.0, high=2.0),
        history=2, chunk=1, prediction=1, scored_steps=0, fps=10.0,
    )  # fmt: skip

    def act(self, observation, generator, *, deterministic=False):
        noise = 0 if deterministic else torch.rand(len(observation[TASK]), 1, 1, generator=generator)
        return Decision(observation["observation.state"][:, -1:, :1] + noise)

    def reset(self, rows=None):
        """Nothing to forget."""


def test_what_a_policy_would_do_at_recorded_observations():
    data, frames = episodes(), torch.tensor([5, 0, 6])
    observation = observations_at(data, frames, 2, ["observation.state"])
    states = data.observation["observation.state"]
    assert torch.equal(observation["observation.state"], states[torch.tensor([[4, 5], [0, 0], [6, 6]])])
    assert observation[TASK] == ["push", "push", "pull"]
    actions = actions_at(Echo(), data, frames, torch.Generator().manual_seed(0), samples=3)
    assert actions.shape == (3, 3, 1, 1) and len(actions.flatten().unique()) == 9
    plain = actions_at(Echo(), data, frames, torch.Generator(), deterministic=True)
    assert torch.equal(plain[:, 0, 0, 0], states[frames, 0])
