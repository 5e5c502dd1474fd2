"""A live page of runs: what each does now, its report while it runs, and several beside one another."""
