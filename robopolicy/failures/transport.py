"""Entropic optimal transport by Sinkhorn's iterations in the log domain. Axes: m or K problem, L rows, n columns."""

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array

CHECKED = 10
"""Iterations between two checks of convergence."""


def sinkhorn(
    cost: Tensor,
    row_mass: Tensor,
    column_mass: Tensor,
    epsilon: float,
    *,
    tolerance: float = 1e-6,
    iterations: int = 1000,
) -> Tensor:
    """Return the plans [m, L, n] that minimise <P, C> + epsilon KL(P, r c^T) with marginals r and c.

    cost: [m, L, n]; row_mass: [m, L], column_mass: [m, n], each of sum 1; masses may be 0 (padding). A problem ends
    when its rows' masses are off by at most `tolerance` in sum, so it does not depend on its batch.
    Sources: Cuturi 2013 (arXiv:1306.0895); log domain: Peyre and Cuturi 2019 (arXiv:1803.00567, section 4.4).
    """
    log_rows, log_columns = row_mass.log()[..., None], column_mass.log()[:, None]
    kernel = cost / -epsilon + log_rows + log_columns
    plan, open_index = torch.zeros_like(kernel), torch.arange(len(kernel))
    by_column = torch.zeros_like(log_columns)
    rows = row_mass
    for step in range(1, iterations + 1):
        by_row = _without_nan(log_rows - torch.logsumexp(kernel + by_column, -1, keepdim=True))
        by_column = _without_nan(log_columns - torch.logsumexp(kernel + by_row, -2, keepdim=True))
        if step % CHECKED and step < iterations:
            continue
        now = (kernel + by_row + by_column).exp()
        plan[open_index] = now
        open_ = (now.sum(-1) - rows).abs().sum(-1) > tolerance
        if not open_.any():
            break
        open_index, kernel = open_index[open_], kernel[open_]
        rows, log_rows = rows[open_], log_rows[open_]
        log_columns, by_column = log_columns[open_], by_column[open_]
    return plan


def _without_nan(potential: Tensor) -> Tensor:
    """Replace -inf - (-inf), of rows and columns without mass, by 0."""
    return torch.nan_to_num(potential, nan=0.0)


def prefix_costs(demonstrations: Array, lengths: Array, prefix: Array, total: int, epsilon: float) -> Array:
    """Return the transport cost of each decision so far, c_j [K, n], from demonstrations to the prefix of an episode.

    demonstrations: unit vectors [K, L, D] of which the first lengths [K] count; prefix: unit vectors [n, D]; total:
    most decisions N of an episode. Rows have mass 1 / length, columns 1 / N; decisions that are still to come cost
    nothing. The N - n equal columns of these are one column of their mass, which gives the same plan.
    """
    vectors, prefix_tensor = torch.from_numpy(demonstrations).double(), torch.from_numpy(prefix)
    ends = torch.from_numpy(lengths)
    cost = 1.0 - vectors @ prefix_tensor.double().T  # [K, L, n]
    cost = torch.nn.functional.pad(cost, (0, 1))
    rows = (torch.arange(vectors.shape[1]) < ends[:, None]) / ends[:, None].double()
    count = len(prefix)
    columns = torch.full((count + 1,), 1.0 / total, dtype=torch.float64)
    columns[-1] = max(total - count, 0) / total
    if count >= total:  # an episode longer than any before: nothing is still to come
        columns[:-1] = 1.0 / count
    plan = sinkhorn(cost, rows, columns.expand(len(rows), -1), epsilon)
    return np.asarray((plan * cost).sum(1)[:, :-1])
