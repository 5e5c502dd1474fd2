"""Serves a live page of the runs in a folder, for a browser on this machine: all runs with their state and success,
the report of each while it runs, and several runs compared.

Names a folder of runs (default: run.root) or one run. Nothing is written, and nobody else can open the page; from
another machine, forward the port: ssh -L 8600:localhost:8600 HOST. Ctrl-C ends it; runs go on.
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
    from robopolicy.watching.server import serve  # draws plots and serves pages, which help does without

    root = config.watch.path or config.run.root
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder of runs: name one, robopolicy watch FOLDER, or start a run first.")

    def say(address: str) -> None:
        output.print(f"Open {address} in a browser on this machine; Ctrl-C ends the page, and no run.", soft_wrap=True)

    serve(root, config.watch.port, say)
    return 0
