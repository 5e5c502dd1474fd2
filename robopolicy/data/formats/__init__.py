"""Dataset formats of other projects, which `robopolicy convert` reads: each is found in a registry, by name."""
