"""Imported by LeRobot's commands because of its name: registers `--env.type=robopolicy`."""

import robopolicy.plugins.environment  # noqa: F401
