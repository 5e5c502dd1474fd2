"""Physics worlds: a native batched MuJoCo engine, our manipulation tasks, and adapters to outside suites.

Importing this package loads nothing heavy; it only chooses MuJoCo's graphics library.
"""

from robopolicy.core.machine import choose_graphics

choose_graphics()
