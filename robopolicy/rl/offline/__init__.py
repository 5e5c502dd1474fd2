"""Learning from batches of transitions, without acting: critics, actors and the agents that join them."""
