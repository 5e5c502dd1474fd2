"""Vision-language token policies learn: by reinforcement in a world of a few pixels, by imitation of what is seen."""

from pathlib import Path

import pytest
import torch
from seeing_toys import CAMERA, SeeingWorld
from torch import Tensor
from vision_language_models import FAMILIES

from robopolicy.core.spec import Field
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.policies.token.configuration import TokenDecoding
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hub")
    return {name: make(folder / name) for name, make in FAMILIES.items()}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(("name", "decoding"), [("smolvlm", "causal"), ("qwen", "parallel"), ("paligemma", "masked")])
def test_reinforcement_learning_tunes_the_adapters_alone(checkpoints, name: str, decoding: str, algorithm: str):
    """One iteration; the trainer itself refuses ratios that are not 1 at first."""
    world = SeeingWorld(4)
    spec = world.spec
    token = TokenConfig(model=str(checkpoints[name]), bins=5, decoding=TokenDecoding(decoding), decode_steps=2)
    config = TokenPolicyConfig(chunk=1, token=token)
    policy = TokenPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)
    assert CAMERA in policy.fields and policy.processor is not None
    policy.prepare_finetuning()
    policy.add_lora(2)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    learning = FinetuneConfig(
        algorithm=algorithm, iterations=2, rollout_length=2, groups=2, group_size=2, epochs=1, minibatch=64,
        learning_rate=1e-3, target_kl=None, evaluate_every=0,
    )  # fmt: skip
    critic = state_critic(spec.observation, 1, width=16, instructions=spec.instructions)
    assert finetune(policy, critic, world, learning).iterations == 2
    after = policy.state_dict()
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert changed and all("lora_" in key for key in changed)
    assert any("vis" in key for key in changed), "nothing of the vision learned"


def imitate(checkpoint: Path, decoding: TokenDecoding, *, shuffled: bool, steps: int = 80) -> Tensor:
    """Return the last losses of learning which side of an image is bright; shuffled: another row's image is seen."""
    draws = torch.Generator().manual_seed(0)
    fields = {CAMERA: Field((32, 32, 3), "uint8", 0, 255)}
    token = TokenConfig(model=str(checkpoint), bins=3, decoding=decoding)
    policy = TokenPolicy(
        TokenPolicyConfig(chunk=1, token=token), fields, Field((2,), low=-1.0, high=1.0), fps=10, instructions=("go",)
    )
    optimiser, losses = torch.optim.Adam(policy.trainable_parameters(), lr=3e-3), []
    for _ in range(steps):
        side = torch.randint(0, 2, (16,), generator=draws)
        images = torch.randint(0, 80, (16, 1, 32, 32, 3), generator=draws, dtype=torch.uint8)
        for row, right in enumerate(side.tolist()):
            images[row, :, :, 16 * right : 16 * right + 16] += 150
        actions = (2.0 * side - 1)[:, None, None].expand(-1, 1, 2)
        if shuffled:
            images = images[torch.randperm(16, generator=draws)]
        batch = {
            "observation": {CAMERA: images, "task": ["go"] * 16},
            "actions": actions,
            "action_valid": torch.ones(16, 1, dtype=torch.bool),
        }
        optimiser.zero_grad()
        loss = policy.loss(batch, draws)["tokens"].mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses)[-10:].mean()


@pytest.mark.parametrize(
    ("name", "decoding"),
    [
        ("smolvlm", "causal"),
        pytest.param("qwen", "parallel", marks=pytest.mark.slow),
        pytest.param("paligemma", "causal", marks=pytest.mark.slow),
    ],
)
def test_imitation_learns_from_what_is_seen(checkpoints, name: str, decoding: str):
    loss_with_images, shuffled = (
        imitate(checkpoints[name], TokenDecoding(decoding), shuffled=flag) for flag in (False, True)
    )
    assert loss_with_images < 0.1 < 0.3 < shuffled
