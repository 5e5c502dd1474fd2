"""A tracker of one's own: a text file with a line for each record."""

from pathlib import Path


class Lines:
    """Appends to lines.txt in the run's folder."""

    def __init__(self, run):
        self._path = run.path / "lines.txt"
        self._path.write_text(f"{run.name}\n")

    def log(self, metrics, step):
        with self._path.open("a") as file:
            file.write(f"{step} {len(metrics)}\n")

    def media(self, name: str, path: Path):
        with self._path.open("a") as file:
            file.write(f"{name}\n")

    def finish(self):
        with self._path.open("a") as file:
            file.write("finished\n")
