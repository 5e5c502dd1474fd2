"""Our coefficients give the gradients of TRL's own loss function on the same tensors."""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.coefficients import ppo
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.objective import log_ratios, policy_loss
from robopolicy.rl.presets import RatioLevel
from robopolicy.rl.weights import constant_denominator, episode_mean, step_mean


def trainer_of_trl():
    """Import it where it is used: it takes ten seconds, which every worker would pay for collecting this file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


LOW, HIGH, LENGTH = 0.2, 0.28, 9


class Alone:
    """An accelerator of one process."""

    num_processes = 1

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value


def trl_gradient(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, loss_type: str, level: str) -> Tensor:
    """Run TRL's `_compute_loss` on given log-probabilities [B, T] and return d loss / d logp."""
    leaf = logp.clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(logp), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=0.0,
        loss_type=loss_type,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        use_vllm=False,
        model=SimpleNamespace(training=False),
        accelerator=Alone(),
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list), "train": defaultdict(list)},
    )
    ids = torch.zeros(logp.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask.to(logp.dtype),
        "advantages": advantage,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    trainer_of_trl()._compute_loss(trainer, None, inputs).backward()
    assert leaf.grad is not None
    return leaf.grad


CASES = {
    "grpo": ("grpo", "token", RatioLevel.STEP, episode_mean),
    "dr_grpo": ("dr_grpo", "token", RatioLevel.STEP, lambda mask: constant_denominator(mask, len(mask) * LENGTH)),
    "dapo": ("dapo", "token", RatioLevel.STEP, step_mean),
    "gspo": ("grpo", "sequence", RatioLevel.EPISODE_MEAN, episode_mean),
}


@pytest.mark.long
@pytest.mark.checks("coefficient/ppo", "weight/episode_mean", "weight/constant", "weight/step_mean")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_gradients_equal_trls(name: str, seed: int):
    loss_type, their_level, level, weight = CASES[name]
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (6,), generator=draws)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    old, noise = (torch.randn(6, LENGTH, generator=draws, dtype=torch.float64) for _ in range(2))
    logp, advantage = old + 0.4 * noise, torch.randn(6, generator=draws, dtype=torch.float64)

    expected = trl_gradient(logp, old, advantage, mask, loss_type, their_level)

    # one unit a decision: an episode of T tokens is [T, 1]
    leaf = logp.clone().requires_grad_()
    latents = mask[..., None]
    ratio = log_ratios(leaf[..., None], old[..., None], latents, 50.0, level)
    c = ppo(ratio.log_ratio, advantage[:, None, None].expand(6, LENGTH, 1), LOW, HIGH, ratio.clamped)
    policy_loss(leaf[..., None], c, weight(latents).double()).backward()
    assert leaf.grad is not None
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(leaf.grad, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_presets_are_made_of_these_parts(name: str):
    algorithm = build_algorithm(AlgorithmConfig(algorithm=name))
    _, _, level, _ = CASES[name]
    assert algorithm.ratio_level is level
    names = {entry.slot.value: entry.name for entry in algorithm.resolved.entries}
    assert names["coefficient"] == "ppo"
    assert names["weight"] == {"grpo": "episode_mean", "gspo": "episode_mean", "dr_grpo": "constant"}.get(
        name, "step_mean"
    )
