"""Where the shipped files are: beside the packages in a checkout, inside the package in a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def resource(kind: str, name: str = "") -> Path:
    """Return the path of a shipped file or folder; kind is "assets" or "configs".

    Raises FileNotFoundError where the installation lacks the folder of that kind; the file itself is not looked for.
    """
    for root in (_PACKAGE.parent / kind, _PACKAGE / "resources" / kind):
        if root.is_dir():
            return root / name
    raise FileNotFoundError(f"The '{kind}' folder is missing from this installation: reinstall robopolicy.")
