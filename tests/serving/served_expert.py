"""The scripted expert of pick_place as a policy with a camera, and the process that serves it."""

from collections.abc import Sequence

import torch

from robopolicy.core.policy import Decision
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, PolicySpec
from robopolicy.serving.server import ServerSettings, serve
from sims.registry import make_expert, make_world

FRONT = f"{IMAGE_PREFIX}front"


class SeeingExpert:
    """Acts by the state alone, and answers NaN where its cameras show nothing."""

    def __init__(self, cameras: Sequence[str] = ("front",), fps: float = 30.0):
        options = {"cameras": cameras, "image_size": 64} if cameras else {}
        world = make_world("pick_place", 1, **options)
        expert = make_expert("pick_place", world.spec)
        assert expert is not None
        self.expert = expert
        self.spec = PolicySpec(world.spec.observation, world.spec.action, 1, 1, 1, 1, fps, world.spec.instructions)
        world.close()

    def act(self, observation, generator, *, deterministic=False):
        shown = {key: observation[key].numpy() for key in (STATE, ENVIRONMENT_STATE)}
        actions = torch.from_numpy(self.expert.act(shown)).float()[:, None]
        for camera in self.spec.cameras:
            image = observation[IMAGE_PREFIX + camera]
            assert image.dtype == torch.uint8
            if image.float().std() < 1 and observation[STATE].any():  # a server warms up on zeros
                actions[:] = torch.nan
        return Decision(actions, {}, torch.zeros(len(actions), 1), torch.ones(len(actions), 1, dtype=torch.bool))

    def reset(self, rows=None): ...


def run_expert(pipe, cameras: Sequence[str]) -> None:
    """Serve the expert until a signal comes."""
    serve(SeeingExpert(cameras), ServerSettings(port=0, exit_with_parent=True), pipe.send)
