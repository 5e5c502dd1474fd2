"""Self-contained report.html and report.json per run, rebuilt at any time from the files in the run folder."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.machine import in_bytes
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_errors, read_object, read_text, write_atomic, write_json
from robopolicy.evaluation import plots
from robopolicy.evaluation.classifier_page import classifier_cards, classifier_sections, supplied_section
from robopolicy.evaluation.few_trials import CalibratedRate, savings_rows
from robopolicy.evaluation.intervals import plus_minus
from robopolicy.evaluation.plots import Rate
from robopolicy.evaluation.tables import (
    COVERAGE,
    STAGES,
    UNLIKE,
    control_table,
    coverage_table,
    coverage_warnings,
    detected_fault_rows,
    detector_rows,
    element_table,
    fault_table,
    horizon_rows,
    instruction_table,
    route_rows,
    specification_table,
    stage_rows,
    task_table,
    variation_table,
    way_rows,
    ways_header,
)

if TYPE_CHECKING:
    import jinja2

UNPLANNED = "without planning"
"""Name of a policy without planning, when compared with itself with planning."""
JUDGED = ("base", "teacher", UNPLANNED, "policy", "tuned", "student")
"""Names of policies in a result."""
IMAGINED = "imagined"
"""Name of the video of imagined and recorded images."""

TIMES = ("estimated_seconds", "seconds", "cpu_seconds")
"""Entries of a stage of `improve` with its estimated, wall and CPU time."""

TEMPLATE = "report.html.jinja"
DAMAGED = "Its files are damaged, or not those of one run: repeat the run"


@dataclass(frozen=True)
class Card:
    """One key metric on the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page with a title: a plot (svg), a video (its address) or a table (header, rows)."""

    title: str
    caption: str = ""
    svg: str = ""
    video: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass
class Report:
    """A report page under construction."""

    title: str
    subtitle: str = ""
    cards: list[Card] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)


def report_for_run(path: Path) -> Path:
    """Write report.html and report.json into the run folder `path` and return the page's path.

    Raises DataError when the folder contains no run, or no measurements yet.
    """
    path = Path(path)
    if not any((path / name).exists() for name in ("result.json", "metrics.jsonl")):
        raise DataError(
            f"{path} contains no run (no result.json, no metrics.jsonl): pass a run folder such as "
            "runs/finetune/push_cube/0."
        )
    report, result = report_of(path)
    with read_errors(path, DAMAGED):
        page = render(report)
        write_json(path / "report.json", {"title": report.title, "figures": result})
    write_atomic(path / "report.html", page)  # last: where it is, a report is complete
    return path / "report.html"


def report_of(path: Path, address: Callable[[Path], str] | None = None) -> tuple[Report, dict[str, Any]]:
    """Return the report of a run, finished or running, and its result ({} until there is one). Writes nothing.

    address: returns the URL of a video; None embeds videos. Raises DataError for damaged files.
    """
    folder = RunFolder(path)
    result = read_object(folder.path / "result.json", DataError) if (folder.path / "result.json").exists() else {}
    with read_errors(folder.path, DAMAGED):
        report = Report(title=_title(folder.path), subtitle=_subtitle(folder.path))
        if "seconds_by_stage" in result:
            _add_demo(report, folder, result, address or embedded)
        elif "stages" in result:
            _add_pipeline(report, result)
        else:
            _add_run(report, folder, result, address or embedded)
        if "base_weights" in result:
            weights = f"sha256 of its weights: {result['base_weights']}"
            report.details["initial checkpoint"] = f"{result['base_checkpoint']}\n{weights}"
        for name in ("config.yaml", "versions.json"):
            if (folder.path / name).exists():
                report.details[name] = read_text(folder.path / name, DataError)
    return report, result


def render(report: Report) -> str:
    """Return the page as HTML with all plots and videos embedded."""
    return templates().get_template(TEMPLATE).render(report=report)


@cache
def templates(*folders: Path) -> "jinja2.Environment":
    """Return the Jinja environment for the templates here and in `folders`, with autoescaping."""
    import jinja2

    places = [str(folder) for folder in (*folders, Path(__file__).parent)]
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(places), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )


def _add_run(report: Report, folder: RunFolder, result: Mapping[str, Any], address: Callable[[Path], str]) -> None:
    """Add all sections for which a run, of any verb, has left files."""
    rates = rates_in(result)
    for rate in rates:
        report.cards.append(Card(rate.label, f"{rate.value:.0%}", f"{rate.low:.0%} to {rate.high:.0%}"))
    report.cards += _return_cards(result)
    if "difference" in result:
        report.cards.append(_difference_card(result["difference"]))
    if "times_faster" in result:
        report.cards.append(Card("policy call", f"{result['times_faster']:.1f}x", "faster than the teacher"))
    if "success_rate" in result and "steps" in result:
        report.cards.append(Card("episodes", str(result["episodes"]), f"{result['steps']} steps"))
        rate = result["success_rate"]
        report.cards.append(Card("success", "not reported" if rate is None else f"{rate:.0%}"))
    if "seconds" in result:
        report.cards.append(Card("time", f"{result['seconds']:.0f} s"))
    if rates:
        caption = (
            "Points are success rates, bars their Wilson 95 % intervals; all policies are evaluated on the same seeds."
        )
        report.sections.append(Section("Success", caption, svg=plots.success_bars(rates)))
    if (supplied := supplied_section(evaluated_policies_in(result))) is not None:
        report.sections.append(Section(**supplied))
    if "classifier" in result:
        report.cards += [Card(*each) for each in classifier_cards(result["classifier"])]
        report.sections += [Section(**each) for each in classifier_sections(result["classifier"], folder.path)]
    _add_conditions(report, result)
    _add_ways(report, result)
    _add_language(report, result)
    _add_curves(report, folder.metrics(), _base_rate(result))
    if "validation" in result:
        _add_validation(report, result["validation"])
        _add_behaviours(report, result.get("behaviours", {}))
    if "models" in result:
        _add_rankings(report, result["models"])
    if "detectors" in result:
        _add_detectors(report, result)
    if "horizons" in result:
        header, rows = horizon_rows(result["horizons"])
        caption = f"{result['verdict']} k: decisions that greedy play looks ahead on values of random play."
        report.sections.append(Section("Effective horizon", caption, header=header, rows=rows))
    if "routes" in result:
        header, rows = route_rows(result["routes"])
        caption = "Policies from the same initial states; routed: each initial state to the best predicted policy."
        report.sections.append(Section("Choice between policies", caption, header=header, rows=rows))
    _add_gate(report, result)
    if "deployed" in result:
        _add_deployment(report, result["deployed"])
    report.sections += embedded_video(folder.path, address)
    if "improve" in result:
        _add_improvement(report, result["improve"], address)


def _add_conditions(report: Report, result: Mapping[str, Any]) -> None:
    """Add the evaluation conditions, and the smoothness of the policies if measured."""
    if "conditions" in result:
        caption = "Success above was measured under these conditions."
        rows = [[condition, value] for condition, value in result["conditions"].items()]
        report.sections.append(Section("Evaluation conditions", caption, header=("what", "value"), rows=rows))
    from robopolicy.evaluation.smoothness import Smoothness  # imports torch, which the pages of runs do without

    smooth = {
        f"{name}, {mode}": Smoothness.told(figures)
        for name, verdict in evaluations_in(result).items()
        for mode, figures in verdict.get("smoothness", {}).items()
    }
    rows = [
        [label, ", ".join(f"{metric} {value}" for metric, value in texts.items())] for label, texts in smooth.items()
    ]
    if rows:
        caption = "Means over action elements and control steps, in the world's units."
        report.sections.append(Section("Smoothness of the actions", caption, header=("policy", "actions"), rows=rows))


def _add_ways(report: Report, result: Mapping[str, Any]) -> None:
    """Add the inference methods that were compared, and the chosen one."""
    if "ways" not in result:
        return
    ways = result["ways"]
    chosen_method = result["chosen"]
    left_out = result["left_out"]
    report.cards.append(
        Card("chosen", chosen_method, f"{ways[chosen_method]['times_as_fast']:.1f}x faster than the reference")
    )
    caption = (
        "Minimum of several interleaved measurements, and the error of the actions; the filled marker is the chosen "
        "method."
    )
    report.sections.append(Section("Time and error", caption, svg=plots.inference_methods(ways, chosen_method)))
    caption = " ".join(
        ["* marks the chosen method.", *(f"{name} was excluded: {reason}." for name, reason in left_out.items())]
    )
    header, rows = ways_header(result.get("error_of", "std")), way_rows(ways, chosen_method)
    report.sections.append(Section(result.get("measured", "Policy call"), caption, header=header, rows=rows))


def _add_language(report: Report, result: Mapping[str, Any]) -> None:
    """Add success by task, instruction and planted fault, where there are several, the formula of the episodes, and
    success under the language controls.
    """
    tasks = task_table(evaluated_policies_in(result))
    if tasks is not None:
        caption = "Success with Wilson 95 % intervals, over the episodes of this task; last row: over all of them."
        report.sections.append(Section("Success by task", caption, header=tasks[0], rows=tasks[1]))
    table = instruction_table(evaluated_policies_in(result))
    if table is not None:
        caption = "Success with Wilson 95 % intervals, over the episodes with this instruction."
        report.sections.append(Section("Success by instruction", caption, header=table[0], rows=table[1]))
    faults = fault_table(evaluated_policies_in(result))
    if faults is not None:
        caption = (
            "Success with Wilson 95 % intervals, over the episodes in which this fault is planted, including those "
            "that ended before it began."
        )
        report.sections.append(Section("Success by planted fault", caption, header=faults[0], rows=faults[1]))
    specified = specification_table(evaluated_policies_in(result))
    if specified is not None:
        caption = (
            "Share of episodes that fulfil the formula of signal temporal logic, with Wilson 95 % intervals, and the "
            "mean margin by which they fulfil (positive) or violate it, with bootstrap intervals."
        )
        report.sections.append(Section("Specification", caption, header=specified[0], rows=specified[1]))
    if "controls" in result:
        header, rows = control_table(result["controls"])
        caption = (
            "Same initial states and success criterion, other instructions. With a wrong instruction, a policy that "
            "conditions on language fails; with a paraphrase, one that understands it succeeds as before."
        )
        report.sections.append(Section("Language conditioning", caption, header=header, rows=rows))
    if "variations" in result:
        header, rows = variation_table(result["variations"])
        caption = (
            "One factor of the scene at a time, or one more per session, from the same initial states. Intervals are "
            "Wilson's 95 % intervals; differences are to the scene as it is, paired by episode."
        )
        report.sections.append(Section("Factors of variation", caption, header=header, rows=rows))


def _add_gate(report: Report, result: Mapping[str, Any]) -> None:
    """Add the gate's results: of every round of an offline run, or of one candidate."""
    verdicts = [(f"round {record['round']}", record.get("verdict")) for record in result.get("rounds", ())]
    if "gate" in result:
        verdicts = [("the candidate", result["gate"])]
    rows = [
        [candidate, "accepted" if verdict["accepted"] else "rejected", "; ".join(verdict["reasons"])]
        for candidate, verdict in verdicts
        if verdict is not None
    ]
    if rows:
        steps = sum(verdict.get("env_steps", 0) for _, verdict in verdicts if verdict is not None)
        env_text = (
            f"Evaluation in the world took {steps:,} steps"
            if steps
            else ("No episodes were played in the real environment")
        )
        caption = (
            "The candidate's value minus the incumbent's on the same initial states, with its bootstrap interval. "
            f"{env_text}; a candidate is accepted if the lower bound exceeds the margin."
        )
        report.sections.append(Section("Gate", caption, header=("candidate", "decision", "reasons"), rows=rows))
    if "accepted" in result and "rounds" in result:
        report.cards.append(Card("accepted", f"{result['accepted']} of {len(result['rounds'])}", "candidates"))


def _add_deployment(report: Report, deployed: Mapping[str, Mapping[str, Any]]) -> None:
    """Add running success while a new policy took over."""
    floor = next(iter(deployed.values()))["floor"]
    for name, metrics in deployed.items():
        note = f"final probability of the new policy {metrics['share_at_last']:.0%}"
        report.cards.append(Card(f"{name}: success", f"{metrics['success_rate']:.1%}", note))
    report.cards.append(Card("floor", f"{floor:.1%}"))
    caption = "Mixed: the new policy acts with a probability that keeps the lower bound of success above the minimum."
    report.sections.append(Section("Running success", caption, svg=plots.deployments(deployed, floor)))


def _add_demo(report: Report, folder: RunFolder, result: Mapping[str, Any], address: Callable[[Path], str]) -> None:
    """Combine the stages of a demo on one page."""
    finetuning, ranked = result["finetune"], result["rank"]
    rates = rates_in(finetuning)
    report.cards = [Card(rate.label, f"{rate.value:.0%}", f"{rate.low:.0%} to {rate.high:.0%}") for rate in rates]
    report.cards.append(_difference_card(finetuning["difference"]))
    drive = result["drive"]
    report.cards.append(
        Card(
            "policy server",
            f"{drive['successes']} of {drive['episodes']}",
            f"{drive['latency_ms']['p50']:.0f} ms per chunk",
        )
    )
    report.cards.append(
        Card("complete demo", f"{result['seconds'] / 60:.1f} min", "from demonstrations to a served policy")
    )
    caption = "Base and fine-tuned policy on the same seeds, with Wilson 95 % intervals."
    report.sections.append(Section("Success in the simulator", caption, svg=plots.success_bars(rates)))
    runs = {path.parent.parent.name: RunFolder(path) for path in folder.path.glob("*/*/*") if path.is_dir()}
    if "finetune" in runs:
        report.sections += embedded_video(runs["finetune"].path, address)
        _add_curves(report, runs["finetune"].metrics(), _base_rate(finetuning))
    _add_rankings(report, ranked["models"])
    _add_validation(report, result["worldmodel"]["validation"])
    stages = [[name, f"{seconds:.0f} s"] for name, seconds in result["seconds_by_stage"].items()]
    report.sections.append(Section("Time per stage", header=("stage", "seconds"), rows=stages))
    report.next_steps = list(result.get("next_steps", ()))


def _add_pipeline(report: Report, result: Mapping[str, Any]) -> None:
    """Add the results of a pipeline's stages."""
    stages = result["stages"]
    verdicts = {name: stage["policy"] for name, stage in stages.items() if "policy" in stage}
    rates = [
        _rate(name, metrics)
        for name, verdict in verdicts.items()
        if (metrics := verdict["deterministic"])["reports_success"]
    ]
    report.cards = [Card(rate.label, f"{rate.value:.1%}", f"{rate.low:.1%} to {rate.high:.1%}") for rate in rates]
    faster = [stage["times_faster"] for stage in stages.values() if "times_faster" in stage]
    report.cards += [Card("decisions", f"{value:.1f}x", "faster than the teacher") for value in faster]
    report.cards.append(Card("time", f"{result['seconds'] / 60:.1f} min"))
    if rates:
        caption = "The deterministic policy after each stage, on the same seeds, with Wilson 95 % intervals."
        report.sections.append(Section("Success by stage", caption, svg=plots.success_bars(rates)))
    caption = (
        "World steps are those collected for training or recording. Steps of evaluations are not included; "
        "evaluations do not select policies."
    )
    report.sections.append(Section("Stages", caption, header=STAGES, rows=stage_rows(stages)))
    report.details["folders"] = "\n".join(f"{name}: {place}" for name, place in result["folders"].items())


def _add_improvement(report: Report, improvement: Mapping[str, Any], address: Callable[[Path], str]) -> None:
    """Add the policy that `improve` chose, the costs of its stages, and the limits of its measurements."""
    policy_name = "the improved policy" if improvement["improved"] else "the base policy"
    rows = [["checkpoint", improvement["policy"]], ["command that serves it", improvement["serve"]]]
    choice = Section(f"Chosen: {policy_name}", improvement["reason"], header=("", ""), rows=rows)
    report.sections.insert(0, choice)
    for stage in improvement["stages"]:
        path = Path(stage["folder"])
        if stage["verb"] == "finetune" and path.is_dir():
            _add_curves(report, RunFolder(path).metrics(), _base_rate(improvement))
        elif stage["name"] == "result":
            report.sections += embedded_video(path, address)
    rows = [
        [stage["name"], stage["verb"], *(f"{stage.get(key, 0.0):.0f}" for key in TIMES), f"{stage['env_steps']:,}"]
        for stage in improvement["stages"]
    ]
    rows.append(["total", "", *(f"{sum(stage.get(key, 0.0) for stage in improvement['stages']):.0f}" for key in TIMES)])
    rows[-1].append(f"{sum(stage['env_steps'] for stage in improvement['stages']):,}")
    memory = [in_bytes(round(improvement[key])) for key in ("memory", "estimated_memory")]
    caption = f"The estimate is {improvement['estimate']}. Peak memory: {memory[0]}, estimated {memory[1]}."
    header = ("stage", "verb", "estimated seconds", "seconds", "CPU seconds", "environment steps")
    report.sections.append(Section("Costs", caption, header=header, rows=rows))
    limits = [[each] for each in improvement["limits"]]
    report.sections.append(Section("Limits of this improvement", header=("not measured",), rows=limits))
    report.next_steps = list(improvement["next_steps"])
    commands = "\n\n".join(stage["command"] for stage in improvement["stages"])
    summary = "\n".join(f"{label}: {text}" for label, text in improvement["found"].items())
    report.details["plan"] = "\n\n".join((summary, "\n".join(improvement["plan"]), commands))


def _add_curves(report: Report, records: Sequence[Mapping[str, Any]], base: Rate | None) -> None:
    tuning = [record for record in records if "iteration" in record]
    fitting = [record for record in records if "step" in record]
    if any("deterministic_real_success" in record for record in tuning):
        caption = (
            "Same initial states in the simulator and the world model, Wilson 95 % intervals. Real episodes were "
            "not used for training, but selected the best policy (unless imagined episodes selected it)."
        )
        report.sections.append(Section("Imagined and real success", caption, svg=plots.imagined_and_real(tuning)))
    elif tuning:
        caption = "Validation on seeds that the final evaluation does not use; bands are Wilson 95 % intervals."
        report.sections.append(Section("Learning curve", caption, svg=plots.learning_curve(tuning, base)))
    student_records = [record for record in records if record.get("student_episodes")]
    if student_records:
        caption = (
            "Success of the episodes that the student played (with exploration noise) before it trained on the "
            "round's data; Wilson 95 % intervals. The last round trains longest, and its result is evaluated above."
        )
        report.sections.append(Section("Success by round", caption, svg=plots.teaching_curve(student_records)))
    if len(fitting) > 1:
        report.sections.append(Section("Training losses", svg=plots.loss_curves(fitting)))


def _add_validation(report: Report, validation: Mapping[str, Any]) -> None:
    success = validation["success"]
    rows = [
        ["reward error (fraction of variance)", plus_minus(validation["reward_error"], ".3f")],
        ["success head: precision", plus_minus(success["precision"], ".2f")],
        ["success head: recall", plus_minus(success["recall"], ".2f")],
    ]
    caption = f"On {validation['steps']} held-out steps."
    report.sections.append(Section("World model on held-out episodes", caption, header=("figure", "value"), rows=rows))
    caption = (
        "Open-loop prediction of recorded actions, without corrections. For a model that ignores actions, shuffled "
        "actions would give the same error."
    )
    for key in sorted({key for figures in validation["open_loop"].values() for key in figures}):
        svg = plots.open_loop_errors(validation["open_loop"], key)
        report.sections.append(Section(f"Open-loop prediction error: {key}", caption, svg=svg))
    if errors := validation.get("elements"):
        header, rows = element_table(errors)
        caption = (
            "Root mean squared error of vectors that the model predicts or that are read off its latent, under the "
            "recorded actions of held-out episodes from their first frame, and in brackets of the first frame "
            "repeated; after 0 steps, off recorded frames."
        )
        report.sections.append(Section("Error by element", caption, header=header, rows=rows))


def _add_behaviours(report: Report, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Add recorded and imagined success of the behaviours that the model was trained on."""
    if not figures:
        return
    rows = [
        [name, f"{row['recorded']:.1%}", f"{row['imagined']:.1%}", str(row["episodes"])]
        for name, row in figures.items()
    ]
    caption = (
        "Every policy and expert that was recorded acts in the model, from the recorded initial states. Imagined "
        "success far above the recorded means that the model flatters policies, whatever its open-loop error."
    )
    header = ("behaviour", "recorded", "imagined", "episodes")
    report.sections.append(Section("Success of recorded behaviours", caption, header=header, rows=rows))


def _add_rankings(report: Report, models: Mapping[str, Mapping[str, Any]]) -> None:
    caption = (
        "One point per policy, same initial states in simulator and world model, Wilson 95 % intervals; on the line "
        "both agree."
    )
    for name, result in models.items():
        svg = ranking_plot(result["policies"])
        report.sections.append(Section(f"World model against simulator: {name}", caption, svg=svg))
    header, rows = agreement(models)
    warnings = dict.fromkeys(warning for result in models.values() for warning in result["warnings"])
    caption = " ".join(["In brackets: bootstrap interval over policies.", *warnings])
    report.sections.append(Section("Agreement", caption, header=header, rows=rows))
    if lines := varied_agreement(models):
        caption = "The same policies and initial states under one factor of the scene at a time."
        report.sections.append(Section("Agreement by factor of variation", caption, header=header, rows=lines))
    if coverage := {name: result["coverage"] for name, result in models.items() if "coverage" in result}:
        header, rows = coverage_table(coverage)
        report.sections.append(
            Section(UNLIKE, " ".join([COVERAGE, *coverage_warnings(coverage)]), header=header, rows=rows)
        )
    if any("calibrated" in result for result in models.values()):
        header, rows = calibrated_table(models)
        caption = (
            "Success estimated from the trials and all episodes in the model together, with 95 % intervals, and how "
            "many trials alone would be as precise. A biased model biases nothing."
        )
        report.sections.append(Section("Success from few trials", caption, header=header, rows=rows))
    for name, result in models.items():
        if result.get("savings"):
            header, rows = savings_rows(result["savings"])
            caption = (
                "Resampled from the episodes played: error of the policies' rates and Spearman correlation with their "
                "order, from the first trials alone and with all episodes in the model. Worth: how many trials alone "
                "have an interval as wide, median."
            )
            report.sections.append(Section(f"Few trials, with {name}", caption, header=header, rows=rows))


def _add_detectors(report: Report, result: Mapping[str, Any]) -> None:
    """Add scores of failure detectors, indices of some episodes, and what is detected of planted faults."""
    header, rows = detector_rows(result["detectors"])
    caption = (
        "AUROC: how well the index separates failed from successful episodes among those that still run at this share "
        f"of the time limit. Thresholds: from {result['calibrated_on']} successful episodes, which are not scored. "
        "Lead: median time from alarm to the end of a detected failure. Equal false alarms: the threshold is that of "
        "the scored episodes themselves. Time: per decision and row, without embedding and sampling. A clock that does "
        "as well shows that failures only last longer. Wilson 95 % intervals."
    )
    report.sections.append(Section("Failure detectors", caption, header=header, rows=rows))
    caption = "Index over the decisions of an episode. Blue: successful, orange: failed, dashed: threshold."
    report.sections.append(Section("Indices", caption, svg=plots.failure_indices(result["curves"])))
    if result["faults"]:
        header, rows = detected_fault_rows(result["faults"])
        caption = (
            "Episodes in which the fault began: success, and the share of failures that are detected after it began, "
            "and the median time from there to the alarm. Wilson 95 % intervals."
        )
        report.sections.append(Section("Planted faults", caption, header=header, rows=rows))


def ranking_plot(policies: Sequence[Mapping[str, Any]]) -> str:
    """Plot the policies of a ranking, as `RankingResult.to_json` lists them."""
    real, model = (
        {row["name"]: Rate(row["name"], row[kind], *row[f"{kind}_interval"]) for row in policies}
        for kind in ("real", "model")
    )
    return plots.ranking_scatter(real, model)


def agreement(models: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: one world model per line, by name, as `RankingResult.to_json` describes it."""
    statistics = next(iter(models.values()))["statistics"]
    header = ["world model", *(name.replace("_", " ") for name in statistics)]
    return header, [
        [name, *(_estimate(estimate) for estimate in result["statistics"].values())] for name, result in models.items()
    ]


def varied_agreement(models: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return lines as `agreement`: one per world model and factor of variation, without those of the scene as it is."""
    results = {
        f"{name}, {label}": figures
        for name, result in models.items()
        for label, figures in result.get("variations", {}).items()
    }
    return agreement(results)[1] if results else []


def calibrated_table(models: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: one policy per line, with its trials alone and its estimate with every model."""
    known = {name: result for name, result in models.items() if "calibrated" in result}
    first = next(iter(known.values()))
    lines = []
    for policy in first["policies"]:
        low, high = policy["real_interval"]
        estimates = [CalibratedRate.from_json(result["calibrated"][policy["name"]]).text for result in known.values()]
        lines.append([policy["name"], f"{policy['real']:.1%} [{low:.1%}, {high:.1%}]", *estimates])
    return ["policy", "trials alone", *(f"with {name}" for name in known)], lines


def _estimate(estimate: Mapping[str, Any]) -> str:
    interval = estimate["interval_over_policies"]
    value = "undefined" if estimate["value"] is None else f"{estimate['value']:.3f}"
    return value if interval is None else f"{value} [{interval[0]:.2f}, {interval[1]:.2f}]"


def embedded(video: Path) -> str:
    """Return a video as a data URL."""
    return f"data:video/mp4;base64,{base64.b64encode(video.read_bytes()).decode()}"


def embedded_video(path: Path, address: Callable[[Path], str] = embedded) -> list[Section]:
    """Return one section per video in a folder; address: returns the URL of a video."""
    sections = []
    for video in sorted(path.glob("*.mp4")):
        if video.is_symlink() or not video.is_file():  # what lies elsewhere does not belong into a page to be shown
            continue
        name = video.stem.replace("_", " ")
        starts = "same initial states, " if "and" in name.split() else ""
        caption = f"{name[0].upper()}{name[1:]}: {starts}green border: success, orange: failure."
        if video.stem == IMAGINED:
            caption = "Top: real. Bottom: imagined, from the same initial states with the same actions."
        sections.append(Section("Rollouts", caption, video=address(video)))
    return sections


def rates_in(result: Mapping[str, Any]) -> list[Rate]:
    """Return the success rates of every evaluated policy, both modes."""
    return [
        _rate(label, metrics)
        for label, metrics in evaluated_policies_in(result)
        if metrics.get("reports_success", True)
    ]


def _rate(label: str, judged: Mapping[str, Any]) -> Rate:
    """Return an evaluated success rate; raises DataError when it or its interval is not in [0, 1] (file edited)."""
    rate = Rate(label, judged["success_rate"], judged["low"], judged["high"])
    if not all(0 <= each <= 1 for each in (rate.value, rate.low, rate.high)):
        raise DataError(
            f"result.json gives '{label}' a success rate of {rate.value} with an interval from {rate.low} to "
            f"{rate.high}; rates must lie between 0 and 1. Repeat the run."
        )
    return rate


def _return_cards(result: Mapping[str, Any]) -> list[Card]:
    """Return the mean returns, both modes, of every policy evaluated in a world that reports no success."""
    return [
        Card(
            f"{label}: return",
            f"{metrics['return_mean']:.4g}",
            f"{metrics['return_low']:.4g} to {metrics['return_high']:.4g}, no success reported",
        )
        for label, metrics in evaluated_policies_in(result)
        if not metrics.get("reports_success", True)
    ]


def evaluations_in(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the evaluation results of every policy by name."""
    verdicts = {name: result[name] for name in JUDGED if isinstance(result.get(name), Mapping)}
    return {**verdicts, **result.get("verdicts", {})}


def evaluated_policies_in(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return ("policy, mode", metrics) for every evaluation in the result."""
    return [
        (f"{name}, {mode}", verdict[mode])
        for name, verdict in evaluations_in(result).items()
        for mode in ("deterministic", "stochastic")
        if mode in verdict
    ]


def _base_rate(result: Mapping[str, Any]) -> Rate | None:
    return next((rate for rate in rates_in(result) if rate.label == "base, deterministic"), None)


def _difference_card(difference: Mapping[str, Any]) -> Card:
    low, high = difference["low"], difference["high"]
    if difference.get("of") == "return":
        return Card("difference of returns", f"{difference['difference']:+.4g}", f"{low:+.4g} to {high:+.4g}")
    return Card("difference", f"{100 * difference['difference']:+.0f} points", f"{100 * low:+.0f} to {100 * high:+.0f}")


def _title(path: Path) -> str:
    parts = path.resolve().parts[-3:]
    return f"{parts[0]}: {parts[1].replace('_', ' ')}"


def _subtitle(path: Path) -> str:
    versions = path / "versions.json"
    if not versions.exists():
        return f"seed {path.name}"
    information = read_object(versions, DataError)
    names = ", ".join(
        f"{name} {information['packages'][name]}"
        for name in ("robopolicy", "torch", "mujoco")
        if name in information["packages"]
    )
    return f"seed {information['seed']} · {names} · Python {information['python']}"


keep_former_names(
    __name__, {"verdicts_in": "evaluations_in", "judged_in": "evaluated_policies_in", "film": "embedded_video"}
)
