"""How a trained policy acts fast and smoothly: engines, fewer steps, caches, and chunks that follow one another."""
