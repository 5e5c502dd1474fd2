"""Fits an agent's critic to recorded decisions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.transitions import Transitions
from robopolicy.nn.optimisers import require_finite
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.training.state import load_trainer, save_trainer

LOG_EVERY, SAVE_EVERY = 100, 1000


def fit_agent(
    agent: OfflineAgent,
    data: Transitions,
    steps: int,
    batch_size: int,
    generators: Generators,
    *,
    run: RunFolder | None = None,
    label: str = "critic",
) -> dict[str, float]:
    """Update `agent` on random batches of `data` until it has had so many `steps`; returns its last figures.

    run: gets a line of metrics every hundred steps, and a resume point named `label`: the same call after a kill goes
    on from there and ends bit for bit in the same place. Raises NonFiniteError naming the step, and what the agent
    raises where the data lacks something.
    """
    data.check()
    place = None if run is None else run.path / "resume" / label
    step = _resumed(agent, generators, place, run, label)
    # After the resume point is read: statistics are taken from the same data again, not saved.
    agent.begin(data)
    figures: dict[str, torch.Tensor] = {}
    draws = generators[f"{label}/batches"]
    with progress(f"Fitting the {label}", steps) as advance:
        advance(step)
        while step < steps:
            figures = agent.update(data.draw(batch_size, draws), generators[f"{label}/update"])
            step += 1
            advance()
            if step % LOG_EVERY == 0 or step == steps:
                for name, value in figures.items():
                    require_finite(name, value, f"step {step} of the {label}")
                if run is not None:
                    run.log({f"{label}_step": step, **_floats(figures)})
            if place is not None and (step % SAVE_EVERY == 0 or step == steps):
                save_trainer(place, {"step": step, "agent": agent.tree(), "generators": generators.state()})
    return _floats(figures)


def _resumed(agent: OfflineAgent, generators: Generators, place: Path | None, run: RunFolder | None, label: str) -> int:
    """Bring the agent to where a killed run left it; returns after how many steps that was."""
    saved: Mapping[str, Any] | None = None if place is None else load_trainer(place)
    step = 0 if saved is None else int(saved["step"])
    if saved is not None:
        agent.restore(saved["agent"])
        generators.restore(saved["generators"])
    if run is not None:
        run.rewind(f"{label}_step", step)
    return step


def _floats(figures: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items()}
