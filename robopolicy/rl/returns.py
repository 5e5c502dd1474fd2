"""Reward scaling by the running standard deviation of the discounted return."""

import torch
from torch import Tensor, nn


class ReturnScale(nn.Module):
    """Divides rewards by the running std of the discounted return, so one critic learning rate fits every task.

    The return is accumulated forward, G_t = R_t + gamma^h_{t-1} (1 - ended_{t-1}) G_{t-1} (as OpenAI baselines'
    VecNormalize and DPPO do), and its moments are pooled over all columns seen (Chan et al. 1979). The mean is not
    subtracted from rewards. Its state is in buffers, fp64: it belongs into checkpoints.
    """

    count: Tensor
    mean: Tensor
    second_moment: Tensor

    def __init__(self):
        super().__init__()
        for name in ("count", "mean", "second_moment"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rewards: Tensor, ended: Tensor, discount: Tensor) -> None:
        """Take in decisions: rewards (chunk sums) [B, T], ended [B, T] bool, discount gamma^h [B, T].

        Streams are taken to start anew (G = 0) at the first column.
        """
        # A discounted sum of the past instead of the future: about the same spread, and it waits for no episode's end.
        running = torch.zeros(rewards.shape[0], dtype=torch.float64, device=rewards.device)
        collected: list[Tensor] = []
        for column in range(rewards.shape[1]):
            running = rewards[:, column].double() + running
            collected.append(running)
            running = torch.where(ended[:, column], 0.0, discount[:, column].double() * running)
        # Chan's update joins the moments of two samples exactly; fp64, because the counts grow for the whole run.
        values = torch.stack(collected)
        count = torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
        total = self.count + count
        shift = values.mean() - self.mean
        self.second_moment += (values - values.mean()).square().sum() + shift.square() * self.count * count / total
        self.mean += shift * count / total
        self.count.copy_(total)

    @property
    def scale(self) -> Tensor:
        """The current standard deviation, [] fp64; 1 before any update or while every return was equal."""
        variance = self.second_moment / self.count.clamp(min=1)
        return torch.where(variance > 1e-12, variance.sqrt(), torch.ones_like(variance))
