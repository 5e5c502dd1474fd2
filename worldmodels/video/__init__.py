"""A latent video model of all cameras (Ctrl-World)."""
