"""Ways of computing the same decisions, as `robopolicy optimize` measured them, in a table.

Reads figures as result.json has them, so that a report can be rebuilt from the file alone.
"""

from collections.abc import Mapping
from typing import Any


def ways_header(error: str = "std") -> tuple[str, ...]:
    """Return the header of `way_rows`; error: in what errors are measured."""
    return "way", "median ms", "least ms", "times as fast", f"error / {error}", "block evaluations"


def way_rows(ways: Mapping[str, Mapping[str, Any]], chosen: str) -> list[list[str]]:
    """Return a row each way, the chosen one with an asterisk.

    ways: name -> median_ms, least_ms, times_as_fast, error, and block_share where some blocks of a network are not
    evaluated.
    """
    return [
        [
            f"{name} *" if name == chosen else name,
            f"{found['median_ms']:.2f}",
            f"{found['least_ms']:.2f}",
            f"{found['times_as_fast']:.1f}",
            f"{found['error']:.1e}" if 0 < found["error"] < 1e-3 else f"{found['error']:.3g}",
            f"{found['block_share']:.0%}" if "block_share" in found else "",
        ]
        for name, found in ways.items()
    ]
