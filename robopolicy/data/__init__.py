"""Demonstrations and rollouts: recorded from a world, stored as LeRobotDataset v3, trained on from memory."""
