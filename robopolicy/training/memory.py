"""What training a large policy will take of memory, measured on one decision before anything starts.

A vision-language policy that does not fit ends a run after minutes of loading and collecting; here one row is decided
and scored, what it keeps is counted, and multiplied by the rows of an iteration. What the world, the critic and the
libraries take is not in it.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.examples import example_batch, example_observation
from robopolicy.core.images import PackedFrames, cameras_in
from robopolicy.core.machine import in_bytes
from robopolicy.core.policy import TensorObservation, Trainable
from robopolicy.core.regression import Regressor
from robopolicy.core.world import World
from robopolicy.nn.configuration import Optimiser
from robopolicy.nn.optimisers import kept_bytes, optimiser_bytes
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import FinetuneConfig

BEYOND = 1.3
"""Times what was planned that torch has held, at most: backward passes and steps of the optimiser take some more."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes: weights, the policy's that learn, and by whom else such are held; learning, gradients, optimiser, and the
    weights before a step; kept, what an iteration's decisions and the copy of a minibatch keep; activations, of the
    scores of at_once decisions, and what each of these adds. And parameters, how many there are, tuned, how many of
    them learn; deciding, scoring: operations with floating-point numbers of one decision, and of its score without
    gradient. rest: the weights that do not learn, which are held once (`nn.sharing`); teacher: those of another policy
    that it learns from, which is loaded last.
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

    @property
    def held(self) -> int:
        """What policy and base take, once they share what does not learn."""
        return self.rest + 2 * self.weights

    @property
    def loading(self) -> int:
        """What they take before that."""
        return 2 * (self.rest + self.weights)

    @property
    def ahead(self) -> int:
        """What is still to be taken when the weights are loaded."""
        return self.learning + self.kept + self.activations + (len(self.copies) - 2) * self.weights + self.teacher

    def text(self) -> str:
        """Return it as one line."""
        taught = f" those of its teacher {in_bytes(self.teacher)}," if self.teacher else ""
        rest = f"{in_bytes(self.rest)} that rest and " if self.rest else ""
        return (
            f"Memory, about: weights {rest}{in_bytes(self.weights)} held {len(self.copies)} times "
            f"({', '.join(self.copies)}),{taught} gradients and optimiser {in_bytes(self.learning)}, {self.decisions} "
            f"decisions and a copy of {self.minibatch} {in_bytes(self.kept)}, activations of {self.at_once} decisions "
            f"{in_bytes(self.activations)}."
        )

    def whole(self) -> str:
        """Return what else there is to say before anything is loaded, in one line."""
        total, times = self.ahead + self.held, "thrice" if self.at_once == self.minibatch else "four times"
        return (
            f"{_count(self.parameters)} parameters, {_count(self.tuned)} of them learn; a decision is "
            f"{_count(self.deciding)} operations, its score {_count(self.scoring)}, with its gradient {times} that. "
            f"In all about {in_bytes(total)} of memory, beside what the world, the critic and the libraries take."
        )

    def require(self, available: int | None) -> None:
        """Raise ConfigError where more is needed than there is, in bytes, None: not known; warn where it is close."""
        if available is not None and self.ahead > available:
            advice = fitting(self.activations, self.each, self.at_once, _spare(self.ahead, available))
            raise ConfigError(
                f"Fine-tuning needs about {in_bytes(self.ahead)} more of memory, and {in_bytes(available)} are free. "
                f"{advice} Or lower minibatch={self.minibatch} or the {self.decisions} decisions of an iteration "
                f"({in_bytes(self.kept)}), num_envs times rollout_length, or set packed_images=true or lora_rank=8 "
                "(of LeRobot's policies lerobot.checkpointing=true and lerobot.keep_prefix=false too)."
            )
        _warn_if_close(self.ahead, available)


def fitting(activations: int, each: int, at_once: int, spare: int) -> str:
    """Return what micro-batches do about the activations, in bytes, of at_once decisions, each of which adds some.

    spare: bytes that are then left, less than nothing where they do not fit.
    """
    fits = at_once + spare // each if each else 0
    said = f"activations of {at_once} decisions at once are {in_bytes(activations)}"
    return f"micro_batch={fits} fits: {said}." if fits >= 1 else f"No micro_batch is small enough: {said}."


def held_by(needs: frozenset[Need], config: FinetuneConfig) -> tuple[str, ...]:
    """Return who holds the policy's weights in a run of fine-tuning, the two that are there before it begins first."""
    holders = ["tuned", "base", "best"]
    if Need.BASE in needs:
        holders.append("reference")
    if config.props or config.staleness or config.delay:
        holders.append("acting")
    holders += ["earlier"] * (config.delay + 1 if config.delay else min(config.staleness, 1))
    if config.proximal == "average":
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
) -> MemoryBudget:
    """Let `policy`, prepared for fine-tuning, decide and score one row, and return what `decisions` of them will take.

    minibatch: decisions of a step; micro_batch: how many of them are scored at once, 0 for all; scored_steps: how many
    steps of each, 0 for all; copies: who holds the weights, the two that are there before a run begins first; device:
    where the policy is, None for that of its weights; images: whether decisions keep what cameras showed; packed: what
    is left of that where it is compressed, as a share, 0 where it is kept elsewhere; optimiser: what takes the steps.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton: who fine-tunes, pays

    device, rows = device or next(policy.parameters()).device, min(minibatch, decisions)
    at_once = min(micro_batch or rows, rows)
    seen = example_observation(policy.spec, 1, torch.Generator().manual_seed(0), device)
    with FlopCounterMode(display=False) as deciding:
        decision = policy.act(seen, torch.Generator(device).manual_seed(0))
    once, copied = _held(policy, seen, packed if images else None)
    told = sum(map(_bytes, decision.latents.values()))
    latents = dict(decision.latents)
    if 0 < scored_steps < policy.spec.scored_steps:
        latents["chosen"] = torch.arange(scored_steps, device=device)[None]
    with FlopCounterMode(display=False) as scoring:
        # The difference between two rows and one is what a row adds; what remains of the first is shared by all rows.
        one = _saved(policy, lambda: policy.log_prob(seen, latents).logp)
    doubled = _twice(seen), _twice(latents)
    each = _saved(policy, lambda: policy.log_prob(*doubled).logp) - one
    learns = list(policy.trainable_parameters())
    weights = sum(_bytes(weight) for weight in policy.parameters() if weight.requires_grad)
    return MemoryBudget(
        weights=weights,
        copies=copies,
        # Gradients, the weights from before a step (`Learner` keeps them for the KL stop), the optimiser's state.
        learning=sum(map(_bytes, learns)) + kept_bytes(optimiser, learns) + optimiser_bytes(optimiser, learns),
        kept=decisions * (once + told) + rows * (copied + told),
        decisions=decisions,
        activations=one + (at_once - 1) * each,
        each=each,
        minibatch=rows,
        at_once=at_once,
        parameters=sum(weight.numel() for weight in policy.parameters()),
        tuned=sum(weight.numel() for weight in learns),
        deciding=deciding.get_total_flops(),
        scoring=scoring.get_total_flops(),
        rest=sum(map(_bytes, policy.parameters())) - weights,
    )


def plan_pretraining(
    policy: Trainable,
    batch_size: int,
    available: int | None,
    micro_batch: int = 0,
    optimiser: Optimiser = "adamw",
    lesson: Regressor | None = None,
) -> str:
    """Return in one line what imitation by batches of so many decisions will take beside the weights.

    micro_batch: how many of them are computed at once, 0 for all; lesson: whose loss it is, None for the policy's own.
    Raises ConfigError where that is more than is available, in bytes; None: not known.
    """
    device = next(policy.parameters()).device
    seen = example_observation(policy.spec, 1, torch.Generator().manual_seed(0), device)

    def losses(seen: TensorObservation) -> list[Tensor]:
        batch = example_batch(policy.spec, seen, device)
        return list((lesson or policy).loss(batch, torch.Generator(device).manual_seed(0)).values())

    at_once = min(micro_batch or batch_size, batch_size)
    one, two = (_saved(policy, lambda given=given: losses(given)) for given in (seen, _twice(seen)))
    activations = one + (at_once - 1) * (two - one)
    learns = list(policy.trainable_parameters())
    # The gradient, and the average of the weights themselves
    learning = 2 * sum(map(_bytes, learns)) + optimiser_bytes(optimiser, learns)
    needed = learning + activations
    if available is not None and needed > available:
        advice = fitting(activations, two - one, at_once, _spare(needed, available))
        raise ConfigError(
            f"Training needs about {in_bytes(needed)} more of memory, and {in_bytes(available)} are free. {advice} Or "
            f"lower batch_size={batch_size}, or let adapters of a token policy learn alone (policy.token.lora_rank=8)."
        )
    _warn_if_close(needed, available)
    weights = sum(_bytes(weight) for weight in policy.parameters())
    return (
        f"Memory, about: weights {in_bytes(weights)}, gradients, optimiser and moving average {in_bytes(learning)}, "
        f"activations of {at_once} decisions {in_bytes(activations)}."
    )


def _spare(needed: int, available: int) -> int:
    """Return the bytes that are left where nothing shall be close, less than nothing where there are too few."""
    return int(available / BEYOND) - needed


def _warn_if_close(needed: int, available: int | None) -> None:
    if available is not None and _spare(needed, available) < 0:
        warnings.warn(
            f"Memory may not do: about {in_bytes(needed)} are needed, {in_bytes(available)} are free, and up to "
            f"{BEYOND - 1:.0%} more than planned has been held. A lower micro_batch makes room.",
            RobopolicyWarning,
            stacklevel=2,
        )


def what_packing_leaves(world: World) -> float:
    """Return what compressing leaves of what cameras show, as a share: of the starts of the world's rows."""
    observation = world.reset(seeds=np.arange(world.batch_size))
    frames = [torch.as_tensor(value[:, -1]) for value in cameras_in(observation).values()]
    packed = sum(len(part) for each in frames for part in PackedFrames.of(each).parts)
    return packed / sum(map(_bytes, frames)) if frames else 1.0


def _held(policy: Trainable, seen: TensorObservation, share: float | None) -> tuple[int, int]:
    """Return the bytes that a decision keeps of an observation of one row, and those of a copy.

    Of H frames of camera images a decision has as many of its own as it takes control steps; a copy has all of them.
    share: of their bytes, which are kept, None for no images.
    """
    fields = {key: value for key, value in seen.items() if isinstance(value, Tensor)}
    cameras = 0 if share is None else sum(_bytes(value) for value in cameras_in(fields).values())
    vectors = sum(_bytes(value) for key, value in fields.items() if key not in cameras_in(fields))
    own, history = min(policy.spec.chunk, policy.spec.history), policy.spec.history
    # Consecutive decisions share frames of their histories, so a decision owns min(chunk, H) of its H frames.
    return vectors + round((share or 0.0) * cameras * own) // history, vectors + cameras


def _twice(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row, tensors [1, ...] and lists of one, as two."""
    return {
        name: torch.cat([value, value]) if isinstance(value, Tensor) else [*value, *value]
        for name, value in given.items()
    }


def _saved(policy: Trainable, compute: Callable[[], object]) -> int:
    """Return the bytes that the gradient of what is computed keeps, weights apart; what is kept twice counts once."""
    # By the storage's own address: where there are no numbers (`nn.shapes`) that of its data is 0.
    own = {weight.untyped_storage()._cdata for weight in policy.parameters()}
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        held = compute()  # while it is, no storage is given away again
    found = sum(kept.values())
    del held
    return found


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _count(number: int) -> str:
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"
