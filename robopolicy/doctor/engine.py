"""Check of the way of deciding that `robopolicy optimize` has stored beside a checkpoint."""

from pathlib import Path

import torch

from robopolicy.core.delayed import recorded_for
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Policy
from robopolicy.doctor.findings import Finding, Health
from robopolicy.inference.comparison import EXACT, action_error, decided
from robopolicy.inference.engine import with_engine
from robopolicy.inference.plan import load_plan
from robopolicy.rl.offline.decisions import observed_at

CHECK, FRAMES = "engine", 128
GROWN = 2.0
"""How many times larger than measured an error may be: other observations, another processor."""


def check_plan(folder: Path, policy: Policy, episodes: Episodes) -> list[Finding]:
    """Compare the stored way of deciding with the policy itself, at recorded observations; nothing where none is."""
    plan = load_plan(folder)
    if plan is None:
        return []
    again = f"robopolicy optimize {folder} makes it anew, and without inference.json the policy decides as trained."
    if plan.refusal(folder):
        return [Finding(CHECK, Health.WARNING, "inference.json was made for other weights", again)]
    episodes = recorded_for(policy, episodes)
    frames = torch.linspace(0, episodes.step_count - 1, min(FRAMES, episodes.step_count)).long()
    frames = frames + episodes.episode_of_step.cpu()[frames]
    seen = observed_at(episodes, frames.to(episodes.device), policy.spec.history, list(policy.spec.observation))
    try:
        fast = with_engine(policy, plan.config, plan.cache)
    except ConfigError as error:
        return [Finding(CHECK, Health.BAD, str(error), again)]
    found = action_error(decided(fast, seen), decided(policy, seen))
    exact = plan.config.exact and plan.cache is None
    allowed = EXACT if exact else GROWN * float(plan.measured.get("error", 0.0)) + EXACT
    measured = (
        f"{plan.config.engine}: actions {found:.2g} standard deviations from the reference, {allowed:.2g} allowed"
    )
    return [Finding(CHECK, Health.GOOD, measured) if found <= allowed else Finding(CHECK, Health.BAD, measured, again)]
