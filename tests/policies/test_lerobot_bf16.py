"""Checkpoints of LeRobot's in bfloat16 learn in fp32, and are saved as what they were."""

from pathlib import Path

import pytest
import torch
from lerobot_models import FRONT, pi_config, tiny_pi, word_tokenizer
from safetensors.torch import load_file
from test_lerobot_policies import features, save, statistics
from test_lerobot_training import lerobots_chunk, observed, trained

from robopolicy.benchmarks.tiny_vla import pi_processors
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from sims.registry import make_world

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("halved")
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(root / "words")
    inputs, outputs = features(state=6, environment=None, cameras=(FRONT,))
    config = pi_config("pi0", inputs, outputs, dtype="bfloat16")
    with tiny_pi(len(tokenizer)):
        processors = pi_processors(config, statistics(inputs, outputs), root / "words")
        yield save(config, root / "pi0", processors=processors)


def types_of(folder: Path) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in load_file(folder / "model.safetensors").items()}


def test_what_is_tuned_moves_though_each_step_is_less_than_bfloat16_sees(folder, tmp_path):
    policy = trained(folder)
    policy.prepare_finetuning()
    expert = [
        weight
        for name, weight in policy.named_parameters()
        if weight.requires_grad and weight.ndim == 2 and "gemma_expert" in name
    ]
    assert {weight.dtype for weight in expert} == {torch.bfloat16}
    before = [weight.detach().clone() for weight in expert]
    world = make_world("push_cube", 4, cameras=("front",), image_size=32)
    critic = state_critic(world.spec.observation, 1, 8, 1, world.spec.instructions)
    config = FinetuneConfig(
        iterations=4, rollout_length=2, minibatch=4, epochs=2, critic_warmup=0, actor_warmup=1, evaluate_every=0,
        target_kl=None, learning_rate=1e-4, weight_decay=0.0,
    )  # fmt: skip
    finetune(policy, critic, world, config)
    world.close()
    moved = sum(int((weight != old).sum()) for weight, old in zip(expert, before, strict=True))
    assert moved > 0.6 * sum(weight.numel() for weight in expert)  # each step adds too little for bfloat16 alone
    policy.save(tmp_path / "tuned")
    assert types_of(tmp_path / "tuned") == types_of(folder)
    noise = torch.randn((3, 6, 5), generator=torch.Generator().manual_seed(7))
    observation = observed(policy)
    ours = policy.predict(observation, torch.Generator().manual_seed(7), deterministic=True)
    assert (ours - lerobots_chunk(tmp_path / "tuned", observation, noise)).abs().max() < 1e-2


def test_adapters_are_added_in_fp32_and_rounded_once(folder, tmp_path):
    policy = trained(folder)
    policy.prepare_finetuning()
    policy.add_lora(2)
    generator, name = torch.Generator().manual_seed(0), "layers.0.mlp.up_proj"
    factors = {}
    with torch.no_grad():
        for key, weight in policy.named_parameters():
            if "lora_" in key:
                weight.copy_(0.03 * torch.randn(weight.shape, generator=generator))
                factors[key] = weight.detach().float()
    first, second = (
        next(value for key, value in factors.items() if name in key and "gemma_expert" in key and part in key)
        for part in ("lora_A", "lora_B")
    )
    policy.save(tmp_path / "adapted")
    old, new = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "adapted"))
    assert {key: value.dtype for key, value in new.items()} == {key: value.dtype for key, value in old.items()}
    key = next(key for key in old if name in key and "gemma_expert" in key)
    scale = 2.0  # lora_alpha / rank
    assert torch.equal(new[key], (old[key].float() + scale * (second @ first)).bfloat16())
