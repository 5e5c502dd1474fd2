"""LeRobot's denoising policies without what they compute anew at every step: the same chunks, sooner.

Of `diffusion` and `multi_task_dit` (0.6.1), what depends on the step alone is computed once for the policy, and what
depends on the observation alone once for a decision. The modulation of a block is linear in SiLU or Mish of [t; c], so
W f([t; c]) + b is a table over the steps plus one product with c; in adaLN that product is most of a step at batch 1.
A step of the scheduler is a weighted sum with six weights. On a CPU layers find their weights in the layout that they
are multiplied in, instead of bringing them into it at every call (which is most of a convolution over 16 steps).
Features of an instruction are kept from decision to decision, because LeRobot's text encoder is frozen. Random numbers
are drawn in LeRobot's order. Axes: B row, T predicted step, A action dimension, K evaluation of the network, C channel.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import origin_of, remember_origin
from robopolicy.inference.lerobot_networks import Lean, lean_transformer, lean_unet
from robopolicy.nn.branches import Caching
from robopolicy.policies.lerobot.acting import LeRobotPolicy

Predict = Callable[[Tensor, int], Tensor]
"""(latents x [B, T, A], evaluation k) -> what the network says of them, [B, T, A]."""

TEXTS = 4096
"""Features of so many instructions are kept at most."""


class StepWeights(NamedTuple):
    """One step of a diffusion scheduler: clean = clip(a x + b output), then a weighted sum of all, and noise.

    x' = clean_weight * clean + x_weight * x + output_weight * output + std * noise.
    """

    a: float
    b: float
    clean_weight: float
    x_weight: float
    output_weight: float
    std: float


def lean_lerobot(policy: LeRobotPolicy, caching: Caching | None = None) -> LeRobotPolicy:
    """Return a policy that decides as `policy` does, to 1e-5 and with the same random numbers, without repetitions.

    caching: who remembers the network's blocks from step to step, which is not exact; None for nobody. Its tables
    follow from the weights as they are now; weights are shared, but for those on a CPU that are kept a second time in
    another layout. Raises ConfigError where there is no lean path: see `why_not_lean`; and for caching of Runge-Kutta's
    method, which comes back to times, or with a plan for another network or chain.
    """
    reason = why_not_lean(policy)
    if reason:
        raise ConfigError(reason)
    inner: Any = policy.policy
    with torch.no_grad():
        if inner.config.type == "diffusion":
            model = inner.diffusion
            steps, weights = _scheduled(model.noise_scheduler, model.num_inference_steps)
            network = Remembered(lean_unet(model.unet, steps.to(policy.device)), len(weights), caching)
            denoise = _diffusion(network, weights, _limit(inner.config))
            changed = {"diffusion": _sampling(model, lambda rows, global_cond, noise: denoise(global_cond, noise))}
        else:
            changed = _transformer_parts(inner, policy.device, caching)
    made = LeRobotPolicy(_with(inner, changed), policy.preprocess, policy.postprocess, policy.settings)
    remember_origin(made, origin_of(policy))
    return made


def why_not_lean(policy: LeRobotPolicy) -> str:
    """Return why there is no lean path for this policy, nothing where there is one."""
    config: Any = policy.policy.config
    if config.type not in ("diffusion", "multi_task_dit"):
        return (
            f"LeRobot's '{config.type}' has no lean path: diffusion and multi_task_dit have one. Use engine=reference."
        )
    if policy.settings.base is not None:
        return (
            "This policy's first denoising steps are those of a frozen base, which has no lean path: engine=reference."
        )
    if getattr(config, "compile_model", False):
        return "LeRobot compiles this policy itself (compile_model): set that to false in config.json first."
    if _diffuses(config) and config.prediction_type not in ("epsilon", "sample"):
        return f"prediction_type={config.prediction_type} is none that LeRobot trains: epsilon and sample are."
    return ""


def _diffuses(config: Any) -> bool:
    return config.type == "diffusion" or config.objective == "diffusion"


def _limit(config: Any) -> float | None:
    return config.clip_sample_range if config.clip_sample else None


def _with(module: Any, parts: dict[str, nn.Module]) -> Any:
    """Return a shallow copy of a module in which `parts` take the place of the submodules of their names."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **parts}
    return twin


def _sampling(module: nn.Module, sample: Callable[..., Tensor]) -> nn.Module:
    """Return a shallow copy of a module of LeRobot's whose `conditional_sample` is `sample`."""
    twin: Any = copy.copy(module)
    twin.conditional_sample = sample
    return twin


class Remembered:
    """A network whose chains of `steps` evaluations remember blocks as `caching` says; see `CachedSteps`."""

    def __init__(self, network: Lean, steps: int, caching: Caching | None):
        if caching is not None:
            caching.check(network.blocks, steps)
        self.network, self.caching = network, caching

    def begin(self, condition: Tensor) -> Predict:
        """Return the network at work under a condition [B, D], for one chain."""
        predict = self.network.bind(condition)
        if self.caching is None:
            return predict
        memory = self.caching.begin()
        return lambda x, index: predict(x, index, memory.at(index))


def _transformer_parts(inner: Any, device: torch.device, caching: Caching | None) -> dict[str, nn.Module]:
    """Return the parts of a multi_task_dit that are replaced: how it samples, and who encodes its instructions."""
    config, objective = inner.config, inner.objective
    shape = objective.horizon, objective.action_dim
    if _diffuses(config):
        times, weights = _scheduled(objective.noise_scheduler, objective.num_inference_steps)
        network = Remembered(lean_transformer(inner.noise_predictor, times.to(device)), len(weights), caching)
        denoise = _diffusion(network, weights, _limit(config))
    else:
        if caching is not None and config.integration_method == "rk4":
            raise ConfigError("Blocks are remembered along a chain, and integration_method=rk4 comes back to times.")
        doubled = 2 if config.integration_method == "rk4" else 1
        times = torch.linspace(0, 1, doubled * config.num_integration_steps + 1, device=device)
        network = Remembered(lean_transformer(inner.noise_predictor, times), config.num_integration_steps, caching)
        denoise = _flow(network, config.num_integration_steps, doubled == 2)

    def sample(model: nn.Module, batch_size: int, conditioning_vec: Tensor) -> Tensor:
        del model
        noise = torch.randn((batch_size, *shape), dtype=conditioning_vec.dtype, device=device)
        return denoise(conditioning_vec, noise)

    encoder = inner.observation_encoder
    remembering = _with(encoder, {"text_encoder": RememberedTexts(encoder.text_encoder)})
    return {"objective": _sampling(objective, sample), "observation_encoder": remembering}


class RememberedTexts(nn.Module):
    """A frozen text encoder that encodes every text once."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self._known: dict[bytes, Tensor] = {}

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the features [B, F] of texts as tokens [B, L] with a mask [B, L], False on padding."""
        keys = [row.numpy().tobytes() for row in torch.cat([tokens, mask.to(tokens.dtype)], 1).cpu()]
        new = list(dict.fromkeys(key for key in keys if key not in self._known))
        if len(self._known) + len(new) > TEXTS:
            self._known, new = {}, list(dict.fromkeys(keys))
        if new:
            rows = torch.tensor([keys.index(key) for key in new], device=tokens.device)
            self._known |= zip(new, self.encoder(tokens[rows], mask[rows]), strict=True)
        return torch.stack([self._known[key] for key in keys])


def _diffusion(
    network: Remembered, weights: Sequence[StepWeights], limit: float | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what turns a condition [B, D] and noise [B, T, A] into actions [B, T, A], clean ones within `limit`."""

    def denoise(condition: Tensor, x: Tensor) -> Tensor:
        predict = network.begin(condition)
        for index, step in enumerate(weights):
            output = predict(x, index)
            clean = torch.add(step.a * x, output, alpha=step.b)
            if limit is not None:
                clean.clamp_(-limit, limit)
            x = torch.add(step.clean_weight * clean, x, alpha=step.x_weight)
            if step.output_weight:
                x.add_(output, alpha=step.output_weight)
            if step.std:
                x.add_(torch.randn(x.shape, dtype=x.dtype, device=x.device), alpha=step.std)
        return x

    return denoise


def _flow(network: Remembered, steps: int, fourth_order: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what turns a condition [B, D] and noise [B, T, A] into actions [B, T, A], by Euler or Runge-Kutta.

    Evaluation k of the network is at time k / steps, or k / (2 steps) in Runge-Kutta's method of fourth order.
    """
    width = 1 / steps

    def integrate(condition: Tensor, x: Tensor) -> Tensor:
        predict = network.begin(condition)
        for step in range(steps):
            if not fourth_order:
                x = torch.add(x, predict(x, step), alpha=width)
                continue
            first = predict(x, 2 * step)
            second = predict(torch.add(x, first, alpha=width / 2), 2 * step + 1)
            third = predict(torch.add(x, second, alpha=width / 2), 2 * step + 1)
            fourth = predict(torch.add(x, third, alpha=width), 2 * step + 2)
            x = torch.add(x, first + 2 * second + 2 * third + fourth, alpha=width / 6)
        return x

    return integrate


def _scheduled(scheduler: Any, count: int) -> tuple[Tensor, list[StepWeights]]:
    """Return the training steps [K] that one of diffusers' schedulers visits in `count` steps, and what each does.

    DDPM with the posterior's variance (fixed_small), or DDIM without noise: what LeRobot makes.
    """
    scheduler.set_timesteps(count)
    steps = scheduler.timesteps.clone()
    stochastic = type(scheduler).__name__ == "DDPMScheduler"
    cumulative = scheduler.alphas_cumprod.double()
    last = 1.0 if stochastic else float(scheduler.final_alpha_cumprod)
    found: list[StepWeights] = []
    for step in steps.tolist():
        before = int(scheduler.previous_timestep(step)) if stochastic else step - len(cumulative) // count
        here, there = float(cumulative[step]), float(cumulative[before]) if before >= 0 else last
        # x = sqrt(here) clean + sqrt(1 - here) noise.
        signal, noise = here**0.5, (1 - here) ** 0.5
        from_noise = scheduler.config.prediction_type == "epsilon"
        a, b = (1 / signal, -noise / signal) if from_noise else (0.0, 1.0)
        if stochastic:
            # The posterior q(x' | x, clean) of Ho et al. 2020, arXiv:2006.11239, equation 7.
            beta = 1 - here / there
            clean, kept = there**0.5 * beta / (1 - here), (here / there) ** 0.5 * (1 - there) / (1 - here)
            variance = max((1 - there) / (1 - here) * beta, 1e-20) if step > 0 else 0.0
            found.append(StepWeights(a, b, clean, kept, 0.0, variance**0.5))
        else:
            # Song et al. 2021, arXiv:2010.02502, equation 12 without noise; the direction is that of the unclipped
            # prediction: what was predicted, or (x - signal output) / noise.
            towards = (1 - there) ** 0.5
            rest = (0.0, towards) if from_noise else (towards / noise, -towards * signal / noise)
            found.append(StepWeights(a, b, there**0.5, *rest, 0.0))
    return steps, found
