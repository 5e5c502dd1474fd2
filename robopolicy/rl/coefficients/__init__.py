"""From advantages and ratios to what a log-probability is multiplied by: one module a family."""
