"""Fine-tune diffusion, flow and vision-language-action policies with RL, in simulators and learned world models.

Importing this package loads nothing heavy; import what you use from its modules.
"""

__version__ = "0.1.0"
