"""Off-policy learning from batches of transitions, without acting: critics, actors and the agents that combine them."""
