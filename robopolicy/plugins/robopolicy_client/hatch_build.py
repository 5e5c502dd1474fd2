"""Adds the files of `robopolicy.client` to the wheel and the sdist, as the package `robopolicy_client`."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports]


class Sources(BuildHookInterface):
    """Finds the files in a checkout, two folders up; an sdist has them as a package, which hatch finds itself."""

    def initialize(self, version: str, build_data: "dict[str, Any]") -> None:
        """Add the package to what is built."""
        root = Path(self.root)
        if not (root / "robopolicy_client").is_dir():
            build_data["force_include"][str(root.parents[1] / "client")] = "robopolicy_client"
