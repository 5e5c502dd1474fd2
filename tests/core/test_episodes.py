"""Episodes: windows against a loop, padding masks, transitions, selection and joining."""

from dataclasses import replace

import pytest
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field


def numbered_episodes(lengths=(3, 1, 5), image=False, known=None) -> Episodes:
    """Frame t of episode e holds 100 e + t, action t holds 100 e + t + 0.5."""
    frames = torch.cat([100.0 * e + torch.arange(n + 1) for e, n in enumerate(lengths)])
    actions = torch.cat([100.0 * e + torch.arange(n) + 0.5 for e, n in enumerate(lengths)])
    fields = {STATE: Field((2,)), ENVIRONMENT_STATE: Field((1,))}
    observation = {STATE: torch.stack([frames, -frames], -1), ENVIRONMENT_STATE: frames[:, None]}
    if image:
        fields["observation.images.front"] = Field((4, 4, 3), "uint8", 0, 255)
        observation["observation.images.front"] = (
            (frames % 256).to(torch.uint8)[:, None, None, None].expand(-1, 4, 4, 3)
        )
    success = torch.zeros(len(actions), dtype=torch.bool)
    success[lengths[0] - 1] = True
    return Episodes(
        observation_fields=fields,
        action_field=Field((1,), low=-1, high=1),
        fps=10.0,
        observation=observation,
        actions=actions[:, None],
        lengths=torch.tensor(lengths),
        tasks=tuple(f"task {e}" for e in range(len(lengths))),
        rewards={"progress": actions, "success": success.float()},
        step_success=success,
        terminated=torch.tensor([e == 0 for e in range(len(lengths))]),
        seeds=torch.arange(len(lengths)) + 7,
        final_known=known,
    )


@pytest.mark.parametrize(("history", "prediction"), [(1, 1), (3, 4), (2, 8)])
def test_windows_equal_a_loop_over_episodes(history, prediction):
    episodes = numbered_episodes()
    batch = episodes.windows(torch.arange(episodes.step_count), history, prediction)
    row = 0
    for e, length in enumerate((3, 1, 5)):
        for t in range(length):
            frames = [100 * e + max(0, t - history + 1 + h) for h in range(history)]
            actions = [100 * e + min(t + p, length - 1) + 0.5 for p in range(prediction)]
            assert batch["observation"][ENVIRONMENT_STATE][row, :, 0].tolist() == frames
            assert batch["observation"]["task"][row] == f"task {e}"
            assert batch["actions"][row, :, 0].tolist() == actions
            assert batch["action_valid"][row].tolist() == [t + p < length for p in range(prediction)]
            row += 1


def test_sampler_continues_from_a_saved_generator_state():
    episodes = numbered_episodes()
    generator = torch.Generator().manual_seed(3)
    batches = episodes.sampler(2, 4, 6, generator)
    next(batches)
    state = generator.get_state()
    expected = next(batches)
    resumed = episodes.sampler(2, 4, 6, torch.Generator())
    other = torch.Generator()
    other.set_state(state)
    resumed = episodes.sampler(2, 4, 6, other)
    again = next(resumed)
    assert torch.equal(expected["actions"], again["actions"])
    assert torch.equal(expected["observation"][STATE], again["observation"][STATE])


def test_sampler_visits_every_step_and_only_wanted_keys():
    episodes = numbered_episodes(image=True)
    batch = next(episodes.sampler(2, 1, 400, torch.Generator().manual_seed(0), keys=["observation.images.front"]))
    assert set(batch["observation"]) == {"observation.images.front"}
    assert batch["observation"]["observation.images.front"].shape == (400, 2, 4, 4, 3)
    assert batch["observation"]["observation.images.front"].dtype == torch.uint8
    assert len(batch["actions"].unique()) == episodes.step_count
    with pytest.raises(DataError, match=r"Did you mean 'observation\.state'"):
        episodes.sampler(1, 1, 1, torch.Generator(), keys=["observation.stat"])


def test_transitions_pair_each_action_with_its_next_frame():
    moves = numbered_episodes().transitions()
    assert moves.state.shape == (9, 3)
    assert torch.equal(moves.next_state[:, 0], moves.state[:, 0] + 1)
    assert torch.equal(moves.action[:, 0], moves.state[:, 0] + 0.5)
    assert moves.terminated.tolist() == [False, False, True] + [False] * 6
    assert moves.success.tolist() == [False, False, True] + [False] * 6
    assert moves.reward[2] == 3.5


def test_unknown_final_observations_make_no_transition():
    episodes = numbered_episodes(known=torch.tensor([True, False, False]))
    moves = episodes.transitions()
    assert moves.episode.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert episodes.statistics()[ENVIRONMENT_STATE]["max"].item() == 204


def test_select_and_concatenate_are_inverse():
    episodes = numbered_episodes(image=True)
    parts = [episodes.select([e]) for e in range(3)]
    whole = Episodes.concatenate(parts)
    for key, value in episodes.observation.items():
        assert torch.equal(whole.observation[key], value)
    assert torch.equal(whole.actions, episodes.actions)
    assert whole.tasks == episodes.tasks
    assert torch.equal(whole.seeds, episodes.seeds)
    assert torch.equal(whole.rewards["progress"], episodes.rewards["progress"])
    winners = episodes.select(episodes.success)
    assert winners.tasks == ("task 0",)
    assert torch.equal(winners.returns, torch.tensor([0.5 + 1.5 + 2.5 + 1.0]))
    assert episodes.select([2, 0]).actions[0].item() == 200.5


def test_inconsistent_episodes_are_refused():
    episodes = numbered_episodes()
    with pytest.raises(DataError, match="actions has 8 entries"):
        Episodes(**{**vars_of(episodes), "actions": episodes.actions[:-1]})
    named, other = (
        replace(episodes, action_field=replace(episodes.action_field, names=names)) for names in (("left",), ("right",))
    )
    assert len(Episodes.concatenate([named, episodes])) == 2 * len(episodes)
    with pytest.raises(
        DataError, match=r"'action' is 'left' in the first episodes, but 'right' in .*train.rename=\{left: right\}"
    ):
        Episodes.concatenate([named, other])
    metres, inches = (replace(episodes, action_field=replace(episodes.action_field, unit=unit)) for unit in ("m", "in"))
    assert len(Episodes.concatenate([metres, episodes])) == 2 * len(episodes)
    with pytest.raises(DataError, match="'action' is in 'm' in the first episodes, in 'in' in the other episodes"):
        Episodes.concatenate([metres, inches])
    with pytest.raises(DataError, match="Control rates differ"):
        Episodes.concatenate([episodes, Episodes(**{**vars_of(episodes), "fps": 20.0})])
    with pytest.raises(DataError, match="empty"):
        episodes.select([]).sampler(1, 1, 1, torch.Generator())


def vars_of(episodes: Episodes) -> dict:
    return {name: getattr(episodes, name) for name in Episodes.__dataclass_fields__}
