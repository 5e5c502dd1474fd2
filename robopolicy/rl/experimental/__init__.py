"""Experimental mechanisms: implemented and tested, but their effect on success is measured by no recipe or benchmark.

They are found by name like all others. A mechanism that a recipe or a benchmark starts to use moves to the module of
its slot; a test compares both. No other package imports from here.
"""
