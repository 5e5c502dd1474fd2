"""From recorded data to a policy: critics are fitted, candidates made of them, and a gate lets the better ones in."""
