"""Result of a check: `Finding`, and the wording of scale factors."""

from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    """Status of a finding; UNKNOWN: the data does not permit this check, which is not a problem in itself."""

    GOOD = "good"
    UNKNOWN = "unknown"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """Result of one check: name, health, measurement, and remedy (empty when good)."""

    check: str
    health: Health
    measured: str
    remedy: str = ""

    @property
    def problem(self) -> bool:
        """Whether the finding requires action."""
        return self.health in (Health.WARNING, Health.BAD)

    def to_json(self) -> dict[str, str]:
        """Return a JSON-ready dictionary."""
        return {"check": self.check, "health": self.health.value, "measured": self.measured, "remedy": self.remedy}


FACTORS: dict[float, tuple[str, str]] = {
    180 / 3.141592653589793: ("degrees instead of radians", "radians instead of degrees"),
    1000.0: ("millimetres instead of metres", "metres instead of millimetres"),
    100.0: (
        "per cent instead of a fraction, or centimetres instead of metres",
        "a fraction instead of per cent, or metres instead of centimetres",
    ),
    127.5: ("bytes instead of numbers from -1 to 1", "numbers from -1 to 1 instead of bytes"),
    10.0: ("another unit or gain", "another unit or gain"),
    2.0: ("a doubled gain or range", "a halved gain or range"),
}
"""Common scale errors: the usual cause of a value that is this factor too large, and too small."""


def name_factor(factor: float) -> str:
    """Describe a factor as "times too large (or small)", with the usual cause if it is within 1 % of a known factor."""
    size = max(abs(factor), 1e-12)
    small, ratio = size < 1, max(size, 1 / size)
    reasons = [texts[small] for known_factor, texts in FACTORS.items() if abs(ratio / known_factor - 1) < 0.01]
    text = f"{ratio:.4g} times too {'small' if small else 'large'}"
    return f"{text} ({reasons[0]}?)" if reasons else text
