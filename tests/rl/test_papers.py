"""The table of papers is true: of mechanisms that exist, tests that are marked, settings that can be written."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from marked import marked
from papers import FILE, README, TESTS, naming, refreshed, written

from robopolicy.benchmarks import paper_runs
from robopolicy.benchmarks.mechanisms import ABLATIONS
from robopolicy.benchmarks.papers import (
    COMMON,
    METRICS,
    REFERENCE,
    Experiment,
    Measurement,
    collected,
    evaluated,
    last_of_each,
    mean_of,
    measured,
    read_experiments,
    tables,
)
from robopolicy.benchmarks.runs import BASES, TUNED_BASES, recipe_of
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import DataError
from robopolicy.core.policy import Decision
from robopolicy.core.registry import load_dotted
from robopolicy.core.spec import TASK, PolicySpec, WorldSpec
from robopolicy.core.storage import write_json
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.paper_effects import (
    difference_text,
    effect,
    experiment_text,
    numbers_text,
    reversed_effects,
    values_at,
)
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.papers import UNBUILT, Paper, count_by_status, papers
from robopolicy.rl.registry import Slot, get_mechanism, mechanisms
from robopolicy.runs import run_path
from robopolicy.verbs.bench import BENCHMARKS
from robopolicy.verbs.pipeline import stages_of
from robopolicy.verbs.verb import VERBS
from sims.registry import make_world
from sims.tasks.push_choice import INSTRUCTIONS, PushChoiceExpert

ROWS, MARKS = papers(), marked(TESTS)
NUMBER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
WITHOUT_PAPER = {
    "sampler/uniform", "rewards/success_only", "rewards/hurry", "rewards/smooth", "rewards/effort",
    "coefficient/none", "auxiliaries/kl_base", "controllers/linear_decay",
}  # fmt: skip
"""Mechanisms that are nobody's paper: schedules, textbook penalties, switches."""


def ours():
    return [entry for entry in mechanisms() if entry.path.startswith("robopolicy.")]


def name_of(entry) -> str:
    return f"{entry.slot.value}/{entry.name}"


def test_the_list_is_whole_and_every_paper_stands_once():
    assert len({paper.id for paper in ROWS}) == len({paper.arxiv for paper in ROWS}) == len(ROWS)
    count = {kind: sum(paper.kind == kind for paper in ROWS) for kind in ("robots", "language models")}
    assert count == {"robots": 28, "language models": 122}
    assert all(re.fullmatch(NUMBER.pattern.removeprefix("arXiv:"), paper.arxiv) for paper in ROWS)


def test_every_source_is_a_row():
    """Its number leads to a row that names it; a mechanism without a number is known to be without a paper."""
    rows, wrong = {paper.arxiv: paper for paper in ROWS}, []
    for entry in ours():
        name, numbers = name_of(entry), NUMBER.findall(entry.source)
        if not numbers and name not in WITHOUT_PAPER:
            wrong.append(f"{name}: source={entry.source!r} names no paper; write its arXiv number")
        for number in numbers:
            if number not in rows:
                wrong.append(f"{name}: arXiv:{number} has no row in papers.json")
            elif name not in rows[number].mechanisms:
                wrong.append(f"{name}: the row of {rows[number].id} does not name it")
    assert not wrong, "\n".join(wrong)


def test_what_carries_a_paper_exists():
    for paper in ROWS:
        for mechanism in paper.mechanisms:
            slot, _, name = mechanism.partition("/")
            assert get_mechanism(Slot(slot), name).source, f"{mechanism} has no source"
        assert bool(paper.mechanisms or paper.settings) == (paper.status not in UNBUILT), paper.id
        assert paper.note or paper.status == "works", f"{paper.id}: say what is missing, or why it is absent"


def test_settings_of_papers_can_be_written():
    for setting in sorted({setting for paper in ROWS for setting in paper.settings}):
        verb, _, target = setting.partition(" ")
        if verb in VERBS.names():
            assert verb != "bench" or target in BENCHMARKS.names()
        else:
            compose(setting.split())


def test_the_tests_of_the_table_exist_and_are_marked():
    for paper in ROWS:
        marked_now = naming({"id": paper.id, "mechanisms": paper.mechanisms, "tests": ()}, MARKS)
        gone = set(paper.tests) - set(marked_now)
        assert not gone, f"{paper.id}: {sorted(gone)} is gone or not marked for it; run: python tests/papers.py"


def test_what_works_is_checked():
    """By a test marked for the paper, or by one for each mechanism that carries it; and the table names it."""
    for paper in ROWS:
        missing = [mechanism for mechanism in paper.mechanisms if mechanism not in MARKS]
        checked = paper.id in MARKS or (paper.mechanisms and not missing)
        assert checked or paper.status != "works", f"{paper.id}: no test checks {missing or 'it'}"
        assert paper.tests or paper.status != "works", f"{paper.id}: run: python tests/papers.py"


def test_the_file_is_as_the_command_writes_it():
    rows = json.loads(FILE.read_text())
    assert FILE.read_text() == refreshed(rows, {row["id"]: row["tests"] for row in rows}), "run: python tests/papers.py"


def test_marks_are_of_mechanisms_or_papers():
    known = {paper.id for paper in ROWS} | {name_of(entry) for entry in mechanisms()}
    assert sorted(set(MARKS) - known) == []


def test_the_readmes_table_is_what_the_data_give():
    assert README.read_text() == written(README.read_text()), "run: python tests/papers.py"


def test_every_ablation_is_of_a_paper_and_every_paper_names_one_that_exists():
    named = {paper.check.partition("/")[0] for paper in ROWS if paper.check}
    assert named == set(ABLATIONS)
    for paper in ROWS:
        name, _, variant = paper.check.partition("/")
        assert not paper.check or not variant or variant in ABLATIONS[name].variants, paper.id
        assert not paper.check or variant or len(ABLATIONS[name].variants) == 2, f"{paper.id}: which of the variants?"


def test_tests_keep_their_order_and_new_ones_of_the_paper_itself_come_first():
    row = {"id": "BAPO", "mechanisms": ["coefficient/bapo", "controllers/vcpo"], "tests": ["gone", "b"]}
    marks = {"BAPO": ["z"], "coefficient/bapo": ["b", "z"], "controllers/vcpo": ["a", "b"], "RL-100": ["c"]}
    assert naming(row, marks) == ["b", "z", "a"]


def rate(successes: int, episodes: int) -> dict:
    low, high = wilson(successes, episodes)
    return {"success_rate": successes / episodes, "low": low, "high": high, "episodes": episodes}


def test_an_effect_is_a_difference_with_newcombes_interval():
    """The published example of Newcombe (1998): 56 of 70 against 48 of 80, by Wilson's intervals of both."""
    old, new = rate(48, 80), rate(56, 70)
    assert difference_text([new], [old]) == "shown: +20.0 points [+5.2, +33.4]"
    assert difference_text([old], [new]) == "reversed: -20.0 points [-33.4, -5.2]"
    assert difference_text([old], [old]).startswith("no effect shown: +0.0 points")
    seeds = difference_text([rate(30, 40), rate(26, 30)], [rate(20, 40), rate(28, 40)])
    assert seeds == "shown: +20.0 points [+5.2, +33.4]", "seeds are pooled"


def test_numbers_show_an_effect_where_no_seed_contradicts_it():
    assert numbers_text([0.5, 0.6], [0.2, 0.4], "over") == "shown: 0.55 (0.5 to 0.6) against 0.3 (0.2 to 0.4)"
    assert numbers_text([0.5, 0.6], [0.2, 0.4], "under").startswith("reversed")
    assert numbers_text([0.3, 0.6], [0.2, 0.4], "over").startswith("no effect shown")


def test_a_path_leads_through_seeds_and_a_wrong_one_names_its_key():
    figures = {"tasks": {"push": {"0": {"a": 1.0, "b": 3.0}, "1": {"a": 2.0, "b": 3.0}}}}
    assert values_at(figures, "tasks/push/*/a") == [1.0, 2.0]
    with pytest.raises(DataError, match=r"no 'pusch' in 'tasks/pusch/a'.*Did you mean 'push'"):
        values_at(figures, "tasks/pusch/a")


def test_every_figure_of_a_paper_is_published():
    for paper in ROWS:
        text = effect(paper)
        assert bool(text) == (paper.status not in UNBUILT), paper.id
        assert not (paper.figure and paper.check), f"{paper.id}: one figure"
        assert not paper.figure or f"(bench {paper.figure.partition(':')[0]})" in text, paper.id


def test_every_experiment_is_of_a_paper_and_can_be_run():
    experiments = read_experiments()
    rows = {paper.id: paper for paper in ROWS}
    for name, experiment in experiments.items():
        assert rows[name].status not in UNBUILT and not rows[name].check and not rows[name].figure, name
        assert experiment.claim.endswith(".") and len(set(experiment.names)) == 2, name
        if isinstance(experiment, Measurement):
            assert callable(load_dotted(experiment.function, name)) and experiment.better in ("over", "under"), name
            continue
        assert experiment.metric in METRICS, name
        arms = experiment.baseline, experiment.method
        assert len({arm.label for arm in arms}) == 2, f"{name}: arms are equal"
        for arm in arms:
            referenced = {match for setting in arm.settings for match in REFERENCE.findall(setting)}
            assert {arm.base, *referenced} <= {*BASES, *TUNED_BASES, "demonstrations"}, name
            settings = [REFERENCE.sub("PATH", setting) for setting in arm.settings]
            compose([*recipe_of(arm.task), *COMMON, *settings]).finetune.resolved()


def test_arms_with_equal_settings_are_one_run():
    bnpo, seed_grpo = experiment_of("BNPO"), experiment_of("SEED-GRPO")
    assert bnpo.baseline.label == seed_grpo.baseline.label != bnpo.method.label
    assert last_of_each(("a=1", "b=2", "a=3")) == ("a=3", "b=2")


def test_a_metric_that_no_iteration_records_has_no_mean():
    run = {"records": [{"kl": 0.1}, {}, {"kl": 0.3}]}
    assert mean_of("kl")(run) == pytest.approx(0.2)
    with pytest.raises(DataError, match="No iteration recorded 'signal'"):
        mean_of("signal")(run)


def experiment_of(paper: str) -> Experiment:
    """Return an experiment of two runs."""
    experiment = read_experiments()[paper]
    assert isinstance(experiment, Experiment)
    return experiment


def test_arms_of_measurements_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their settings are those of runs that learn; each measurement returns the values of its two parts."""
    config, arms, stages = compose([]), [], []
    outcome = {"success": rate(20, 80), "records": [{"distillation_angle_won": 0.1, "distillation_angle_lost": 0.3}]}
    monkeypatch.setattr(paper_runs, "checkpoint_of", lambda *_: Path("TEACHER"))
    monkeypatch.setattr(paper_runs, "composed", lambda config, root, arm, seed: stages.append(arm))
    monkeypatch.setattr(paper_runs.finetune, "run", lambda config: None)
    monkeypatch.setattr(paper_runs, "run_arm", lambda config, root, arm, seed: (arms.append(arm), outcome)[1])
    angles = paper_runs.distillation_alignment(config, tmp_path, 0)
    assert angles == {"baseline": 0.1, "method": 0.3}
    assert paper_runs.corrected_preferences(config, tmp_path, 0) == dict.fromkeys(angles, rate(20, 80))
    assert [arm.task for arm in (*arms, *stages)] == ["push_cube", *["push_cube_32px"] * 3]
    for arm in (*arms, *stages):
        settings = [REFERENCE.sub("PATH", setting) for setting in arm.settings]
        compose([*recipe_of(arm.task), *COMMON, *settings]).finetune.resolved()
    first, second = ({*arm.settings} for arm in arms[1:])
    differing = {item.partition("=")[0] for item in first ^ second}
    assert differing == {"finetune.policy", "finetune.iterations"}


def run_of(successes: int, gradient: float) -> dict:
    record = {"env_steps": 9, "success": 0.5, "gradient_norm": gradient, "kl": 0.1, "signal": 0.5}
    both = {"success": rate(successes, 80), "noisy": rate(successes, 80), "length": 3.0, "worst_instruction": 0.1}
    return {"settings": [], **both, "cpu_seconds": 1.0, "records": [{"iteration": 0, "env_steps": 0}, record]}


def experiment_row(root: Path, *successes: tuple[int, int], gradients: tuple[float, float] = (1.0, 2.0)) -> dict:
    """Return the published row of BNPO whose seeds had these successes, baseline and method."""
    experiment = experiment_of("BNPO")
    for seed, counts in enumerate(successes):
        for arm, count, gradient in zip((experiment.baseline, experiment.method), counts, gradients, strict=True):
            write_json(root / arm.task / "runs" / arm.label / f"{seed}.json", run_of(count, gradient))
    return collected(root, ["BNPO", "DRPO"], range(3))["experiments"]["BNPO"]


def test_an_experiment_shows_an_effect_if_no_seed_contradicts_it(tmp_path: Path):
    row = experiment_row(tmp_path / "a", (20, 60), (20, 60), (30, 40))
    assert experiment_text(row).startswith("shown: +37.5 points")
    assert row["settings"]["method"] == ["finetune.advantage=bnpo"] and row["settings"]["baseline"] == []
    assert experiment_text(experiment_row(tmp_path / "b", (60, 20), (60, 20), (40, 30))).startswith("reversed: -37.5")
    text = experiment_text(experiment_row(tmp_path / "c", (20, 60), (20, 60), (40, 30)))
    assert text.startswith("no effect shown: +29.2 points"), "one seed is worse"
    text = experiment_text(experiment_row(tmp_path / "d", (20, 60)))
    assert text.startswith("1 of 3 seeds so far: +50.0 points"), "too few for a result"
    equal = experiment_row(tmp_path / "e", (20, 20), (20, 20), (40, 40), gradients=(1.0, 1.0))
    assert experiment_text(equal) == "no effect shown: both learned the same"


def test_a_measurement_is_made_once_a_seed_and_judged_by_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measurement = read_experiments()["V0"]
    assert isinstance(measurement, Measurement)
    calls = []

    def predicted(config, root, seed):
        calls.append(seed)
        return {"baseline": 0.2 + seed / 100, "method": 0.1}

    monkeypatch.setattr(measurement.function.replace(":", "."), predicted)
    for seed in (0, 1, 1, 2):
        values = measured(compose([]), tmp_path, measurement, seed)
    assert calls == [0, 1, 2] and values == {"baseline": {"value": 0.22}, "method": {"value": 0.1}}
    figures = collected(tmp_path, ["V0", "LatentSeek"], range(3))
    assert figures["experiments"].keys() == {"V0"}
    row = figures["experiments"]["V0"]
    assert experiment_text(row) == "shown: 0.1 (0.1 to 0.1) against 0.21 (0.2 to 0.22) (Brier score)"
    line = tables(figures)[0].lines[0]
    assert line[4:6] == ["0.21 (0.2 to 0.22)", "0.1 (0.1 to 0.1)"]
    (tmp_path / "measured").rename(tmp_path / "elsewhere")
    rates = {"baseline": {"value": rate(20, 80)}, "method": {"value": rate(60, 80)}}
    for seed in range(3):
        write_json(tmp_path / "measured" / measurement.function.rpartition(":")[2] / f"{seed}.json", rates)
    figures = collected(tmp_path, ["V0"], range(3))
    assert experiment_text(figures["experiments"]["V0"]).startswith("shown: +50.0 points")
    assert tables(figures)[0].lines[0][4:6] == ["25.0 % (25.0 to 25.0)", "75.0 % (75.0 to 75.0)"]


class ReadsPlainWords:
    """The expert of push_choice under its plain instructions, and idle under others."""

    def __init__(self, spec: WorldSpec):
        self.spec = PolicySpec(spec.observation, spec.action, 1, 1, 1, 0, spec.fps, spec.instructions)
        self.expert = PushChoiceExpert()

    def reset(self, rows=None) -> None:
        self.expert.reset(rows)

    def act(self, observation, generator, *, deterministic=False) -> Decision:
        texts = observation[TASK]
        arrays = {key: value.numpy() for key, value in observation.items() if key != TASK}
        reads = np.isin(texts, INSTRUCTIONS)[:, None]
        actions = np.where(reads, self.expert.act({**arrays, TASK: np.array(texts)}), 0.0)
        return Decision(torch.as_tensor(actions, dtype=torch.float32)[:, None])


def test_outcomes_are_compared_with_those_in_other_words_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    """Of episodes in plain words all succeed, and fail in others; those in other words fail in all."""
    monkeypatch.setattr("robopolicy.benchmarks.papers.EPISODES", 40)
    for phrasing in ("all", "plain"):
        world = make_world("push_choice", 40, phrasing=phrasing)
        result = evaluated(compose(["recipe=push_choice"]), world, ReadsPlainWords(world.spec))
        world.close()
        if phrasing == "all":
            rate = result["success"]["success_rate"]
            assert 0.1 < rate < 0.5 and result["agreement"]["success_rate"] == pytest.approx(1 - rate)
        else:
            assert result["success"]["success_rate"] > 0.9 and "agreement" not in result


def test_a_preset_whose_effect_is_reversed_says_so():
    (clause,) = reversed_effects("grpo_guard")
    assert clause.startswith("GRPO-Guard claims an effect that was reversed: -")
    assert reversed_effects("ppo") == []


def test_what_is_not_applicable_is_counted_apart(monkeypatch: pytest.MonkeyPatch):
    statuses = ("works", "absent", "not applicable", "not applicable", "works")
    rows = tuple(Paper(str(place), "", "", "robots", status) for place, status in enumerate(statuses))
    monkeypatch.setattr("robopolicy.rl.papers.papers", lambda: rows)
    assert count_by_status("robots") == "5 papers: 2 works, 0 part, 1 absent, 2 not applicable"
    monkeypatch.setattr("robopolicy.rl.papers.papers", lambda: rows[:2])
    assert count_by_status("robots") == "2 papers: 1 works, 0 part, 1 absent"


def test_the_verb_prints_papers_and_says_whose_a_mechanism_is(tmp_path: Path, capsys):
    figures = tmp_path / "papers.json"
    assert main(["algorithms", "papers", f"json={figures}"]) == 0
    printed = capsys.readouterr().out
    assert all(paper.id in printed for paper in ROWS if len(paper.id) < 12)
    listed = json.loads(figures.read_text())["papers"]
    assert [row["id"] for row in listed] == [paper.id for paper in ROWS]
    assert main(["algorithms", "bnpo"]) == main(["algorithms", "DID"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"paper BNPO, arXiv:2506.02864: works\n    checked by tests/\S+\n", printed)
    assert "not applicable" in printed
    assert main(["algorithms", "BAP"]) == 2
    assert "BAPO" in capsys.readouterr().err


@pytest.mark.checks("Sparse-to-Dense", "VerIPO", "OPA-DPO", "iTool/iRFT")
@pytest.mark.parametrize(
    ("recipe", "chain"),
    [
        ("sparse_to_dense", {"teacher": "large", "bridge": "small", "distilled": "bridge", "student": "distilled"}),
        ("opa_dpo", {"teacher": "taught", "imitated": "taught", "preferred": "imitated"}),
        ("irft", {"teacher": "imitation", "warmed": "imitation", "searched": "warmed"}),
        ("veripo", {"explored": "imitation", "preferred": "explored", "refined": "preferred"}),
    ],
)
def test_recipes_of_papers_go_on_from_the_stage_before(recipe: str, chain: dict[str, str], tmp_path: Path):
    stages = stages_of(compose([f"recipe={recipe}"]), tmp_path)
    for name, before in chain.items():
        (verb, config), (verb_before, config_before) = stages[name], stages[before]
        assert verb == "finetune"
        assert config.finetune.policy == run_path(config_before, verb_before) / "checkpoint"
        build_algorithm(config.finetune)
    taught = [name for name, (verb, config) in stages.items() if verb == "finetune" and config.finetune.teacher]
    expected = {"sparse_to_dense": ["distilled"], "opa_dpo": ["imitated", "preferred"]} | {
        "irft": ["warmed"],
        "veripo": [],
    }
    assert taught == expected[recipe]
