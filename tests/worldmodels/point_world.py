"""A system with a known answer that world models must learn: a point pushed over a plane towards a goal."""

import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, WorldSpec

GAIN = 0.2
SPEC = WorldSpec(
    name="points",
    observation={
        STATE: Field((2,), names=("x", "y")),
        ENVIRONMENT_STATE: Field((4,), names=("goal_x", "goal_y", "to_goal_x", "to_goal_y")),
    },
    action=Field((2,), low=-1.0, high=1.0),
    fps=10,
    horizon=12,
    rewards=("progress", "success"),
    instructions=("go there",),
)


def assembled(spec, positions, goals, actions, lengths, progress, won):
    """Episodes out of lists: a position a frame, a goal a frame (by episode), the rest by step."""
    state, target, success = torch.stack(positions), torch.cat(goals), torch.stack(won)
    ends = torch.tensor(lengths).cumsum(0) - 1
    return Episodes(
        spec.observation,
        spec.action,
        spec.fps,
        {STATE: state, ENVIRONMENT_STATE: torch.cat([target, target - state], 1)},
        torch.stack(actions),
        torch.tensor(lengths),
        spec.instructions * len(lengths),
        rewards={"progress": torch.stack(progress), "success": success.float()},
        step_success=success,
        terminated=success[ends],
    )


def recorded(episodes=300, steps=10, seed=0, power=1):
    """A point that moves by GAIN times the action (its power, with its sign); reward is progress to the goal; success
    within 0.15.
    """
    generator = torch.Generator().manual_seed(seed)
    positions, goals, actions, lengths, progress, won = [], [], [], [], [], []
    for _ in range(episodes):
        position = 2 * torch.rand(2, generator=generator) - 1
        goal = 2 * torch.rand(2, generator=generator) - 1
        positions.append(position)
        for step in range(steps):
            noisy = 2 * (goal - position) + 0.8 * torch.randn(2, generator=generator)
            actions.append(noisy.clamp(-1, 1))
            after = position + GAIN * actions[-1].sign() * actions[-1].abs() ** power
            distance = [(goal - p).norm() for p in (position, after)]
            progress.append(distance[0] - distance[1])
            won.append(distance[1] < 0.15)
            position = after
            positions.append(position)
            if won[-1] or step == steps - 1:
                lengths.append(step + 1)
                goals.append(goal.expand(step + 2, 2))
                break
    return assembled(SPEC, positions, goals, actions, lengths, progress, won)
