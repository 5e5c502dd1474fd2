"""The command line: one verb per job, `robopolicy VERB [TARGET] [section.key=value ...] [json=PATH]`."""

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from robopolicy import __version__
from robopolicy.core.errors import ConfigError, RobopolicyError, did_you_mean
from robopolicy.core.registry import ask_for
from robopolicy.verbs.verb import VERBS, Verb, declaration

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 done, 1 a failed check, 2 an error the user can mend, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    output = Console(emoji=False)
    if not output.is_terminal:
        output = Console(emoji=False, width=120)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_overview(output)
        return 0
    if arguments[0] in ("-V", "--version"):
        output.print(f"robopolicy {__version__}")
        return 0
    try:
        return run_verb(arguments[0], arguments[1:], output)
    except RobopolicyError as error:
        text = f"[bold red]Error:[/] {escape(str(error))}"
        Console(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True, emoji=False).print("\nInterrupted. Nothing is lost: run the same command again to go on.")
        return INTERRUPTED


def run_verb(name: str, arguments: list[str], output: Console) -> int:
    """Compose the configuration of verb `name` and run it."""
    if name not in VERBS:
        raise ConfigError(f"'{name}' is not a verb.{did_you_mean(name, VERBS.names())}")
    verb = declaration(name)
    from robopolicy.configuration import compose  # imports hydra: only once a verb is known

    settings = [argument for argument in arguments if argument not in ("-h", "--help")]
    config = compose(overrides(name, verb, settings))
    if settings != arguments:
        print_help(name, verb, config, output)
        return 0
    ask_for(config.run.plugins)
    return int(VERBS.load(name)(config) or 0)


def overrides(name: str, verb: Verb, arguments: list[str]) -> list[str]:
    """Turn a bare word into the verb's target key; leave `key=value` alone."""
    result = []
    for argument in arguments:
        if "=" in argument:
            result.append(argument)
        elif argument.startswith("-"):
            raise ConfigError(
                f"'{argument}' is not an option: settings are written key=value. See: robopolicy {name} --help"
            )
        elif verb.target is None:
            raise ConfigError(f"'{name}' takes no bare word ('{argument}'): settings are written key=value.")
        else:
            result.append(f"{verb.target}={argument}")
    return result


def print_overview(output: Console) -> None:
    """Print every verb with one line each."""
    output.print("[bold]robopolicy[/]: fine-tune robot policies in simulators and learned world models.\n")
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name in VERBS.names():
        table.add_row(f"[bold cyan]{name}[/]", declaration(name).summary)
    output.print(table)
    output.print("\n[dim]robopolicy VERB --help teaches one verb; start with:[/] robopolicy demo")


def print_help(name: str, verb: Verb, config: Any, output: Console) -> None:
    """Print what a verb does, an example, and every setting it reads: its value in `config` and what it means."""
    from robopolicy.configuration import described, groups

    width = min(output.width, 120)
    target = f" [{verb.target.split('.')[1].upper()}]" if verb.target else ""
    output.print(f"[bold]robopolicy {name}[/]{escape(target)} \\[section.key=value ...] \\[json=PATH]\n")
    output.print(reflowed(verb.text), highlight=False, markup=False, width=width)
    output.print(f"\nExample:\n  {verb.example}", highlight=False, markup=False)
    if "world" in verb.sections:
        for group, options in groups().items():
            output.print(f"\n[bold]{group}=[/] one of: {', '.join(options)}", highlight=False, width=width)
        output.print(f"\nWhat a recipe sets: robopolicy {name} recipe=NAME --help", highlight=False, markup=False)
    for section in described(verb.sections, config):
        output.print(f"\n[bold cyan]{section.path}.KEY=VALUE[/]  {escape(section.text)}", highlight=False, width=width)
        table = Table(box=None, show_header=False, padding=(0, 2), width=width)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(style="cyan", overflow="fold", max_width=24)
        table.add_column(style="dim", ratio=1)
        for row in section.keys:
            table.add_row(*map(escape, row))
        output.print(table, highlight=False)
    output.print("\n[bold]json=PATH[/] also writes the figures of this run as JSON.", highlight=False)


def reflowed(text: str) -> str:
    """Return a text with a line a paragraph or item ("- "), to be broken where the terminal ends."""
    lines: list[str] = []
    for line in map(str.strip, text.strip().splitlines()):
        if lines and lines[-1] and line and not line.startswith("- "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
