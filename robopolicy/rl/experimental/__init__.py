"""Experimental mechanisms: implemented and tested, but no recipe and no benchmark but `papers` uses them.

They are found by name like all others. Small experiments of most are in robopolicy/benchmarks/papers.yaml. A mechanism
that a recipe or another benchmark starts to use moves to the module of its slot; a test compares both. No other package
imports from here.
"""
