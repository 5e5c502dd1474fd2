"""Plugins for LeRobot: its commands run robopolicy's checkpoints (`--policy.type=robopolicy`) and worlds
(`--env.type=robopolicy`).

LeRobot finds classes by the names of modules: `configuration_robopolicy` -> `modeling_robopolicy`,
`processor_robopolicy`. It imports whatever installed distribution is called lerobot_policy_* or lerobot_env_*: the two
folders beside this file are such distributions, each of one line. `--policy.discover_packages_path=robopolicy.plugins`
does without them.
"""
