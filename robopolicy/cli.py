"""The command line: one verb per job, `robopolicy VERB [TARGET] [section.key=value ...] [json=PATH]`."""

import re
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from robopolicy import __version__
from robopolicy.core import replicas
from robopolicy.core.errors import (
    ConfigError,
    RobopolicyError,
    RobopolicyWarning,
    did_you_mean,
    in_a_sentence,
    is_interruption,
)
from robopolicy.core.registry import import_plugins
from robopolicy.core.status import end_on_error, note
from robopolicy.verbs.verb import VERBS, Verb, configuration_of, declaration, overrides

if TYPE_CHECKING:
    from robopolicy.configuration import Config, Described

INTERRUPTED = 130

HELP = ("-h", "--help")

WIDEST = 120
"""Maximum width of help in columns, and its width when the output is not a terminal."""

NARROW = 110
"""Width in columns below which a setting's meaning follows its value instead of having its own column."""

MANY = 40
"""Number of settings in a section above which a verb's help describes each briefly."""

NAMING = ("collect.quality",)
"""Settings that change the default input location of any verb, whichever sections it reads."""

JOBS = {
    "Train in simulation": "robopolicy demo demo.recipe=pick_place",
    "Fine-tune what you have": "robopolicy improve CHECKPOINT world=push_t",
    "Evaluate in a world model": "robopolicy evaluate CHECKPOINT world=worldmodel world.model=MODEL",
    "Serve to a robot": "robopolicy serve CHECKPOINT",
}
"""The most common jobs, each with its command."""

SHARED = ("run", "world", "workers", "plan", "lerobot")
"""Sections that many verbs read: a verb's help lists only their setting names."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 success, 1 a failed check, 2 a user error, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.showwarning = partial(_show, set[str]())
    output = Console(emoji=False)
    if not output.is_terminal:
        output = Console(emoji=False, width=WIDEST)
    if not arguments or arguments[0] in (*HELP, "help"):
        print_overview(output)
        return 0
    if arguments[0] in ("-V", "--version"):
        output.print(f"robopolicy {__version__}")
        return 0
    try:
        replicas.join()
        try:
            with end_on_error():
                status = run_verb(arguments[0], arguments[1:], output)
            replicas.leave()
            return status
        except Exception as error:
            if not replicas.reports():
                replicas.end(INTERRUPTED if replicas.was_interrupted() else 2)
            if is_interruption(error) or replicas.was_interrupted():
                return _interrupted(arguments[0])
            if not (message := in_a_sentence(error)):
                raise
            text = f"[bold red]Error:[/] {escape(message)}"
            Console(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True)
            replicas.end(2)
            return 2
    except KeyboardInterrupt:
        if not replicas.reports():
            replicas.end(INTERRUPTED)
        return _interrupted(arguments[0])


def _interrupted(verb: str) -> int:
    """Print how to resume after Ctrl-C, ignoring further Ctrl-C meanwhile, and return the exit status."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        again = "Nothing is lost: run the same command again to resume."
        if not declaration(verb).resumes:
            again = "Running the same command starts again from the beginning."
        Console(stderr=True, emoji=False).print(f"\nInterrupted. {again}")
        replicas.end(INTERRUPTED)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
    return INTERRUPTED


def _show(shown: set[str], message: Warning | str, category: type[Warning], *_: object) -> None:
    """Print a warning unless it is among those `shown`: robopolicy's as a sentence, a library's in short form."""
    text = str(message) if issubclass(category, RobopolicyWarning) else f"{category.__name__}: {message}"
    if text not in shown:
        shown.add(text)
        note(text)
        Console(stderr=True, emoji=False).print(
            f"[bold yellow]Note:[/] {escape(text)}", highlight=False, soft_wrap=True
        )


def run_verb(name: str, arguments: list[str], output: Console) -> int:
    """Compose the configuration of verb `name` and run it."""
    if name not in VERBS:
        raise ConfigError(f"'{name}' is not a verb.{did_you_mean(name, VERBS.names())}")
    verb = declaration(name)
    if replicas.count() > 1 and not verb.replicas:
        several = ", ".join(each for each in VERBS.names() if declaration(each).replicas)
        raise ConfigError(
            f"'{name}' runs in one process, but {replicas.count()} were started: start it without torchrun or "
            f"accelerate. Verbs that train data-parallel: {several}."
        )
    help_place = next((place for place, argument in enumerate(arguments) if argument in HELP), None)
    if help_place is not None:
        after = [argument for argument in arguments[help_place:] if argument not in HELP]
        settings = arguments[:help_place] + [argument for argument in after if "=" in argument]
        sections = [argument for argument in after if "=" not in argument]
        from robopolicy.configuration import compose

        print_help(name, verb, compose(overrides(name, verb, settings), sections=verb.sections), output, sections)
        return 0
    all_overrides = overrides(name, verb, arguments)
    config = configuration_of(verb, all_overrides)
    _say_unread(name, verb, config, all_overrides)
    if config.json is not None:
        from robopolicy.core.storage import require_writable  # imports safetensors

        require_writable(config.json)
    import_plugins(config.run.plugins)
    try:
        return int(VERBS.load(name)(config) or 0)
    except RobopolicyError as error:
        from robopolicy.configuration.description import with_sections

        own_sections = sorted(verb.sections, key=lambda section: (section != name, section in ("run", "world")))
        error.args = (with_sections(str(error), own_sections, config),)
        raise


def _say_unread(name: str, verb: Verb, config: "Config", given: Sequence[str]) -> None:
    """Print which given settings `name` does not read; not a warning, since scripts may pass the same settings to all
    verbs.
    """
    keys = [setting.partition("=")[0].lstrip("+~") for setting in given]
    other_sections = {item.name for item in fields(config)} - set(verb.sections)
    unread = [key for key in keys if "." in key and key.partition(".")[0] in other_sections and key not in NAMING]
    if unread:
        text = f"'{name}' does not read {', '.join(unread)}: it reads only {', '.join(verb.sections)}."
        Console(stderr=True, emoji=False).print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)


def print_overview(output: Console) -> None:
    """Print the most common jobs, then every verb with its one-line summary."""
    output.print("[bold]robopolicy[/]: fine-tune robot policies in simulators and learned world models.\n")
    jobs, verbs = (Table(box=None, show_header=False, padding=(0, 2)) for _ in range(2))
    for job, command in JOBS.items():
        jobs.add_row(job, f"[bold cyan]{command}[/]")
    for name in VERBS.names():
        verbs.add_row(f"[bold cyan]{name}[/]", declaration(name).summary)
    for title, table in (("What do you want to do?", jobs), ("\nAll verbs", verbs)):
        output.print(f"[bold]{title}[/]")
        output.print(table)
    output.print(
        "\n[dim]robopolicy VERB --help explains one verb; the complete example in ten minutes:[/] robopolicy demo"
    )


def print_help(name: str, verb: Verb, config: "Config", output: Console, sections: Sequence[str] = ()) -> None:
    """Print a verb's description, an example, and its own settings with their values in `config` and meanings.

    For sections shared with other verbs, and for deeply nested ones, only the setting names are printed. sections:
    paths such as world or train.fit, whose settings (and subsections) are explained instead. Raises ConfigError when
    the verb has no such section.
    """
    from robopolicy.configuration import described

    width, described_sections = min(output.width, WIDEST), described(verb.sections, config)
    if sections:
        selected = _chosen(name, described_sections, sections)
        if selected[0].path == "world":
            print_groups(output, width)
        for part in selected:
            print_section(part, output, width)
        return
    target = " VERB" if verb.rest else "".join(f" [{key.split('.')[1].upper()}]" for key in verb.targets)
    output.print(f"[bold]robopolicy {name}[/]{escape(target)} \\[section.key=value ...] \\[json=PATH]\n")
    output.print(reflowed(verb.text), highlight=False, markup=False, width=width)
    output.print(f"\nExample:\n  {verb.example}", highlight=False, markup=False)
    if "world" in verb.sections:
        output.print()
        print_groups(output, width, name)
    folded = [part for part in described_sections if _is_folded(part.path, name)]
    for part in described_sections:
        if part not in folded:
            print_section(part, output, width, page=True)
    if folded:
        output.print(f"\n[bold]More settings[/] are explained by robopolicy {name} --help SECTION:", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2), width=width)
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(style="dim", ratio=1, no_wrap=True, overflow="ellipsis")
        for part in folded:
            table.add_row(part.path, ", ".join(key for key, _, _ in part.keys))
        output.print(table, highlight=False)
    output.print("[bold]json=PATH[/] also writes the results of this run as JSON.", highlight=False)


def print_groups(output: Console, width: int, verb: str = "") -> None:
    """Print the available recipes and worlds; verb: whose help shows the settings of a recipe."""
    from robopolicy.configuration import groups

    for group, options in groups().items():
        hint = f" (settings: robopolicy {verb} recipe=NAME --help)" if verb and group == "recipe" else ""
        names = ", ".join(name for name in options if name != "none")
        output.print(f"[bold]{group}=[/]{hint} one of: {names}", highlight=False, width=width)


def print_section(section: "Described", output: Console, width: int, page: bool = False) -> None:
    """Print the settings of a section within `width` columns: as a table of three columns, or key=value followed by the
    meaning.

    page: as on a verb's page, of what is seldom set only the key; where that leaves many, of what is null as well, and
    of meanings only the first sentence.
    """
    output.print(f"\n[bold cyan]{section.path}.KEY=VALUE[/]  {escape(section.text)}", highlight=False, width=width)
    rows = section.keys
    if page:
        unset, rare = [], [key for key, _, _ in rows if key in section.rare]
        rows = [row for row in rows if row[0] not in rare]
        if len(rows) > MANY:
            unset = [key for key, value, _ in rows if value == "null"]
            rows = [(key, value, re.split(r"(?<=\.) (?=[A-Z0-9])", meaning)[0]) for key, value, meaning in rows]
            rows = [row for row in rows if row[0] not in unset]
        short_lists = {"Not set (null)": unset, "Rarely set": rare}
        line = " ".join(f"{title}: {', '.join(keys)}." for title, keys in short_lists.items() if keys)
        if line:
            line = f"{line} All settings: --help {section.path}"
            output.print(textwrap.fill(line, width - 2, initial_indent="  ", subsequent_indent="    "), highlight=False)
    if width < NARROW:
        for key, value, meaning in rows:
            line = textwrap.fill(f"  {key}={value}  {meaning}", width, subsequent_indent=4 * " ")
            text = Text(line, style="dim")
            text.stylize("not dim bold", 2, 2 + len(key))
            text.stylize("not dim cyan", 3 + len(key), 3 + len(key) + len(value))
            output.print(text, highlight=False, soft_wrap=True)
        return
    table = Table(box=None, show_header=False, padding=(0, 2), width=width)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="cyan", overflow="fold", max_width=24)
    table.add_column(style="dim", ratio=1)
    for row in rows:
        table.add_row(*map(escape, row))
    output.print(table, highlight=False)


def _is_folded(path: str, verb: str) -> bool:
    """Whether the help of `verb` lists only the setting names of a section: it is shared, another verb's, or three
    levels deep.
    """
    top, *inner = path.split(".")
    return top in SHARED or (top in VERBS and top != verb) or len(inner) > 1


def _chosen(name: str, found: Sequence["Described"], sections: Sequence[str]) -> list["Described"]:
    """Return the requested sections, in the verb's order, with their subsections."""
    paths = [part.path for part in found]
    for section in sections:
        if section not in paths:
            raise ConfigError(
                f"'{section}' is not a section that '{name}' reads. Write --help SECTION with one of "
                f"{', '.join(paths)}.{did_you_mean(section, paths)}"
            )
    return [part for part in found if any(f"{part.path}.".startswith(f"{section}.") for section in sections)]


def reflowed(text: str) -> str:
    """Return a text with one line per paragraph or list item ("- "), to be wrapped at the terminal's width."""
    lines: list[str] = []
    for line in map(str.strip, text.strip().splitlines()):
        if lines and lines[-1] and line and not line.startswith("- "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
