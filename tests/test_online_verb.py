"""robopolicy online through the command line: both methods, what they leave behind, and what is refused."""

import json

import pytest
from tiny_runs import TINY

from robopolicy.cli import main
from robopolicy.core.run import RunFolder
from robopolicy.policies import load_policy
from robopolicy.training.critics import AgentPolicy, SteeredPolicy
from robopolicy.training.editing import EditedPolicy

pytestmark = pytest.mark.long

SMALL = (
    *TINY,
    "evaluate.episodes=4",
    "evaluate.videos=0",
    "online.steps=400",
    "online.warmup=100",
    "online.num_envs=4",
    "online.batch_size=8",
    "online.pretrain_steps=5",
    "online.evaluate_episodes=8",
    "online.evaluate_at=[0,1,5]",
)
NARROW = ("online.agent.width=8", "online.agent.depth=1")
RLPD = (*NARROW, "online.agent.critics=3")
CAL_QL = (*NARROW, "online.agent=cal_ql", "online.agent.samples=2")


def run(root, verb, *arguments):
    own = [item for item in SMALL if item.partition(".")[0] not in ("evaluate", "online") or item.startswith(verb)]
    return main([verb, *own, f"run.root={root}", *arguments])


def result(root, name):
    return json.loads((root / "online" / name / "0" / "result.json").read_text())


def test_a_steered_policy_is_learned_judged_loaded_and_learned_further(root, capsys):
    assert run(root, "online", "run.name=dsrl", *RLPD, f"online.policy={root}/train/reach_planar/0/checkpoint") == 0
    result_json = result(root, "dsrl")
    assert 396 <= result_json["env_steps"] <= 400 and result_json["updates"] > 50
    assert [record["updates"] for record in result_json["evaluations"]] == [0, 1, 5, result_json["updates"]]
    assert result_json["base"]["deterministic"]["episodes"] == 8
    assert {"tuned", "difference", "dip", "seconds"} <= result_json.keys()
    folder = root / "online" / "dsrl" / "0"
    assert isinstance(load_policy(folder / "checkpoint"), SteeredPolicy)
    assert "<svg" in (folder / "report.html").read_text()
    assert "Largest drop" in capsys.readouterr().out
    assert run(root, "evaluate", f"evaluate.policy={folder / 'checkpoint'}", "run.name=dsrl") == 0
    assert run(root, "online", "run.name=on", *RLPD, f"online.policy={folder / 'checkpoint'}", "online.steps=200") == 0
    assert result(root, "on")["updates"] > 10
    assert run(root, "online", "run.name=dsrl", *RLPD, f"online.policy={root}/train/reach_planar/0/checkpoint") == 0
    assert "is done" in capsys.readouterr().out


def test_an_agent_learns_from_data_and_then_in_the_world(root):
    data = f"online.dataset={root}/collect/reach_planar/0/dataset"
    for name, settings in {
        "wsrl": (*CAL_QL, data),
        "rlpd": (*RLPD, data, "online.offline_ratio=0.5", "online.pretrain_steps=0"),
        "offline_only": (*NARROW, "online.agent=td3_bc", data, "online.steps=0"),
        "alone": RLPD,
    }.items():
        assert run(root, "online", "online.method=actions", f"run.name={name}", *settings) == 0, name
        result_json = result(root, name)
        assert (result_json["env_steps"] == 0) is (name == "offline_only")
        assert isinstance(load_policy(root / "online" / name / "0" / "checkpoint"), AgentPolicy)
    trained = RunFolder(root / "online" / "wsrl" / "0").metrics()
    assert any("agent_step" in record for record in trained) and any("iteration" in record for record in trained)


def test_without_a_policy_an_agent_acts_from_data_or_from_nothing(root, tmp_path):
    data = f"online.dataset={root}/collect/reach_planar/0/dataset"
    for name, settings in {"data": (data, "online.steps=0"), "nothing": ("online.steps=200",)}.items():
        arguments = ("online.method=actions", f"run.name={name}", *RLPD, *settings, "online.chunk=2")
        assert run(tmp_path, "online", *arguments) == 0
        policy = load_policy(tmp_path / "online" / name / "0" / "checkpoint")
        assert policy.spec.chunk == 2


def test_data_of_another_task_is_refused_before_anything_is_learned_of_it(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("robopolicy.verbs.online.fit_agent", lambda *_, **__: pytest.fail("it has begun to learn"))
    data = f"online.dataset={root}/collect/reach_planar/0/dataset"
    own = [item for item in SMALL if item.startswith(("run.", "online."))]
    command = ["online", *own, "world=push_cube", f"run.root={tmp_path}", "online.method=actions", data]
    assert main([*command, *RLPD]) == 2
    assert "Is this the world it was trained for?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("online.dataset=somewhere",), "offline.improve=dsrl"),
        (("online.method=actions", "online.offline_ratio=0.5"), "set online.dataset"),
        (("online.policy=/nowhere",), "/nowhere does not exist"),
        (("online.noise_bound=0",), "online.noise_bound is 0: it must be above 0"),
        (("online.offline_ratio=2", "online.method=actions"), "online.offline_ratio is 2: it must lie between 0 and 1"),
        (("online.agent=rldp",), "Did you mean 'rlpd'"),
        (("online.method=action",), "Did you mean 'actions'"),
        (("online.method=edit", "online.method.edit_scale=3"), "at most 2"),
        (("online.method=dsrl", "online.method.edit_scale=0.3"), "Set online.method.kind=edit, which has it"),
    ],
)
def test_mistakes_end_with_a_sentence(settings, text, root, capsys):
    assert run(root, "online", "run.name=wrong", *settings) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_policy_goes_on_by_the_method_by_which_it_learned(root, capsys):
    assert run(root, "online", "run.name=own", "online.method=actions", *RLPD, "online.steps=120") == 0
    own = f"online.policy={root}/online/own/0/checkpoint"
    assert run(root, "online", "run.name=other", own, *RLPD) == 2
    assert "was trained with online.method=actions: pass" in " ".join(capsys.readouterr().err.split())
    assert run(root, "online", "run.name=further", "online.method=actions", own, *RLPD) == 0


def test_chunks_are_edited_from_demonstrations_and_further_and_the_base_may_learn(root):
    base = f"online.policy={root}/train/reach_planar/0/checkpoint"
    data = f"online.dataset={root}/collect/reach_planar/0/dataset"
    edit = ("online.method=edit", "online.method.candidates=2", *RLPD)
    for name, settings in {
        "edit": (base, data, "online.offline_ratio=0.5", "online.method.base_utd_ratio=0.2"),
        "edit_alone": (base, "online.method.edit_scale=0.5"),
    }.items():
        assert run(root, "online", f"run.name={name}", *edit, *settings) == 0, name
        assert result(root, name)["method"] == "edit" and result(root, name)["updates"] > 50
        assert isinstance(load_policy(root / "online" / name / "0" / "checkpoint"), EditedPolicy)
    assert any("base_loss" in record for record in RunFolder(root / "online" / "edit" / "0").metrics())
    own = f"online.policy={root}/online/edit/0/checkpoint"
    assert run(root, "online", "run.name=edit_on", *edit, own, data, "online.method.base_utd_ratio=0.2") == 0
    assert run(root, "evaluate", f"evaluate.policy={root}/online/edit/0/checkpoint", "run.name=edit") == 0
