"""`python -m robopolicy.plugins CHECKPOINT FOLDER`: export a robopolicy checkpoint as a folder for LeRobot's
--policy.path.
"""

import sys
from pathlib import Path

from robopolicy.core.errors import ConfigError, RobopolicyError


def export(checkpoint: Path, folder: Path) -> None:
    """Write a robopolicy `checkpoint`, with LeRobot's config.json and processors, to `folder`.

    Raises CheckpointError where the checkpoint cannot be loaded, ConfigError where the folder holds something.
    """
    from robopolicy.plugins.configuration_robopolicy import RobopolicyConfig
    from robopolicy.plugins.modeling_robopolicy import RobopolicyPolicy
    from robopolicy.plugins.processor_robopolicy import make_robopolicy_pre_post_processors

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose a new folder.")
    config = RobopolicyConfig(checkpoint=checkpoint, device="cpu", push_to_hub=False)
    for part in (RobopolicyPolicy(config), *make_robopolicy_pre_post_processors(config)):
        part.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """Export, and return the exit status: 2 for an error that the user can fix."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        export(*map(Path, arguments))
    except RobopolicyError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"lerobot-eval --policy.path={arguments[1]} --env.type=robopolicy")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
