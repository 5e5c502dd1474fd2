"""Outside suites as worlds: any gymnasium environment with continuous actions, and Meta-World."""
