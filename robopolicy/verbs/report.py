"""Rebuilds report.html and report.json of a run folder from its stored results."""

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError
from robopolicy.evaluation.report import report_for_run
from robopolicy.runs import output
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Rebuild report.html of a run folder",
    sections=("run", "report"),
    example="robopolicy report runs/finetune/push_cube/0",
    targets=("report.run",),
)


def run(config: Config) -> int:
    """Write the report and print its path."""
    if config.report.run is None:
        raise ConfigError("No run given. Usage: robopolicy report runs/finetune/push_cube/0")
    output.print(f"Report: {report_for_run(config.report.run)}")
    return 0
