"""The kinds of policies, by name; the next one is one line here, an entry point, or a dotted path.

The class of a kind is called as cls(config, observation fields, action field, fps=, instructions=, values=, seed=),
and its `save(folder)` calls `robopolicy.policies.checkpoint.save_policy`. Where that is not enough it has
`build(config, spec, episodes, seed)`, which returns a fresh policy, and `load(folder, description, device)`, which
rebuilds it from a checkpoint whose config.json is `description`.
"""

from robopolicy.core.registry import Kinds

POLICIES = Kinds(
    "policy",
    "robopolicy.policies",
    {
        "diffusion": "robopolicy.policies.configuration:DenoisingPolicyConfig",
        "flow": "robopolicy.policies.configuration:DenoisingPolicyConfig",
        "token": "robopolicy.policies.token.configuration:TokenPolicyConfig",
        "joint": "robopolicy.policies.joint_configuration:JointConfig",
    },
)
SAVED_AS = {"denoising_policy": "diffusion", "token_policy": "token", "world_model/joint": "joint"}
"""What checkpoints call a kind, where that is not its name."""
