"""All settings: sections with their defaults (`sections/`), composed by hydra with recipes and the command line.

Nothing here imports torch. `configs/recipe/<name>.yaml` contains the differences from the defaults.
"""

from robopolicy.configuration.composition import compose, groups, read_yaml, to_yaml
from robopolicy.configuration.config import Config
from robopolicy.configuration.description import Described, described
from robopolicy.configuration.downloads import with_downloads

__all__ = ["Config", "Described", "compose", "described", "groups", "read_yaml", "to_yaml", "with_downloads"]
