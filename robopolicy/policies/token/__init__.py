"""Token policies: a language model over instruction, observation and action tokens."""
