"""A diffusion model of the next image (DIAMOND)."""
