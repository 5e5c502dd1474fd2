"""Somebody else's planner: random shooting, the best of many sequences."""

import torch

from worldmodels.mpc import Problem, best_sequences


class RandomShooting:
    """Draws sequences once, uniformly, and takes the best."""

    def __init__(self, samples: int = 32):
        self.samples = samples

    def plan(self, problem: Problem) -> torch.Tensor:
        """Return the best sequence of every row, [B, T, A]."""
        noise = problem.held_noise(self.samples, 1).erf()  # uniform between -1 and 1, nearly
        middle = (problem.low + problem.high) / 2
        sequences = torch.cat([problem.clip(middle + problem.half * noise), problem.start[:, None]], 1)
        return best_sequences(sequences, problem.score(sequences), 1)[0][:, 0]
