"""Agents that learn from recorded data, by name."""

from robopolicy.core.registry import Kinds

AGENTS = Kinds(
    "offline agent",
    "robopolicy.offline_agents",
    {
        "iql": "robopolicy.rl.offline.configuration:IqlConfig",
        "td3_bc": "robopolicy.rl.offline.configuration:Td3BcConfig",
        "rebrac": "robopolicy.rl.offline.configuration:ReBracConfig",
        "prdc": "robopolicy.rl.offline.configuration:PrdcConfig",
        "cql": "robopolicy.rl.offline.configuration:CqlConfig",
        "cal_ql": "robopolicy.rl.offline.configuration:CalQlConfig",
        "edac": "robopolicy.rl.offline.configuration:SacConfig",
        "rlpd": "robopolicy.rl.offline.configuration:RlpdConfig",
    },
)
"""Name -> configuration, a dataclass whose `builds` names the `OfflineAgent`: Class(config, state, action, seed)."""
