"""Lists the presets and mechanisms that fine-tuning is composed of, with one line and one source per mechanism.

Mechanisms that no recipe and no benchmark but `papers` uses are listed last: built and tested, with a small experiment
at most.

`robopolicy algorithms grpo` explains one entry and its options; for a preset it lists the mechanism in each slot and
its source file. Select a preset with finetune.algorithm=NAME, replace single slots with finetune.advantage=NAME or
finetune.credit=[NAME,NAME], and set options with finetune.options.NAME.OPTION=VALUE. `robopolicy algorithms papers`
lists all requested papers: the code that implements each, the test that checks its mathematics, whether it is complete,
and the measured effect, of most in `robopolicy bench papers`. A paper's name, such as BAPO or RL-100, shows its row.
"""

from typing import Any

from rich.markup import escape
from rich.table import Table

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, nearest
from robopolicy.core.registry import is_dotted
from robopolicy.core.structured import to_plain
from robopolicy.evaluation.paper_effects import claim_of, effect
from robopolicy.rl.configuration import AlgorithmConfig, Resolved
from robopolicy.rl.papers import HEADER, TITLES, Paper, cells, count_by_status, papers, papers_of
from robopolicy.rl.presets import PRESETS
from robopolicy.rl.registry import Mechanism, Slot, declared_at, mechanisms, setting_for
from robopolicy.runs import output, publish
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="List fine-tuning algorithms (presets) and their mechanisms",
    sections=("algorithms",),
    example="robopolicy algorithms grpo",
    targets=("algorithms.name",),
)


UNMEASURED = "Built and tested, effect measured in a small experiment at most"
"""Heading above mechanisms that no recipe and no benchmark but `papers` uses, and above presets that contain them."""

PAPERS = "papers"
"""Word that lists all papers when given instead of a name."""


def run(config: Config) -> int:
    """Print all entries, the papers, or the entries named `algorithms.name`."""
    name = config.algorithms.name
    entries_of_name = (
        entries_at(name) if is_dotted(name) else [entry for entry in mechanisms() if name in ("", entry.name)]
    )
    presets = {key: preset for key, preset in PRESETS.items() if name in ("", key)}
    if not entries_of_name and not presets:
        listed_papers = [paper for paper in papers() if name in (PAPERS, paper.id)]
        if not listed_papers:
            names = [PAPERS, *PRESETS, *(entry.name for entry in mechanisms()), *(paper.id for paper in papers())]
            suggestion = nearest(name, names)
            hint = (
                f"Did you mean '{suggestion}'?"
                if suggestion
                else f"Without a name, all are listed; '{PAPERS}' lists papers."
            )
            raise ConfigError(f"No algorithm, mechanism or paper is named '{name}'. {hint}")
        show_papers(listed_papers)
        publish(config, {"papers": [{**to_plain(paper), "effect": effect(paper)} for paper in listed_papers]})
        return 0
    resolved = AlgorithmConfig(name).resolved() if name in PRESETS else None
    for is_shown_measured in (True, False):
        shown_presets = {key: preset for key, preset in presets.items() if is_measured(key) is is_shown_measured}
        entries = [entry for entry in entries_of_name if entry.measured is is_shown_measured]
        if not is_shown_measured and (shown_presets or entries):
            output.print(f"[bold]{UNMEASURED}[/]\n")
        if shown_presets:
            show_presets(shown_presets)
        if shown_presets and resolved is not None:
            show_resolved(resolved)
        for slot in Slot:
            if slot_entries := [entry for entry in entries if entry.slot is slot]:
                show_slot(slot, slot_entries)
    if name:
        for entry in entries_of_name:
            explain(entry)
            if is_dotted(name):
                output.print(f"  finetune.{setting_for(entry.slot, name)}\n", markup=False)
    figures: dict[str, Any] = {
        "presets": {key: to_plain(value) for key, value in presets.items()},
        "mechanisms": list(map(row, entries_of_name)),
    }
    publish(config, figures if resolved is None else {**figures, "resolved": resolved_rows(resolved)})
    return 0


def is_measured(preset: str) -> bool:
    """Check whether recipes or benchmarks use every mechanism that a preset resolves to."""
    return all(entry.measured for entry in AlgorithmConfig(preset).resolved().entries)


def entries_at(path: str) -> list[Mechanism]:
    """Return the mechanisms at an import path; raises ConfigError when there is none."""
    entries = declared_at(path)
    if not entries:
        raise ConfigError(
            f"'{path}' is not decorated as a mechanism (robopolicy.rl.registry.mechanism), which declares its slot "
            f"and its needs. Pass a plain function directly in a slot, such as finetune.advantage={path}."
        )
    return entries


def show_presets(presets: dict[str, dict[str, Any]]) -> None:
    """Print the mechanisms that each preset puts into the slots."""
    table = Table(title="finetune.algorithm", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("preset", style="bold")
    table.add_column("slots", overflow="fold")
    for name, preset in presets.items():
        table.add_row(name, escape(", ".join(f"{slot}={_text(value)}" for slot, value in to_plain(preset).items())))
    output.print(table, "")


def show_resolved(resolved: Resolved) -> None:
    """Print the mechanism of every slot of a preset, defaults included, and the file that implements it."""
    title = f"Resolved settings of {resolved.name} (ratio_level={resolved.ratio_level.value})"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("slot", "part", "options", "file"):
        table.add_column(column, style="bold" if column == "part" else "", overflow="fold")
    for row in resolved_rows(resolved):
        options = ", ".join(f"{option}={value}" for option, value in row["options"].items())
        table.add_row(row["slot"], row["part"] or "[dim]none[/]", escape(options), row["file"])
    output.print(table, "")


def resolved_rows(resolved: Resolved) -> list[dict[str, Any]]:
    """Return the resolved mechanisms by slot, in the order in which an iteration runs them, with their effective
    options.

    part and file are "" for an empty slot.
    """
    rows: list[dict[str, Any]] = []
    for slot in Slot:
        parts = resolved.slots[slot]
        rows += [
            {
                "slot": slot.value,
                "part": part.entry.name,
                "options": to_plain({**part.entry.options, **part.options}),
                "file": part.file,
            }
            for part in parts
        ]
        if not parts:
            rows.append({"slot": slot.value, "part": "", "options": {}, "file": ""})
    return rows


def show_slot(slot: Slot, entries: list[Mechanism]) -> None:
    """Print the mechanisms of one slot, one line each."""
    table = Table(title=f"finetune.{slot.value}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("description", overflow="fold", ratio=3)
    table.add_column("source", style="dim", overflow="fold", ratio=1)
    for entry in entries:
        table.add_row(entry.name, escape(entry.line), escape(entry.source))
    output.print(table, "")


def explain(entry: Mechanism) -> None:
    """Print the full description and the options of one mechanism."""
    output.print(f"[bold]{entry.slot.value} {entry.name}[/]\n{escape(entry.text)}")
    for option, default in entry.options.items():
        output.print(f"  finetune.options.{entry.name}.{option}={default}", markup=False)
    for need in sorted(entry.needs, key=lambda item: item.name):
        output.print(f"  needs {need.value}", markup=False)
    for paper in papers_of(f"{entry.slot.value}/{entry.name}"):
        lines = [f"paper {paper.id}, arXiv:{paper.arxiv}: {paper.said}"]
        lines += [f"  checked by {test}" for test in paper.tests]
        lines += [f"  claim: {claim}"] if (claim := claim_of(paper)) else []
        lines += [f"  effect: {effect(paper)}"]
        for line in lines:
            output.print(f"  {line}", markup=False, soft_wrap=True)
    output.print()


def show_papers(chosen: list[Paper]) -> None:
    """Print the requested papers, then the other sources of mechanisms, and how many of them are complete."""
    for kind, title in TITLES.items():
        rows = [paper for paper in chosen if paper.kind == kind]
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column, ratio in zip(HEADER, (2, 1, 3, 3, 4, 2), strict=True):
            table.add_column(column, style="bold" if column == "paper" else "", overflow="fold", ratio=ratio)
        for paper in rows:
            table.add_row(*map(escape, cells(paper, effect(paper))))
        if rows:
            output.print(table, "")
    if len(chosen) == 1 and (claim := claim_of(chosen[0])):
        output.print(f"Claim tested by bench papers: {claim}", markup=False)
    if len(chosen) > 1:
        output.print(f"{count_by_status('robots', 'language models')}; from other fields, {count_by_status('others')}")


def row(entry: Mechanism) -> dict[str, Any]:
    """Return one mechanism as JSON."""
    return {
        "slot": entry.slot.value,
        "name": entry.name,
        "line": entry.line,
        "source": entry.source,
        "options": {name: to_plain(value) for name, value in entry.options.items()},
        "needs": sorted(need.name.lower() for need in entry.needs),
    }


def _text(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
