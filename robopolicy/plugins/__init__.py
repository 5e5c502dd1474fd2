"""Plugins for LeRobot: its commands run robopolicy's checkpoints (`--policy.type=robopolicy`) and worlds
(`--env.type=robopolicy`).

LeRobot finds classes by module names: `configuration_robopolicy` -> `modeling_robopolicy`, `processor_robopolicy`. It
imports every installed distribution with a name like lerobot_policy_* or lerobot_env_*; the two folders next to this
file are such distributions, of one line each. `--policy.discover_packages_path=robopolicy.plugins` works without them.
"""
