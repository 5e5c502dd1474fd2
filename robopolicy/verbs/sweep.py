"""Runs a verb for every combination of its settings' values, and compares the results in one table and one plot.

Write the verb and its settings as usual, with several values where they vary: run.seed=0,1,2 finetune.clip=0.02,0.05
makes six runs. Values follow Hydra's sweep grammar: also range(0,5) and choice(a,b); a value inside brackets or quotes
stays one value. Runs are executed one after another, or workers.count at a time, each in the verb's usual folder. Swept
settings other than the seed are added to the run's name; the default inputs are those of the name without these
settings (run.inputs). The table shows each setting's mean and range over seeds, and the paired difference to the first
setting on the same initial states. A run that fails is listed with its reason, and the others continue. If interrupted,
run the same command again: finished runs are kept, the interrupted one resumes. Add values to the command to extend a
sweep.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from rich.rule import Rule

from robopolicy.building.commands import run_commands
from robopolicy.building.workers import open_workers
from robopolicy.configuration import Config, to_yaml
from robopolicy.core.errors import ConfigError, DataError, RobopolicyError, did_you_mean, in_one_line
from robopolicy.core.pools import Pool
from robopolicy.core.run import versions
from robopolicy.core.storage import read_object, write_atomic, write_json
from robopolicy.evaluation.report import render
from robopolicy.evaluation.sweeps import (
    FAILURE_HEADER,
    FINISHED,
    RUN_HEADER,
    SweptRun,
    failures,
    metric_of,
    numbers_in,
    run_rows,
    summaries,
    sweep_report,
    table,
    value_of,
)
from robopolicy.evaluation.tables import markdown_table
from robopolicy.runs import RESULT, decisive, open_folder, output, print_table, publish, run_name, run_path
from robopolicy.verbs.verb import VERBS, Verb, configuration_of, declaration, overrides

VERB = Verb(
    summary="Run a verb for every combination of settings and compare the results",
    sections=("sweep", "workers"),
    example="robopolicy sweep finetune recipe=push_t run.seed=0,1,2 finetune.clip=0.02,0.05",
    rest="sweep.command",
    resumes=True,
)
WITHOUT_RESULT = frozenset(
    ("sweep", "pipeline", "demo", "bench", "serve", "drive", "watch", "report", "push", "algorithms", "doctor", "check")
) | {"convert", "improve"}
"""Verbs that leave no result.json of one run, or run other verbs."""
SEED = "run.seed"
FAILED = "failed"
LONGEST_LABEL = 100
"""Maximum characters that the settings add to a run's name."""
GRACE = 5.0
"""Seconds that an interrupted run has to end by itself."""
INTERRUPTED = 130
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Planned:
    """A planned run: its command line, its configuration, and its labels in the tables."""

    verb: str
    settings: list[str]
    config: Config
    shown: SweptRun

    def is_finished(self) -> bool:
        """Whether its folder contains a result of exactly these settings."""
        config_file = self.shown.folder / "config.yaml"
        if self.config.run.overwrite or not (self.shown.folder / RESULT).exists() or not config_file.exists():
            return False
        return config_file.read_text() == to_yaml(self.config, decisive(declaration(self.verb).sections))


def run(config: Config) -> int:
    """Run all combinations; return 1 if one of them failed."""
    runs = planned(config.sweep.command)
    first = runs[0]
    name = config.sweep.name or f"{first.verb}-{first.config.run.inputs or run_name(first.config)}"
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"sweep.name={name} is not a folder name: choose one without '/'.")
    folder = open_folder(first.config.run.root / "sweep" / name, way_out="name this sweep with sweep.name=NAME").path
    swept_runs = [each.shown for each in runs]
    try:
        with open_workers(config) as workers:
            ended = side_by_side(runs, workers.pool, folder) if workers.pool is not None else in_turn(runs)
            for place, run_result in ended:
                swept_runs[place] = run_result
                _write(config, folder, first.verb, swept_runs)
    except KeyboardInterrupt:
        _write(config, folder, first.verb, swept_runs)
        output.print(f"\nStopped. The table so far: {folder / 'table.md'}", soft_wrap=True)
        raise
    _print(config, folder, first.verb, swept_runs)
    return int(any(each.state == FAILED for each in swept_runs))


def planned(command: Sequence[str]) -> list[Planned]:
    """Return every run of a sweep, in the order of Hydra's sweeps: the last setting varies fastest.

    Raises ConfigError for a verb that cannot be swept, or settings that cannot be read or are invalid in one of the
    combinations.
    """
    if not command:
        raise ConfigError("No command given. Usage: robopolicy sweep finetune recipe=push_t run.seed=0,1,2")
    verb, *words = command
    if verb not in VERBS:
        raise ConfigError(f"'{verb}' is not a verb.{did_you_mean(verb, VERBS.names())}")
    if verb in WITHOUT_RESULT:
        raise ConfigError(f"'{verb}' leaves no result to compare: sweep a verb that trains or evaluates.")
    declared = declaration(verb)
    settings = [_values(each) for each in _parsed(overrides(verb, declared, words))]
    varied = {key: values for key, values in settings if len(values) > 1}
    for key in varied.keys() & {"run.name", "run.root", "run.inputs"}:
        raise ConfigError(f"{key} cannot be swept: the sweep names its runs by their settings.")
    combinations = itertools.product(*([(key, value) for value in values] for key, values in settings))
    runs = [_planned(verb, declared, list(each), list(varied)) for each in combinations]
    if twice := [folder for folder, count in Counter(each.shown.folder for each in runs).items() if count > 1]:
        raise ConfigError(f"Two combinations have the folder {twice[0]}: give each value once.")
    return runs


def _parsed(given: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(given)
    except HydraException as error:
        raise ConfigError(f"A setting cannot be read: {in_one_line(error)}. Several values are written A,B.") from error


def _values(override: Override) -> tuple[str, list[str]]:
    """Return key and all values of a setting, as text for the command line; raises ConfigError if they are not
    finite.
    """
    key = override.get_key_element()
    if not override.is_sweep_override():
        return key, [str(override.input_line).partition("=")[2]]
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        raise ConfigError(f"{override.input_line} has no list of values: write {key}=A,B or {key}=range(0,5).")
    return key, list(override.sweep_string_iterator())


def _planned(verb: str, declared: Verb, settings: list[tuple[str, str]], varied: list[str]) -> Planned:
    """Return the run of one combination, with the part of its name that its settings give it."""
    typed = [f"{key}={value}" for key, value in settings]
    composed = configuration_of(declared, typed)
    swept_values = {_short(key, varied): value for key, value in settings if key in varied and key != SEED}
    if swept_values:
        usual, label = run_name(composed), "_".join(f"{key}-{_plain(value)}" for key, value in swept_values.items())
        run_settings = {"name": f"{usual}-{label[:LONGEST_LABEL]}", "inputs": composed.run.inputs or usual}
        typed += [f"run.{key}={value}" for key, value in run_settings.items()]
        composed = composed.replaced(run=replace(composed.run, **run_settings))
    setting = ", ".join(f"{key}={value}" for key, value in swept_values.items())
    return Planned(verb, typed, composed, SweptRun(setting, composed.run.seed, run_path(composed, verb)))


def _short(key: str, varied: Sequence[str]) -> str:
    """Return the last part of a setting's name, or all of it if two varied ones share that."""
    key, last = key.lstrip("+"), key.rpartition(".")[2]
    return key if sum(each.rpartition(".")[2] == last for each in varied) > 1 else last


def _plain(value: str) -> str:
    """Return a value as part of a folder name that needs no quotes."""
    return re.sub(r"[^\w.+-]+", "-", value).strip("-")


def in_turn(runs: Sequence[Planned]) -> Iterator[tuple[int, SweptRun]]:
    """Run the combinations one after another, unless they are finished; yield place and end of each.

    Raises KeyboardInterrupt when one was interrupted.
    """
    for place, each in enumerate(runs):
        title = f"{place + 1} of {len(runs)}: {_described(each.shown)}"
        output.print(Rule(f"[bold]{title}", align="left"))
        if each.is_finished():
            output.print(f"{each.shown.folder} is finished already.", soft_wrap=True)
            yield place, ended(each)
            continue
        status, error_output = _run([sys.executable, "-m", "robopolicy", each.verb, *each.settings])
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        yield place, ended(each, status, error_output)


def side_by_side(runs: Sequence[Planned], pool: Pool, folder: Path) -> Iterator[tuple[int, SweptRun]]:
    """Run the combinations on workers, unless they are finished; yield place and end of each, in order of arrival."""
    missing = [place for place, each in enumerate(runs) if not each.is_finished()]
    for place in (place for place in range(len(runs)) if place not in missing):
        output.print(f"{runs[place].shown.folder} is finished already.", soft_wrap=True)
        yield place, ended(runs[place])
    logs = [folder / "logs" / f"{place + 1}.txt" for place in missing]
    commands = [[runs[place].verb, *runs[place].settings] for place in missing]
    for index, status, said in run_commands(pool, commands, logs, "runs"):
        place = missing[index]
        run_result = ended(runs[place], status, said)
        line = f"{place + 1} of {len(runs)}: {_described(run_result)}: {run_result.state}. Output: {logs[index]}"
        output.print(line, markup=False, soft_wrap=True)
        yield place, run_result


def ended(each: Planned, status: int = 0, said: str = "") -> SweptRun:
    """Return the end of one combination, with its result; said: the end of its output."""
    swept_run = each.shown
    if status != 0:
        return replace(swept_run, state=FAILED, reason=_reason(status, said))
    try:
        return replace(swept_run, state=FINISHED, result=read_object(swept_run.folder / RESULT, DataError))
    except RobopolicyError as error:
        return replace(swept_run, state=FAILED, reason=str(error))


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command and return its exit status and the end of its stderr, which is also shown."""
    environment = dict(os.environ)
    if sys.stdout.isatty() and sys.stderr.isatty():  # progress bars, though its stderr passes through here
        environment |= {"FORCE_COLOR": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    tail = bytearray()
    reader = threading.Thread(target=_pass_on, args=(process.stderr, tail), daemon=True)
    reader.start()
    try:
        status = process.wait()
    except BaseException:
        _end(process)
        raise
    finally:
        reader.join(GRACE)
        process.stderr.close()
    return status, _COLOURS.sub("", tail.decode(errors="replace"))


def _pass_on(source: IO[bytes], tail: bytearray) -> None:
    """Copy a stream to stderr as it comes, keeping its end."""
    while chunk := os.read(source.fileno(), 4096):
        sys.stderr.write(chunk.decode(errors="replace"))
        sys.stderr.flush()
        tail += chunk
        del tail[:-8192]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a process that Ctrl-C has interrupted as well; interrupt it if only this process received the signal."""
    for ask in (None, process.send_signal, lambda _: process.terminate()):
        if ask is not None:
            ask(2)
        try:
            process.wait(GRACE)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()


def _reason(status: int, said: str) -> str:
    """Return why a run failed: its error message, else the last line that it wrote."""
    if status < 0:
        killed = " (the system ends processes when memory runs out)" if status == -9 else ""
        return f"ended by signal {-status}{killed}"
    errors = re.findall(r"^Error: (.*)$", said, re.MULTILINE)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return in_one_line((errors or lines or [f"exit status {status}"])[-1])


def _described(shown: SweptRun) -> str:
    return f"{shown.setting}, seed {shown.seed}" if shown.setting else f"seed {shown.seed}"


def _command(config: Config) -> str:
    sweep_settings = [f"sweep.{key}={value}" for key in ("metric", "name") if (value := getattr(config.sweep, key))]
    return shlex.join(["robopolicy", "sweep", *config.sweep.command, *sweep_settings])


def _numbers(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(header, rows, numbers=True) + "\n"


def _write(config: Config, folder: Path, verb: str, shown: list[SweptRun]) -> None:
    """Write table.md, table.json and report.html with the results so far."""
    metric = metric_of(shown, config.sweep.metric)
    setting_summaries = summaries(shown, metric)
    header, rows = table(setting_summaries, metric)
    parts = (f"# Sweep of {verb}\n", f"`{_command(config)}`\n", _numbers(header, rows))
    failed = [_numbers(FAILURE_HEADER, failures(shown))] if failures(shown) else []
    write_atomic(folder / "table.md", "\n".join([*parts, _numbers(RUN_HEADER, run_rows(shown, metric)), *failed]))
    runs = [
        {
            **{name: value for name, value in vars(each).items() if name != "result"},
            "folder": str(each.folder),
            "value": value_of(each.result, metric),
        }
        for each in shown
    ]
    content = {"command": _command(config), "metric": metric, "versions": versions()}
    content |= {"settings": [each.to_json() for each in setting_summaries], "runs": runs}
    write_json(folder / "table.json", content)
    publish(config, content)
    page = sweep_report(f"Sweep of {verb}", folder.name, shown, metric, _command(config))
    write_atomic(folder / "report.html", render(page))


def _print(config: Config, folder: Path, verb: str, shown: list[SweptRun]) -> None:
    metric = metric_of(shown, config.sweep.metric)
    header, rows = table(summaries(shown, metric), metric)
    print_table(f"Sweep of {verb}", header, rows)
    results = [each.result for each in shown if each.state == FINISHED]
    if results and all(value_of(result, metric) is None for result in results):
        entries = ", ".join(list(numbers_in(results[0]))[:30])
        problem = f"no {metric}" if metric else "neither success nor return"
        output.print(f"result.json contains {problem}. Compare another entry with sweep.metric=NAME: {entries}.")
    for run_label, reason in failures(shown):
        output.print(f"Failed: {run_label}: {reason}", markup=False, soft_wrap=True)
    output.print(f"Table: {folder / 'table.md'}\nReport: {folder / 'report.html'}", soft_wrap=True)
