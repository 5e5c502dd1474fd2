"""Serves a live web page of the runs in a folder: a list with state and success, the report of each run while it is
running, and comparisons of several runs.

The argument is a folder of runs (default: run.root) or one run. The page is read-only and can be opened on this machine
only; from another machine, forward the port: ssh -L 8600:localhost:8600 HOST. Ctrl-C stops the page, not the runs.
"""

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError
from robopolicy.runs import output
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Serve a live page of runs: curves, videos, progress, comparison",
    sections=("run", "watch"),
    example="robopolicy watch runs",
    targets=("watch.path",),
)


def run(config: Config) -> int:
    """Serve until interrupted."""
    from robopolicy.watching.server import serve  # not needed for --help

    root = config.watch.path or config.run.root
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder of runs: pass one (robopolicy watch FOLDER) or start a run first.")

    def say(address: str) -> None:
        text = f"Open {address} in a browser on this machine. Ctrl-C stops this page; runs continue."
        output.print(text, soft_wrap=True)

    serve(root, config.watch.port, say)
    return 0
