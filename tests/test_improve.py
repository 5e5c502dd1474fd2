"""`improve`: the plan, the stages, what is refused, and what an interruption leaves."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from robopolicy.cli import JOBS, main, overrides
from robopolicy.configuration import Config, compose
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.run import RunFolder
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.verbs import improve as improve_verb
from robopolicy.verbs import job
from robopolicy.verbs.improve import again, changes, setting
from robopolicy.verbs.verb import VERBS, declaration

SIZES = (
    *("finetune.num_envs=8", "finetune.rollout_length=4", "finetune.minibatch=32", "finetune.evaluate_every=1"),
    *("finetune.evaluate_episodes=8", "finetune.critic_width=16", "evaluate.videos=1", "finetune.finetuned_steps=2"),
    *("offline.rounds=1", "offline.critic.steps=20", "offline.improve.steps=10", "gate.steps=20", "gate.num_states=8"),
)
SMALL = ("run.threads=1", "improve.episodes=8", f"improve.overrides=[{','.join(map(repr, SIZES))}]")


def checkpoint(root: Path) -> Path:
    return root / "train" / "reach_planar" / "0" / "checkpoint"


def log(root: Path) -> Path:
    return root / "collect" / "reach_planar" / "0" / "dataset"


def improve(root: Path, *arguments: str, policy: Path | None = None) -> int:
    return main(["improve", str(policy or checkpoint(root)), *SMALL, f"run.root={root}", *arguments])


def result(root: Path, name: str) -> dict:
    return json.loads((root / "improve" / name / "0" / "result.json").read_text())


def said(capsys) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_robopolicy_alone_shows_the_four_jobs_before_the_verbs(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    places = [text.index(command) for command in JOBS.values()]
    assert places == sorted(places) and places[-1] < text.index("All verbs") < text.index("bakeoff")
    for command in JOBS.values():
        _, verb, *words = shlex.split(command)
        compose(overrides(verb, declaration(verb), words), sections=declaration(verb).sections)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert all(f"| {job} | `{command}` |" in readme for job, command in JOBS.items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cameras": ("top", "wrist"), "image_size": {"top": [48, 64], "wrist": 32}},
        {
            "options": {
                "success": "return >= 3",
                "style": 3,
                "reward": "mine:paid",
                "names": ["a b", "1e3"],
                "off": None,
            }
        },
        {"name": "gymnasium:Reacher-v5", "data": Path("with space/x"), "batch_size": 7},
    ],
)
def test_a_section_written_as_settings_composes_to_itself(options: dict):
    section = replace(WorldSection(name="push_t"), **options)
    config = compose(changes("world", section, WorldSection(name="")))
    assert json.dumps(config.world.options) == json.dumps(section.options)
    assert replace(config.world, options={}) == replace(section, options={}, cameras=tuple(section.cameras))


def test_data_is_short_for_the_setting_of_the_verb(tmp_path: Path):
    strange = tmp_path / "a, [log]"
    strange.mkdir()
    config = compose(overrides("improve", declaration("improve"), ["a/b", f"data={strange}"]))
    assert (config.improve.policy, config.improve.data) == (Path("a/b"), strange)
    assert compose([setting("improve.data", strange)]).improve.data == strange
    assert Config().improve.data is None


def test_the_command_with_other_settings_is_the_same_job():
    words = ["my run/checkpoint", "world=push_t", "data=a/b", "improve.episodes=40", "improve.iterations=3"]
    words.append("improve.overrides=['finetune.clip=0.1','finetune.rewards=[success_only]']")
    config = compose(overrides("improve", declaration("improve"), ["'my run/checkpoint'", *words[1:]]))
    _, verb, policy, *others = shlex.split(again(config, "improve.iterations=6"))
    assert (verb, policy) == ("improve", "my run/checkpoint")
    settings = overrides("improve", declaration("improve"), [f"'{policy}'", *others])
    other = compose(settings)
    assert other.improve == replace(config.improve, iterations=6) and other.world == config.world


@pytest.fixture(scope="module")
def able(root: Path) -> Path:
    """A checkpoint that succeeds in some episodes."""
    demonstrations = "world=reach_planar", "run.threads=1", f"run.root={root}", "run.name=able"
    assert main(["collect", *demonstrations, "collect.episodes=60"]) == 0
    sizes = "policy.width=64", "policy.depth=1", "policy.sampling_steps=2", "train.batch_size=64"
    steps = "train.fit.steps=600", "train.fit.learning_rate=2e-3", "train.evaluate_episodes=0"
    assert main(["train", *demonstrations, *sizes, *steps]) == 0
    return root / "train" / "able" / "0" / "checkpoint"


@pytest.mark.long
def test_the_plan_alone_prints_commands_that_work_and_leaves_nothing(root: Path, capsys):
    assert improve(root, "world=reach_planar", "improve.plan_only=true", "run.name=planned") == 0
    text = capsys.readouterr().out
    commands = [line.strip() for line in text.splitlines() if line.strip().startswith("robopolicy ")]
    assert [shlex.split(line)[1] for line in commands] == ["evaluate", "finetune", "evaluate"]
    assert "recipe=reach_planar" in commands[1] and "measured just now" in text and "of memory" in text
    assert not (root / "improve" / "planned").exists()
    assert main([*shlex.split(commands[0])[1:], "evaluate.episodes=4"]) == 0
    assert (root / "improve" / "planned" / "0" / "evaluate" / "base" / "0" / "result.json").exists()


@pytest.mark.long
def test_a_killed_run_goes_on_and_does_nothing_twice(root: Path, able: Path, capsys, monkeypatch):
    whole = job.finish

    def killed(config, folder, told):
        if folder.path.is_relative_to(root):
            raise KeyboardInterrupt
        whole(config, folder, told)

    arguments = ["world=reach_planar", "improve.iterations=3", "improve.episodes=16"]
    monkeypatch.setattr(job, "finish", killed)
    assert improve(root, *arguments, policy=able) == 130
    assert "Nothing is lost" in said(capsys)
    monkeypatch.setattr(job, "finish", whole)
    folder = root / "improve" / "reach_planar" / "0"
    first = folder / "evaluate" / "base" / "0" / "result.json"
    before = [path.stat().st_mtime_ns for path in (first, *folder.glob("finetune/tuned/0/resume/*"))]
    began = json.loads((folder / "costs.json").read_text())
    monkeypatch.setattr("robopolicy.verbs.improve.trial", lambda *_: pytest.fail("it measures again"))
    status = improve(root, *arguments, policy=able)
    assert [path.stat().st_mtime_ns for path in (first, *folder.glob("finetune/tuned/0/resume/*"))] == before
    iterations = [each["iteration"] for each in RunFolder(folder / "finetune" / "tuned" / "0").metrics()]
    assert iterations == [0, 1, 2, 3]
    result_json = result(root, "reach_planar")
    told, low = result_json["improve"], result_json["difference"]["low"]
    costs = json.loads((folder / "costs.json").read_text())
    assert costs["base"] == began["base"] and costs["tuned"]["seconds"] > began["tuned"]["seconds"]
    assert status == (0 if low > 0 else 1) and told["improved"] == (low > 0)
    served = folder / "finetune" / "tuned" / "0" / "checkpoint" if low > 0 else able
    assert told["policy"] == str(served) and told["serve"] == f"robopolicy serve {served}"
    assert list(result_json["verdicts"]) == ["base", "improved" if low > 0 else "tuned"] and "per_episode" not in str(
        result_json["verdicts"]
    )
    assert [stage["verb"] for stage in told["stages"]] == ["evaluate", "finetune", "evaluate"]
    assert all(stage["env_steps"] > 0 and stage["cpu_seconds"] > 0 for stage in told["stages"])
    page = (folder / "report.html").read_text()
    for text in ("Chosen: the", "Limits of this improvement", "CPU seconds", "base, deterministic", "Learning curve"):
        assert text in page, text
    assert told["serve"] in page and page.count("<video") == 2 and "points" in page
    capsys.readouterr()
    assert improve(root, *arguments, policy=able) == status
    assert "is done" in said(capsys)


@pytest.mark.long
def test_a_time_budget_limits_the_iterations_and_one_that_is_too_short_is_refused(root: Path, capsys, monkeypatch):
    speed = {"loading": 3.0, "iteration": 20.0, "episode": 0.01, "episodes": 8, "memory": 1e9}
    monkeypatch.setattr(improve_verb, "speed_of_finetuning", lambda stage, config: speed)
    short = ["world=reach_planar", "improve.plan_only=true"]
    assert improve(root, *short, "improve.minutes=0.001") == 2
    refused = said(capsys)
    assert "improve.minutes=0.001 is too short" in refused
    assert improve(root, *short, "improve.minutes=1000") == 0
    assert "finetune.iterations=60 " in said(capsys)
    least = float(refused.partition("the shortest plan takes ")[2].split()[0])
    assert improve(root, *short, f"improve.minutes={least}") == 0
    assert "finetune.iterations=1 " in said(capsys)
    assert improve(root, *short, f"improve.minutes={least + 4}") == 0, (
        "4 minutes are 12 iterations, less for validations"
    )
    (count,) = (int(word.split()[0]) for word in said(capsys).split("finetune.iterations=")[1:2])
    assert 11 <= count <= 13


@pytest.mark.long
def test_a_policy_that_never_succeeds_is_not_fine_tuned(root: Path, capsys):
    few = "world=push_t", "run.threads=1", f"run.root={root}", "run.name=hopeless"
    assert main(["collect", *few, "collect.episodes=4"]) == 0
    sizes = "policy.width=16", "policy.depth=1", "policy.sampling_steps=2"
    assert main(["train", *few, *sizes, "train.fit.steps=2", "train.evaluate_episodes=0"]) == 0
    policy = root / "train" / "hopeless" / "0" / "checkpoint"
    capsys.readouterr()
    assert improve(root, "run.name=hopeless", policy=policy) == 1  # in the world that the checkpoint names
    text = said(capsys)
    assert "0 of 16 episodes" in text and "dense reward" in text and "robopolicy teach expert" in text
    folder = root / "improve" / "hopeless" / "0"
    assert not (folder / "finetune").exists() and "Chosen: the base policy" in (folder / "report.html").read_text()
    assert result(root, "hopeless")["improve"]["policy"] == str(policy)


@pytest.mark.long
def test_a_log_alone_is_judged_by_the_gate_and_real_success_is_not_claimed(root: Path, capsys):
    status = improve(root, f"data={log(root)}")
    text = said(capsys)
    result_json = result(root, "log")
    assert "world=reach_planar, which the checkpoint records" in text and "fitted Q evaluation" in text
    assert status == 1 and not result_json["improve"]["improved"] and len(result_json["rounds"]) == 1
    assert result_json["improve"]["policy"] == str(checkpoint(root))
    assert not result_json["accepted"] or "robopolicy deploy" in text
    (judgement,) = result_json["rounds"][0]["verdict"]["judgements"]
    page = (root / "improve" / "log" / "0" / "report.html").read_text()
    assert f"[{judgement['bootstrap'][0]:+.3f}" in page and "Real success: nothing was executed" in page
    assert "verdicts" not in result_json


@pytest.mark.long
def test_a_log_that_only_records_success_is_enough_and_one_without_is_refused(root: Path, tmp_path: Path, capsys):
    episodes = read_dataset(log(root))
    write_dataset(replace(episodes, rewards=None), tmp_path / "success")
    write_dataset(replace(episodes, rewards=None, step_success=None, terminated=None), tmp_path / "nothing")
    assert improve(root, f"data={tmp_path / 'success'}", "improve.plan_only=true") == 0  # leaves no run
    assert "offline.reward=success" in said(capsys)
    assert improve(root, f"data={tmp_path / 'nothing'}", "run.name=nothing") == 2
    text = said(capsys)
    assert "neither rewards (next.reward) nor success" in text and "world=NAME" in text
    assert not (root / "improve" / "nothing" / "0" / "offline").exists()


@pytest.mark.long
def test_with_both_the_simulator_is_used_and_the_plan_says_why(root: Path, capsys):
    arguments = [f"data={log(root)}", "world=reach_planar", "improve.plan_only=true"]
    assert improve(root, *arguments) == 0
    text = said(capsys)
    assert "The log is therefore not used" in text and "98.3 % [97.0, 99.1]" in text
    results = (Path(__file__).parents[1] / "docs" / "results.md").read_text()
    gates = (Path(__file__).parents[1] / "robopolicy" / "benchmarks" / "README.md").read_text()
    assert "| fqe | 7 of 61" in gates and "| fqe | 3 of 86" in gates
    assert all(
        each in results
        for each in ("98.3 % [97.0, 99.1]", "98.5 % [97.2, 99.2]", "94.3 % [92.2, 95.9]", "94.8 % [92.8, 96.3]")
    )


@pytest.mark.long
def test_where_there_are_several_instructions_the_log_is_imitated_as_well(root: Path, capsys):
    few = "world=push_choice", "run.threads=1", f"run.root={root}", "run.name=choice"
    assert main(["collect", *few, "collect.episodes=8"]) == 0
    sizes = "policy.width=16", "policy.depth=1", "policy.sampling_steps=2"
    assert main(["train", *few, *sizes, "train.fit.steps=2", "train.evaluate_episodes=0"]) == 0
    policy, data = root / "train" / "choice" / "0" / "checkpoint", root / "collect" / "choice" / "0" / "dataset"
    capsys.readouterr()
    plan = "world=push_choice", "improve.plan_only=true", "improve.recipe=none"
    assert improve(root, *plan, f"data={data}", policy=policy) == 0
    text = said(capsys)
    assert f"finetune.expert_datasets=[{data}]" in text and "84.3 to 92.2 %" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["world=pick_place"], "Is this the world it was trained for?"),
        (["world=worldmodel"], "robopolicy imagine"),
        (["world=demonstrations"], "data=LOG"),
        (["world=reach_planar", "improve.overrides=['finetune.clpi=1']"], "finetune.clpi"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(root: Path, capsys, arguments: list[str], text: str):
    assert improve(root, *arguments, "run.name=refused") == 2
    assert text in said(capsys)
    assert not list((root / "improve" / "refused" / "0").glob("*/*/*"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::robopolicy.core.errors.RobopolicyWarning")
def test_a_lerobot_checkpoint_is_fine_tuned_in_its_world(root: Path, tmp_path: Path, capsys):
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    from lerobot.policies.factory import make_pre_post_processors

    import robopolicy

    spec = robopolicy.make_world("reach_planar", batch_size=1).spec
    kinds = {key: FeatureType.ENV if "environment" in key else FeatureType.STATE for key in spec.observation}
    config = DiffusionConfig(
        input_features={key: PolicyFeature(kinds[key], field.shape) for key, field in spec.observation.items()},
        output_features={"action": PolicyFeature(FeatureType.ACTION, spec.action.shape)},
        horizon=8,
        n_action_steps=4,
        n_obs_steps=1,
        down_dims=(16, 32),
        noise_scheduler_type="DDIM",
        num_inference_steps=2,
        device="cpu",
        push_to_hub=False,
    )
    DiffusionPolicy(config).save_pretrained(tmp_path / "fresh")
    for processor in make_pre_post_processors(config):
        processor.save_pretrained(tmp_path / "fresh")
    learned = [
        "policy.kind=lerobot",
        f"policy.path={tmp_path / 'fresh'}",
        f"train.data={log(root)}",
        "run.name=lerobot",
    ]
    sizes = ["world=reach_planar", "run.threads=1", "train.fit.steps=20", "train.evaluate_episodes=8"]
    assert main(["train", *learned, *sizes, f"run.root={root}"]) == 0
    policy = root / "train" / "lerobot" / "0" / "checkpoint"
    capsys.readouterr()
    status = improve(root, "world=reach_planar", "run.name=lerobot", "improve.iterations=1", policy=policy)
    text = said(capsys)
    assert "LeRobot" in text and "Settings: defaults" in text
    told = result(root, "lerobot")["improve"]
    assert status == (0 if told["improved"] else 1) and told["serve"] in text
    assert VERBS.names()[1] == "improve"
