"""The kinds of policies, by name; the next one is one line here, an entry point, or a dotted path.

The class of a kind is called as cls(config, observation fields, action field, fps=, instructions=, values=, seed=),
and its `save(folder)` calls `robopolicy.policies.checkpoint.save_policy`. Where that is not enough it has
`build(config, spec, episodes, seed)`, which returns a fresh policy, and `load(folder, description, device)`, which
rebuilds it from a checkpoint whose config.json is `description`.
"""

import inspect
from typing import Any

from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import Kinds, Registry


class PolicyKinds(Kinds):
    """The kinds of policies; a controller in the place of one is told where it belongs."""

    def load(self, name: str) -> Any:
        """Import and return what `name` (or a dotted path) stands for. Raises ConfigError, also for a controller."""
        found = super().load(name)
        if _is_controller(found):
            raise ConfigError(
                f"'{name}' is a controller: it acts by act(observation) -> actions [B, A] and cannot learn, and a "
                f"policy acts by act(observation, generator, deterministic=). {_way_out(name)}"
            )
        if inspect.isfunction(found) and not hasattr(found, "configuration"):
            raise ConfigError(
                f"'{name}' is a function, and a policy is a class. Does it make a controller? {_way_out(name)}"
            )
        return found


def _way_out(name: str) -> str:
    return f"To imitate it, let `robopolicy collect` record it (controller={name}) and train a policy on that."


def _is_controller(found: Any) -> bool:
    """Whether an object or a class has `reset` and an `act` that takes an observation and nothing more."""
    act = getattr(found, "act", None)
    if not callable(act) or not callable(getattr(found, "reset", None)):
        return False
    itself = (found,) if inspect.isclass(found) else ()
    return _takes(act, *itself, {}) and not _takes(act, *itself, {}, None)


def _takes(call: Any, *given: Any) -> bool:
    """Whether `call` can be called with so many arguments."""
    try:
        inspect.signature(call).bind(*given)
    except (TypeError, ValueError):
        return False
    return True


POLICIES = PolicyKinds(
    "policy",
    "robopolicy.policies",
    {
        "diffusion": "robopolicy.policies.configuration:DenoisingPolicyConfig",
        "flow": "robopolicy.policies.configuration:DenoisingPolicyConfig",
        "token": "robopolicy.policies.token.configuration:TokenPolicyConfig",
        "joint": "robopolicy.policies.configuration:JointConfig",
        "lerobot": "robopolicy.policies.lerobot.configuration:LeRobotStart",
    },
)
LEFT_BEHIND = Registry(
    "policy",
    "",
    {
        "agent": "robopolicy.training.critics:AgentPolicy",
        "best_of": "robopolicy.training.critics:BestOfPolicy",
        "steered": "robopolicy.training.critics:SteeredPolicy",
    },
)
"""Policies that other trainings than imitation leave behind: their classes, for checkpoints."""
SAVED_AS = {"denoising_policy": "diffusion", "token_policy": "token", "world_model/joint": "joint"}
"""What checkpoints call a kind, where that is not its name."""
