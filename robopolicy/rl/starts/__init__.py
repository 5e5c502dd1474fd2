"""Which starts are played, how often, and from how far along a demonstration."""
