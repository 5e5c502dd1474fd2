"""A world of a few pixels with two instructions, and the smallest real policies in it, for tests of mechanisms."""

import numpy as np
from bandit_toys import BanditWorld

from robopolicy.core.spec import IMAGE_PREFIX, STATE, TASK, Field, WorldSpec
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.policies import DenoisingPolicy, TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.policies.configuration import DenoisingPolicyConfig

CAMERA = IMAGE_PREFIX + "front"
INSTRUCTIONS = ("go left", "go right")
SIZE = 20


class SeeingWorld(BanditWorld):
    """The bandit, which shows its context as the brightness of an image too, and asks for one of two things."""

    def __init__(self, batch_size: int, horizon: int = 3):
        super().__init__(batch_size, horizon, terminates=True, with_task=True)
        fields = {STATE: Field((2,)), CAMERA: Field((SIZE, SIZE, 3), dtype="uint8")}
        self.spec = WorldSpec("seeing", fields, self.spec.action, 10.0, horizon, instructions=INSTRUCTIONS)

    def observe(self) -> dict:
        brightness = np.clip(127 + 300 * self.context[:, 0], 0, 255).astype(np.uint8)
        image = np.broadcast_to(brightness[:, None, None, None, None], (self.batch_size, 1, SIZE, SIZE, 3)).copy()
        image[:, :, : SIZE // 2] //= 2
        return {**super().observe(), CAMERA: image, TASK: np.array(INSTRUCTIONS)[(self.context[:, 1] > 0).astype(int)]}


def denoising_policy(world: BanditWorld, seed: int = 0, *, cameras: bool = False, **changes):
    """A diffusion policy of three steps, two of them scored."""
    keys = () if cameras else (STATE,)
    config = DenoisingPolicyConfig(
        width=8, depth=1, sampling_steps=3, chunk=1, prediction_steps=1, observation_keys=keys,
        image=ImageEncoderConfig(features=8, channels=(8, 8, 8)), **changes,
    )  # fmt: skip
    spec = world.spec
    return DenoisingPolicy(
        config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions, seed=seed
    )


def token_policy(world: BanditWorld, seed: int = 0, *, cameras: bool = False):
    """A token policy of two tokens."""
    config = TokenPolicyConfig(
        chunk=1, observation_keys=() if cameras else (STATE,),
        token=TokenConfig(width=8, depth=1, heads=2, feed_forward=8, bins=5, patch=10),
    )  # fmt: skip
    spec = world.spec
    return TokenPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions, seed=seed)
