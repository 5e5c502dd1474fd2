"""External suites as worlds: any gymnasium environment with continuous actions, Meta-World, robosuite and OGBench."""
