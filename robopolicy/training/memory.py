"""Memory budget of training a large policy, measured on one chunk before the run starts.

A vision-language policy that does not fit fails after minutes of loading and collecting. Here one row is sampled and
its log-probability computed; its stored memory is measured and multiplied by the rows of an iteration. Memory of the
world, the critic and the libraries is not included.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.examples import example_batch, example_observation
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.images import PackedFrames, cameras_in
from robopolicy.core.machine import in_bytes
from robopolicy.core.policy import TensorObservation, Trainable
from robopolicy.core.regression import Regressor
from robopolicy.core.world import World
from robopolicy.nn.configuration import Optimiser
from robopolicy.nn.optimisers import optimiser_bytes, saved_weights_bytes
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import FinetuneConfig

BEYOND = 1.3
"""Maximum observed ratio of torch's memory use to the plan; backward passes and optimiser steps need some more."""


@dataclass(frozen=True)
class MemoryBudget:
    """Sizes in bytes unless stated. weights: trainable weights of the policy, and copies: the holders of copies of
    them; learning: gradients, optimiser state and the weights before a step; kept: stored chunks of an iteration and
    the copy of a minibatch; activations: of computing log-probabilities of at_once chunks; each: what each of these
    adds; replicas: number of data-parallel processes that divide a minibatch, of which all sizes are those of one.
    parameters, tuned: number of all and of trainable parameters; deciding, scoring: FLOPs of one policy call, and
    of its log-probability without gradient. rest: frozen weights, stored once (`nn.sharing`); teacher: weights of the
    teacher, loaded last.
    """

    weights: int
    copies: tuple[str, ...]
    learning: int
    kept: int
    decisions: int
    activations: int
    each: int
    minibatch: int
    at_once: int
    parameters: int
    tuned: int
    deciding: int
    scoring: int
    rest: int = 0
    teacher: int = 0
    replicas: int = 1

    @property
    def held(self) -> int:
        """Memory of policy and base once they share the frozen weights."""
        return self.rest + 2 * self.weights

    @property
    def loading(self) -> int:
        """Memory of policy and base before they share the frozen weights."""
        return 2 * (self.rest + self.weights)

    @property
    def ahead(self) -> int:
        """Memory still to be allocated after the weights are loaded."""
        return self.learning + self.kept + self.activations + (len(self.copies) - 2) * self.weights + self.teacher

    def text(self) -> str:
        """Return the budget as one line."""
        teacher_text = f" those of its teacher {in_bytes(self.teacher)}," if self.teacher else ""
        frozen_text = f"frozen {in_bytes(self.rest)} and trainable " if self.rest else ""
        process_text = f" of each of {self.replicas} processes" if self.replicas > 1 else ""
        return (
            f"Estimated memory{process_text}: weights {frozen_text}{in_bytes(self.weights)}, stored "
            f"{len(self.copies)} times ({', '.join(self.copies)}),{teacher_text} gradients and optimiser "
            f"{in_bytes(self.learning)}, {self.decisions} action chunks and a minibatch of {self.minibatch} "
            f"{in_bytes(self.kept)}, activations of {self.at_once} chunks {in_bytes(self.activations)}."
        )

    def whole(self) -> str:
        """Return parameter counts, FLOPs and the total memory before loading, in one line."""
        own = -(-self.minibatch // self.replicas)
        total, times = self.ahead + self.held, "thrice" if self.at_once >= own else "four times"
        return (
            f"{_count(self.parameters)} parameters, {_count(self.tuned)} trainable. One policy call takes "
            f"{_count(self.deciding)} FLOPs, its log-probability {_count(self.scoring)}, with gradient {times} that. "
            f"Total memory about {in_bytes(total)}, plus that of the world, the critic and the libraries."
        )

    def require(self, available: int | None) -> None:
        """Raise ConfigError when more than `available` bytes (None: unknown) are needed; warn when it is close."""
        if available is not None and self.ahead > available:
            advice = fitting_message(self.activations, self.each, self.at_once, _spare(self.ahead, available))
            raise ConfigError(
                f"Fine-tuning needs about {in_bytes(self.ahead)} more memory, but only {in_bytes(available)} are "
                f"free. {advice} Or lower minibatch={self.minibatch}, or the {self.decisions} action chunks per "
                f"iteration (num_envs x rollout_length, {in_bytes(self.kept)}), or set packed_images=true or "
                "lora_rank=8 (for LeRobot policies also lerobot.gradient_checkpointing=true and "
                "lerobot.cache_encoder_outputs=false)."
            )
        _warn_if_close(self.ahead, available)


def fitting_message(activations: int, each: int, at_once: int, spare: int) -> str:
    """Return a message on the micro_batch size that fits, given the activations, in bytes, of at_once chunks and of
    each further one.

    spare: bytes left at `at_once`; negative when they do not fit.
    """
    fits = at_once + spare // each if each else 0
    estimate = f"the activations of {at_once} chunks at once need {in_bytes(activations)}"
    return f"micro_batch={fits} fits: {estimate}." if fits >= 1 else f"No micro_batch is small enough: {estimate}."


def policy_copies(needs: frozenset[Need], config: FinetuneConfig) -> tuple[str, ...]:
    """Return the names of all holders of the policy's weights in a fine-tuning run; the first two exist before it
    starts.
    """
    holders = ["tuned", "base", "best"]
    if Need.BASE in needs:
        holders.append("reference")
    if config.props_parts or config.staleness or config.policy_lag:
        holders.append("acting")
    holders += ["earlier"] * (config.policy_lag + 1 if config.policy_lag else config.staleness)
    if config.proximal_policy == "average":
        holders += ["average", "average before"]
    return tuple(holders)


def plan_memory(
    policy: Trainable,
    decisions: int,
    minibatch: int,
    scored_steps: int = 0,
    copies: tuple[str, ...] = ("tuned", "base", "best"),
    device: torch.device | None = None,
    *,
    micro_batch: int = 0,
    images: bool = True,
    packed: float = 1.0,
    optimiser: Optimiser = "adamw",
    replicas: int = 1,
    fsdp: bool = False,
) -> MemoryBudget:
    """Run one row of `policy`, prepared for fine-tuning, and return the memory budget of `decisions` chunks.

    minibatch: chunks per optimiser step; micro_batch: chunks computed at once, 0 for all; scored_steps: denoising steps
    (or tokens) per chunk with log-probabilities, 0 for all; copies: holders of the weights, the first two exist before
    a run starts; device: the policy's device, None for that of its weights; images: whether rollouts store camera
    images; packed: compressed size of images as a fraction, 0 when they are stored elsewhere; optimiser: name of the
    optimiser; replicas: number of data-parallel processes, which divide minibatches and add their gradients; fsdp:
    whether they divide the optimiser's state and the gradients too. Weights are then divided between steps only, and
    counted as complete.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton: who fine-tunes, pays

    device, rows = device or next(policy.parameters()).device, min(minibatch, decisions)
    own_rows = -(-rows // replicas)
    at_once = min(micro_batch or own_rows, own_rows)
    observation = example_observation(policy.spec, 1, torch.Generator().manual_seed(0), device)
    with FlopCounterMode(display=False) as deciding:
        decision = policy.act(observation, torch.Generator(device).manual_seed(0))
    chunk_bytes, copy_bytes = _held(policy, observation, packed if images else None)
    latent_bytes = sum(map(_bytes, decision.latents.values()))
    latents = dict(decision.latents)
    if 0 < scored_steps < policy.spec.scored_steps:
        latents["chosen"] = torch.arange(scored_steps, device=device)[None]
    with FlopCounterMode(display=False) as scoring:
        # The difference between two rows and one is what a row adds; what remains of the first is shared by all rows.
        row_bytes = _saved(policy, lambda: policy.log_prob(observation, latents).logp)
    doubled = _twice(observation), _twice(latents)
    each = _saved(policy, lambda: policy.log_prob(*doubled).logp) - row_bytes
    learns = list(policy.trainable_parameters())
    weights = sum(_bytes(weight) for weight in policy.parameters() if weight.requires_grad)
    gradients = sum(map(_bytes, learns))
    # The weights from before a step (`Learner` keeps them for the KL stop), and the optimiser's state.
    states = saved_weights_bytes(optimiser, learns) + optimiser_bytes(optimiser, learns)
    return MemoryBudget(
        weights=weights,
        copies=copies,
        learning=gradients + _added(learns, replicas) + ((gradients + states) // replicas if fsdp else states),
        kept=decisions * (chunk_bytes + latent_bytes) + own_rows * (copy_bytes + latent_bytes),
        decisions=decisions,
        activations=row_bytes + (at_once - 1) * each,
        each=each,
        minibatch=rows,
        at_once=at_once,
        parameters=sum(weight.numel() for weight in policy.parameters()),
        tuned=sum(weight.numel() for weight in learns),
        deciding=deciding.get_total_flops(),
        scoring=scoring.get_total_flops(),
        rest=sum(map(_bytes, policy.parameters())) - weights,
        replicas=replicas,
    )


def plan_pretraining(
    policy: Trainable,
    batch_size: int,
    available: int | None,
    micro_batch: int = 0,
    optimiser: Optimiser = "adamw",
    lesson: Regressor | None = None,
    replicas: int = 1,
) -> str:
    """Return a one-line memory budget of behaviour cloning with batches of `batch_size`, in addition to the weights.

    micro_batch: chunks computed at once, 0 for all; lesson: model whose loss is trained, None for the policy's own;
    replicas: number of data-parallel processes, which divide batches and add their gradients. Raises ConfigError when
    that exceeds the available bytes (None: unknown).
    """
    device = next(policy.parameters()).device
    observation = example_observation(policy.spec, 1, torch.Generator().manual_seed(0), device)

    def losses(seen: TensorObservation) -> list[Tensor]:
        batch = example_batch(policy.spec, seen, device)
        return list((lesson or policy).loss(batch, torch.Generator(device).manual_seed(0)).values())

    at_once = -(-min(micro_batch or batch_size, batch_size) // replicas)
    row_bytes, two = (
        _saved(policy, lambda given=inputs: losses(given)) for inputs in (observation, _twice(observation))
    )
    activations = row_bytes + (at_once - 1) * (two - row_bytes)
    learns = list(policy.trainable_parameters())
    # The gradient, and the average of the weights themselves
    learning = 2 * sum(map(_bytes, learns)) + optimiser_bytes(optimiser, learns) + _added(learns, replicas)
    byte_count = learning + activations
    if available is not None and byte_count > available:
        advice = fitting_message(activations, two - row_bytes, at_once, _spare(byte_count, available))
        raise ConfigError(
            f"Training needs about {in_bytes(byte_count)} more memory, but only {in_bytes(available)} are free. "
            f"{advice} Or lower batch_size={batch_size}, or train only LoRA adapters of a token policy "
            "(policy.token.lora_rank=8)."
        )
    _warn_if_close(byte_count, available)
    weights = sum(_bytes(weight) for weight in policy.parameters())
    return (
        f"Estimated memory{f' of each of {replicas} processes' if replicas > 1 else ''}: weights {in_bytes(weights)}, "
        "gradients, optimiser and moving average "
        f"{in_bytes(learning)}, activations of {at_once} chunks {in_bytes(activations)}."
    )


def _added(learns: Sequence[nn.Parameter], replicas: int) -> int:
    """Return the bytes of the sum of all processes' gradients, in fp32."""
    return sum(4 * weight.numel() for weight in learns) if replicas > 1 else 0


def _spare(needed: int, available: int) -> int:
    """Return the bytes left with the safety margin; negative when there are too few."""
    return int(available / BEYOND) - needed


def _warn_if_close(needed: int, available: int | None) -> None:
    if available is not None and _spare(needed, available) < 0:
        warnings.warn(
            f"Memory may be too small: about {in_bytes(needed)} are needed and {in_bytes(available)} are free; "
            f"measured use exceeded such estimates by up to {BEYOND - 1:.0%}. Lower micro_batch.",
            RobopolicyWarning,
            stacklevel=2,
        )


def packed_image_fraction(world: World) -> float:
    """Return the compressed size of camera images as a fraction, measured on the initial states of the world's rows."""
    observation = world.reset(seeds=np.arange(world.batch_size))
    frames = [torch.as_tensor(value[:, -1]) for value in cameras_in(observation).values()]
    packed = sum(len(part) for each in frames for part in PackedFrames.of(each).parts)
    return packed / sum(map(_bytes, frames)) if frames else 1.0


def _held(policy: Trainable, seen: TensorObservation, share: float | None) -> tuple[int, int]:
    """Return the bytes that a stored chunk needs for the observation of one row, and those of a copy.

    Of H frames of camera images, a chunk owns as many as it has control steps; a copy contains all. share: fraction of
    the image bytes that is stored, None for no images.
    """
    fields = {key: value for key, value in seen.items() if isinstance(value, Tensor)}
    cameras = 0 if share is None else sum(_bytes(value) for value in cameras_in(fields).values())
    vectors = sum(_bytes(value) for key, value in fields.items() if key not in cameras_in(fields))
    frames_owned, history = min(policy.spec.chunk, policy.spec.history), policy.spec.history
    # Consecutive decisions share frames of their histories, so a decision owns min(chunk, H) of its H frames.
    return vectors + round((share or 0.0) * cameras * frames_owned) // history, vectors + cameras


def _twice(given: Mapping[str, Any]) -> dict[str, Any]:
    """Duplicate one row, tensors [1, ...] and lists of one, into two."""
    return {
        name: torch.cat([value, value]) if isinstance(value, Tensor) else [*value, *value]
        for name, value in given.items()
    }


def _saved(policy: Trainable, compute: Callable[[], object]) -> int:
    """Return the bytes saved for the backward pass, weights excluded; shared storage counts once."""
    # By the storage's own address: where there are no numbers (`nn.shapes`) that of its data is 0.
    weight_storages = {weight.untyped_storage()._cdata for weight in policy.parameters()}
    sizes: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in weight_storages:
            sizes[storage._cdata] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = compute()  # while it is, no storage is given away again
    total = sum(sizes.values())
    del output
    return total


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _count(number: int) -> str:
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"


keep_former_names(
    __name__, {"what_packing_leaves": "packed_image_fraction", "held_by": "policy_copies", "fitting": "fitting_message"}
)
