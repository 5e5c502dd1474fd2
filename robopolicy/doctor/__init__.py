"""Diagnosis of low success: checks every convention between dataset, world and policy, by replaying demonstrations.

Each check returns findings: the measurement, whether it is healthy, and a remedy. `examine` runs the checks in order
and skips those that are meaningless after an earlier failure.
"""

import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.policy import Policy
from robopolicy.core.world import World
from robopolicy.doctor.data import (
    check_action_range,
    check_constant_actions,
    check_fields,
    check_finite_values,
    check_policy_fields,
    check_statistics,
)
from robopolicy.doctor.findings import Finding, Health
from robopolicy.doctor.images import STANDS_STILL, check_cameras, check_image_timing, check_images
from robopolicy.doctor.policy import check_normalizers, check_policy_on_data
from robopolicy.doctor.recording import (
    check_constant_elements,
    check_duplicates,
    check_instructions,
    check_spikes,
    check_success,
    check_truncation,
)
from robopolicy.doctor.replay import check_replay

__all__ = ["Finding", "Health", "check_statistics", "examine", "examine_data", "examine_policy"]


def examine(
    episodes: Episodes,
    world: World | None = None,
    policy: Policy | None = None,
    generator: torch.Generator | None = None,
    *,
    success: float | None = None,
) -> list[Finding]:
    """Run all checks on this combination of data, world and policy; return the findings.

    world: None if unknown, so that only the data are checked; generator: random generator of the policy's noise;
    success: the policy's success rate after training on this data, None if unknown.
    """
    reads_text = getattr(policy, "reads_instructions", None)
    data_findings = examine_data(episodes, world, reads_text)
    findings = [*check_success(episodes, None if world is None else world.spec), *data_findings]
    if policy is not None and not _fails(findings, "finite values"):
        findings += examine_policy(episodes, policy, generator or torch.Generator().manual_seed(0), success)
    return findings


def examine_data(episodes: Episodes, world: World | None, reads_text: bool | None = None) -> list[Finding]:
    """Check the data by itself, then against the world: fields, ranges, cameras, instructions, replay.

    reads_text: whether the policy reads instructions, None if unknown.
    """
    images = check_cameras(episodes)
    findings = [*check_finite_values(episodes), *(check_fields(episodes, world.spec) if world else ()), *images]
    findings += [*check_duplicates(episodes), *check_constant_elements(episodes)]
    if world is None:
        text = "not given: a replay needs the world to check units, signs, order and timing of the recording"
        findings.append(Finding("world", Health.UNKNOWN, text, "Set it: world=NAME."))
        if not _fails(findings, "finite values"):
            findings += [*check_constant_actions(episodes.actions, episodes.action_field), *check_spikes(episodes)]
        return findings
    findings += check_instructions(episodes, world, reads_text)
    if _fails(findings, "finite values") or episodes.action_field.shape != world.spec.action.shape:
        return findings
    findings += check_action_range(episodes.actions, world.spec)
    findings += check_images(episodes, world)
    data_fields, world_fields = episodes.observation_fields, world.spec.observation
    if all(data_fields[key].shape == world_fields[key].shape for key in world_fields if key in data_fields):
        replay_findings = check_replay(episodes, world)
        findings += replay_findings
        if not any(finding.problem for finding in replay_findings):
            timing = check_image_timing(episodes, world, images)
            findings = [*_without_repeated(findings, timing), *timing]
    if episodes.seeds is None:
        findings += check_spikes(episodes)
    if not any(finding.check in ("success labels", "ends of episodes") for finding in findings):
        findings += check_truncation(episodes, world.spec)
    return findings


def _without_repeated(findings: list[Finding], timing: list[Finding]) -> list[Finding]:
    """Drop findings of frozen cameras where the image-timing check reports the same in more detail."""
    repeated_checks = {finding.check for finding in timing if finding.measured.startswith(STANDS_STILL)}
    return [item for item in findings if not (item.check in repeated_checks and item.measured.startswith(STANDS_STILL))]


def examine_policy(
    episodes: Episodes, policy: Policy, generator: torch.Generator, success: float | None = None
) -> list[Finding]:
    """Check finite data against a policy: its fields, its normalisers, its actions at recorded states."""
    spec = policy.spec
    findings = check_policy_fields(spec.observation, spec.action, spec.fps, episodes)
    data_fields = episodes.observation_fields
    fits = all(key in data_fields and data_fields[key].shape == field.shape for key, field in spec.observation.items())
    if fits and episodes.action_field.shape == spec.action.shape:
        findings += check_normalizers(policy, episodes)
        findings += check_policy_on_data(policy, episodes, generator, success=success)
    return findings


def _fails(findings: list[Finding], check: str) -> bool:
    return any(finding.check == check and finding.health is Health.BAD for finding in findings)
