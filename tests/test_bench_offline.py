"""The benchmarks of learning from a log, and in the world, smaller than they are meant to be; what their tables say."""

import json

import pytest

from robopolicy.benchmarks import offline, online
from robopolicy.cli import main
from robopolicy.core.errors import ConfigError
from robopolicy.core.storage import read_json

pytestmark = pytest.mark.long

TINY = [
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=16",
    "train.fit.steps=60",
    "train.evaluate_episodes=8",
    "world.batch_size=16",
    "offline.critic.steps=3",
    "offline.evaluate_episodes=8",
    "offline.agent.width=16",
    "offline.guided.steps=2",
    "offline.guided.episodes=8",
    "online.agent.width=16",
    "online.pretrain_steps=3",
    "online.evaluate_episodes=8",
    "deploy.base_episodes=8",
    "deploy.episodes=20",
    "deploy.update_every=10",
    "finetune.evaluate_episodes=8",
    "finetune.rollout_length=4",
    "finetune.finetuned_steps=2",
]
QUICK = (
    "imitation of everything",
    "of the episodes that succeeded",
    "best of 16, imitated",
    "Diffusion-QL, a critic of 4,000 updates",
    "best of 16, imitated, of a flow",
)


def bench(root, name, *chosen, changed=()):
    overrides = ",".join(f"'{setting}'" for setting in (*TINY, *changed))
    given = ["bench", name, "bench.tasks=[push_cube]", "bench.seeds=[0]", f"bench.overrides=[{overrides}]", *chosen]
    assert main([*given, "run.threads=1", f"run.root={root}", f"json={root / name}.json"]) == 0
    return json.loads((root / f"{name}.json").read_text())


def everybody_succeeds(monkeypatch):
    """Successes are too rare in tiny runs to imitate them alone."""
    monkeypatch.setitem(
        offline.WAYS,
        "of the episodes that succeeded",
        offline.Way("filtered_imitation", "", ("offline.improve.advantage=critic",)),
    )


def fewer_updates(monkeypatch, names):
    ways = {name: offline.WAYS[name] for name in names}
    for name, way in ways.items():
        small = () if way.improve == "idql" else (_steps(way),)
        own = [setting for setting in way.settings if "critic.steps" not in setting]
        ways[name] = offline.Way(way.improve, way.critic, (*own, *small), way.base)
    monkeypatch.setattr(offline, "WAYS", ways)


def _steps(way):
    return f"offline.improve.{'observations=16' if way.improve == 'chain_ppo' else 'steps=2'}"


def test_every_part_runs_once_and_its_tables_name_every_row(tmp_path, monkeypatch, capsys):
    everybody_succeeds(monkeypatch)
    fewer_updates(monkeypatch, QUICK)
    monkeypatch.setattr(offline, "AGENTS", ("td3_bc",))
    result = bench(tmp_path, "offline")["tasks"]["push_cube"]["0"]
    output = " ".join(capsys.readouterr().out.split())
    assert set(result) == set(offline.PARTS) and set(result["ways"]) == set(QUICK)
    assert result["ways"]["best of 16, imitated"]["base"]["episodes"] == 8
    assert set(result["deployment"]["spoilt"]) == {"StepMix", "EpsMix", "replaced at once"}
    assert "running" not in result["deployment"]["spoilt"]["StepMix"]
    assert set(result["corrections"]) == set(offline.CORRECTIONS)
    folder = tmp_path / "bench" / "offline" / "push_cube"
    corrected = read_json(folder / "train" / offline.slug("40 corrected at once") / "0" / "result.json")
    assert corrected["episodes"] > result["ways"]["best of 16, imitated"]["base"]["episodes"]
    assert " and " in corrected["data"] or " and " in corrected["read"]["data"]
    flows = read_json(folder / "offline" / offline.slug(QUICK[-1]) / "0" / "result.json")
    assert "/flow/" in flows["base_checkpoint"]
    titles = [table.title for table in offline.tables({"tasks": {"push_cube": {"0": result}}})]
    assert len(titles) == 4 and "floor" in output
    before = sorted(folder.rglob("model.safetensors"))
    assert bench(tmp_path, "offline")["tasks"]["push_cube"]["0"] == result  # nothing is done twice
    assert sorted(folder.rglob("model.safetensors")) == before
    assert main(["bench", "offline", "bench.only=[way]", f"run.root={tmp_path}"]) == 2
    assert "Did you mean" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_way_of_learning_from_a_log_runs(tmp_path, monkeypatch):
    everybody_succeeds(monkeypatch)
    fewer_updates(monkeypatch, tuple(offline.WAYS))
    result = bench(tmp_path, "offline", "bench.only=[ways]")["tasks"]["push_cube"]["0"]
    assert set(result["ways"]) == set(offline.WAYS)


ONLINE = ["online.steps=400", "online.warmup=100", "online.num_envs=4", "online.batch_size=8"]


def test_arms_in_the_world_begin_alike_and_say_what_they_lose(tmp_path, capsys):
    few = ["online.evaluate_at=[0,1]", "finetune.minibatch=32", *ONLINE]
    result = bench(tmp_path, "online", "bench.only=[dsrl,rlpd,ppo]", changed=few)["tasks"]["push_cube"]
    rows = {name: seeds["0"] for name, seeds in result.items()}
    assert len({row["base"]["success_rate"] for row in rows.values()}) == 1
    assert rows["dsrl"]["early"].keys() == {"1"} and rows["ppo"]["early"] == {}
    assert all(0 < row["env_steps"] <= 1.5 * 1000 and row["curve"] for row in rows.values())
    log = tmp_path / "bench/online/push_cube/collect/log_diffusion/0/dataset"
    assert log.is_dir()
    assert "RLPD" in capsys.readouterr().out
    assert "<svg" in online.picture({"tasks": {"push_cube": result}}).svg


def test_names_are_folders_and_nothing_is_filed_under_two_of_them():
    names = [offline.slug(name) for name in (*offline.WAYS, *offline.CORRECTIONS)]
    assert len(set(names)) == len(names) and all(name.replace("_", "").isalnum() for name in names)
    assert set(offline.NEW.values()) <= set(offline.WAYS)
    with pytest.raises(ConfigError, match="no 'dsr'"):
        online.chosen_from(online.compose(["bench.only=[dsr]"]), online.ARMS)
