"""The gate under attack, smaller than it is meant to be; and its confusion, by hand."""

import json

import pytest
import torch

from robopolicy.benchmarks import gate, gate_candidates
from robopolicy.benchmarks.gate import confusion, kind_of
from robopolicy.configuration import compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import Field
from robopolicy.verbs import bench

pytestmark = pytest.mark.long

TINY = [
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=16",
    "train.fit.steps=20",
    "train.evaluate_episodes=4",
    "worldmodel.config.members=2",
    "worldmodel.fit.steps=5",
    "worldmodel.validation_episodes=4",
    "worldmodel.validation_steps=50",
    "world.batch_size=16",
    "finetune.num_envs=4",
    "finetune.rollout_length=2",
    "finetune.finetuned_steps=2",
    "offline.critic.steps=5",
    "offline.evaluate_episodes=8",
    "offline.agent.width=16",
    "gate.steps=5",
    "gate.width=16",
    "gate.num_states=8",
]


def verdict(low, high, **better):
    judges = {name: {"better": is_better, "low": 0.0, "difference": 0.0} for name, is_better in better.items()}
    return {"true": {"low": low, "high": high, "difference": (low + high) / 2}, "judges": judges}


def test_the_confusion_by_hand():
    rows = [
        verdict(0.1, 0.3, model=True, fqe=True),
        verdict(0.1, 0.3, model=True, fqe=False),
        verdict(0.1, 0.3, model=False, fqe=True),
        verdict(-0.3, -0.1, model=True, fqe=False),
        verdict(-0.3, -0.1, model=False, fqe=True),
        verdict(-0.1, 0.1, model=True, fqe=True),
        verdict(0.0, 0.1, model=False, fqe=True),
    ]
    assert [kind_of(row["true"]) for row in rows[-2:]] == ["undecided"] * 2, "a bound of 0 decides nothing"
    assert confusion(rows, ("model",)) == {"bad": (1, 2), "good": (2, 3), "undecided": (1, 2)}
    assert confusion(rows, ("fqe",)) == {"bad": (1, 2), "good": (2, 3), "undecided": (2, 2)}
    assert confusion(rows, ("model", "fqe")) == {"bad": (0, 2), "good": (1, 3), "undecided": (1, 2)}
    assert confusion([], ("model",)) == {"bad": (0, 0), "good": (0, 0), "undecided": (0, 0)}


def test_the_rank_correlation_of_a_judge_by_hand():
    def candidate(true, said):
        return {"true": {"difference": true}, "judges": {"model": {"difference": said}}}

    same = {str(place): candidate(value, 3 * value) for place, value in enumerate((0.1, -0.2, 0.3))}
    other = {str(place): candidate(value, -value) for place, value in enumerate((0.1, -0.2, 0.3))}
    seeds = [{"candidates": same}, {"candidates": {}}, {"candidates": other}]
    assert gate.ranked(seeds, "model") == pytest.approx([1.0, -1.0])


def test_there_are_as_many_candidates_as_claimed_and_planted_ones_of_every_kind():
    assert len(gate_candidates.CANDIDATES) == 53 and len(gate_candidates.HONEST) == 23
    assert {each.family for each in gate_candidates.PLANTED.values()} == {
        "wrong sign",
        "over-estimated critic",
        "distribution shift",
        "narrow data",
        "a model that flatters",
        "noise on the weights",
    }
    assert len({gate.path_of(gate.Path(), name) for name in (*gate_candidates.CANDIDATES, *gate.ARMS)}) == 56
    offered = [gate_candidates.CANDIDATES[name] for name in gate_candidates.OFFERED]
    assert len(offered) == 10 and len({each.family for each in offered if each.planted}) == 6


def recorded() -> Episodes:
    won = torch.zeros(20, dtype=torch.bool)
    won[9] = True
    return Episodes(
        observation_fields={"observation.state": Field((1,))},
        action_field=Field((2,), low=-1.0, high=1.0),
        fps=10.0,
        observation={"observation.state": torch.arange(22.0)[:, None]},
        actions=torch.linspace(-1, 1, 40).reshape(20, 2),
        lengths=torch.tensor([10, 10]),
        tasks=("", ""),
        rewards={"progress": torch.ones(20), "success": 5.0 * won},
        step_success=won,
        terminated=torch.tensor([True, False]),
    )


def test_a_log_that_flatters_pays_speed_and_announces_success():
    episodes = gate_candidates.flattering(recorded(), early=3)
    assert episodes.step_success.nonzero().flatten().tolist() == [7, 8, 9]
    speed = episodes.actions.norm(dim=1)
    assert torch.allclose(episodes.rewards["progress"] / speed, episodes.rewards["progress"][:1] / speed[:1])
    assert torch.equal(episodes.rewards["success"], recorded().rewards["success"])


def test_what_is_imitated_of_a_log():
    data, draws = recorded(), Generators(0)
    assert gate_candidates.outcomes(False)(data, draws).lengths.tolist() == [10]
    assert gate_candidates.few(1)(data, draws).step_count == 10
    batch = data.windows(torch.tensor([3, 12]), 1, 4)
    moved = gate_candidates.shifted(0.5)(batch, data, draws)["observation"]["observation.state"]
    spread = data.observation["observation.state"].std(correction=0)
    assert torch.allclose(moved, batch["observation"]["observation.state"] + 0.5 * spread)
    assert torch.allclose(gate_candidates.acted(0.5)(batch, data, draws)["actions"], 0.5 * batch["actions"])
    noisy = gate_candidates.acted(noise=9.0)(batch, data, draws)["actions"]
    assert bool((noisy != batch["actions"]).any()) and noisy.min() >= -1 and noisy.max() <= 1


def attacked(root, *chosen):
    overrides = ",".join(f"'{setting}'" for setting in TINY)
    shared = ["bench.name=gate", "bench.tasks=[reach_planar]", "bench.seeds=[0]", f"run.root={root}"]
    return bench.run(compose([*shared, f"bench.overrides=[{overrides}]", *chosen]))


@pytest.mark.slow
def test_a_policy_is_attacked_judged_and_nothing_is_done_twice(tmp_path, monkeypatch, capsys):
    names = (
        "best of 2",
        "PPO in another model, 4 iterations",
        "negated advantages",
        "failures",
        "PPO in a model with wrong heads, 4 iterations",
        "weights with noise of 0.4",
    )
    few = {name: gate_candidates.CANDIDATES[name] for name in names}
    few["half way"] = gate_candidates.Candidate("on the way", gate_candidates.between("best of 2", 0.5))
    monkeypatch.setattr(gate, "CANDIDATES", few)
    monkeypatch.setattr(gate, "OFFERED", ("weights with noise of 0.4", "best of 2"))
    assert attacked(tmp_path) == 0
    output = capsys.readouterr().out
    assert "7 candidates of 1 policies" in output and "gate: both models" in output
    folder = tmp_path / "bench" / "gate"
    result = json.loads((folder / "benchmark.json").read_text())["tasks"]["reach_planar"]["0"]
    assert set(result["candidates"]) == set(few) and set(result["rounds"]) == set(gate.ARMS)
    for row in result["candidates"].values():
        assert set(row["judges"]) == set(gate.JUDGES) and -1 <= row["true"]["low"] <= row["true"]["high"] <= 1
    off = result["rounds"]["gate off"]["records"]
    assert [record["accepted"] for record in off] == [True, True]
    assert [record["candidate"] for record in off] == [
        record["candidate"] for record in result["rounds"]["gate: model"]["records"]
    ]
    assert attacked(tmp_path, "bench.only=[rounds]") == 0
    output = capsys.readouterr().out
    assert "true success" not in output and "candidates of" not in output
    with pytest.raises(ConfigError, match="Did you mean 'rounds'"):
        attacked(tmp_path, "bench.only=[round]")
