"""Live page of runs: progress, the report of a running job, comparison of several runs."""
