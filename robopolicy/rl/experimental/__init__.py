"""Mechanisms that are built and tested, and whose effect on success no recipe and no benchmark has measured.

They are found by name like all others. One that a recipe or a benchmark comes to use moves to the module of its slot; a
test compares both. Nothing outside imports from here.
"""
