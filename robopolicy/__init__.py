"""Fine-tune diffusion, flow and vision-language-action policies with RL, in simulators and learned world models.

Importing this package loads nothing heavy (it only chooses the graphics library of a machine without a display); import
what you use from its modules.
"""

from robopolicy.core.graphics import choose_graphics

__version__ = "0.1.0"

choose_graphics()
