"""Imported by LeRobot's commands because of its name: registers `--policy.type=robopolicy`."""

import robopolicy.plugins.configuration_robopolicy  # noqa: F401
