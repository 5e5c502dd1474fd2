"""Policies that LeRobot saved: they act here, most learn, and what has learned is a checkpoint of LeRobot's again."""
