"""Every verb on a small job, through the command line's own entry, in the order in which a user runs them."""

import functools
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny_runs import TINY

from robopolicy.cli import INTERRUPTED, main, overrides, print_help
from robopolicy.configuration import Config, compose, described, groups
from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.run import RunFolder
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.policies.registry import POLICIES
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.presets import PRESETS
from robopolicy.rl.registry import Slot
from robopolicy.training import imagined
from robopolicy.training.fit import fit_stages
from robopolicy.verbs import serve
from robopolicy.verbs.verb import VERBS, declaration
from worldmodels.registry import WORLD_MODELS

pytestmark = pytest.mark.long

SMALL = [
    *TINY,
    "finetune.iterations=2",
    "finetune.num_envs=8",
    "finetune.rollout_length=4",
    "finetune.evaluate_every=1",
    "finetune.evaluate_episodes=8",
    "finetune.critic_width=16",
    "finetune.videos=1",
    "rank.episodes=8",
    "rank.noise=[none,medium,random]",
    "evaluate.episodes=8",
    "evaluate.videos=1",
    "doctor.episodes=8",
]


def run(root, *arguments):
    return main([arguments[0], *SMALL, f"run.root={root}", *arguments[1:]])


def make(root, *verbs):
    """Run what is missing, so that a test needs no other before it (a run that is done is not done again)."""
    for verb in verbs:
        assert run(root, verb) == 0, verb


def test_what_ends_a_run_what_is_chosen_and_what_is_judged_are_seen_on_different_seeds(root, monkeypatch):
    make(root, "collect", "train")
    played: dict[str, set[int]] = {}

    def watched(world, policy, seeds, **rest):
        played.setdefault(rest.get("label", "?"), set()).update(int(seed) for seed in seeds)
        return evaluate_policy(world, policy, seeds, **rest)

    for module in ("verbs.finetune", "verbs.job", "evaluation.success"):
        monkeypatch.setattr(f"robopolicy.{module}.evaluate_policy", watched)
    own = "run.name=ended", explicit(root)[0], "finetune.target_success=0", "finetune.videos=0"
    assert run(root, "finetune", *own) == 0
    (first,) = RunFolder(root / "finetune" / "ended" / "0").metrics()
    assert first["iteration"] == 0 and 0 <= first["confirmed_success"] <= 1
    names = sorted(played)
    assert {"validate", "confirm"} < set(names) and len(names) >= 3, names
    judged = set().union(*(played[name] for name in names if name not in ("validate", "confirm")))
    assert not played["validate"] & played["confirm"] and not judged & (played["validate"] | played["confirm"])


def explicit(root):
    base, model = (root / verb / "reach_planar" / "0" / "checkpoint" for verb in ("train", "worldmodel"))
    return f"finetune.policy={base}", f"imagine.model={model}"


def test_the_whole_path(root, capsys):
    for verb in ("collect", "train", "finetune", "worldmodel", "rank"):
        assert run(root, verb) == 0, verb
        assert (root / verb / "reach_planar" / "0" / "result.json").exists()
    tuned = root / "finetune" / "reach_planar" / "0" / "checkpoint"
    figures = root / "figures.json"
    assert run(root, "evaluate", f"evaluate.policy={tuned}", f"json={figures}") == 0
    measured = json.loads(figures.read_text())["policy"]["deterministic"]
    assert measured["episodes"] == 8
    assert 0 <= measured["low"] <= measured["success_rate"] <= measured["high"] <= 1
    model = root / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    imagined = ["world=worldmodel", f"world.model={model}", "run.name=imagined"]
    assert run(root, "evaluate", f"evaluate.policy={tuned}", *imagined) == 0
    assert run(root, "finetune", *imagined, f"finetune.policy={root / 'train/reach_planar/0/checkpoint'}") == 0
    watched = [
        "imagine.real_eval_episodes=8",
        "finetune.checkpoint_every=1",
        "imagine.refresh_every=1",
        "imagine.refresh_episodes=8",
    ]
    assert run(root, "imagine", *watched, "imagine.refresh_steps=5") == 0
    imagined = json.loads((root / "imagine" / "reach_planar" / "0" / "result.json").read_text())
    assert imagined["imagined_steps"] > 0 and imagined["env_steps"] > 0 and "tuned, imagined" in imagined["imagined"]
    synthetic = ["imagine.method=sft", "imagine.rounds=1", "imagine.rollouts_per_round=16", "imagine.imitate_steps=5"]
    synthetic += ["imagine.real_eval_episodes=0", "run.name=reach_planar_sft", *explicit(root)]
    assert run(root, "imagine", *synthetic, "imagine.imitate_learning_rate=1e-4") == 0
    assert "imitate_learning_rate: 0.0001" in (root / "imagine/reach_planar_sft/0/config.yaml").read_text()
    assert run(root, "imagine", *synthetic, "imagine.imitate_learning_rate=1e-3") == 2
    for page in root.glob("*/*/*/report.html"):
        text = page.read_text()
        assert "<svg" in text, page
        assert 'src="http' not in text
        assert 'href="http' not in text
    capsys.readouterr()
    assert run(root, "finetune") == 0
    assert "already fine-tuned" in capsys.readouterr().out


@pytest.mark.parametrize(
    "planned", [pytest.param(False, id="alone"), pytest.param(True, id="planned", marks=pytest.mark.slow)]
)
def test_imagination_that_is_interrupted_while_its_model_is_refreshed_ends_in_the_same_place(
    planned, root, monkeypatch
):
    make(root, "collect", "train", "worldmodel")
    model = explicit(root)[1].removeprefix("imagine.")
    plans = [f"plan.{model}", "plan.uncertainty=-1", "plan.candidates=2", "imagine.refresh_uncertainty=1"]

    def imagine(name):
        name, settings = f"{name}_{planned}", plans if planned else []
        refreshed = "finetune.checkpoint_every=1", "imagine.refresh_every=1", "imagine.refresh_steps=5"
        shared = (
            "finetune.iterations=3",
            "imagine.real_eval_episodes=8",
            "imagine.refresh_episodes=8",
            "imagine.divergence_threshold=null",
        )
        return run(root, "imagine", f"run.name={name}", *refreshed, *shared, *settings, *explicit(root))

    refreshes = []

    def interrupted(*arguments):
        refreshes.append(fit_stages(*arguments))
        if len(refreshes) == 2:
            raise KeyboardInterrupt

    assert imagine("whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(imagined, "fit_stages", interrupted)
        assert imagine("broken") == INTERRUPTED
    assert imagine("broken") == 0
    whole, broken = (root / "imagine" / f"{name}_{planned}" / "0" for name in ("whole", "broken"))
    for file in ("checkpoint/model.safetensors", "model/model.safetensors", "refreshes.json"):
        assert (whole / file).read_bytes() == (broken / file).read_bytes(), file


def test_a_joint_model_is_trained_judged_with_and_without_planning_and_evaluated_but_not_fine_tuned(root, capsys):
    make(root, "collect")
    shared = [setting for setting in SMALL if not setting.startswith("policy.")]  # keys of a diffusion policy
    small = "policy.kind=joint", "policy.width=16", "policy.candidates=2", "policy.edm.steps=2"
    data = root / "collect" / "reach_planar" / "0" / "dataset"
    assert main(["train", *shared, f"run.root={root}", *small, "run.name=joint", f"train.data={data}"]) == 0
    folder = root / "train" / "joint" / "0"
    result = json.loads((folder / "result.json").read_text())
    assert {"without planning", "policy"} <= result.keys()
    assert "without planning, deterministic" in (folder / "report.html").read_text()
    assert run(root, "evaluate", f"evaluate.policy={folder / 'checkpoint'}", "run.name=joint") == 0
    judged = json.loads((root / "evaluate" / "joint" / "0" / "result.json").read_text())["policy"]
    assert judged["deterministic"]["success_rate"] == result["policy"]["deterministic"]["success_rate"]
    capsys.readouterr()
    assert run(root, "finetune", f"finetune.policy={folder / 'checkpoint'}", "run.name=joint") == 2
    assert "JointModel can act but cannot be trained: it lacks log_prob" in " ".join(capsys.readouterr().err.split())


def test_a_policy_that_looks_ahead_is_judged_beside_itself_and_can_be_recorded(root, capsys):
    make(root, "collect", "train", "worldmodel")
    base, model = (root / verb / "reach_planar" / "0" / "checkpoint" for verb in ("train", "worldmodel"))
    ahead = f"plan.model={model}", "plan.candidates=2", "plan.horizon=4", "run.name=ahead"
    assert run(root, "evaluate", f"evaluate.policy={base}", *ahead) == 0
    result = json.loads((root / "evaluate" / "ahead" / "0" / "result.json").read_text())
    alone, ahead_of = result["without planning"], result["policy"]
    assert alone["checkpoint"] == ahead_of["checkpoint"] and "difference" in result
    assert alone["deterministic"]["return_mean"] != ahead_of["deterministic"]["return_mean"]
    assert (root / "evaluate" / "ahead" / "0" / "without_planning.mp4").exists()
    assert run(root, "collect", f"collect.policy={base}", *ahead, "plan.uncertainty=1") == 0
    capsys.readouterr()
    assert run(root, "collect", *ahead, "run.name=nobody") == 2
    assert "collect.policy" in capsys.readouterr().err


OFFLINE = [
    "offline.critic.steps=20",
    "offline.agent.width=16",
    "offline.improve.steps=4",
    "offline.improve.observations=40",
    "offline.improve.candidates=2",
    "offline.evaluate_episodes=8",
    "offline.rounds=2",
    "gate.steps=20",
    "gate.width=16",
    "gate.num_states=8",
]


def test_a_policy_is_improved_from_recorded_data_and_put_before_a_gate(root, capsys):
    make(root, "collect", "train", "worldmodel")
    capsys.readouterr()
    data, base = (
        root / "collect" / "reach_planar" / "0" / "dataset",
        root / "train" / "reach_planar" / "0" / "checkpoint",
    )
    chosen = [f"offline.policy={base}", "offline.agent=td3_bc", "gate.evaluators=[fqe]", "run.name=off"]
    assert run(root, "offline", str(data), *OFFLINE, *chosen) == 0
    folder = root / "offline" / "off" / "0"
    result = json.loads((folder / "result.json").read_text())
    assert result["env_steps"] == 0 and len(result["rounds"]) == 2 and result["selected_by"] == ["fitted Q evaluation"]
    assert result["held_out"] == 7 and result["episodes"] == 17  # 30 % of 24 are the judges'
    output = capsys.readouterr().out
    assert output.count(" round ") == 2 and "of 2 candidates accepted" in output and "reach_planar" in output
    page = (folder / "report.html").read_text()
    assert "Gate" in page and "evaluated by fitted Q evaluation" in page
    assert run(root, "offline", str(data), *OFFLINE, *chosen) == 0
    assert "is done" in capsys.readouterr().out
    model = root / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    judges = ["gate.evaluators=[model,critic,fqe]", f"gate.models=[{model}]", f"gate.data=[{data}]"]
    assert run(root, "gate", str(folder / "checkpoint"), str(base), *OFFLINE[-3:], *judges) in (0, 1)
    output = capsys.readouterr().out
    assert output.count("evaluated by") == 3 and "success in the imagined reach_planar" in output
    policies = [base, root / "offline" / "off" / "0" / "base", folder / "checkpoint"]
    asked = f"bakeoff.policies=[{','.join(map(str, policies))}]"
    assert run(root, "bakeoff", asked, "bakeoff.episodes=8", *OFFLINE[-3:], *judges) == 0
    assert "Evaluators, on 3 policies" in capsys.readouterr().out
    scored = json.loads((root / "bakeoff" / "reach_planar" / "0" / "result.json").read_text())
    assert len(scored["judges"]) == 3 and {score["pairs"] for score in scored["judges"].values()} == {6}
    gate = json.loads((root / "gate" / "reach_planar" / "0" / "result.json").read_text())["gate"]
    assert len(gate["judgements"]) == 3 and gate["accepted"] == all(each["better"] for each in gate["judgements"])


def test_imagined_decisions_join_the_recorded_ones_and_their_model_does_not_judge_alone(root, capsys):
    make(root, "collect", "train", "worldmodel")
    model = root / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    settings = [
        f"offline.dataset={root}/collect/reach_planar/0/dataset",
        f"offline.policy={root}/train/reach_planar/0/checkpoint",
        "offline.data=[recorded,imagined]",
        "offline.imagined_episodes=8",
        f"offline.model={model}",
        f"gate.models=[{model}]",
        "run.name=imagined",
    ]
    (root / "elsewhere").symlink_to(model)
    for same in (model, root / "elsewhere", root / "worldmodel" / ".." / "worldmodel" / "reach_planar/0/checkpoint"):
        spelled = [*settings[:-2], f"gate.models=[{same}]", "run.name=imagined", "run.overwrite=true"]
        assert run(root, "offline", *OFFLINE, *spelled) == 2
        assert "cannot be the only evaluator" in " ".join(capsys.readouterr().err.split())
    assert run(root, "offline", *OFFLINE, *settings, "gate.evaluators=[model,fqe]", "run.overwrite=true") == 0
    metrics = RunFolder(root / "offline" / "imagined" / "0").metrics()
    assert any("critic_step" in record for record in metrics) and any("round" in record for record in metrics)


def test_doctor_finds_nothing_wrong_with_its_own_recording(root):
    figures = root / "doctor.json"
    run(root, "collect")
    run(root, "doctor", f"json={figures}")
    findings = {item["check"]: item["health"] for item in json.loads(figures.read_text())["findings"]}
    assert findings["replayed motion"] == "good"
    assert findings["replayed success"] == "good"
    assert findings["control rate"] == "good"


def test_a_folder_of_a_version_with_fewer_settings_goes_on(root, capsys):
    run(root, "collect")
    written = root / "collect" / "reach_planar" / "0" / "config.yaml"
    whole = written.read_text()
    assert "  images: png\n" in whole
    written.write_text(whole.replace("  images: png\n", ""))
    capsys.readouterr()
    assert run(root, "collect") == 0
    assert "already contains" in capsys.readouterr().out
    assert run(root, "collect", "collect.images=video") != 0
    written.write_text(whole)


def test_another_configuration_in_the_same_folder_is_refused(root, capsys):
    run(root, "collect")
    assert run(root, "collect", "collect.episodes=25") == 2
    assert "run.overwrite=true" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["colect"], "Did you mean 'collect'"),
        (["train", "train.data=/nowhere"], "/nowhere"),
        (["train", "--verbose"], "key=value"),
        (["evaluate"], "evaluate CHECKPOINT"),
        (["evaluate", "/nowhere"], "/nowhere"),
        (["bench", "simz"], "Did you mean 'sims'"),
        (["report", "/nowhere"], "/nowhere"),
        (["collect", "run.device=cudda"], "run.device"),
        (["gate", "/nowhere"], "gate CANDIDATE INCUMBENT"),
        (["gate", "a", "b", "c"], "takes no further positional argument ('c')"),
        (["bakeoff", "bakeoff.policies=[a,b]"], "at least three policies"),
        (["offline", "offline.agent=icl"], "Did you mean 'iql'"),
        (["offline", "offline.improve.expectile=1"], "offline.improve.kind=best_of has no 'expectile'"),
        (["offline", "offline.data=[imagined]"], "set offline.model"),
        (["online", "online.offline_ratio=0.5"], "offline.improve=dsrl"),
    ],
)
def test_mistakes_end_with_a_sentence_and_status_2(arguments, text, capsys, tmp_path):
    assert main([*arguments, *([f"run.root={tmp_path}"] if arguments[0] in VERBS.names() else [])]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("fps", [0.0, 10.0])
def test_serve_says_at_once_that_a_policy_without_a_rate_drives_no_robot(fps, monkeypatch, recwarn):
    policy, served = SimpleNamespace(spec=SimpleNamespace(fps=fps)), []
    monkeypatch.setattr(serve, "load_acting", lambda *_: policy)
    monkeypatch.setattr(serve, "with_planning", lambda *_: policy)
    monkeypatch.setattr(serve, "serve", lambda *given, **kinds: served.append(given))
    assert serve.run(compose(["serve.policy=folder"])) == 0
    notes = [str(note.message) for note in recwarn if note.category is RobopolicyWarning]
    assert len(served) == 1
    assert len(notes) == (fps == 0)
    assert all('add "fps": N to robopolicy.json next to config.json' in note for note in notes)


@pytest.mark.parametrize(("certificate", "address"), [("null", "ws://robot:80"), ("file.pem", "wss://robot:80")])
def test_serve_says_an_address_to_connect_to(certificate, address, monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_acting", lambda *_: SimpleNamespace(spec=SimpleNamespace(fps=10.0)))
    monkeypatch.setattr(serve, "with_planning", lambda config, policy, device: policy)
    monkeypatch.setattr(serve, "serve", lambda policy, settings, announce, **kinds: announce(80))
    given = ["serve.policy=folder", "serve.host=robot", f"serve.certificate={certificate}"]
    assert serve.run(compose(given)) == 0
    assert f" at {address} " in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS.names())
def test_help_teaches_every_verb(verb, capsys):
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert declaration(verb).example.split(" && ")[0][:40] in text
    for part in described(declaration(verb).sections, compose([])):
        assert f"\n{part.path}.KEY=VALUE" in text or f"\n  {part.path} " in text


@functools.cache
def composed(*arguments: str) -> Config:
    """Return a configuration, which is frozen: made once for all verbs that are asked for help about it."""
    return compose(list(arguments))


def helped(verb: str, width: int, *arguments: str, sections: tuple[str, ...] = ()) -> str:
    """Return what --help prints on a terminal of so many columns."""
    shown = io.StringIO()
    print_help(verb, declaration(verb), composed(*arguments), Console(file=shown, width=width), sections)
    return shown.getvalue()


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", VERBS.names())
def test_help_fits_a_page_whatever_is_chosen(verb, width):
    kinds = {"worldmodel": WORLD_MODELS, "policy": POLICIES}
    choices = [()]
    for section in declaration(verb).sections:
        choices += [(f"{section}.kind={kind}",) for kind in (kinds[section].names() if section in kinds else ())]
        choices += [(f"recipe={recipe}",) for recipe in groups()["recipe"] if section == "world"]
    for arguments in choices:
        lines = helped(verb, width, *arguments).rstrip().splitlines()
        assert len(lines) <= 130, f"{arguments}: {len(lines)} lines"
        assert max(map(len, lines)) <= width


def test_what_help_folds_is_shown_when_asked_for(capsys):
    folded = helped("imagine", 80)
    assert "finetune.KEY=VALUE" not in folded and "Bound on the gradient" not in folded
    assert main(["imagine", "recipe=pick_place", "--help", "finetune"]) == 0
    text = capsys.readouterr().out.split()
    assert text[text.index("target_success") + 1] == "0.97"
    assert not {"imagine.KEY=VALUE", "world.KEY=VALUE"} & set(text)
    deep = helped("worldmodel", 80, "worldmodel.kind=video", sections=("worldmodel.config", "world"))
    for path in ("worldmodel.config", "worldmodel.config.edm", "world", "world.imagination"):
        assert f"{path}.KEY=VALUE" in deep
    assert "worldmodel.KEY=VALUE" not in deep and "push_choice" in deep
    assert main(["train", "--help", "train.fitt"]) == 2
    assert "Did you mean 'train.fit'?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("width", [80, 120])
def test_help_gives_every_setting_its_value_and_its_meaning(width):
    values = {"[low,medium,high,random]": "Action noise levels", "100000": "Number of control steps of training data"}
    text = " ".join(helped("worldmodel", width).split())
    for value, meaning in values.items():
        assert f"{value} {meaning}" in text


def test_help_shows_what_a_recipe_sets(capsys):
    shown = []
    for recipe in ("none", "pick_place"):
        assert main(["finetune", f"recipe={recipe}", "--help"]) == 0
        shown.append(capsys.readouterr().out.split())
    assert "target_success," in shown[0], "among those that are not set"
    assert shown[1][shown[1].index("target_success") + 1] == "0.97"


def test_algorithms_lists_presets_and_explains_one(tmp_path, capsys):
    figures = tmp_path / "algorithms.json"
    assert main(["algorithms", f"json={figures}"]) == 0
    printed = capsys.readouterr().out
    listed = json.loads(figures.read_text())
    assert "advantage=gae, credit=[denoising_discount]" in printed
    assert {"dppo", "grpo", "gspo"} <= set(listed["presets"])
    assert all(entry["line"] for entry in listed["mechanisms"])
    assert main(["algorithms", "denoising_discount"]) == 0
    assert "finetune.options.denoising_discount.gamma=0.9" in capsys.readouterr().out
    assert main(["algorithms", "ngrpo", f"json={figures}"]) == 0
    assert "robopolicy/rl/advantages/group.py" in capsys.readouterr().out
    parts = {entry["slot"]: entry for entry in json.loads(figures.read_text())["resolved"]}
    assert [slot.value for slot in Slot] == list(parts)
    ppo = {"dual_clip": None, "low": 0.16, "high": 0.24, "keep_above": False}
    assert parts["coefficient"] == {
        "slot": "coefficient",
        "part": "ppo",
        "options": ppo,
        "file": "robopolicy/rl/coefficients.py",
    }
    assert parts["sampler"]["part"] == "uniform" and parts["hint"]["part"] == ""
    root = Path(__file__).parents[1]
    for name in PRESETS:
        files = [part.file for parts in AlgorithmConfig(name).resolved().slots.values() for part in parts]
        assert len(files) >= 5 and all((root / file).is_file() for file in files), name
    assert main(["algorithms", "grop"]) == 2
    assert "grpo" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_algorithms_compares_methods_on_the_same_base_and_can_be_gone_on_with(root, capsys):
    figures = root / "algorithms.json"
    small = [item for item in SMALL if not item.startswith(("world=", "finetune.videos", "collect.episodes"))]
    quick = [*small, "world=reach_planar", "finetune.videos=0", "finetune.groups=2", "finetune.group_size=4"]
    arguments = [
        *("bench", "algorithms", f"run.root={root}", "bench.tasks=[push_cube]", "bench.seeds=[0]"),
        *("bench.only=[PPO,GRPO]", f"bench.overrides=[{','.join(map(json.dumps, [*quick, 'collect.episodes=8']))}]"),
        f"json={figures}",
    ]
    assert main(arguments) == 0
    rows = json.loads(figures.read_text())["tasks"]["push_cube"]
    assert set(rows) == {"PPO", "GRPO"}
    assert rows["PPO"]["base"] == rows["GRPO"]["base"]
    assert all(row["tuned"]["episodes"] == 8 for row in rows.values())
    assert rows["GRPO"]["curves"][0][0][0] == 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert "seed 0" not in capsys.readouterr().out
    assert "<svg" in (root / "bench" / "algorithms" / "report.html").read_text()


def test_a_folder_may_stand_where_a_list_of_them_is_meant(tmp_path):
    for name, expected in (("worldmodel", (tmp_path,)), ("train", tmp_path)):
        (given,) = overrides(name, declaration(name), [str(tmp_path)])
        section, key = given.split("=")[0].split(".")
        assert getattr(getattr(compose([given]), section), key) == expected
