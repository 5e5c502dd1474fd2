"""Demonstrations and rollouts: recorded from a world, stored as LeRobotDataset v3, trained from a copy in memory."""
