"""Codes of who acted in a control step, and in what kind of segment; see `interventions`."""

from enum import IntEnum


class ActingAgent(IntEnum):
    """Code of the agent that acted."""

    UNKNOWN = -1
    POLICY = 0
    HUMAN = 1
    SCRIPT = 2
    NOBODY = 3
    """The robot held still, e.g. while it waited for an operator."""


class Segment(IntEnum):
    """Code of the kind of segment: autonomous, recovery or correction."""

    UNKNOWN = -1
    AUTONOMOUS = 0
    RECOVER = 1
    CORRECT = 2
