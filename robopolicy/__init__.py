"""Fine-tune diffusion, flow and vision-language-action policies with RL, in simulators and learned world models.

Importing this package loads nothing heavy (it only chooses how to draw without a display and how threads wait); import
what you use from its modules.
"""

from robopolicy.core.graphics import choose_graphics
from robopolicy.core.threads import choose_waiting

__version__ = "0.1.0"

choose_graphics()
choose_waiting()
