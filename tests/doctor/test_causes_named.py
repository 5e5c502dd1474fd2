"""Causes that are named: statistics that disagree with the data, a world that ignores its seed; no blame on success."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planted_faults import Unseeded

from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE
from robopolicy.core.storage import write_json
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.record import record
from robopolicy.doctor import Health, check_statistics, examine_data
from robopolicy.doctor.data import check_fields
from robopolicy.doctor.policy import check_policy_on_data
from robopolicy.doctor.recording import check_instructions
from robopolicy.verbs.doctor import judged_success
from sims.registry import load_task, make_world


@pytest.fixture(scope="module")
def reach():
    world = make_world("reach_planar", 6)
    yield world, record(world, load_task("reach_planar").expert(), np.arange(6))
    world.close()


def test_statistics_that_disagree_with_the_data_are_named(reach, tmp_path):
    _, episodes = reach
    write_dataset(episodes, tmp_path / "data")
    assert [finding.health for finding in check_statistics(episodes, tmp_path / "data")] == [Health.GOOD]
    path = tmp_path / "data" / "meta" / "stats.json"
    stored = json.loads(path.read_text())
    stored[STATE]["mean"][1] += 40.0
    del stored["action"]
    path.write_text(json.dumps(stored))
    first, second = check_statistics(episodes, tmp_path / "data")
    assert (first.health, second.health) == (Health.BAD, Health.WARNING)
    assert STATE in first.measured
    assert f"mean of '{episodes.observation_fields[STATE].names[1]}' is" in first.measured
    assert first.measured.count(" is ") == 1
    assert "lacks 'action'" in second.measured
    path.unlink()
    assert "missing" in check_statistics(episodes, tmp_path / "data")[0].measured


def test_a_world_that_ignores_its_seed_is_named_as_the_cause(reach):
    world, episodes = reach
    findings = [finding for finding in examine_data(episodes, Unseeded(world)) if finding.problem]
    start = next(finding for finding in findings if finding.check == "start of episodes")
    assert "starts differently each time with the same seeds" in start.measured
    assert "ignores its seed" in start.remedy


def test_success_on_the_same_data_frees_a_policy_from_training_longer(reach, tmp_path):
    import torch

    from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig

    _, episodes = reach
    config = DenoisingPolicyConfig(width=8, depth=1, sampling_steps=2)
    policy = DenoisingPolicy(config, episodes.observation_fields, episodes.action_field, fps=episodes.fps)

    def imitation(success):
        findings = check_policy_on_data(policy, episodes, torch.Generator().manual_seed(0), success=success)
        return next(finding for finding in findings if finding.check == "imitation")

    assert imitation(None).problem
    assert imitation(0.3).problem
    assert "Train longer" in imitation(None).remedy
    assert not imitation(0.95).problem
    assert "95%" in imitation(0.95).measured


def test_the_success_is_what_train_measured_on_this_data(tmp_path):
    run = RunFolder(tmp_path / "run")
    judged = {"policy": {"deterministic": {"reports_success": True, "success_rate": 0.9}}}
    assert judged_success(run.checkpoint, tmp_path / "data") is None
    write_json(run.path / "result.json", {"data": str(tmp_path / "data"), **judged})
    assert judged_success(run.checkpoint, tmp_path / "data") == 0.9
    assert judged_success(run.checkpoint, tmp_path / "other") is None
    judged["policy"]["deterministic"]["reports_success"] = False
    write_json(run.path / "result.json", {"data": str(tmp_path / "data"), **judged})
    assert judged_success(run.checkpoint, tmp_path / "data") is None


def test_one_task_in_other_words_is_no_fault_of_what_reads_no_text():
    reach = make_world("reach_planar", 2)
    episodes = record(reach, load_task("reach_planar").expert(), np.arange(2))
    reach.close()
    named = replace(reach.spec, instructions=("touch the ball",))
    other = SimpleNamespace(spec=named)

    def health(tasks, reads_text=None, world=other):
        (finding,) = check_instructions(replace(episodes, tasks=tasks), world, reads_text)
        return finding.health

    assert health(("push it", "push it")) is Health.UNKNOWN
    assert health(("push it", "push it"), True) is Health.BAD
    several = SimpleNamespace(spec=replace(named, instructions=("left", "right")))
    assert health(("push it", "pull it"), world=several) is Health.BAD
    assert health(("push it", "pull it"), False, several) is Health.UNKNOWN


def test_units_and_rates_of_data_and_world_are_compared_and_mere_numbers_by_count():
    reach = make_world("reach_planar", 2)
    episodes = record(reach, load_task("reach_planar").expert(), np.arange(2))
    reach.close()
    field = episodes.observation_fields[STATE]

    def found(**changes):
        fields = {**episodes.observation_fields, STATE: replace(field, **changes)}
        return check_fields(replace(episodes, observation_fields=fields, fps=reach.spec.fps + 0.04), reach.spec)

    assert not [each for each in found() if each.problem]
    assert [each.health for each in found(unit="deg") if each.check == STATE] == [Health.BAD]
    numbered = found(names=tuple(f"motor_{index}" for index in range(field.size)))
    assert not [each for each in numbered if each.problem]
    assert [each.health for each in numbered if each.check == "element names"] == [Health.UNKNOWN]
    assert [each for each in found(names=field.names[::-1]) if each.check == "observation order"]
