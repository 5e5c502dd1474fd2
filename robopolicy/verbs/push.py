"""Uploads a checkpoint or dataset to the Hugging Face hub, with a card written from the results of its run.

Safetensors, JSON, the card and the run's videos are uploaded, and parquet and mp4 files of a dataset; never pickles.
Given a run folder, its checkpoint (or dataset) is uploaded; given a run of evaluate or improve, the checkpoint that
this run evaluated or chose, with its results. The card states success with Wilson intervals, the base next to it, the
paired difference, command, seed, versions, and what was not measured. A README.md that is already in the folder is
uploaded unchanged: push.dry_run=true writes it for editing. A new repository is private unless push.private=false. Log
in first with 'hf auth login'. Users with read access pass hf://USER/NAME as a checkpoint or dataset.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.hub import CONTENT, HubName, Kind, endpoint, files_to_upload, hub_errors, hub_name
from robopolicy.core.storage import read_object, write_atomic
from robopolicy.data.lerobot_reading import is_dataset
from robopolicy.evaluation.cards import dataset_card, model_card
from robopolicy.policies.loading import checkpoint_in
from robopolicy.runs import RESULT, output, publish
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Upload a checkpoint or dataset to the Hugging Face hub",
    sections=("push",),
    example="robopolicy push runs/finetune/push_cube/0 USER/push_cube push.dry_run=true",
    targets=("push.folder", "push.repository"),
)
CARD = "README.md"


@dataclass(frozen=True)
class Upload:
    """Files to upload. folder: the checkpoint or dataset; run: the run folder with its results, None if unknown; films:
    the run's videos; files, left_out: paths relative to `folder`.
    """

    folder: Path
    kind: Kind
    run: Path | None
    films: list[Path] = field(default_factory=list[Path])
    files: list[Path] = field(default_factory=list[Path])
    left_out: list[Path] = field(default_factory=list[Path])

    def sources(self) -> dict[str, Path]:
        """Return path in the repository -> local file, without the card."""
        local_files = {path.as_posix(): self.folder / path for path in self.files if path.as_posix() != CARD}
        return local_files | {path.name: path for path in self.films}


def run(config: Config) -> int:
    """Write the card, list the files, and upload them unless push.dry_run."""
    section = config.push
    if section.folder is None or not section.repository:
        raise ConfigError("Folder and repository are required. Usage: robopolicy push FOLDER USER/NAME")
    upload = upload_of(section.folder)
    name = hub_name(section.repository, upload.kind)
    if name is None or name.revision:
        raise ConfigError(
            f"push.repository={section.repository} is not a repository name: write USER/NAME with letters, digits, "
            "'-', '_' and '.'."
        )
    name = HubName(name.repository, upload.kind, explicit=True)
    card, is_generated = card_of(upload, name)
    if section.dry_run:
        write_atomic(upload.folder / CARD, card)
        print_files(upload, is_generated)
        output.print(f"Card: {upload.folder / CARD}. Nothing was uploaded: unset push.dry_run to upload.")
        return 0
    print_files(upload, is_generated)
    private = send(upload, name, card, section.private)
    page = f"{endpoint()}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
    visibility = "private: visible to you and your organisation" if private else "public: visible to everyone"
    output.print(f"Uploaded to {page} ({visibility}).", soft_wrap=True)
    use = "robopolicy train train.data=" if name.kind == "dataset" else "robopolicy evaluate "
    output.print(f"Use it: {use}{name}", soft_wrap=True)
    publish(config, {"repository": str(name), "page": page, "private": private, "files": sorted(upload.sources())})
    return 0


def upload_of(path: Path) -> Upload:
    """Return the files to upload of a checkpoint, dataset or run folder.

    Raises ConfigError when `path` is none of them or contains no safe weights, DataError when it is damaged.
    """
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a folder: pass a checkpoint, a dataset or a run, such as runs/finetune/push_t/0."
        )
    folder, run_folder = _inside(path)
    if is_dataset(folder):
        kind: Kind = "dataset"
        films: list[Path] = []
    else:
        kind, folder = "model", checkpoint_in(folder)
        films = sorted(film for film in (run_folder.glob("*.mp4") if run_folder else ()) if film.is_file())
    files, left_out = files_to_upload(folder, kind)
    suffix = CONTENT[kind]
    if not any(file.suffix == suffix for file in files):
        raise ConfigError(f"{folder} contains no {suffix} file, so there is nothing to upload: was its run finished?")
    return Upload(folder, kind, run_folder, films, files, left_out)


def _inside(path: Path) -> tuple[Path, Path | None]:
    """Return the checkpoint or dataset that `path` is or contains, and the run folder with its results if there is
    one.
    """
    for part in ("checkpoint", "dataset"):
        if (path / part).is_dir() and not (path / "config.json").exists():
            return path / part, path
    if (path / RESULT).is_file() and not (path / "config.json").exists():
        result = read_object(path / RESULT, DataError)
        evaluated, improved = result.get("policy"), result.get("improve")
        checkpoint = evaluated.get("checkpoint") if isinstance(evaluated, dict) else None
        checkpoint = improved.get("policy") if isinstance(improved, dict) else checkpoint
        if checkpoint and Path(str(checkpoint)).is_dir():
            return Path(str(checkpoint)), path
        raise ConfigError(f"{path} is a run without a checkpoint or dataset: name the folder to upload.")
    above = path.absolute().parent
    return path, above if (above / RESULT).is_file() else None


def card_of(upload: Upload, name: HubName) -> tuple[str, bool]:
    """Return the card, and whether it was written from the run: a README.md in the folder is used unchanged."""
    card_file = upload.folder / CARD
    if card_file.is_file():
        return card_file.read_text(encoding="utf-8"), False
    if upload.kind == "dataset":
        return dataset_card(upload.folder, name.repository, upload.run), True
    return model_card(upload.folder, name.repository, upload.run, [film.name for film in upload.films]), True


def print_files(upload: Upload, written: bool) -> None:
    """Print the uploaded files with sizes, and the omitted ones."""
    output.print(f"{CARD}: {'written from the run' if written else f'as it is in {upload.folder}'}", soft_wrap=True)
    for place, source in upload.sources().items():
        output.print(f"{place}: {source.stat().st_size:,} bytes", markup=False, soft_wrap=True)
    if upload.left_out:
        names = ", ".join(path.as_posix() for path in upload.left_out[:5])
        more = f" and {len(upload.left_out) - 5} more" if len(upload.left_out) > 5 else ""
        output.print(f"Left out (neither safetensors nor JSON): {names}{more}", markup=False, soft_wrap=True)


def send(upload: Upload, name: HubName, card: str, private: bool) -> bool:
    """Create the repository if needed, upload everything in one commit, and return whether the repository is private.

    Files that are there already are not sent again. Raises ConfigError or StorageError as `core.hub.hub_errors`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="robopolicy")
    repository: dict[str, Any] = {"repo_id": name.repository, "repo_type": name.kind}
    additions: list[Any] = [CommitOperationAdd(CARD, card.encode())]
    additions += [CommitOperationAdd(place, source) for place, source in upload.sources().items()]
    with hub_errors(name):
        api.create_repo(**repository, private=private, exist_ok=True)
        before = api.list_repo_files(**repository)
        api.create_commit(**repository, operations=additions, commit_message="Upload with robopolicy")
        if upload.kind == "dataset":
            _tag_version(api, upload.folder, name)
        info: Any = api.repo_info(**repository)
    sent_paths = {addition.path_in_repo for addition in additions}
    if stale := [file for file in before if file not in sent_paths and not file.startswith(".git")]:
        more = ", ..." if len(stale) > 5 else ""
        output.print(
            f"The repository also contains {', '.join(stale[:5])}{more}, which this folder does not: delete what is "
            "outdated on its page.",
            markup=False,
            soft_wrap=True,
        )
    return bool(info.private)


def _tag_version(api: Any, folder: Path, name: HubName) -> None:
    """Tag the commit with the dataset's format version, by which LeRobot finds a revision that it can read."""
    from huggingface_hub.errors import HfHubHTTPError

    version = str(read_object(folder / "meta" / "info.json", DataError)["codebase_version"])
    tag: dict[str, Any] = {"repo_id": name.repository, "repo_type": name.kind, "tag": version}
    with suppress(HfHubHTTPError):
        api.delete_tag(**tag)
    api.create_tag(**tag)
