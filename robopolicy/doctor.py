"""Why is success low? Replays demonstrations through every convention between dataset, world and policy.

Each check returns findings: what was measured, whether it is healthy, and the way out. The classic causes are covered:
other control rate, actions clipped or in other units, flipped or swapped action dimensions, observation keys or scales
that differ between data and world, a normaliser fitted on other data, a policy that ignores its input.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.policy import Policy
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.core.world import World
from robopolicy.data.episodes import Episodes


class Health(Enum):
    """How a finding is to be read."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One check: name, health, what was measured, and what to do about it (empty when good)."""

    check: str
    health: Health
    measured: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return a JSON-ready dictionary."""
        return {"check": self.check, "health": self.health.value, "measured": self.measured, "remedy": self.remedy}


def check_fields(episodes: Episodes, world: World) -> list[Finding]:
    """Compare keys, shapes and control rate of the data with the world's."""
    findings = []
    for key, field in world.spec.observation.items():
        if key.startswith(IMAGE_PREFIX):
            continue
        recorded = episodes.observation_fields.get(key)
        if recorded is None:
            findings.append(
                Finding(key, Health.BAD, "not in the dataset", "Record again, or rename the dataset's key.")
            )
        elif recorded.shape != field.shape:
            text = f"dataset {recorded.shape}, world {field.shape}"
            findings.append(
                Finding(key, Health.BAD, text, "The data comes from another world or version: record again.")
            )
        elif recorded.names and field.names and recorded.names != field.names:
            swapped = [f"{a} / {b}" for a, b in zip(recorded.names, field.names, strict=True) if a != b][:3]
            findings.append(Finding(key, Health.BAD, f"elements differ: {', '.join(swapped)}", "Reorder the dataset."))
        else:
            findings.append(Finding(key, Health.GOOD, f"shape {field.shape} on both sides"))
    if episodes.action_field.shape != world.spec.action.shape:
        text = f"dataset {episodes.action_field.shape}, world {world.spec.action.shape}"
        findings.append(Finding("action", Health.BAD, text, "The data was recorded with another action space."))
    ratio = episodes.fps / world.spec.fps
    rate = f"dataset {episodes.fps:g} steps/s, world {world.spec.fps:g}"
    health = Health.GOOD if abs(ratio - 1) < 0.01 else Health.BAD
    findings.append(Finding("control rate", health, rate, "" if health is Health.GOOD else "Resample the data."))
    return findings


def check_action_range(actions: Tensor, field: Field) -> list[Finding]:
    """Look for actions [N, A] that the world would clip, and for dimensions that hardly move."""
    low = torch.as_tensor(np.broadcast_to(field.low, field.shape).copy(), dtype=torch.float32)
    high = torch.as_tensor(np.broadcast_to(field.high, field.shape).copy(), dtype=torch.float32)
    outside = ((actions < low - 1e-4) | (actions > high + 1e-4)).float().mean(0)
    worst = int(outside.argmax())
    name = field.names[worst] if field.names else str(worst)
    health = Health.BAD if outside[worst] > 0.05 else Health.WARNING if outside[worst] > 0.001 else Health.GOOD
    remedy = "" if health is Health.GOOD else "The world clips these: check the units and the sign of the action."
    findings = [Finding("action range", health, f"{outside[worst]:.1%} of '{name}' outside the world's bounds", remedy)]
    spread = actions.std(0, correction=0)
    still = [field.names[i] if field.names else str(i) for i in range(len(spread)) if spread[i] < 1e-6]
    if still:
        text = f"never moves in the data: {', '.join(still)}"
        findings.append(Finding("constant actions", Health.WARNING, text, "Fine if intended; else check the recorder."))
    span = (high - low).clamp(min=1e-9)
    narrow = [i for i in range(len(spread)) if torch.isfinite(span[i]) and 1e-6 < spread[i] < 0.01 * span[i]]
    if narrow:
        names = ", ".join(field.names[i] if field.names else str(i) for i in narrow)
        remedy = "Units differ (metres for millimetres, radians for degrees?), or the data hardly moves."
        findings.append(Finding("action scale", Health.WARNING, f"uses < 1 % of the range: {names}", remedy))
    return findings


def check_replay(episodes: Episodes, world: World) -> list[Finding]:
    """Play recorded actions open-loop from the recorded seeds; the world must go where the data went."""
    if episodes.seeds is None:
        return [
            Finding("replay", Health.WARNING, "the dataset has no seeds", "Replay needs data recorded by 'collect'.")
        ]
    rows = min(world.batch_size, len(episodes))
    chosen = np.arange(rows)
    lengths = episodes.lengths[:rows].numpy()
    seeds = np.resize(episodes.seeds[:rows].numpy(), world.batch_size)
    observation = world.reset(seeds=seeds)
    keys = [key for key in world.spec.observation if key in episodes.observation and not key.startswith(IMAGE_PREFIX)]
    starts, frames = episodes.starts[:rows].numpy(), episodes.frame_starts[:rows].numpy()
    scale = {key: episodes.observation[key].std(0, correction=0).numpy() + 1e-6 for key in keys}
    first, last = 0.0, np.zeros(rows)
    success = np.zeros(rows, dtype=bool)
    for key in keys:
        recorded = episodes.observation[key][frames].numpy()
        first = max(first, float((np.abs(observation[key][:rows, -1] - recorded) / scale[key]).max()))
    for index in range(int(lengths.max())):
        step_index = np.minimum(starts + index, starts + lengths - 1)
        actions = np.zeros((world.batch_size, 1, *world.spec.action.shape))
        actions[:rows, 0] = episodes.actions[step_index].numpy()
        step = world.step(actions)
        active = chosen[index < lengths]
        for key in keys:
            recorded = episodes.observation[key][frames[active] + index + 1].numpy()
            error = np.abs(step.observation[key][active, -1] - recorded) / scale[key]
            last[active] = np.maximum(last[active], error.reshape(len(active), -1).max(1))
        success[active] = step.success[active]
    findings = [_divergence("start of episodes", first, "Seeds or task version differ from the recording.")]
    remedy = "Same starts, other motion: control rate, substeps, action units or order differ from the recording."
    findings.append(_divergence("replayed motion", float(np.median(last)), remedy))
    if episodes.success is not None:
        recorded_success = episodes.success[:rows].numpy()
        agree = float((recorded_success == success).mean())
        health = Health.GOOD if agree > 0.95 else Health.BAD
        text = f"{agree:.0%} of {rows} replays end like the recording"
        findings.append(Finding("replayed success", health, text, "" if health is Health.GOOD else remedy))
    return findings


def _divergence(check: str, error: float, remedy: str) -> Finding:
    health = Health.GOOD if error < 0.01 else Health.WARNING if error < 0.3 else Health.BAD
    text = f"differs from the data by {error:.2g} standard deviations"
    return Finding(check, health, text, "" if health is Health.GOOD else remedy)


def check_policy_on_data(
    policy: Policy, episodes: Episodes, generator: torch.Generator, samples: int = 512
) -> list[Finding]:
    """Compare the policy's actions with the demonstrated ones at recorded states, dimension by dimension."""
    missing = [key for key in policy.spec.observation if key not in episodes.observation]
    if missing:
        return [
            Finding("policy inputs", Health.BAD, f"the data lacks {', '.join(missing)}", "Collect with these keys.")
        ]
    steps = torch.randperm(episodes.step_count, generator=generator)[:samples]
    batch = episodes.windows(steps, policy.spec.history, policy.spec.prediction, list(policy.spec.observation))
    decided = policy.act(batch["observation"], generator, deterministic=True).actions[:, 0].cpu()
    wanted = batch["actions"][:, 0].cpu()
    spread = wanted.std(0, correction=0).clamp(min=1e-6)
    error = ((decided - wanted) / spread).pow(2).mean()
    health = Health.GOOD if error < 0.5 else Health.WARNING if error < 1.0 else Health.BAD
    text = f"normalised squared error {error:.2f} (1 is no better than the mean action)"
    findings = [Finding("imitation", health, text, "" if health is Health.GOOD else "Train longer, or see below.")]
    correlation = _correlation(decided, wanted)
    names = policy.spec.action.names or tuple(str(i) for i in range(wanted.shape[1]))
    for i, name in enumerate(names):
        if correlation[i, i] < -0.3:
            text = f"'{name}' correlates {correlation[i, i]:+.2f} with the data"
            findings.append(Finding("action sign", Health.BAD, text, "Flip this dimension in the data or the world."))
        best = int(correlation[i].argmax())
        if best != i and correlation[i, best] > 0.6 and correlation[i, i] < 0.3:
            text = f"'{name}' follows '{names[best]}' of the data ({correlation[i, best]:+.2f})"
            findings.append(Finding("action order", Health.BAD, text, "Action dimensions are swapped."))
    shuffled = {
        key: value[torch.randperm(len(value), generator=generator)] if isinstance(value, Tensor) else value
        for key, value in batch["observation"].items()
    }
    blind = policy.act(shuffled, generator, deterministic=True).actions[:, 0].cpu()
    ratio = float(((blind - wanted) / spread).pow(2).mean() / error.clamp(min=1e-6))
    health = Health.GOOD if ratio > 1.2 else Health.BAD
    text = f"error grows {ratio:.1f}x when observations are shuffled"
    remedy = "" if health is Health.GOOD else "The policy ignores its input: check the normaliser and the keys."
    findings.append(Finding("policy reads its input", health, text, remedy))
    return findings


def check_policy_fields(policy: Policy, episodes: Episodes) -> list[Finding]:
    """Compare the shapes of the policy's fields with those of the data."""
    findings = []
    low_high = {key: (value.amin(0), value.amax(0)) for key, value in episodes.observation.items() if value.dim() == 2}
    for key, field in policy.spec.observation.items():
        if key not in low_high or key.startswith(IMAGE_PREFIX):
            continue
        recorded = episodes.observation_fields[key]
        if recorded.shape != field.shape:
            text = f"policy {field.shape}, data {recorded.shape}"
            findings.append(Finding(f"policy {key}", Health.BAD, text, "The policy was trained on other data."))
    if not findings:
        findings.append(Finding("policy fields", Health.GOOD, "every field has the shape of the data"))
    return findings


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return correlations [A, A] between columns of first and second [N, A]; 0 where a column is constant."""
    a, b = first - first.mean(0), second - second.mean(0)
    norms = a.norm(dim=0)[:, None] * b.norm(dim=0)[None, :]
    return torch.where(norms > 1e-6, a.T @ b / norms.clamp(min=1e-6), torch.zeros_like(norms))
