"""Denoising chains of recorded action chunks, stored with the episodes.

They allow evaluating another policy by its likelihood of the same decisions (`evaluation.importance`). In a dataset
they are columns of every step, zero where no decision starts. Axes: N step, D decision, K denoising step, P predicted
step, A action dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Decision
from robopolicy.data.lerobot_reading import read_columns, read_information

BEGINS = "chain.begins"
"""Column, bool [N]: an action chunk starts at this step."""
CHAIN = "chain.latents"
"""Column of denoising chains, [N, (K+1) * P * A]."""
DENSITY = "chain.log_density"
"""Column of log-densities, [N, K]."""


@dataclass(frozen=True)
class Chains:
    """Recorded denoising chains. step: [D] int64, index of the recorded step at which each action chunk starts, in
    temporal order; chain: [D, K+1, P, A].

    log_density: [D, K], of every denoising step under the policy that acted; None until computed.
    """

    step: Tensor
    chain: Tensor
    log_density: Tensor | None = None

    def to(self, device: torch.device | str) -> "Chains":
        """Move every tensor to a device."""
        density = None if self.log_density is None else self.log_density.to(device)
        return Chains(self.step.to(device), self.chain.to(device), density)

    def columns(self, steps: int) -> dict[str, Tensor]:
        """Return the dataset columns for N steps; raises DataError without log-densities."""
        if self.log_density is None:
            raise DataError("Recorded denoising chains need their log-probabilities under the policy that acted.")
        begins = torch.zeros(steps, dtype=torch.bool)
        begins[self.step] = True
        columns = {BEGINS: begins}
        for name, values in ((CHAIN, self.chain.flatten(1)), (DENSITY, self.log_density)):
            columns[name] = torch.zeros(steps, values.shape[1])
            columns[name][self.step] = values.float()
        return columns


def chain_of(decision: Decision, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the chain [K+1, P, A] of one row of a `Decision` and the mask [K] of sampled steps; ConfigError if it has
    no chain.
    """
    chain = decision.latents.get("chain")
    if chain is None or not bool(decision.mask[row].any()):
        raise ConfigError("This policy has no noisy denoising steps, so no chain can be recorded.")
    return chain[row].detach().cpu().numpy(), decision.mask[row].cpu().numpy()


def read_chains(folders: Sequence[Path], predicted: int, size: int) -> Chains:
    """Read and concatenate the chains of datasets, for policies that predict `predicted` steps of `size` elements.

    Raises DataError when a dataset has no chains, or those of incompatible policies.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    before = 0
    for folder in folders:
        if BEGINS not in read_information(folder)["features"]:
            raise DataError(
                f"{folder} has no denoising chains: record them with collect.chains=true collect.policy=CHECKPOINT, "
                "or evaluate with gate.evaluators=[model]."
            )
        columns = read_columns(folder, (BEGINS, CHAIN, DENSITY))
        step = columns[BEGINS].nonzero().squeeze(1)
        chain, density = columns[CHAIN][step], columns[DENSITY][step].reshape(len(step), -1)
        if chain.shape[1] != (density.shape[1] + 1) * predicted * size:
            raise DataError(
                f"{folder} contains chains of another policy: they do not fit {predicted} predicted steps of "
                f"dimension {size}."
            )
        parts.append((step + before, chain.reshape(len(step), -1, predicted, size), density))
        before += len(columns[BEGINS])
    if len({part[2].shape[1] for part in parts}) > 1:
        raise DataError("The datasets contain chains of different lengths: use datasets of one policy.")
    step, chain, density = (torch.cat([part[place] for part in parts]) for place in range(3))
    return Chains(step, chain, density)
