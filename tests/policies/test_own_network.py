"""Somebody else's network in a denoising policy: cross-attention over observation tokens with a mask."""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.registry import import_plugins
from robopolicy.core.spec import STATE, Field
from robopolicy.nn.configuration import FlowNoise
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy
from robopolicy.policies.configuration import Likelihood, PolicyKind
from robopolicy.policies.network import ChunkNetwork
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from bandit_toys import ACTION, FIELDS, BanditWorld

pytestmark = pytest.mark.long

CONFIG = DenoisingPolicyConfig(chunk=1, prediction_steps=2, sampling_steps=4, denoising_steps=20, finetuned_steps=2)
CAMERA = {"observation.images.front": Field((8, 8, 3), "uint8", 0, 255)}


class CrossAttention(nn.Module):
    """Latents ask, tokens of the observation answer: one token an element of the state, one a row of the image.

    Elements of the state below -0.9 count as unseen: their tokens are masked, so rows differ in how many they have.
    """

    def __init__(self, state: int, rows: int = 0, width: int = 16, heads: int = 2):
        super().__init__()
        self.settings = {"state": state, "rows": rows, "width": width, "heads": heads}
        self.place = nn.Parameter(torch.randn(1 + state, width))
        self.value = nn.Linear(1, width)
        self.row = nn.Linear(24, width)
        self.question = nn.Linear(ACTION.size + 1, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.answer = nn.Sequential(nn.SiLU(), nn.Linear(width, ACTION.size))

    def encode(self, observation: dict[str, Any], generator: torch.Generator | None = None) -> dict[str, Tensor]:
        state = observation[STATE][:, -1]
        everything = torch.cat([torch.ones_like(state[:, :1]), state], 1)  # the first token is never masked
        tokens, mask = self.value(everything[..., None]) + self.place, everything > -0.9
        if self.settings["rows"]:
            image = observation["observation.images.front"][:, -1].float() / 255
            tokens = torch.cat([tokens, self.row(image.flatten(2))], 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), self.settings["rows"])], 1)
        return {"condition.tokens": tokens, "condition.seen": mask}

    def denoise(self, x: Tensor, time: Tensor, condition: Any) -> Tensor:
        assert x.dim() == 3 and time.shape == x.shape[:1] == condition["condition.tokens"].shape[:1]
        question = self.question(torch.cat([x, time[:, None, None].expand(-1, x.shape[1], 1)], -1))
        tokens, mask = condition["condition.tokens"], condition["condition.seen"]
        attention_output, _ = self.attention(question, tokens, tokens, key_padding_mask=~mask, need_weights=False)
        return self.answer(question + attention_output)

    def encoder_parameters(self) -> list[nn.Parameter]:
        return [self.place, *self.value.parameters(), *self.row.parameters()]

    def description(self) -> dict[str, Any]:
        return self.settings

    @classmethod
    def restore(cls, description: dict[str, Any]) -> "CrossAttention":
        return cls(**description)


def make(config: DenoisingPolicyConfig = CONFIG, fields: dict[str, Field] = FIELDS) -> DenoisingPolicy:
    torch.manual_seed(0)
    network = CrossAttention(FIELDS[STATE].size, 8 if len(fields) > 1 else 0)
    return DenoisingPolicy(config, fields, ACTION, fps=10.0, network=network)


CONFIGS = {
    "diffusion": CONFIG,
    "flow": replace(CONFIG, kind=PolicyKind.FLOW),
    "matching": replace(CONFIG, kind=PolicyKind.FLOW, likelihood=Likelihood.MATCHING),
    "quiet": replace(CONFIG, noisy_steps=1),
}


@pytest.mark.parametrize("fields", [FIELDS, {**FIELDS, **CAMERA}], ids=["state", "image"])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_keeps_every_promise_of_what_can_be_fine_tuned(name: str, fields: dict[str, Field]):
    import_plugins([__name__])
    assert check_policy(make(CONFIGS[name], fields), load_policy).level is Level.TRAINS
    prepared = make(CONFIGS[name], fields)
    prepared.prepare_finetuning(train_encoder=False)
    assert check_policy(prepared, load_policy).level is Level.TRAINS


def test_it_is_pretrained_sampled_scored_and_fine_tuned():
    """A few steps of each; imitation gets better, scores agree to 1e-5, and one iteration moves the decoder alone."""
    policy, draws = make(), torch.Generator().manual_seed(1)
    state = 0.4 * torch.rand(256, 1, 2, generator=draws) - 0.2
    batch = {
        "observation": {STATE: state},
        "actions": (state + 0.3).expand(-1, 2, -1),
        "action_valid": torch.ones(256, 2, dtype=torch.bool),
    }
    optimiser = torch.optim.Adam(policy.trainable_parameters(), lr=3e-3)
    losses = []
    for _ in range(100):
        loss = policy.loss(batch, draws)["denoising"].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    policy.prepare_finetuning(2, train_encoder=False)
    decision = policy.act(batch["observation"], draws)
    scores = policy.log_prob(batch["observation"], decision.latents)
    assert (scores.logp - decision.logp).abs().max() <= 1e-5
    chosen = torch.randint(0, 2, (256, 1), generator=draws)
    part = policy.log_prob(batch["observation"], {**decision.latents, "chosen": chosen})
    assert torch.allclose(part.logp, scores.logp.gather(1, chosen), atol=1e-5)
    before = copy.deepcopy(policy.state_dict())
    config = FinetuneConfig(algorithm="grpo", iterations=1, groups=8, group_size=4, epochs=1, evaluate_every=0)
    finetune(policy, None, BanditWorld(32), config, seed=0)
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all(name.startswith(("network.question", "network.attention", "network.answer")) for name in moved)


def test_a_frozen_encoder_keeps_tokens_and_mask_in_the_latents():
    policy = make(fields={**FIELDS, **CAMERA})
    policy.prepare_finetuning(2, train_encoder=False)
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (5, 1, 8, 8, 3), generator=generator, dtype=torch.uint8)
    observation: dict[str, Any] = {
        STATE: 2 * torch.rand(5, 1, 2, generator=generator) - 1,
        **dict.fromkeys(CAMERA, image),
    }
    decision = policy.act(observation, generator)
    assert set(decision.latents) == {"chain", "condition.tokens", "condition.seen"}
    assert torch.equal(policy.log_prob({}, decision.latents).logp, policy.log_prob(observation, decision.latents).logp)
    assert (policy.log_prob({}, decision.latents).logp - decision.logp).abs().max() <= 1e-5


def test_checkpoints_name_the_class_and_import_it_only_where_it_was_named(tmp_path: Path, monkeypatch):
    policy = make()
    policy.save(tmp_path / "own")
    assert f'"{__name__}:CrossAttention"' in (tmp_path / "own" / "config.json").read_text()
    import_plugins([__name__])
    assert isinstance(load_policy(tmp_path / "own").network, CrossAttention)
    ours = DenoisingPolicy(CONFIG, FIELDS, ACTION, fps=10.0)
    ours.save(tmp_path / "ours")
    assert '"network"' not in (tmp_path / "ours" / "config.json").read_text()
    assert isinstance(load_policy(tmp_path / "ours").network, ChunkNetwork)
    config = tmp_path / "own" / "config.json"
    config.write_text(config.read_text().replace(f"{__name__}:CrossAttention", "antigravity:Network"))
    with pytest.raises(CheckpointError, match="needs the denoising network 'antigravity:Network'"):
        load_policy(tmp_path / "own")
    assert "antigravity" not in sys.modules


class Nameless(CrossAttention):
    """Its condition has a name that latents do not know."""

    def encode(self, observation, generator=None):
        return {name.removeprefix("condition."): value for name, value in super().encode(observation).items()}


def test_what_a_network_lacks_is_said():
    with pytest.raises(ConfigError, match=r"Linear is not a torch\.nn\.Module with encode"):
        DenoisingPolicy(CONFIG, FIELDS, ACTION, fps=10.0, network=nn.Linear(1, 1))  # type: ignore[arg-type]
    learned = replace(CONFIG, kind=PolicyKind.FLOW, flow_noise=FlowNoise.LEARNED)
    with pytest.raises(ConfigError, match="flow_noise=learned needs a network with noise_std"):
        make(learned)
    nameless = DenoisingPolicy(CONFIG, FIELDS, ACTION, fps=10.0, network=Nameless(2))
    with pytest.raises(ConfigError, match="condition contains 'tokens'"):
        nameless.act({STATE: torch.zeros(3, 1, 2)}, torch.Generator())
