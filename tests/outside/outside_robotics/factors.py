"""A factor of variation of one's own: gravity, as a multiple of the scene's."""

from sims.variations.protocol import Factor


class Gravity(Factor):
    low, high, physical = 0.0, 3.0, True

    def change(self, model, value, generator):
        model.opt.gravity[:] *= value
