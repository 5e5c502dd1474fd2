"""LeRobot policies: they act, most can be trained, and trained ones are saved as LeRobot checkpoints."""
