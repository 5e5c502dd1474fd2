"""Physics engines of `MujocoWorld`, which advance the simulated state; found through `protocol.PHYSICS`."""
