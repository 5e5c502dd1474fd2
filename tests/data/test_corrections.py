"""Interventions: who acted travels with the data, an operator recovers, corrects, ends, and learning has its sign."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from robopolicy.cli import main
from robopolicy.configuration.sections.recorded import CollectSection
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.interventions import (
    KINDS,
    before_intervention,
    imitated_in_words,
    imitation_mask,
    intervention_counts,
    interventions_in_words,
    kinds_of_steps,
    last_step_of_turn,
    sampling_shares,
)
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec
from robopolicy.core.world import Step
from robopolicy.data.configuration import CorrectConfig
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record, record_corrected
from robopolicy.operators.recovery import FamiliarStates
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.decisions import recorded_decisions
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.papers import papers
from robopolicy.training.offline.improvers import OfflineContext
from robopolicy.training.offline.recap import corrections
from robopolicy.training.pretrain import regression_batches

FIELDS, ACTION = {STATE: Field((1,))}, Field((1,), low=-1.0, high=1.0, names=("velocity",))
LENGTHS = (6, 3, 3, 2)
SEGMENT = [0, 0, 1, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]
ACTOR = [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
SUCCESS = [0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0]
"""An operator's correction that the policy completes; the policy's own success, and failure; a person's failed one."""


def episodes(**changed) -> Episodes:
    steps, count = sum(LENGTHS), len(LENGTHS)
    made = Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={STATE: torch.arange(steps + count).float()[:, None] / 20},
        actions=torch.linspace(-1, 1, steps)[:, None],
        lengths=torch.tensor(LENGTHS),
        tasks=("",) * count,
        rewards={"reward": torch.tensor(SUCCESS).float()},
        step_success=torch.tensor(SUCCESS).bool(),
        terminated=torch.tensor([True, True, False, False]),
        final_known=torch.ones(count, dtype=torch.bool),
        actor=torch.tensor(ACTOR),
        segment=torch.tensor(SEGMENT),
    )
    return replace(made, **changed)


def flags(values) -> list[int]:
    return values.long().tolist()


@pytest.mark.checks("RaC")
def test_recoveries_corrections_and_own_successes_are_imitated_and_never_what_led_to_an_intervention():
    data = episodes()
    assert flags(before_intervention(data)) == [1, 1, 0, 0, 0, 0] + [0] * 8
    assert flags(imitation_mask(data)) == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1]
    unlabelled = replace(data, step_success=None)  # what the policy did alone is not known to have been any good
    assert flags(imitation_mask(unlabelled)) == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert imitation_mask(replace(data, actor=None, segment=None)) is None
    assert interventions_in_words(data) == (
        "Interventions: in 1 of 4 episodes; 1 steps recover, 2 correct, 2 of the policy's own steps led to an "
        "intervention"
    )
    counts = {"episodes": 1, "takeovers": 1, "steps": 3, "recovering_steps": 1, "waiting_steps": 0}
    assert intervention_counts(data) == counts
    assert intervention_counts(replace(data, actor=None, segment=None)) == {}
    assert "Imitates 9 of 14 steps" in imitated_in_words(data) and "excluded: 5" in imitated_in_words(data)


def test_who_acted_is_kept_by_selecting_joining_and_splitting():
    data = episodes()
    chosen = data.select([1, 0])
    assert flags(chosen.segment) == SEGMENT[6:9] + SEGMENT[:6] and flags(chosen.actor) == ACTOR[6:9] + ACTOR[:6]
    plain = replace(data, actor=None, segment=None)
    joined = Episodes.concatenate([plain, data])
    assert flags(joined.actor) == [-1] * 14 + ACTOR and flags(joined.segment) == [-1] * 14 + SEGMENT
    assert flags(imitation_mask(joined))[:14] == [1] * 14  # as without the columns: nothing speaks against them
    assert Episodes.concatenate([plain, plain]).segment is None
    training, held = data.split(0.25, torch.Generator().manual_seed(0))
    assert len(training.segment) == training.step_count and len(held.actor) == held.step_count
    assert data.to("cpu").segment.dtype == torch.int64
    with pytest.raises(DataError, match="segment has 3 entries"):
        episodes(segment=torch.zeros(3, dtype=torch.int64))


def test_a_dataset_says_who_acted_and_lerobot_reads_its_own_flag(tmp_path):
    write_dataset(episodes(), tmp_path / "own")
    episodes_read = read_dataset(tmp_path / "own")
    assert flags(episodes_read.actor) == ACTOR and flags(episodes_read.segment) == SEGMENT
    table = pq.read_table(next((tmp_path / "own/data").glob("*/*.parquet")))
    assert table["intervention"].to_pylist() == [each > 0 for each in SEGMENT]
    write_dataset(replace(episodes(), actor=None, segment=None), tmp_path / "plain")
    assert read_dataset(tmp_path / "plain").segment is None


@pytest.mark.parametrize("name", ["intervention", "complementary_info.is_intervention"])
def test_flags_of_lerobots_recordings_are_read(tmp_path, name):
    write_dataset(replace(episodes(), actor=None, segment=None), tmp_path / "theirs")
    path, info = next((tmp_path / "theirs/data").glob("*/*.parquet")), tmp_path / "theirs/meta/info.json"
    pq.write_table(pq.read_table(path).append_column(name, pa.array([each > 0 for each in SEGMENT])), path)
    described = json.loads(info.read_text())
    described["features"][name] = {"dtype": "bool", "shape": [1], "names": None}
    info.write_text(json.dumps(described))
    episodes_read = read_dataset(tmp_path / "theirs")
    assert flags(episodes_read.actor) == [int(each > 0) for each in SEGMENT]
    assert flags(episodes_read.segment) == [2 * int(each > 0) for each in SEGMENT]


@pytest.mark.checks("RaC")
def test_batches_begin_and_stay_among_what_is_worth_imitating():
    config = DenoisingPolicyConfig(chunk=2, prediction_steps=3, width=8, depth=1)
    policy, draws = DenoisingPolicy(config, FIELDS, ACTION, fps=10), torch.Generator().manual_seed(0)

    def learned(data):
        batch = next(regression_batches(policy, data, 512, draws))
        steps = ((batch["actions"][:, 0, 0] + 1) / 2 * 13).round()
        return {int(step): flags(valid) for step, valid in zip(steps, batch["action_valid"], strict=True)}

    counts = learned(episodes())
    assert set(counts) == {2, 3, 4, 5, 6, 7, 8, 12, 13}
    assert counts[2] == counts[3] == counts[6] == [1, 1, 1] and counts[4] == counts[7] == counts[12] == [1, 1, 0]
    twice = episodes(
        actor=torch.tensor([0, 1, 0, 0, 0, 1, *ACTOR[6:]]), segment=torch.tensor([0, 2, 0, 0, 0, 2, *SEGMENT[6:]])
    )
    counts = learned(twice)
    assert set(counts) == {1, 5, 6, 7, 8, 12, 13} and counts[1] == [1, 0, 0]  # the next one led to an intervention
    with pytest.raises(DataError, match="No step in this data is suitable for imitation"):
        next(regression_batches(policy, twice.select([2]), 4, torch.Generator()))


@pytest.mark.checks("RaC")
def test_a_critic_is_told_neither_that_the_task_was_over_nor_what_the_operator_earned():
    data = episodes(rewards={"reward": torch.tensor([0.0, 1, 10, 10, 10, 100] + [0] * 8)})
    assert last_step_of_turn(data).tolist() == [1, 1, 4, 4, 4, 5] + [8] * 3 + [11] * 3 + [13] * 2
    interface = Interface(FIELDS, ACTION, chunk=3)
    transitions = recorded_decisions(data, interface, 0.5).transitions
    # The policy's decisions end at the hand-over: paid what came until then, worth what comes from there on.
    assert transitions.reward[:6].tolist() == [0.5, 1.0, 17.5, 15.0, 10.0, 100.0]
    assert transitions.decay[:6].tolist() == [0.25, 0.5, 0.125, 0.25, 0.5, 0.5]
    assert transitions.next_state[:6, 0].tolist() == pytest.approx([0.1, 0.1, 0.25, 0.25, 0.25, 0.3])
    assert flags(transitions.terminated[:6]) == [0, 0, 0, 0, 0, 1]
    assert transitions.action[0].tolist() == pytest.approx([-1, -1 + 2 / 13, -1 + 2 / 13])  # not the operator's
    assert transitions.outcome[:2].tolist() == [-torch.inf] * 2 and bool(transitions.outcome[2:6].isfinite().all())
    plain = recorded_decisions(replace(data, actor=None, segment=None), interface, 0.5).transitions
    assert plain.reward[0] == 3.0 and bool(plain.outcome[0].isfinite())


@pytest.mark.checks("RaC")
def test_recap_takes_corrections_for_better():
    interface = Interface(FIELDS, ACTION, chunk=1)
    data = recorded_decisions(episodes(), interface, 0.9)
    lesson = OfflineContext(None, data, interface)  # type: ignore[arg-type]
    assert flags(corrections(lesson)) == [int(each > 0) for each in SEGMENT]
    silent = recorded_decisions(episodes(actor=None, segment=None), interface, 0.9)
    assert corrections(OfflineContext(None, silent, interface)) is None  # type: ignore[arg-type]


class Line:
    """A point that walks from 0 to 1 in steps of at most 0.1; paid for every bit of the way, success at 1."""

    def __init__(self, rows=3, names=("velocity",)):
        action = Field((len(names),), low=-0.1, high=0.1, names=names)
        self.spec = WorldSpec("line", FIELDS, action, 10.0, 60, 1, ("progress",))
        self.batch_size, self.place, self.time = rows, np.zeros(rows), np.zeros(rows, int)

    def _shown(self):
        return {STATE: self.place[:, None, None].astype(np.float32), "task": np.array([""] * self.batch_size)}

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.place[rows], self.time[rows] = 0.0, 0
        return self._shown()

    def step(self, actions):
        live = (self.place < 1 - 1e-9) & (self.time < 60)
        before = self.place.copy()
        self.place = np.where(live, self.place + np.clip(actions[:, 0, 0], -0.1, 0.1), self.place)
        self.time = self.time + live
        won = self.place >= 1 - 1e-9
        trace = {STATE: self.place[:, None, None].astype(np.float32)}
        paid = {"progress": (self.place - before)[:, None]}
        return Step(self._shown(), trace, paid, live[:, None], won, ~won & (self.time >= 60), won)

    def close(self):
        pass


class Stuck:
    """Walks to 0.3 and no further, two steps at a time."""

    def __init__(self, names=("velocity",)):
        self.spec = PolicySpec(FIELDS, Field((len(names),), low=-0.1, high=0.1, names=names), 1, 2, 2, 0, 10.0)

    def reset(self, rows=None):
        pass

    def act(self, observation, generator, deterministic=False):
        far = observation[STATE][:, -1] < 0.299
        actions = torch.where(far, 0.1, 0.0)[:, None].expand(-1, 2, self.spec.action.size)
        none = torch.zeros(len(far), 0)
        return Decision(actions, {}, none, none.bool())


class Expert:
    """Walks on."""

    def __init__(self, size=1):
        self.size, self.resets = size, []

    def reset(self, rows=None):
        self.resets.append(rows)

    def act(self, observation):
        return np.full((len(observation[STATE]), self.size), 0.1)


def corrected(config: CorrectConfig, names=("velocity",), count=5) -> Episodes:
    world, policy = Line(names=names), Stuck(names)
    return record_corrected(world, policy, Expert(len(names)), range(count), config, generator=torch.Generator())


@pytest.mark.checks("RaC")
def test_an_operator_goes_back_does_it_right_and_the_episode_ends():
    # By hand: chunks of two steps take it to 0.4, it stands still for 4, of the last 6 the operator undoes 5, to 0.3,
    # and 7 more lead to 1.
    data = corrected(CorrectConfig(no_progress_steps=4, rewind=5))
    for row in range(len(data)):
        one = data.select([row])
        assert one.actions[:, 0].tolist() == pytest.approx([0.1] * 4 + [0.0] * 4 + [0.0] * 4 + [-0.1] + [0.1] * 7)
        assert flags(one.segment) == [0] * 8 + [1] * 5 + [2] * 7 and flags(one.actor) == [0] * 8 + [2] * 12
    assert bool(data.success.all())


class Returner(Expert):
    """Goes back to 0.1, and then walks on."""

    def recover(self, observation):
        return np.full((len(observation[STATE]), self.size), -0.1)

    def recovered(self, observation):
        return observation[STATE][:, -1, 0] < 0.15


def recovering(config: CorrectConfig, expert=None, count=3, rows=3) -> Episodes:
    world, expert = Line(rows), expert or Returner()
    return record_corrected(world, Stuck(), expert, range(count), config, generator=torch.Generator())


@pytest.mark.checks("RaC")
def test_recovery_is_a_behaviour_with_an_end_then_comes_the_correction_and_the_episode_ends():
    # By hand: two chunks lead to 0.4, two steps there make six of the policy; three go back to 0.1, nine lead to 1.
    config = CorrectConfig(max_policy_steps=6, recover_steps=20)
    one = recovering(config, count=1)
    assert one.actions[:, 0].tolist() == pytest.approx([0.1] * 4 + [0.0] * 2 + [-0.1] * 3 + [0.1] * 9)
    assert flags(one.segment) == [0] * 6 + [1] * 3 + [2] * 9 and flags(one.actor) == [0] * 6 + [2] * 12
    assert flags(imitation_mask(one)) == [0] * 6 + [1] * 12
    assert last_step_of_turn(one).tolist() == [5] * 6 + [17] * 12
    short = recovering(replace(config, recover_steps=2), count=1)  # whoever is not back by then corrects from there
    assert flags(short.segment) == [0] * 6 + [1] * 2 + [2] * 8
    assert (
        flags(recovering(replace(config, max_policy_steps=1), count=1).segment) == [0] + [2] * 9
    )  # nothing to go back
    with pytest.raises(ConfigError, match="Expert cannot go back"):
        recovering(config, expert=Expert())


@pytest.mark.checks("RaC")
def test_of_6_own_3_recovering_and_5_correcting_steps_8_are_imitated_and_no_end_is_worth_nothing():
    data = episodes(
        actor=torch.tensor([0] * 6 + [2] * 8),
        segment=torch.tensor([0] * 6 + [1] * 3 + [2] * 5),
        lengths=torch.tensor([14]),
        tasks=("",),
        observation={STATE: torch.arange(15).float()[:, None] / 20},
        step_success=torch.zeros(14, dtype=torch.bool),
        terminated=torch.tensor([False]),
        final_known=torch.ones(1, dtype=torch.bool),
    )
    assert flags(imitation_mask(data)) == [0] * 6 + [1] * 8
    interface = Interface(FIELDS, ACTION, chunk=4)
    transitions = recorded_decisions(data, interface, 0.5).transitions
    assert not transitions.terminated.any()
    # A decision that begins two steps before the hand-over lasts two, and is worth what comes from there on.
    assert transitions.decay[4] == 0.25 and transitions.next_state[4, 0] == pytest.approx(0.3)


@pytest.mark.checks("RaC")
def test_a_recovery_ends_in_a_state_that_demonstrations_have_no_later(tmp_path):
    # Two demonstrations with frames at 0, 0.1, ..., 1 and between; the state 0.4 at the takeover is familiar at once.
    expert = record(Line(2), Expert(), range(2))
    write_dataset(expert, tmp_path)
    config = CorrectConfig(max_policy_steps=6, recover_steps=20, recover_data=tmp_path)
    assert flags(recovering(config, count=1).segment) == [0] * 6 + [2] * 6


def test_states_are_familiar_but_for_the_outer_ones_and_at_no_later_stage():
    draws = np.random.default_rng(0)
    walks = [np.cumsum(draws.normal(size=(50, 3)), 0) for _ in range(20)]
    states = FamiliarStates(walks)
    others = [states.nearest(each, without=index)[0] for index, each in enumerate(walks)]
    inside = np.concatenate(others) <= states.bound
    assert inside.mean() == pytest.approx(0.95, abs=0.001)
    assert not states.contain(np.full((1, 3), 1e3), np.ones(1))[0]
    begin, end = walks[3][:1], walks[3][-1:]
    assert states.contain(begin, np.zeros(1))[0] and states.nearest(end)[1] == 1.0
    assert states.contain(end, np.ones(1))[0] and not states.contain(end, np.full(1, 0.9))[0]
    with pytest.raises(DataError, match="two demonstrations or more, and there are 1"):
        FamiliarStates(walks[:1])


def test_a_budget_of_operators_steps_ends_the_recording_however_many_rows_there_are():
    # By hand: every episode has three recovering and nine correcting steps, so 13 need two of them.
    config = CorrectConfig(max_policy_steps=6, recover_steps=20, frames=13)
    for rows in (1, 3):
        data = recovering(config, count=9, rows=rows)
        assert len(data) == 2 and int((data.segment > 0).sum()) == 24
    assert len(recovering(replace(config, frames=12), count=9)) == 1
    assert len(recovering(replace(config, frames=1000), count=4)) == 4


@pytest.mark.checks("RaC")
@pytest.mark.parametrize(
    ("counts", "shares", "expected"),
    [
        ((60, 20, 10, 10), {"recover": 0.25, "correct": 0.25}, (0.375, 0.125, 0.25, 0.25)),
        ((60, 20, 0, 20), {"recover": 0.25, "correct": 0.25}, (0.5, 1 / 6, 0.0, 1 / 3)),
        ((60, 20, 15, 5), {"autonomous": 0.0, "correct": 0.5}, (0.4, 0.0, 0.1, 0.5)),
        ((60, 20, 10, 10), {}, (0.6, 0.2, 0.1, 0.1)),
        ((30, 0, 10, 10), {"demonstration": 0.2, "recover": 0.2, "correct": 0.1}, (0.4, 0.0, 0.4, 0.2)),
    ],
)
def test_shares_by_hand(counts, shares, expected):
    assert tuple(sampling_shares(dict(zip(KINDS, counts, strict=True)), shares).values()) == pytest.approx(expected)


@pytest.mark.checks("RaC")
def test_its_row_leaves_out_what_the_policy_did_itself():
    """As its recipe and its figure: of 100, 50, 10 and 20 steps the operators' make half, own successes none."""
    (row,) = (paper for paper in papers() if paper.id == "RaC")
    (setting,) = (each for each in row.settings if each.startswith("train.shares="))
    shares = OverridesParser.create().parse_override(setting).value()
    assert sampling_shares(dict(zip(KINDS, (100, 50, 10, 20), strict=True)), shares) == pytest.approx(
        {"demonstration": 0.5, "autonomous": 0.0, "recover": 0.25, "correct": 0.25}
    )


@pytest.mark.checks("RaC")
def test_samples_have_their_shares_and_chunks_end_before_a_kind_without_one():
    policy = DenoisingPolicy(
        DenoisingPolicyConfig(chunk=2, prediction_steps=3, width=8, depth=1), FIELDS, ACTION, fps=10
    )
    data, draws = episodes(), torch.Generator().manual_seed(0)
    # To imitate: 2 recovers, 3 and 4 correct, 5 to 8 are the policy's own, 12 and 13 demonstrated.
    assert kinds_of_steps(data).tolist() == [1, 1, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    batch = next(
        regression_batches(policy, data, 4096, draws, shares={"recover": 0.3, "correct": 0.5, "autonomous": 0})
    )
    steps = ((batch["actions"][:, 0, 0] + 1) / 2 * 13).round().long()
    drawn = torch.bincount(steps, minlength=14) / len(steps)
    expected = torch.tensor([0, 0, 0.3, 0.25, 0.25, 0, 0, 0, 0, 0, 0, 0, 0.1, 0.1])
    assert drawn.numpy() == pytest.approx(expected.numpy(), abs=0.03)  # four standard deviations are 0.03
    valid = {int(step): flags(each) for step, each in zip(steps, batch["action_valid"], strict=True)}
    assert valid[3] == [1, 1, 0] and valid[4] == [1, 0, 0]  # what follows is the policy's own
    with pytest.raises(DataError, match="does not record"):
        next(regression_batches(policy, replace(data, actor=None, segment=None), 4, draws, shares={"correct": 0.5}))
    with pytest.raises(ConfigError, match=r"no kind of step 'corect'.*'correct'"):
        next(regression_batches(policy, data, 4, draws, shares={"corect": 0.5}))
    with pytest.raises(DataError, match="leaves no step"):
        next(regression_batches(policy, data.select([0]), 4, draws, shares=dict.fromkeys(KINDS, 0.0)))


def test_a_budget_ends_the_policys_turn_and_nobody_corrects_without_either():
    data = corrected(CorrectConfig(max_policy_steps=3, rewind=0))
    assert flags(data.select([0]).segment) == [0] * 3 + [2] * 7
    long = corrected(CorrectConfig(no_progress_steps=100), count=1)
    assert flags(long.segment) == [0] * 60 and not bool(long.success.any())


def test_one_operator_serves_three_rows_in_order_while_the_others_hold_still():
    # By hand: all three stand at 0.2 after two steps; 8 more lead to 1, so the second waits 8 steps, the third 16.
    data = corrected(CorrectConfig(max_policy_steps=2, operators=1), count=3)
    for row, waits in enumerate((0, 8, 16)):
        one = data.select([row])
        assert flags(one.actor) == [0] * 2 + [3] * waits + [2] * 8
        assert flags(one.segment) == [0] * (2 + waits) + [2] * 8
        assert one.actions[:, 0].tolist() == pytest.approx([0.1] * 2 + [0.0] * waits + [0.1] * 8)
        assert flags(imitation_mask(one)) == [0] * (2 + waits) + [1] * 8
    assert bool(data.success.all())
    counts = {"episodes": 3, "takeovers": 3, "steps": 24, "recovering_steps": 0, "waiting_steps": 24}
    assert intervention_counts(data) == counts


def test_an_operator_hands_back_after_a_number_of_steps():
    # By hand: the policy walks to 0.2, the operator to 0.5, the policy stands still for its two steps, and so on.
    data = corrected(CorrectConfig(max_policy_steps=2, operator_steps=3), count=1)
    assert flags(data.actor) == [0, 0, 2, 2, 2, 0, 0, 2, 2, 2, 0, 0, 2, 2]
    assert data.actions[:, 0].tolist() == pytest.approx([0.1] * 5 + [0.0] * 2 + [0.1] * 3 + [0.0] * 2 + [0.1] * 2)
    assert intervention_counts(data)["takeovers"] == 3


def test_a_row_that_nobody_reaches_in_time_fails_while_it_waits():
    data = corrected(
        CorrectConfig(max_policy_steps=53, operators=1), count=2
    )  # 6 steps to go of 60: not enough for 0.6
    assert flags(data.select([0]).actor) == [0] * 53 + [2] * 6 and bool(data.success[0])
    assert flags(data.select([1]).actor) == [0] * 53 + [3] * 6 + [2] and not bool(data.success[1])


def test_grippers_are_undone_by_what_they_held():
    data = corrected(CorrectConfig(max_policy_steps=2, rewind=2), names=("velocity", "gripper"), count=1)
    assert data.actions[:5].tolist() == [
        pytest.approx(each) for each in ([0.1, 0.1], [0.1, 0.1], [-0.1, 0.1], [-0.1, 0.1], [0.1, 0.1])
    ]


def test_corrections_need_a_policy_and_turns_of_some_length():
    with pytest.raises(ConfigError, match=r"set collect\.policy=CHECKPOINT"):
        CollectSection(correct=CorrectConfig(no_progress_steps=3))
    with pytest.raises(ConfigError, match="at least 0"):
        CorrectConfig(rewind=-1)


def test_collect_corrects_and_train_says_what_it_leaves_out(tmp_path, capsys):
    small = [
        "world=reach_planar",
        "policy.width=8",
        "policy.depth=1",
        "policy.sampling_steps=2",
        f"run.root={tmp_path}",
    ]
    small += ["train.fit.steps=2", "train.evaluate_episodes=0", "collect.episodes=4"]
    assert main(["collect", *small]) == main(["train", *small]) == 0
    policy = tmp_path / "train/reach_planar/0/checkpoint"
    more = [f"collect.policy={policy}", "collect.correct.max_policy_steps=5", "run.name=corrected"]
    assert main(["collect", *small, *more]) == 0
    assert "steps recover" in capsys.readouterr().out
    result = json.loads((tmp_path / "collect/corrected/0/result.json").read_text())
    assert result["interventions"]["takeovers"] == 4 and result["interventions"]["waiting_steps"] == 0
    dataset = tmp_path / "collect/corrected/0/dataset"
    assert main(["train", *small, f"train.data={dataset}", "run.name=again"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "Interventions: in 4 of 4 episodes" in output
        and "excluded: 20 of the policy's own" in output
        and "Skipped" not in output
    )
    beside = tmp_path / "collect/reach_planar/0/dataset"
    both = ["run.name=both", f"train.data={beside}", f"train.extra_datasets=[{dataset}]", "train.episodes=1"]
    assert main(["train", *small, *both]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"Data: {beside} and {dataset}, 5 episodes" in output and "Interventions: in 4 of 5 episodes" in output
    other = tmp_path / "collect/other/0/dataset"
    assert main(["collect", *small, "world=push_cube", "run.name=other"]) == 0
    assert main(["train", *small, "run.name=neither", f"train.data={beside}", f"train.extra_datasets=[{other}]"]) != 0
    output = " ".join(capsys.readouterr().err.split())
    assert f"{other}, to be merged with {beside}" in output and "cannot be concatenated" in output
