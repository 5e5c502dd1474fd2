"""Model and dataset cards: the README.md of a repository on the Hugging Face hub, written from a run's own files."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.core.errors import CheckpointError, DataError
from robopolicy.core.hub import HubName, repository_of
from robopolicy.core.storage import read_errors, read_object, read_text
from robopolicy.data.lerobot_format import recorded_origin
from robopolicy.evaluation.report import JUDGED
from robopolicy.evaluation.tables import difference_text, evaluation_text, markdown_table
from robopolicy.policies.loading import foreign_format, open_checkpoint, saved_origin

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

HERE = Path(__file__).parent
MODES = ("deterministic", "stochastic")
FEW = 100
"""Number of episodes below which a success rate is uncertain."""
ASSURED = "Other tasks, objects, cameras or initial states than those of the evaluation."


def model_card(checkpoint: Path, repository: str, run: Path | None = None, films: Sequence[str] = ()) -> str:
    """Return the card of a checkpoint: its kind, its success and the base's with intervals, its training, and what was
    not measured.

    run: folder of the run with its result.json, None if unknown; films: names of videos in the repository. Raises
    CheckpointError or DataError when the files are damaged.
    """
    from huggingface_hub import ModelCard, ModelCardData

    files = _Run(run)
    described = open_checkpoint(checkpoint)
    foreign = foreign_format(described)
    library = "robopolicy" if foreign is None else foreign.library.lower()
    kind = _kind(described.description)
    world = _world(checkpoint, files)
    bases = [name.repository for name in files.named() if name.kind == "model"]
    data = ModelCardData(
        library_name=library,
        pipeline_tag="robotics",
        tags=sorted({"robotics", "robopolicy", library, *filter(None, (_tag(kind), files.verb, _tag(world)))}),
        datasets=sorted({name.repository for name in files.named() if name.kind == "dataset"}) or None,
        base_model=bases[0] if len(bases) == 1 else bases or None,
        model_name=repository.rpartition("/")[2],
        eval_results=files.eval_results(world),
    )
    card = ModelCard.from_template(
        data,
        template_str=(HERE / "model_card.md.jinja").read_text(),
        name=repository.rpartition("/")[2],
        summary=_summary(kind, files.verb, world),
        films=films,
        success=files.success(),
        beside="the base" if files.first() in ("base", "") else f"`{files.first()}`",
        difference=difference_text(files.result["difference"]) if "difference" in files.result else "",
        repository=repository,
        world_setting=f" world={world}" if world and saved_origin(described) is None else "",
        library=library,
        is_policy=files.verb != "worldmodel",
        command=files.command,
        origin=_items(files.origin()),
        settings=files.settings.strip(),
        unmeasured=_items(files.unmeasured(world)),
    )
    return _tidy(str(card))


def dataset_card(folder: Path, repository: str, run: Path | None = None) -> str:
    """Return the card of a LeRobotDataset: its size, its columns, and how it was recorded.

    run: folder of the run that recorded it, None if unknown. Raises DataError when meta/info.json is damaged.
    """
    from huggingface_hub import DatasetCard, DatasetCardData

    files = _Run(run)
    with read_errors(folder / "meta" / "info.json"):
        info = read_object(folder / "meta" / "info.json", DataError)
        size = f"{int(info['total_episodes']):,} episodes", f"{int(info['total_frames']):,} steps at {info['fps']} Hz"
        rows = [
            (f"`{name}`", str(column["dtype"]), "x".join(map(str, column["shape"])))
            for name, column in info["features"].items()
        ]
        version = str(info["codebase_version"])
    origin = recorded_origin(folder)
    data = DatasetCardData(
        task_categories=["robotics"],
        tags=sorted({"LeRobot", "robopolicy", *filter(None, [origin and _tag(origin.name)])}),
        configs=[{"config_name": "default", "data_files": "data/*/*.parquet"}],
    )
    world = f" of `{origin.name}`" if origin else ""
    card = DatasetCard.from_template(
        data,
        template_str=(HERE / "dataset_card.md.jinja").read_text(),
        name=repository.rpartition("/")[2],
        summary=f"{size[0]}{world}, {size[1]}.",
        features=markdown_table(("column", "type", "shape"), rows),
        repository=repository,
        version=version,
        origin=_items(([f"Command: `{files.command}`"] if files.command else []) + files.origin()),
    )
    return _tidy(str(card))


class _Run:
    """The files of a run folder that a card reads: result.json, config.yaml and versions.json, each if it exists."""

    def __init__(self, path: Path | None):
        self.path = path
        self.result = self._object("result.json")
        self.versions = self._object("versions.json")
        settings = None if path is None else path / "config.yaml"
        self.settings = _without_home(read_text(settings, DataError)) if settings and settings.exists() else ""
        self.verb = "" if path is None else path.absolute().parent.parent.name

    def _object(self, name: str) -> dict[str, Any]:
        if self.path is None or not (self.path / name).exists():
            return {}
        return read_object(self.path / name, DataError)

    @property
    def command(self) -> str:
        """The command line that started the run, without the folder of the program."""
        words = [str(word) for word in self.versions.get("command", ())]
        return _without_home(shlex.join(["robopolicy", *words[1:]])) if len(words) > 1 else ""

    def evaluated(self) -> dict[str, Mapping[str, Any]]:
        """Return the evaluation of every policy by name: the base first, the resulting policy last."""
        return {name: self.result[name] for name in JUDGED if isinstance(self.result.get(name), Mapping)}

    def final(self) -> Mapping[str, Any]:
        """Return the resulting policy's evaluation without exploration noise, {} if there is none."""
        evaluations = list(self.evaluated().values())
        return evaluations[-1]["deterministic"] if evaluations else {}

    def first(self) -> str:
        """Return the name of the policy that the last one is compared with, "" if there is none."""
        return next(iter(self.evaluated()), "")

    def success(self) -> str:
        """Return a table of success rates, or of returns where no success is reported, "" without evaluations."""
        evaluations = self.evaluated()
        if not evaluations:
            return ""
        rows: list[tuple[str, ...]] = []
        with read_errors(self.path or Path(), "Its result.json is damaged"):
            for name, each in evaluations.items():
                plain = each["deterministic"]
                rates = [evaluation_text(each[mode]) for mode in MODES]
                rows.append((name, str(plain["world"]), *rates, str(plain["episodes"])))
        return markdown_table(("policy", "world", "without exploration noise", "with noise", "episodes"), rows)

    def eval_results(self, world: str) -> "list[EvalResult] | None":
        """Return the success of the resulting policy for the card's metadata, None if there is none."""
        from huggingface_hub import EvalResult

        plain = self.final()
        if not plain or not plain.get("reports_success", True):
            return None
        name = world or str(plain["world"])
        shared: dict[str, Any] = {"task_type": "robotics", "dataset_type": _tag(name), "dataset_name": name}
        return [
            EvalResult(
                **shared,
                metric_type="success_rate",
                metric_name=f"success rate, {plain['episodes']} episodes",
                metric_value=round(float(plain["success_rate"]), 4),
            )
        ]

    def named(self) -> list[HubName]:
        """Return the repositories whose downloads the run started from, in the order of its settings."""
        texts = re.findall(r"[^\s'\",\[\]]*(?:models|datasets)--[^\s'\",\[\]]+", self.settings)
        repositories = [repository_of(text) for text in [*texts, str(self.result.get("base_checkpoint", ""))]]
        return list({name.repository: name for name in repositories if name is not None}.values())

    def origin(self) -> list[str]:
        """Describe the training of the checkpoint, one sentence each: seed, base, steps, versions."""
        lines: list[str] = []
        if "seed" in self.versions:
            lines.append(f"Training seed: {self.versions['seed']}")
        if "base_checkpoint" in self.result:
            base = repository_of(self.result["base_checkpoint"]) or _without_home(str(self.result["base_checkpoint"]))
            weights = self.result.get("base_weights", "")
            lines.append(f"Base policy: `{base}`" + (f", sha256 of its weights {weights}" if weights else ""))
        if "env_steps" in self.result:
            lines.append(f"Environment steps of training: {self.result['env_steps']:,}")
        if "seconds" in self.result:
            lines.append(
                f"Training time: {self.result['seconds']:.0f} s on {self.versions.get('processor', 'unknown')}"
            )
        packages = self.versions.get("packages", {})
        if packages:
            names = ", ".join(f"{name} {version}" for name, version in packages.items())
            lines.append(f"Versions: {names}, Python {self.versions.get('python', '')}")
        if self.versions.get("commit"):
            lines.append(f"Commit of robopolicy: {self.versions['commit']}")
        return lines

    def unmeasured(self, world: str) -> list[str]:
        """Return the limits of the evaluation, one sentence each."""
        evaluations, plain = self.evaluated(), self.final()
        place = f" Everything above was measured in `{plain.get('world', world)}`." if evaluations else ""
        lines = [f"A real robot.{place}"]
        if not evaluations:
            return ["Success: this checkpoint was not evaluated; evaluate it with `robopolicy evaluate`.", *lines]
        lines.append("Variation over training seeds: this is one run, and others may differ by several points.")
        if len(evaluations) < 2:
            lines.append("The difference to a base policy on the same episodes.")
        if not plain.get("reports_success", True):
            lines.append("Success: the world reports none, so returns are given.")
        if plain.get("episodes", 0) < FEW:
            lines.append(f"Success in more than {plain.get('episodes', 0)} episodes: the intervals are wide.")
        return [*lines, ASSURED]


def _kind(description: Mapping[str, Any]) -> str:
    """Return the kind of a checkpoint in words, from its config.json: robopolicy's, or LeRobot's `type`."""
    type_name = str(description.get("kind", description.get("type", ""))).rpartition("/")[2].rpartition(":")[2]
    inner = description.get("config")
    finer = str(inner.get("kind", "")) if isinstance(inner, Mapping) else ""
    return finer or type_name


def _summary(kind: str, verb: str, world: str) -> str:
    """Return the first sentence of a model's card."""
    subject = f"A world model ({kind})" if verb == "worldmodel" else f"A robot policy ({kind.replace('_', ' ')})"
    phrases = {
        "train": "trained by imitation with",
        "finetune": "fine-tuned with RL by",
        "imagine": "fine-tuned in a world model by",
        "distill": "distilled by",
        "improve": "improved by",
    }
    return f"{subject}{f' for `{world}`' if world else ''}, {phrases.get(verb, 'saved by')} robopolicy."


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _world(checkpoint: Path, files: _Run) -> str:
    """Return the name of the world that the checkpoint was made in, "" if unknown."""
    try:
        origin = saved_origin(checkpoint)
    except CheckpointError:
        origin = None
    if origin is not None:
        return origin.name
    return str(files.final().get("world", ""))


def _tag(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _without_home(text: str) -> str:
    """Remove the path of the user's home folder from a text that is published."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _tidy(text: str) -> str:
    """Collapse the empty lines that a template leaves in Markdown."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
