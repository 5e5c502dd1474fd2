"""Episodes with every optional column, for tests of the dataset's format."""

import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field

FRONT = "observation.images.front"


def moving_episodes(lengths=(6, 4, 9), image=True, seed=0) -> Episodes:
    generator = torch.Generator().manual_seed(seed)
    frames, steps = sum(lengths) + len(lengths), sum(lengths)
    fields = {
        STATE: Field((3,), unit="m", names=("x", "y", "z"), low=(-1.0, -2.0, float("-inf"))),
        ENVIRONMENT_STATE: Field((1,)),
    }
    observation = {
        STATE: torch.rand(frames, 3, generator=generator),
        ENVIRONMENT_STATE: torch.rand(frames, 1, generator=generator),
    }
    if image:
        fields[FRONT] = Field((64, 64, 3), "uint8", 0, 255)
        level = torch.arange(frames, dtype=torch.uint8)[:, None, None, None] * 8
        ramp = torch.arange(64, dtype=torch.uint8)[None, None, :, None]
        observation[FRONT] = (level + ramp).expand(-1, 64, -1, 3).contiguous()
    success = torch.zeros(steps, dtype=torch.bool)
    success[lengths[0] - 1] = True
    return Episodes(
        observation_fields=fields,
        action_field=Field((2,), low=-1, high=1, names=("a", "b")),
        fps=12.5,
        observation=observation,
        actions=torch.rand(steps, 2, generator=generator),
        lengths=torch.tensor(lengths),
        tasks=tuple("push the cube" if e % 2 else "reach" for e in range(len(lengths))),
        rewards={"progress": torch.rand(steps, generator=generator), "success": success.float()},
        step_success=success,
        terminated=torch.tensor([e == 0 for e in range(len(lengths))]),
        seeds=torch.arange(len(lengths)) + 2**61,
        final_known=torch.ones(len(lengths), dtype=torch.bool),
    )
