"""Checkpoints and datasets on the Hugging Face hub: names, downloads of safe files only, and errors in one sentence.

A name is `USER/NAME` or `hf://USER/NAME`, for a dataset also `hf://datasets/USER/NAME`, each with an optional
`@REVISION` (branch, tag or commit). Downloads go to huggingface_hub's own cache and resume there. Pickles are never
downloaded: they can run any code when they are read.
"""

import re
import shutil
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.errors import ConfigError, RobopolicyNote, StorageError, in_one_line
from robopolicy.core.progress import console
from robopolicy.core.storage import recover_folder, write_failure

Kind = Literal["model", "dataset"]

PREFIX = "hf:"
SAFE: dict[Kind, tuple[str, ...]] = {
    "model": ("*.safetensors", "*.json", "*.md", "*.txt"),
    "dataset": ("*.parquet", "*.mp4", "*.json", "*.jsonl", "*.md", "*.safetensors", "*.png"),
}
"""Patterns of the files that are downloaded. Those of robopolicy's own datasets contain a side table as safetensors."""
CONTENT: dict[Kind, str] = {"model": ".safetensors", "dataset": ".parquet"}
"""Ending of the files without which a repository has no weights or data."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy")
"""Endings of files that are, or may be, pickles."""

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(hf:/{{1,2}})?(?:(datasets|models)/(?=.*/))?({_PART}/{_PART})(?:@([\w./-]+))?")
_STORED = re.compile(r"(model|dataset)s--(.+?)--(.+)")


@dataclass(frozen=True)
class HubName:
    """A repository on the hub. revision: branch, tag or commit, None for the default branch; explicit: written with
    hf://, so that it cannot mean a local folder.
    """

    repository: str
    kind: Kind
    revision: str | None = None
    explicit: bool = False

    def __str__(self) -> str:
        place = "datasets/" if self.kind == "dataset" else ""
        return f"hf://{place}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def hub_name(text: str, kind: Kind) -> HubName | None:
    """Return the repository that `text` names, None for text that can only be a path; kind: what a name without
    `datasets/` means.
    """
    match = _NAME.fullmatch(text)
    if match is None or "--" in match[3] or ".." in match[3] or (match[2] and not match[1]):
        return None
    kinds: dict[str | None, Kind] = {"datasets": "dataset", "models": "model"}
    return HubName(match[3], kinds.get(match[2], kind), match[4], bool(match[1]))


def local_folder(given: Path | str, kind: Kind) -> Path:
    """Return the local folder of a checkpoint or dataset: `given` itself, or the download of the repository it names.

    An existing local folder takes precedence over a repository of the same name, and so does the path of one that is
    missing in an existing folder USER; a note says so where that is ambiguous. Raises ConfigError or StorageError as
    `download`, and ConfigError for an invalid hf:// name.
    """
    text, path = str(given), Path(given)
    name = hub_name(text, kind)
    if name is None:
        if text.startswith(PREFIX):
            hub_text = re.sub("^hf:/+", "hf://", text)  # a path has one slash
            raise ConfigError(
                f"'{hub_text}' is not a name on the hub: write hf://USER/NAME, hf://datasets/USER/NAME, or one of them "
                "with @REVISION."
            )
        return path
    if not name.explicit:
        if path.exists() or recover_folder(path).exists():
            if stored_folder(name).is_dir():
                _note(f"{text} is read as the local folder; the repository on the hub is {name}.")
            return path
        if path.parent.is_dir():
            _note(f"{text} is read as a path, because the folder {path.parent} exists; on the hub it would be {name}.")
            return path
    return download(name)


def _note(text: str) -> None:
    warnings.warn(text, RobopolicyNote, stacklevel=4)


def download(name: HubName) -> Path:
    """Download the safe files of a repository into huggingface_hub's cache and return their folder.

    Complete files of an earlier, interrupted download are kept. Without a network, or with HF_HUB_OFFLINE, a complete
    copy in the cache is used. Raises ConfigError when the repository cannot be reached, does not exist, is private or
    contains no safe weights or data, StorageError when the disk is full.
    """
    allowed = list(SAFE[name.kind])
    with hub_errors(name):
        try:
            files = _files(name)
        except Exception as error:
            if not is_unreachable(error):
                raise
            return _cached(name, error)
        _require_safe(name, [file for file, _, _ in files])
        missing_sizes = [
            size for file, size, cached in files if not cached and any(fnmatch(file, each) for each in allowed)
        ]
        _require_space(name, sum(missing_sizes))
        if missing_sizes:
            text = f"Downloading {name}: {len(missing_sizes)} files, {sum(missing_sizes) / 1e6:.1f} MB."
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        return _snapshot(name)


def _files(name: HubName) -> list[tuple[str, int, bool]]:
    """Return path, size in bytes, and whether it is in the cache, of every file of the repository."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    api: Any = HfApi()
    info = api.repo_info(name.repository, revision=name.revision, repo_type=name.kind, files_metadata=True)
    return [
        (
            file.rfilename,
            file.size or 0,
            isinstance(
                try_to_load_from_cache(name.repository, file.rfilename, revision=info.sha, repo_type=name.kind), str
            ),
        )
        for file in info.siblings or ()
    ]


def _require_safe(name: HubName, files: list[str]) -> None:
    """Raise ConfigError unless the repository contains weights as safetensors, or data as parquet."""
    if any(file.endswith(CONTENT[name.kind]) for file in files):
        return
    pickled = [file for file in files if file.endswith(PICKLED)]
    if pickled:
        raise ConfigError(
            f"{name} contains only pickled weights ({', '.join(pickled[:3])}), which can run any code when they are "
            "read: they are never downloaded. Ask its author for safetensors, or convert it at "
            "https://huggingface.co/spaces/safetensors/convert."
        )
    required_content = (
        "weights as safetensors" if name.kind == "model" else "data as parquet, which a LeRobotDataset has"
    )
    raise ConfigError(f"{name} contains no {required_content}: is it the repository that you meant?")


def _require_space(name: HubName, needed: int) -> None:
    """Raise StorageError if the cache's disk has less than `needed` bytes free."""
    place = cache_folder()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise StorageError(
            f"{name} takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {place}: free some, or move the "
            "cache with HF_HOME=FOLDER."
        )


def _cached(name: HubName, reason: Exception) -> Path:
    """Return the copy of a repository in the cache; raises ConfigError if there is no complete one."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = _snapshot(name, local_files_only=True)
    except LocalEntryNotFoundError as error:
        offline = isinstance(reason, OfflineModeIsEnabled)
        reason_text = (
            "HF_HUB_OFFLINE is set" if offline else f"{endpoint()} cannot be reached ({in_one_line(reason, 80)})"
        )
        way = "unset HF_HUB_OFFLINE" if offline else "connect to the network"
        local = "" if name.explicit else f"{name.repository} is not a local folder; "
        repo = f"{name.repository} --repo-type dataset" if name.kind == "dataset" else name.repository
        raise ConfigError(
            f"{local}{name} cannot be downloaded: {reason_text}, and its cache has no complete copy. Either {way}, or "
            f"fetch it elsewhere with 'hf download {repo} --local-dir FOLDER' and name that folder."
        ) from error
    if not isinstance(reason, OfflineModeIsEnabled):
        _note(f"{endpoint()} cannot be reached: the copy of {name} in the cache is used, {folder.name[:8]}.")
    return folder


def _snapshot(name: HubName, local_files_only: bool = False) -> Path:
    """Return the folder with all safe files of a repository, after downloading those that the cache lacks."""
    from huggingface_hub import HfApi

    api: Any = HfApi()
    arguments = {"repo_type": name.kind, "revision": name.revision, "allow_patterns": list(SAFE[name.kind])}
    return Path(api.snapshot_download(name.repository, **arguments, local_files_only=local_files_only))


def is_unreachable(error: Exception) -> bool:
    """Whether an error of huggingface_hub means that the hub did not answer: no network, offline, or a failing
    server.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, OfflineModeIsEnabled | httpx.TransportError)


@contextmanager
def hub_errors(name: HubName) -> Generator[None, None, None]:
    """Raise huggingface_hub's errors about a repository as ConfigError or StorageError with the remedy."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"{name} cannot be reached: HF_HUB_OFFLINE is set. Unset it and try again.") from error
    except HfHubHTTPError as error:
        raise ConfigError(_refused(name, error)) from error
    except httpx.TransportError as error:
        reason = in_one_line(error, 100)
        raise ConfigError(
            f"{endpoint()} cannot be reached ({reason}): connect to the network and run it again; {name} continues "
            "where it stopped."
        ) from error
    except OSError as error:
        if error.errno is None:
            raise ConfigError(f"{name}: {in_one_line(error)}. Run it again.") from error
        raise StorageError(
            write_failure(error.filename or cache_folder(), error).replace("run.root=", "HF_HOME=")
        ) from error


def _refused(name: HubName, error: Any) -> str:
    """Return why the hub refused a request about a repository, and the remedy, in one sentence."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    login = "log in with 'hf auth login'"
    if isinstance(error, GatedRepoError):
        page = f"{endpoint()}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
        return f"{name} is gated: accept its conditions on {page}, then {login}."
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repository} exists on the hub, but has no branch, tag or commit '{name.revision}'."
    if isinstance(error, RepositoryNotFoundError):
        other = _other_kind(name)
        if other:
            return other
        if get_token() is None:
            return f"{name} does not exist on the hub, or is private: if it is yours, {login}."
        return f"{name} does not exist on the hub, or your token may not read it: check the name, or {login}."
    if status == 401:
        return f"The hub refuses your token, which is invalid or has expired: {login}."
    if status == 403:
        return (
            f"Your token is not allowed to do this with {name}: {login} with a token that may (write access to upload)."
        )
    return f"The hub refuses {name} (status {status}: {in_one_line(error.server_message or error, 160)})."


def _other_kind(name: HubName) -> str:
    """Return the sentence for a repository that exists as the other kind, "" if it does not."""
    from huggingface_hub import HfApi

    kind: Kind = "dataset" if name.kind == "model" else "model"
    other = HubName(name.repository, kind, name.revision, True)
    try:
        exists = HfApi().repo_exists(name.repository, repo_type=kind)
    except Exception:  # the first answer is the one to report
        return ""
    return f"{name.repository} is a {kind} on the hub ({other}), where a {name.kind} is needed." if exists else ""


def endpoint() -> str:
    """Return the hub's address."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def cache_folder() -> Path:
    """Return huggingface_hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def stored_folder(name: HubName) -> Path:
    """Return the folder of a repository in the cache, which may not exist."""
    return cache_folder() / f"{name.kind}s--{name.repository.replace('/', '--')}"


def repository_of(path: Path | str) -> HubName | None:
    """Return the repository, with the commit as revision, whose download lies at `path`; None for other folders."""
    parts = Path(path).parts
    for place, commit in zip(parts, parts[2:], strict=False):
        match = _STORED.fullmatch(place)
        if match and "snapshots" in parts:
            kind: Kind = "model" if match[1] == "model" else "dataset"
            return HubName(f"{match[2]}/{match[3]}", kind, commit, True)
    return None


def blobs_of(folder: Path) -> Path | None:
    """Return the folder of a download's files, to which those in `folder` are links; None for other folders."""
    repository = folder.parent.parent
    return repository / "blobs" if folder.parent.name == "snapshots" and _STORED.fullmatch(repository.name) else None


def files_to_upload(folder: Path, kind: Kind) -> tuple[list[Path], list[Path]]:
    """Return the files below `folder` that may be uploaded, and those that are left out, relative to it, sorted."""
    paths: Iterable[Path] = (path for path in sorted(folder.rglob("*")) if path.is_file())
    relative = [path.relative_to(folder) for path in paths]
    visible = [path for path in relative if not any(part.startswith(".") for part in path.parts)]
    safe = [path for path in visible if any(fnmatch(path.name, each) for each in SAFE[kind])]
    return safe, [path for path in relative if path not in safe]
