"""One file per verb of the command line: `run(config) -> exit status`; the module docstring is the verb's help text."""
