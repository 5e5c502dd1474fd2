"""Registry of policy kinds; extend it with a line here, an entry point, or an import path.

The class of a kind is called as cls(config, observation fields, action field, fps=, instructions=, values=, seed=), and
its `save(folder)` calls `robopolicy.policies.checkpoint.save_policy`. For other needs it defines `build(config, spec,
episodes, seed)`, which returns a new policy, and `load(folder, description, device)`, which restores it from a
checkpoint whose config.json is `description`.
"""

import inspect
from typing import Any

from robopolicy.core.errors import ConfigError
from robopolicy.core.registry import Kinds, Registry


class PolicyKinds(Kinds):
    """Registry of policy kinds; rejects controllers with a hint where to pass them."""

    def load(self, name: str) -> Any:
        """Import and return the object for `name` (or an import path). Raises ConfigError, also for a controller."""
        target = super().load(name)
        if _is_controller(target):
            raise ConfigError(
                f"'{name}' is a controller: it has act(observation) -> actions [B, A] and cannot be trained, but a "
                f"policy has act(observation, generator, deterministic=). {_way_out(name)}"
            )
        if inspect.isfunction(target) and not hasattr(target, "configuration"):
            raise ConfigError(
                f"'{name}' is a function, but a policy is a class. Does it create a controller? {_way_out(name)}"
            )
        return target


def _way_out(name: str) -> str:
    return f"To imitate it, record it with `robopolicy collect` (controller={name}) and train a policy on that data."


def _is_controller(found: Any) -> bool:
    """Whether an object or class has `reset` and an `act` with the observation as only argument."""
    act = getattr(found, "act", None)
    if not callable(act) or not callable(getattr(found, "reset", None)):
        return False
    itself = (found,) if inspect.isclass(found) else ()
    return _takes(act, *itself, {}) and not _takes(act, *itself, {}, None)


def _takes(call: Any, *given: Any) -> bool:
    """Whether `call` accepts this number of arguments."""
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
        "memory": "robopolicy.policies.configuration:MemoryPolicyConfig",
        "joint_video": "worldmodels.configuration:JointVideoConfig",
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
        "seeking": "robopolicy.training.offline.seeking:SeekingPolicy",
        "edited": "robopolicy.training.editing:EditedPolicy",
    },
)
"""Policy classes produced by trainings other than imitation, for loading checkpoints."""
SAVED_AS = {"denoising_policy": "diffusion", "token_policy": "token", "world_model/joint": "joint"}
"""Kind name in checkpoints -> registered name, if they differ."""
