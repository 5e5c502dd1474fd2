"""Adapters for LeRobot's denoising policies: batch encoding, denoising step and training-time sampling, by family.

Every family calls LeRobot's own modules in the order of LeRobot's `sample_actions`. The observation is encoded once,
and the resulting keys and values of every layer are the condition, so denoising steps and their log-probabilities do
not need the observation again. Axes: N row, k denoising steps, P predicted step, L latent element, S prefix token, T
suffix token, D size of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import CONDITION
from robopolicy.nn.configuration import FlowNoise, Prediction, Spacing
from robopolicy.nn.schedules import EstimateSchedule, Schedule
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind
from robopolicy.policies.lerobot.configuration import LeRobotTuning
from robopolicy.policies.network import Condition
from robopolicy.policies.sampler import make_schedule

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy


TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"

Batch = Mapping[str, Any]
"""One history frame as output by LeRobot's preprocessor: key -> [N, ...]."""


class Family(Protocol):
    """Adapter of one family of LeRobot policies.

    latent_size: L; first_step: number of predicted steps before the first executed one; reads_instructions: whether the
    condition depends on the instruction; steps_setting: LeRobot's setting for the number of steps, "" if its sampler
    cannot run a few-step student.
    """

    latent_size: int
    first_step: int
    reads_instructions: bool

    @property
    def steps_setting(self) -> str:
        """Name of the setting with the number of denoising steps; see the class."""
        ...

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """Return the `DenoisingPolicyConfig` entries for the policy's chunks and its chain."""
        ...

    def read(self, frames: Sequence[Batch]) -> Condition:
        """Encode the history's frames, oldest first."""
        ...

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, L] of latents x [N, P, L] at times [N] in (0, 1], 1 is noise."""
        ...

    def denoising_modules(self) -> list[nn.Module]:
        """Return the modules used by `denoise` but not by `read`."""
        ...

    def draw_levels(self, count: int) -> Tensor:
        """Draw noise levels [count] from LeRobot's training distribution, with torch's global generator."""
        ...

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Return the schedule of LeRobot's sampler with the exploration noise of config."""
        ...

    def finished(self, latents: Tensor) -> Tensor:
        """Convert clean latents [N, S, L] to the output of LeRobot's policy: normalised actions, [N, S, A]."""
        ...

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return LeRobot's training loss per step, [N, P], for predictions and targets [N, P, L]."""
        ...


@runtime_checkable
class BatchesSteps(Protocol):
    """Optional: a family that evaluates several steps without copying the condition for each."""

    def denoise_several(self, x: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Predict [N, k, P, L] for k latents of each row, x [N, k, P, L] at times [N, k], as `denoise` does for one."""
        ...

    def is_faster(self, x: Tensor, condition: Condition) -> bool:
        """Whether `denoise_several` is faster than copying the condition, for x [N, k, P, L]."""
        ...


class SquaredErrorFamily:
    """Base of families whose latents are (padded) actions trained with a squared error."""

    def __init__(self, config: Any):
        self.config = config
        self.action_size: int = config.action_feature.shape[0]

    def finished(self, latents: Tensor) -> Tensor:
        """Return the first A elements of latents, [N, S, A]; see `Family`."""
        return latents[..., : self.action_size]

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the mean square over the first A elements, [N, P]; see `Family`."""
        return (prediction - target)[..., : self.action_size].square().mean(-1)


def flow_chain(config: Any, steps: int, tuning: LeRobotTuning) -> dict[str, Any]:
    """Return the `DenoisingPolicyConfig` entries for a chain of `steps` with the noise of `tuning`."""
    level = tuning.flow_noise_level
    return {
        "kind": PolicyKind.FLOW,
        "history": config.n_obs_steps,
        "chunk": config.n_action_steps,
        "prediction_steps": getattr(config, "chunk_size", None) or config.horizon,
        "sampling_steps": steps,
        "finetuned_steps": steps,
        "flow_noise": tuning.flow_noise,
        "flow_noise_level": level,
        "flow_noise_bounds": (level, level),
        "clip": None,
    }


KEYS, VALUES, MASK, STATE = (f"condition.{name}" for name in ("keys", "values", "mask", "state"))
ACTION_MODES = ("auto", "ee6d", "joint", "agibot_ee6d", "franka_joint7", "so101_bimanual")
"""LeRobot's action modes that map each latent element to the action element at the same index."""
FEATURES, VIEWS, DOMAIN = (f"{CONDITION}.{name}" for name in ("features", "views", "domain"))
BETAS = (0.0001, 0.02)
"""beta_start and beta_end of diffusers' and LeRobot's schedules, the ends of a linear beta_schedule."""


class PrefixFamily(SquaredErrorFamily):
    """Base of families with a key-value prefix for the observation and a flow-matching expert."""

    reads_instructions = True
    first_step = 0

    def __init__(self, policy: "PreTrainedPolicy"):
        inner: Any = policy
        super().__init__(inner.config)
        self.policy, self.model = inner, inner.model
        self.latent_size: int = self.config.max_action_dim

    def draw_levels(self, count: int) -> Tensor:
        """Draw times [count]; see `Family`."""
        return self.model.sample_time(count, torch.device("cpu"))

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Implement `Family.schedule`."""
        return make_schedule(config)

    def is_faster(self, x: Tensor, condition: Condition) -> bool:
        """Whether the k concatenated chunks, k P of x [N, k, P, L], are no longer than the prefix; attention is
        computed over all of them.
        """
        return x.shape[1] * x.shape[2] <= condition[MASK].shape[1]

    def _predicted(self, after: Tensor, x: Tensor) -> Tensor:
        """Return velocities [N, k, P, L] from the expert's outputs of concatenated suffixes, [N, k T, width]."""
        steps = after.unflatten(1, (x.shape[1], -1))[:, :, -x.shape[2] :]
        return self.model.action_out_proj(steps.to(torch.float32))


class SmolVLA(PrefixFamily):
    """SmolVLA: the state is the last token of the prefix, and the expert attends to the prefix in every layer."""

    steps_setting = "num_steps"

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """Implement `Family.chain`."""
        return flow_chain(self.config, self.config.num_steps, tuning)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """Implement `Family.read`. Texts are padded to one length, so that conditions can be stacked."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        batch = dict(frames[-1])
        images, image_masks = self.policy.prepare_images(batch)
        padding = max(0, self.config.tokenizer_max_length - batch[TOKENS].shape[1])  # its processor may say more
        tokens, words = (nn.functional.pad(batch[name], (0, padding)) for name in (TOKENS, TOKEN_MASK))
        state = self.policy.prepare_state(batch)
        embedded, padding_mask, order = self.model.embed_prefix(images, image_masks, tokens, words.bool(), state=state)
        mask = make_att_2d_masks(padding_mask, order)
        return _read_prefix(self.model.vlm_with_expert, embedded, padding_mask, mask)

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict velocities [N, P, L]; see `Family`."""
        return self.model.denoise_step(condition[MASK], _cache(condition), x, time)

    def denoise_several(self, x: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Predict velocities [N, k, P, L]; see `BatchesSteps`."""
        suffixes, padding_mask, order = self.model.embed_suffix(x.flatten(0, 1), times.flatten())
        suffix, positions, mask = _side_by_side(suffixes, padding_mask, order, condition[MASK])
        (_, after), _ = self.model.vlm_with_expert.forward(
            attention_mask=mask,
            position_ids=positions,
            past_key_values=_cache(condition),
            inputs_embeds=[None, suffix],
            use_cache=True,
        )
        return self._predicted(after, x)

    def denoising_modules(self) -> list[nn.Module]:
        """Implement `Family.denoising_modules`."""
        model = self.model
        return [
            model.vlm_with_expert.lm_expert,
            model.action_in_proj,
            model.action_out_proj,
            model.action_time_mlp_in,
            model.action_time_mlp_out,
        ]


class Pi(PrefixFamily):
    """pi0, with the state as first token of the suffix, and pi05, with the state as part of the text."""

    steps_setting = "num_inference_steps"

    def __init__(self, policy: "PreTrainedPolicy"):
        super().__init__(policy)
        self.reads_state_apart = self.config.type == "pi0"

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """Implement `Family.chain`."""
        return flow_chain(self.config, self.config.num_inference_steps, tuning)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """Implement `Family.read`."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d

        batch, joint = frames[-1], self.model.paligemma_with_expert
        images, image_masks = self.policy._preprocess_images(batch)
        embedded, padding_mask, order = self.model.embed_prefix(
            images, image_masks, batch[TOKENS], batch[TOKEN_MASK].bool()
        )
        # As LeRobot's own `sample_actions` does before it reads a prefix under such a mask.
        joint.paligemma.model.language_model.config._attn_implementation = "eager"
        mask = prepare_attention_masks_4d(make_att_2d_masks(padding_mask, order))
        state = {STATE: self.policy.prepare_state(batch)} if self.reads_state_apart else {}
        return {**_read_prefix(joint, embedded, padding_mask, mask), **state}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict velocities [N, P, L]; see `Family`."""
        state = (condition[STATE],) if self.reads_state_apart else ()
        return self.model.denoise_step(*state, condition[MASK], _cache(condition), x, time)

    def denoising_modules(self) -> list[nn.Module]:
        """Implement `Family.denoising_modules`. The expert's language head is not used."""
        model = self.model
        modules = [model.paligemma_with_expert.gemma_expert.model, model.action_in_proj, model.action_out_proj]
        if self.reads_state_apart:
            return [*modules, model.state_proj, model.action_time_mlp_in, model.action_time_mlp_out]
        return [*modules, model.time_mlp_in, model.time_mlp_out]


class Pi0(Pi):
    """Additions for pi0: time is an input of its suffix tokens. In pi05 time scales whole suffixes of a single step."""

    def denoise_several(self, x: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Predict velocities [N, k, P, L]; see `BatchesSteps`."""
        from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

        state = condition[STATE].repeat_interleave(x.shape[1], 0)
        suffixes, padding_mask, order, _ = self.model.embed_suffix(state, x.flatten(0, 1), times.flatten())
        suffix, positions, mask = _side_by_side(suffixes, padding_mask, order, condition[MASK])
        joint = self.model.paligemma_with_expert
        joint.gemma_expert.model.config._attn_implementation = "eager"
        (_, after), _ = joint.forward(
            attention_mask=prepare_attention_masks_4d(mask),
            position_ids=positions,
            past_key_values=_cache(condition),
            inputs_embeds=[None, suffix],
            use_cache=False,
        )
        return self._predicted(after, x)


class Diffusion(SquaredErrorFamily):
    """The U-Net of `diffusion`, conditioned on one feature vector of the whole history; chunks start at its first
    frame.
    """

    reads_instructions = False
    steps_setting = ""

    def __init__(self, policy: "PreTrainedPolicy"):
        inner: Any = policy
        super().__init__(inner.config)
        self.model = inner.diffusion
        self.scheduler = self.model.noise_scheduler
        self.latent_size: int = self.action_size
        self.first_step: int = self.config.n_obs_steps - 1

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """Implement `Family.chain`."""
        return _diffusion_chain(self.config, self.model.num_inference_steps)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """Implement `Family.read`."""
        return {CONDITION: self.model._prepare_global_conditioning(_history(frames))}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict noise or clean actions [N, P, L]; see `Family`."""
        return self.model.unet(x, _index(time, self.config), global_cond=condition[CONDITION])

    def denoising_modules(self) -> list[nn.Module]:
        """Implement `Family.denoising_modules`."""
        return [self.model.unet]

    def draw_levels(self, count: int) -> Tensor:
        """Draw steps [count] of the training grid; see `Family`."""
        return torch.randint(self.config.num_train_timesteps, (count,))

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Implement `Family.schedule`."""
        return _diffusion_schedule(self.config, config)


class MultiTaskDiT(SquaredErrorFamily):
    """The transformer of `multi_task_dit`, conditioned on one feature vector of history and instruction.

    Its flow uses reversed time, from noise at 0 to data at 1, and predicts data - noise.
    """

    reads_instructions = True

    def __init__(self, policy: "PreTrainedPolicy"):
        inner: Any = policy
        super().__init__(inner.config)
        self.policy = inner
        self.latent_size: int = self.action_size
        self.first_step: int = self.config.n_obs_steps - 1
        self.steps_setting = "" if self.config.is_diffusion else "num_integration_steps"

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """Implement `Family.chain`."""
        if self.config.is_diffusion:
            return _diffusion_chain(self.config, self.policy.objective.num_inference_steps)
        return flow_chain(self.config, self.config.num_integration_steps, tuning)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """Implement `Family.read`."""
        return {CONDITION: self.policy.observation_encoder.encode(_history(frames))}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict noise, clean actions or velocities [N, P, L]; see `Family`."""
        if self.config.is_diffusion:
            return self.policy.noise_predictor(x, _index(time, self.config), condition[CONDITION])
        return -self.policy.noise_predictor(x, 1 - time, condition[CONDITION])

    def denoising_modules(self) -> list[nn.Module]:
        """Implement `Family.denoising_modules`."""
        return [self.policy.noise_predictor]

    def draw_levels(self, count: int) -> Tensor:
        """Draw times or steps of the training grid, [count]; see `Family`."""
        if self.config.is_diffusion:
            return torch.randint(self.config.num_train_timesteps, (count,))
        return 1 - self.policy.objective._sample_timesteps(count, torch.device("cpu"))

    def schedule(self, config: DenoisingPolicyConfig) -> Schedule:
        """Implement `Family.schedule`."""
        return _diffusion_schedule(self.config, config) if self.config.is_diffusion else make_schedule(config)


class XVLA:
    """X-VLA (arXiv:2510.10274): a Florence-2 encoder and a transformer with soft prompts.

    Its transformer estimates clean actions, and every step mixes the estimate with the initial noise: see
    `EstimateSchedule`. The meaning of an action element depends on `action_mode`: some modes hide the grippers from the
    transformer and predict the logit of closing, which a sigmoid converts to an action. This map is elementwise, so the
    probability of a latent equals that of its action up to a factor that cancels in ratios of two policies. Latents
    contain the estimate and the noise, 2L elements. A: action dimension; S: here steps of a chunk.
    """

    reads_instructions = True
    first_step = 0
    steps_setting = "num_denoising_steps"

    def __init__(self, policy: "PreTrainedPolicy"):
        inner: Any = policy
        self.policy, self.model = inner, inner.model
        self.config = inner.config
        self.space = self.model.action_space
        self.latent_size: int = 2 * self.model.dim_action

    def chain(self, tuning: LeRobotTuning) -> dict[str, Any]:
        """Implement `Family.chain`. Raises ConfigError for noise types that require velocities."""
        if tuning.flow_noise is FlowNoise.SDE:
            raise ConfigError("flow_noise=sde corrects a velocity, and X-VLA has none: set flow_noise=constant.")
        return flow_chain(self.config, self.config.num_denoising_steps, tuning)

    def read(self, frames: Sequence[Batch]) -> Condition:
        """Implement `Family.read`."""
        inputs = self.policy._build_model_inputs(dict(frames[-1]))
        images = inputs["image_input"].to(self._dtype)
        features = self.model.forward_vlm(inputs["input_ids"], images, inputs["image_mask"])
        return {
            FEATURES: features["vlm_features"],
            VIEWS: features["aux_visual_inputs"],
            DOMAIN: inputs["domain_id"],
            STATE: inputs["proprio"],
        }

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Estimate clean actions and pass the noise on: [N, P, 2L]; see `Family`."""
        vectors = EstimateSchedule.mixed(x, time), time, condition[STATE], condition[FEATURES], condition[VIEWS]
        mixed, time, state, features, views = (vector.to(self._dtype) for vector in vectors)
        state, mixed = self.space.preprocess(state, mixed)
        estimate = self.model.transformer(
            domain_id=condition[DOMAIN],
            vlm_features=features,
            aux_visual_inputs=views,
            action_with_noise=mixed,
            proprio=state,
            t=time,
        )
        return torch.cat([estimate.to(x.dtype), x.chunk(2, -1)[1]], -1)

    def denoising_modules(self) -> list[nn.Module]:
        """Implement `Family.denoising_modules`."""
        return [self.model.transformer]

    def draw_levels(self, count: int) -> Tensor:
        """Draw times [count] evenly spaced over [0, 1) with one random offset; see `Family`.

        In random order, so that the adjacent levels of one sample are not correlated.
        """
        spread = (torch.rand(1) + torch.arange(count) / count) % (1 - 1e-5)
        return spread[torch.randperm(count)]

    def schedule(self, config: DenoisingPolicyConfig) -> EstimateSchedule:
        """Implement `Family.schedule`."""
        explores = config.flow_noise is not FlowNoise.ODE
        level = max(config.flow_noise_level, config.min_sampling_std) if explores else 0.0
        return EstimateSchedule(config.sampling_steps, level)

    def finished(self, latents: Tensor) -> Tensor:
        """Return actions [N, S, A], with grippers as probabilities if the mode requires it; see `Family`."""
        return self.space.postprocess(latents.chunk(2, -1)[0].clone())

    def errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the action mode's own loss, there a mean over steps and rows, per step, [N, P]; see `Family`."""

        def of_step(estimate: Tensor, wanted: Tensor) -> Tensor:
            losses = self.space.compute_loss(estimate[None, None], wanted[None, None])
            return torch.stack([*losses.values()]).sum()

        pair = (each.chunk(2, -1)[0].flatten(0, 1) for each in (prediction, target))
        # The mode's own loss averages over steps and rows, so it is asked of one step at a time.
        return torch.func.vmap(of_step)(*pair).unflatten(0, prediction.shape[:2])

    @property
    def _dtype(self) -> torch.dtype:
        return self.model._get_target_dtype()


FAMILIES: Mapping[str, Callable[["PreTrainedPolicy"], Family]] = {
    "smolvla": SmolVLA,
    "pi0": Pi0,
    "pi05": Pi,
    "xvla": XVLA,
    "multi_task_dit": MultiTaskDiT,
    "diffusion": Diffusion,
}
"""LeRobot `type` -> adapter of its denoising policy."""
WITHOUT_STEPS = ("act", "pi0_fast")
"""Trainable types without denoising steps: see `act` and `pi0_fast`."""


def why_not_trainable(policy: "PreTrainedPolicy") -> str:
    """Return the reason why a LeRobot policy cannot be fine-tuned here, "" if it can."""
    config: Any = policy.config
    kinds = (*FAMILIES, *WITHOUT_STEPS)
    if config.type not in kinds:
        return (
            f"the log-probability of its actions is not supported here. Supported are: {', '.join(kinds)}. Its "
            "actions can be recorded (collect.policy) and imitated by another policy."
        )
    if getattr(config, "adapt_to_pi_aloha", False):
        return "adapt_to_pi_aloha transforms actions, and the inverse is not supported here."
    if getattr(config, "use_relative_actions", False):
        return "with use_relative_actions its processors store the last state, of one robot only: set it to false."
    if not getattr(config, "use_cache", True):
        return "use_cache=false encodes the observation again in every step: set it to true in config.json."
    if config.type == "pi0_fast" and config.n_action_steps != config.chunk_size:
        return (
            f"it is trained to generate chunks of {config.chunk_size} steps, but LeRobot decodes "
            f"{config.n_action_steps} steps: set n_action_steps to chunk_size in its config.json."
        )
    if getattr(config, "action_mode", "auto") not in ACTION_MODES:
        return (
            f"how action_mode={config.action_mode} transforms the network's output is unknown here, so its actions "
            f"have no log-probability. Supported are LeRobot's modes: {', '.join(ACTION_MODES)}."
        )
    flows = getattr(config, "objective", "") == "flow_matching"
    if flows and config.integration_method != "euler":
        return f"a step of integration_method={config.integration_method} has no density: set it to euler."
    if flows and config.sigma_min:
        return (
            f"sigma_min={config.sigma_min:g} leaves noise in the data, which robopolicy's flow does not support: it "
            "must be 0."
        )
    if hasattr(config, "num_train_timesteps") and not flows and (config.beta_start, config.beta_end) != BETAS:
        return (
            f"beta_start and beta_end are {config.beta_start:g} and {config.beta_end:g}, but only {BETAS} are "
            "supported."
        )
    return ""


def why_steps_are_fixed(policy: "PreTrainedPolicy", steps_setting: str) -> str:
    """Return the reason why LeRobot cannot run a few-step student, "" if it can."""
    config: Any = policy.config
    if steps_setting:
        return ""
    return (
        "a few-step diffusion student predicts the clean action from pure noise, at the noisiest step of the "
        f"training grid (timestep_spacing=trailing), and LeRobot's '{config.type}' has no setting for that: its "
        "sampler uses leading spacing, which with one inference step starts at the least noisy one, and with DDPM "
        "adds noise between steps. Distil a robopolicy policy instead, or a LeRobot flow policy."
    )


def _diffusion_chain(config: Any, steps: int) -> dict[str, Any]:
    return {
        "kind": PolicyKind.DIFFUSION,
        "history": config.n_obs_steps,
        "chunk": config.n_action_steps,
        "prediction_steps": config.horizon,
        "prediction": Prediction(config.prediction_type),
        "denoising_steps": config.num_train_timesteps,
        "sampling_steps": steps,
        "finetuned_steps": steps,
        "timestep_spacing": Spacing.LEADING,
        "clip": config.clip_sample_range if config.clip_sample else None,
    }


def _diffusion_schedule(lerobots: Any, config: DenoisingPolicyConfig) -> Schedule:
    """Return the schedule of diffusers' DDPM or DDIM, which differ in how they use an out-of-bounds clean estimate.

    Noise-free sampling uses DDIM on DDPM's grid, because LeRobot's sampler has no noise-free mode.
    """
    rederived = lerobots.noise_scheduler_type == "DDPM"
    return make_schedule(config, beta_schedule=lerobots.beta_schedule, rederived=rederived)


def _index(time: Tensor, config: Any) -> Tensor:
    """Convert times [N] in (0, 1] to steps [N] of the training grid."""
    # Step i of the grid, from 0, lies at time (i + 1) / count: see `DiffusionSchedule`.
    return (time * config.num_train_timesteps).round().long() - 1


def _history(frames: Sequence[Batch]) -> dict[str, Tensor]:
    """Stack the frames into one batch, [N, H, ...]; for text only the last frame, [N, ...]."""
    last = frames[-1]
    return {
        key: value if key in (TOKENS, TOKEN_MASK) else torch.stack([frame[key] for frame in frames], 1)
        for key, value in last.items()
    }


def _read_prefix(joint: Any, embedded: Tensor, seen: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return keys and values of all layers, [N, layers, heads, S, D] each, and the mask of valid prefix tokens [N, S].

    joint: LeRobot's language model and expert; embedded: the prefix [N, S, width]; mask: attention mask.
    """
    # Padding takes no place: positions count the tokens that are seen.
    positions = seen.cumsum(1) - 1
    arguments = {"past_key_values": None, "inputs_embeds": [embedded, None], "use_cache": True}
    _, cache = joint.forward(attention_mask=mask, position_ids=positions, **arguments)
    return {
        KEYS: torch.stack([layer.keys for layer in cache.layers], 1),
        VALUES: torch.stack([layer.values for layer in cache.layers], 1),
        MASK: seen,
    }


def _side_by_side(suffixes: Tensor, seen: Tensor, order: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate k suffixes of each row into one sequence; each attends to the row's prefix and itself only.

    suffixes: embedded, [N k, T, width]; seen, order: masks in LeRobot's format, [N k, T], identical for all; prefix:
    mask of valid prefix tokens, [N, S]. Returns the tokens [N, k T, width], their position ids [N, k T] as for a single
    suffix, and the attention mask [N, k T, S + k T]. The prefix's keys and values are thus neither copied nor projected
    per step, which dominates the cost if the chunk is short compared with the prefix.
    """
    from lerobot.policies.common.vla_utils import make_att_2d_masks

    rows = len(prefix)
    count = len(suffixes) // rows
    # A block for each suffix: within it LeRobot's own mask, and nothing between two of them.
    block_mask = torch.block_diag(*make_att_2d_masks(seen[:1], order[:1]).expand(count, -1, -1))
    length = len(block_mask)
    mask = torch.cat([prefix[:, None].expand(-1, length, -1), block_mask.expand(rows, -1, -1)], 2)
    positions = prefix.sum(-1, keepdim=True) + (seen[0].cumsum(0) - 1).repeat(count)
    return suffixes.unflatten(0, (rows, count)).flatten(1, 2), positions, mask


def _cache(condition: Condition) -> Any:
    """Return a temporary transformers cache with the condition's keys and values, to be extended and discarded."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(condition[KEYS].unbind(1), condition[VALUES].unbind(1), strict=True)):
        cache.update(keys, values, layer)
    return cache


keep_former_names(
    __name__,
    {
        "SeveralAtOnce": "BatchesSteps",
        "Squared": "SquaredErrorFamily",
        "Prefixed": "PrefixFamily",
        "why_as_many_steps": "why_steps_are_fixed",
    },
)
