"""Physics worlds: a native batched MuJoCo engine, built-in manipulation tasks, and adapters to external suites.

Importing this package loads no heavy dependencies; it only selects MuJoCo's graphics library.
"""

from robopolicy.core.machine import configure_rendering

configure_rendering()
