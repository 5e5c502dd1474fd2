"""What is reported on."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReportSection:
    """What to report on."""

    run: Path | None = None
    """A run folder."""
