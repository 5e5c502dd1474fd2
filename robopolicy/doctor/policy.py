"""Checks of a policy against data: its normalisers, its actions at recorded states, and its inference engine."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.candidates import rows_of_observation
from robopolicy.core.delayed import episodes_for_policy
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.finite_values import element_names, join_names
from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.doctor.findings import Finding, Health, name_factor
from robopolicy.doctor.images import IMAGES_DIR, image_check
from robopolicy.inference.comparison import EXACT, action_error, noise_free_actions
from robopolicy.inference.engine import with_engine
from robopolicy.inference.plan import load_plan
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.normalizer import ACTION, CONSTANT_SCALE, Normalizer, ShowsNormalizers
from robopolicy.rl.offline.decisions import observations_at

OUTSIDE = {NormalizationMode.MIN_MAX: 1.25, NormalizationMode.MEAN_STD: 3.5}
"""Normalised values beyond this lie outside the data that a normaliser was fitted on."""
NOTABLE, CLEARLY = 0.2, 0.5
"""Squared error above which images need an explanation, and maximum fraction of it that may remain."""
FOLLOWS, WIDER = 0.4, 5.0
"""Correlation above which a policy action follows a data dimension, and maximum scale ratio.

A policy that has learned little stays near the mean, so smaller factors are left to the replay.
"""
HESITANT, CLOSELY = 2.0, 0.9
"""Slope of the data over a policy's action above which it hardly leaves the mean, and correlation conclusive even then.

A trained policy has slope 1, however poorly it imitates; a high correlation with a narrower range means another scale.
"""
SUCCEEDS = 0.8
"""Success rate above which a policy need not imitate closely: different experts leave an error that is acceptable."""
SHARE, NARROW = 0.3, 3.0
"""Fraction of values outside that makes a normaliser stale, and factor by which most elements must be narrower than it.

Objects at rest hardly move, another recording may push them: single elements that are sometimes wider or narrower also
differ between correct recordings.
"""
ENGINE_CHECK = "engine"
ENGINE_FRAMES = 128
GROWN = 2.0
"""Factor by which an error may exceed the measured one: other observations, another processor."""


def check_normalizers(policy: Policy, episodes: Episodes) -> list[Finding]:
    """Compare a policy's normalisers with the data, element by element."""
    if not isinstance(policy, ShowsNormalizers):
        return [Finding("normaliser", Health.UNKNOWN, f"{type(policy).__name__} does not expose its normalisers")]
    data_values, fields = {**episodes.observation, ACTION: episodes.actions}, policy.spec.observation
    findings: list[Finding] = []
    for key, normalizer in policy.normalizers().items():
        names = policy.spec.action.names if key == ACTION else fields[key].names
        findings += _check_normalizer(key, normalizer, data_values[key], names)
    return findings or [Finding("normaliser", Health.GOOD, "fits the data")]


def check_policy_on_data(
    policy: Policy,
    episodes: Episodes,
    generator: torch.Generator,
    samples: int = 512,
    success: float | None = None,
) -> list[Finding]:
    """Compare the policy's actions with the demonstrated ones at about `samples` recorded states, and explain
    differences.

    success: its success rate after training on these episodes, None if not evaluated; a policy that succeeds need not
    imitate closely.
    """
    rows = _whole_episodes(episodes, samples, generator)
    part = episodes.select(rows)
    steps = torch.arange(part.step_count, device=part.device)
    batch = part.windows(steps, policy.spec.history, policy.spec.prediction, [*policy.spec.observation, "task"])
    observation = _to(batch["observation"], generator.device)
    state = generator.get_state()

    def decide(changed: TensorObservation) -> Tensor:
        generator.set_state(state)
        return policy.act(changed, generator, deterministic=True).actions[:, 0].cpu()

    data_actions = part.actions.cpu()
    spread = data_actions.std(0, correction=0)
    moving = spread > 1e-6
    if not moving.any():
        text = "all recorded actions are equal, so imitation and the use of the input cannot be tested"
        return [Finding("imitation", Health.UNKNOWN, text)]
    policy_actions = decide(observation)

    def error(actions: Tensor) -> float:
        return float((((actions - data_actions) / spread)[:, moving]).pow(2).mean())

    plain_error = error(policy_actions)
    findings = [_imitation(plain_error, success)]
    fits = _action_normalizer_fits(policy, data_actions)
    findings += _compare_actions(policy_actions, data_actions, element_names(policy.spec.action, "action"), fits)
    findings += _explain_images(observation, lambda changed: error(decide(changed)), plain_error)
    order = torch.randperm(len(data_actions), generator=generator, device=generator.device)
    shuffled = rows_of_observation(observation, order.tolist())
    variance = policy_actions.var(0, correction=0).sum().clamp(min=1e-12)
    change = float((decide(shuffled) - policy_actions).pow(2).mean(0).sum() / (2 * variance))
    health = Health.GOOD if change > 0.1 else Health.BAD
    text = f"actions change by {change:.2f} when observations are shuffled (1: completely, 0: not at all)"
    remedy = "" if health is Health.GOOD else "The policy ignores its input: check the normaliser and the keys."
    return [*findings, Finding("policy reads its input", health, text, remedy)]


def _imitation(error: float, success: float | None) -> Finding:
    """Rate the normalised squared error of a policy; its success rate is known or None."""
    text = f"normalised squared error {error:.2f} (1 is no better than the mean action)"
    health = Health.GOOD if error < 0.5 else Health.WARNING if error < 1.0 else Health.BAD
    if health is Health.GOOD or success is None or success < SUCCEEDS:
        return Finding(
            "imitation", health, text, "" if health is Health.GOOD else ("Train longer, or see the findings below.")
        )
    return Finding("imitation", Health.GOOD, f"{text}, but it succeeded in {success:.0%} of its episodes")


def _action_normalizer_fits(policy: Policy, actions: Tensor) -> bool:
    """Whether a policy exposes an action normaliser that fits actions [n, A], so that both have the same scale."""
    normalizer = policy.normalizers().get(ACTION) if isinstance(policy, ShowsNormalizers) else None
    if normalizer is None or normalizer.mode is NormalizationMode.IDENTITY:
        return False
    return not _check_normalizer(ACTION, normalizer, actions, ())


def _check_normalizer(key: str, normalizer: Normalizer, values: Tensor, names: tuple[str, ...]) -> list[Finding]:
    """Compare one normaliser with values [n, *shape]."""
    if normalizer.mode is NormalizationMode.IDENTITY:
        return []
    offset, scale = (part.detach().cpu().flatten() for part in (normalizer.offset, normalizer.scale))
    values = values.cpu().float().reshape(len(values), -1)
    refit = Normalizer((len(offset),), normalizer.mode).fit(values)
    outside_mask = (((values - offset) / scale).abs() > OUTSIDE[normalizer.mode]).float().mean(0) > SHARE
    varies = values.std(0, correction=0) > CONSTANT_SCALE
    subsequence = torch.where(varies, refit.scale / scale, torch.ones_like(scale))
    narrow = varies & (subsequence < 1 / NARROW)
    if 2 * int(narrow.sum()) <= int(varies.sum()):
        narrow[:] = False
    off = (outside_mask | narrow).nonzero().squeeze(1).tolist()
    if not off:
        return []
    labels = [f"'{name}'" for name in names] or [f"'{key}[{index}]'" for index in range(len(offset))]
    details = join_names([_misfit(labels[i], refit, offset, scale, i) for i in off], 3)
    exchanges = _swapped(offset, scale, refit, off, labels)
    cause = "fitted on other data"
    if bool((offset == 0).all() and (scale == 1).all()):
        cause = "fitted on values from -1 to 1, or never fitted (offset 0, scale 1)"
    elif exchanges:
        cause = f"fits if {join_names(exchanges, 2)} are exchanged"
    remedy = (
        "Train on this data (which fits them again), or convert the data to the units that the policy was trained with."
    )
    health = Health.WARNING if len(off) == 1 and len(labels) > 2 and not exchanges else Health.BAD
    return [Finding("normaliser", health, f"{key}: {cause}: {details}", remedy)]


def _misfit(label: str, fitted: Normalizer, offset: Tensor, scale: Tensor, i: int) -> str:
    subsequence = float(fitted.scale[i] / scale[i])
    shift = float((fitted.offset[i] - offset[i]) / scale[i])
    if subsequence < NARROW and abs(shift) > 0.5:
        return f"{label} lies {abs(shift):.1f} ranges too {'high' if shift > 0 else 'low'}"
    return f"the spread of {label} is {name_factor(subsequence)}"


def _swapped(offset: Tensor, scale: Tensor, fitted: Normalizer, off: list[int], labels: list[str]) -> list[str]:
    """Return the pairs that include a misfitting element and whose elements would fit each other's statistics."""

    def fits(i: int, j: int) -> bool:
        is_near = abs(float(fitted.offset[i] - offset[j])) < 0.3 * float(scale[j])
        return is_near and 1 / 1.5 < float(fitted.scale[i] / scale[j]) < 1.5

    pairs = [(i, j) for i in off for j in range(len(labels)) if j != i and not (j in off and j < i)]
    return [f"{labels[i]} and {labels[j]}" for i, j in pairs if fits(i, j) and fits(j, i)]


def _whole_episodes(episodes: Episodes, samples: int, generator: torch.Generator) -> Tensor:
    """Return random episodes [E] with about `samples` steps in total."""
    order = torch.randperm(len(episodes), generator=generator, device=generator.device).cpu()
    enough = int((episodes.lengths.cpu()[order].cumsum(0) < samples).sum()) + 1
    return order[:enough]


def _compare_actions(decided: Tensor, wanted: Tensor, names: tuple[str, ...], fits: bool) -> list[Finding]:
    """Match each policy action dimension to the data dimension that it follows, [N, A] both, with sign and scale.

    Uses correlations, not errors: they are informative for a poorly imitating policy as well. They are not for a policy
    that hardly leaves the mean action: its correlations are chance, unless they are high and its scale may differ
    (fits: its normaliser excludes that). Time shifts are left to the replay: policies repeat the action that they
    observe in the velocities, so they appear delayed on correct data.
    """
    from scipy.optimize import linear_sum_assignment

    correlation = _correlation(decided, wanted).numpy()
    own_correlation, places = np.diagonal(correlation), np.arange(len(correlation))
    _, match = linear_sum_assignment(-np.abs(correlation))
    follows = np.abs(correlation[places, match])
    spread, demonstrated = decided.std(0, correction=0).clamp(min=1e-9).numpy(), wanted.std(0, correction=0).numpy()
    undertrained = (follows * demonstrated[match] / spread > HESITANT) & (fits | (follows < CLOSELY))
    permuted = (match != places) & (follows > FOLLOWS) & (follows > np.abs(own_correlation) + 0.2) & ~undertrained
    for _ in places:
        permuted &= permuted[match]
    match = np.where(permuted, match, places)
    correlations, ratio = correlation[places, match], demonstrated[match] / spread
    undertrained = (np.abs(correlations) * ratio > HESITANT) & (fits | (np.abs(correlations) < CLOSELY))
    findings = []
    if undertrained.any():
        elements_text = (
            "" if undertrained.all() else f"{join_names([f"'{names[i]}'" for i in np.flatnonzero(undertrained)])} "
        )
        times = f"{ratio[undertrained].min():.3g} times"
        text = f"not trained enough for this check: the policy moves {elements_text}at least {times} less than the data"
        remedy = "Train longer and test again before changing data or driver."
        findings.append(Finding("order, sign and scale", Health.UNKNOWN, text, remedy))
    if permuted.any():
        texts = [
            f"'{names[i]}' follows '{names[match[i]]}' of the data ({correlations[i]:+.2f})"
            for i in permuted.nonzero()[0]
        ]
        remedy = "Reorder the columns of the actions as in the data that the policy was trained on."
        findings.append(Finding("action order", Health.BAD, join_names(texts), remedy))
    opposite = np.flatnonzero((correlations < -FOLLOWS) & ~undertrained)
    if len(opposite):
        texts = [
            f"'{names[match[i]]}' has the opposite sign of the policy's ({correlations[i]:+.2f})" for i in opposite
        ]
        remedy = "Flip it in the data, or in the driver that records it."
        findings.append(Finding("action sign", Health.BAD, join_names(texts), remedy))
    scaled = (np.abs(correlations) > 1.5 * FOLLOWS) & ((ratio > WIDER) | (ratio < 1 / WIDER)) & ~undertrained
    if scaled.any():
        texts = [f"'{names[match[i]]}' is about {name_factor(float(ratio[i]))}" for i in scaled.nonzero()[0]]
        remedy = "Convert the actions to the scale that the policy was trained on."
        findings.append(Finding("action scale", Health.BAD, f"for the policy, {join_names(texts)}", remedy))
    return findings


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return correlations [A, A] between columns of first and second [N, A]; 0 where a column is constant."""
    a, b = first - first.mean(0), second - second.mean(0)
    norms = a.norm(dim=0)[:, None] * b.norm(dim=0)[None, :]
    return torch.where(norms > 1e-6, a.T @ b / norms.clamp(min=1e-6), torch.zeros_like(norms))


def _explain_images(
    observation: TensorObservation, error: Callable[[TensorObservation], float], plain: float
) -> list[Finding]:
    """Test modified images: the policy imitates clearly better on images like those it was trained on."""
    findings = []
    for key, images in observation.items():
        if not key.startswith(IMAGE_PREFIX) or not isinstance(images, Tensor):
            continue
        image_errors = {
            text: error({**observation, key: torch.from_numpy(mend(images.cpu().numpy()).copy()).to(images.device)})
            for text, mend in IMAGES_DIR.items()
        }
        best = min(image_errors, key=lambda text: image_errors[text])
        if plain > NOTABLE and image_errors[best] < min(CLEARLY * plain, 0.7):
            camera, errors = (
                key.removeprefix(IMAGE_PREFIX),
                (f"error {plain:.2f}, after the fix {image_errors[best]:.2f}"),
            )
            text = f"'{camera}': {best}, compared with the policy's training data ({errors})"
            remedy = "Convert the images of this data to match those that the policy was trained on."
            findings.append(Finding(image_check(best), Health.BAD, text, remedy))
    return findings


def _to(observation: Mapping, device: torch.device) -> TensorObservation:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in observation.items()}


def check_plan(folder: Path, policy: Policy, episodes: Episodes) -> list[Finding]:
    """Compare the stored inference plan with the policy itself, at recorded observations; no finding without a plan."""
    plan = load_plan(folder)
    if plan is None:
        return []
    advice = f"Create it again with robopolicy optimize {folder}; without inference.json the policy acts as trained."
    if plan.refusal(folder):
        return [Finding(ENGINE_CHECK, Health.WARNING, "inference.json was created for other weights", advice)]
    episodes = episodes_for_policy(policy, episodes)
    frames = torch.linspace(0, episodes.step_count - 1, min(ENGINE_FRAMES, episodes.step_count)).long()
    frames = frames + episodes.episode_of_step.cpu()[frames]
    observation = observations_at(
        episodes, frames.to(episodes.device), policy.spec.history, list(policy.spec.observation)
    )
    try:
        fast = with_engine(policy, plan.config, plan.cache)
    except ConfigError as error:
        return [Finding(ENGINE_CHECK, Health.BAD, str(error), advice)]
    difference = action_error(noise_free_actions(fast, observation), noise_free_actions(policy, observation))
    exact = plan.config.exact and plan.cache is None
    tolerance = EXACT if exact else GROWN * float(plan.measured.get("error", 0.0)) + EXACT
    text = (
        f"{plan.config.engine}: actions differ by {difference:.2g} standard deviations from the reference, "
        f"{tolerance:.2g} allowed"
    )
    return [
        Finding(ENGINE_CHECK, Health.GOOD, text)
        if difference <= tolerance
        else Finding(ENGINE_CHECK, Health.BAD, text, advice)
    ]
