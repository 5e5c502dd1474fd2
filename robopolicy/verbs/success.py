"""Trains a success classifier on labelled images or states, and calibrates it on episodes that it has not seen.

The labels are next.success of every step, the success of episodes (success.labels=episodes), a column of 0 and 1
(success.labels=next.reward), or a file of episodes (success.labels=labels.csv). Episodes are divided into training,
calibration and test; the threshold is chosen so that at most success.max_false_accepts of the failed episodes count as
successful, with 95 % confidence. Prints the precision, false accepts and false rejects of the test episodes with
intervals, and writes a page with a reliability diagram, scores along episodes, and the most confident mistakes as
images. world.success=CHECKPOINT then replaces the success of a simulator in evaluate, online, finetune, gate and the
other verbs, and relabels the data of offline. success.classifier=CHECKPOINT tests a classifier on other data;
success.relabelled=FOLDER also writes a copy of the data with its success.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.building.policies import choose_device
from robopolicy.configuration import Config
from robopolicy.configuration.sections.success import SuccessSection
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, did_you_mean
from robopolicy.core.randomness import Generators, derive_seed, numpy_generator
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.core.storage import recover_folder
from robopolicy.data.lerobot_format import read_dataset, recorded_origin, write_dataset
from robopolicy.data.lerobot_reading import read_columns, require_known
from robopolicy.evaluation.intervals import percent
from robopolicy.evaluation.report import report_for_run
from robopolicy.runs import default_path, finish, open_fresh_run, output, print_table
from robopolicy.success.calibration import choose_threshold, failures_needed, fit_calibration
from robopolicy.success.classifier import SuccessClassifier, load_classifier, new_network
from robopolicy.success.labels import (
    EPISODES,
    FRAMES,
    UNKNOWN,
    Labels,
    constant,
    labels_of,
    require_both,
    require_held,
    split_by_episode,
)
from robopolicy.success.measures import measure, measure_frames, scores_by_episode
from robopolicy.success.page import save_examples
from robopolicy.success.relabelling import relabelled
from robopolicy.success.training import ClassifierTraining, episode_of_frame, known_frames
from robopolicy.training.fit import fit
from robopolicy.verbs.job import Job
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Train a calibrated success classifier from labelled images or states",
    sections=("run", "world", "success"),
    example="robopolicy success runs/collect/pick_place/0/dataset success.inputs=[front]",
    targets=("success.dataset",),
    world_from={"success.dataset": "collect/dataset"},
    resumes=True,
)
CONFIDENCE = 0.95


def run(config: Config) -> int:
    """Train, calibrate and test a classifier, or test the given one."""
    section = config.success
    if section.classifier is not None:
        return examined(config, section.classifier)
    job = Job.open(config, "success", VERB.sections, "is already trained; run.overwrite=true trains again.")
    if job is None:
        return 0
    recorded, labels, names = labelled(config, None)
    where = section.dataset or "The dataset"
    require_both(labels, where)
    require_held(recorded, labels, section.hold)
    fields = chosen_fields(section.inputs, recorded)
    fractions = (1 - section.holdout, section.holdout / 2, section.holdout / 2)
    parts = split_by_episode(labels, fractions, numpy_generator(config.run.seed, "success/split"))
    trained, calibrated, tested = ((recorded.select(part), labels.select(recorded, part)) for part in parts)
    print_data(labels, fields, [len(part) for part in parts])
    generators = Generators(config.run.seed, job.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.run.seed, "success classifier weights"))
        network = new_network(section.kind, section.config, fields).to(job.device)
    origin = described(config, labels, recorded.tasks[0])
    classifier = SuccessClassifier(network, section.kind, fields, {}, 0.0, section.hold, {}, origin)
    clock = job.folder.clock()
    train(section, classifier, *trained, generators, job)
    calibrate(section, classifier, *calibrated)
    result = test(classifier, *tested)
    classifier.measured = {key: result[key] for key in ("false_accepts", "false_rejects", "precision", "threshold")}
    classifier.save(job.folder.checkpoint)
    save_examples(job.folder.path, classifier, *tested, [names[number] for number in parts[2]])
    print_measured(result)
    job.finish({"classifier": result, "seconds": clock.seconds, "trained_on": classifier.trained_on}, "Classifier")
    return 0


def labelled(config: Config, classifier: SuccessClassifier | None) -> tuple[Episodes, Labels, list[str]]:
    """Return the episodes of all datasets with their labels and names; classifier: the one to be tested, of which only
    the inputs are read.
    """
    section = config.success
    first = default_path(config, "collect", "dataset", section.dataset, "success.dataset")
    main = () if section.dataset is None and (section.positives and section.negatives) else (first,)
    require_known(section.rename, (*main, *section.extra_datasets))
    parts: list[tuple[Episodes, Labels]] = []
    paths = (*main, *section.extra_datasets, *section.positives, *section.negatives)
    for path in (*main, *section.extra_datasets):
        episodes = read(section, path, classifier)
        column = None
        if section.labels not in (FRAMES, EPISODES) and not section.labels.endswith(".csv"):
            column = read_columns(path, [section.labels])[section.labels]
            if column.ndim > 1:
                raise DataError(f"{path}: the column {section.labels} has several numbers per step, not one label.")
        parts.append((episodes, labels_of(episodes, section.labels, section.success_frames, column, path)))
    for path, label in (*((path, 1) for path in section.positives), *((path, 0) for path in section.negatives)):
        episodes = read(section, path, classifier)
        parts.append((episodes, constant(episodes, label)))
    selected = [of_instruction(section.instruction, *part) for part in parts]
    names = [
        f"{number}" if len(paths) == 1 else f"{path}: {number}"
        for path, (_, _, numbers) in zip(paths, selected, strict=True)
        for number in numbers
    ]
    episodes = Episodes.concatenate([plain(part) for part, _, _ in selected])
    frames, successful = (torch.cat([getattr(part[1], key) for part in selected]) for key in ("frames", "episodes"))
    require_one_instruction(episodes)
    return episodes, Labels(frames, successful), names


def read(section: SuccessSection, path: Path, classifier: SuccessClassifier | None) -> Episodes:
    """Read a dataset with the cameras that are needed; images of the others are not decoded."""
    known = list(read_dataset(path, cameras=(), rename=section.rename, episodes=[0]).observation)
    if classifier is not None:
        cameras = tuple(classifier.image_sizes)
    elif section.inputs and all(name in known for name in section.inputs):
        cameras = ()
    elif section.inputs:
        cameras = tuple(name.removeprefix(IMAGE_PREFIX) for name in section.inputs if name not in known)
    else:
        cameras = None
    return read_dataset(recover_folder(path), cameras=cameras, rename=section.rename)


def plain(episodes: Episodes) -> Episodes:
    """Return the parts that all datasets have: observations, actions and instructions."""
    return Episodes(
        episodes.observation_fields,
        episodes.action_field,
        episodes.fps,
        episodes.observation,
        episodes.actions,
        episodes.lengths,
        episodes.tasks,
        final_known=episodes.final_known,
    )


def of_instruction(instruction: str, episodes: Episodes, labels: Labels) -> tuple[Episodes, Labels, list[int]]:
    """Return the episodes with this instruction, "" for all, and their numbers; raises as `numbers_of`."""
    index = numbers_of(instruction, episodes)
    if not instruction:
        return episodes, labels, index
    return episodes.select(index), labels.select(episodes, index), index


def numbers_of(instruction: str, episodes: Episodes) -> list[int]:
    """Return the numbers of the episodes with this instruction, "" for all; raises ConfigError when there are none."""
    index = [place for place, task in enumerate(episodes.tasks) if instruction in ("", task)]
    if not index:
        tasks = sorted(set(episodes.tasks))
        raise ConfigError(
            f"No episode has the instruction '{instruction}'.{did_you_mean(instruction, tasks)} Instructions: "
            f"{'; '.join(tasks[:20])}."
        )
    return index


def require_one_instruction(episodes: Episodes) -> None:
    """Raise ConfigError when episodes have several instructions, because the same image may then be both."""
    tasks = sorted(set(episodes.tasks))
    if len(tasks) > 1:
        raise ConfigError(
            f"The data have {len(tasks)} instructions, but a success classifier reads none: train one for each, "
            f"success.instruction='{tasks[0]}'."
        )


def chosen_fields(inputs: tuple[str, ...], episodes: Episodes) -> dict[str, Field]:
    """Return the fields that success.inputs names, by key; raises ConfigError for an unknown one."""
    fields = episodes.observation_fields
    if not inputs:
        images = {key: field for key, field in fields.items() if key.startswith(IMAGE_PREFIX)}
        return images or dict(fields)
    selected: dict[str, Field] = {}
    for name in inputs:
        key = name if name in fields else IMAGE_PREFIX + name
        if key not in fields:
            names = [each.removeprefix(IMAGE_PREFIX) for each in fields]
            raise ConfigError(
                f"success.inputs names '{name}', but the data have {', '.join(names)}.{did_you_mean(name, names)}"
            )
        selected[key] = fields[key]
    return selected


def described(config: Config, labels: Labels, instruction: str) -> dict[str, Any]:
    """Return the origin of the training data, for the checkpoint; instruction: that of all episodes."""
    section = config.success
    datasets = (section.dataset, *section.extra_datasets, *section.positives, *section.negatives)
    return {
        "datasets": [str(path) for path in datasets if path is not None],
        "labels": section.labels,
        "instruction": instruction,
        "world": config.world.name,
        "episodes": len(labels.episodes),
        "successful": int(labels.episodes.sum()),
    }


def train(
    section: SuccessSection,
    classifier: SuccessClassifier,
    episodes: Episodes,
    labels: Labels,
    generators: Generators,
    job: Job,
) -> None:
    """Fit the network on labelled frames."""
    frames, known, episode = known_frames(classifier.fitted(episodes.observation), labels, episode_of_frame(episodes))
    training = ClassifierTraining(classifier.network)
    training.fit_normalizers(frames)
    batches = training.batches(frames, known, episode, section.batch_size, generators["batches"])
    fit(training, batches, section.fit, generators, run=job.folder, label="success classifier")
    classifier.network.eval()


def calibrate(section: SuccessSection, classifier: SuccessClassifier, episodes: Episodes, labels: Labels) -> None:
    """Set the probabilities and the threshold on episodes that training has not seen."""
    logits = classifier.logits(episodes.observation)
    known = labels.frames.numpy() != UNKNOWN
    classifier.calibration = fit_calibration(section.calibration, logits[known], labels.frames.numpy()[known] == 1)
    scores = scores_by_episode(episodes, labels, logits, classifier.hold)
    highest = {kind: np.array([each.highest_failure for each in scores if each.successful == kind])
               for kind in (False, True)}  # fmt: skip
    threshold = choose_threshold(highest[False], highest[True], section.max_false_accepts, CONFIDENCE)
    if not np.isfinite(threshold.value):
        raise DataError(
            f"The held-out failed episodes are shorter than success.hold={section.hold} frames, so no threshold can be "
            "chosen: set a smaller success.hold, or record longer failures."
        )
    classifier.threshold = threshold.value
    classifier.measured = {"threshold": vars(threshold) | {"met": threshold.met}}


def test(classifier: SuccessClassifier, episodes: Episodes, labels: Labels) -> dict[str, Any]:
    """Return the error rates of the classifier on labelled episodes."""
    logits = classifier.logits(episodes.observation)
    scores = scores_by_episode(episodes, labels, logits, classifier.hold)
    threshold = classifier.measured["threshold"]
    probability = float(classifier.probabilities(np.array([classifier.threshold]))[0])
    chances = classifier.probabilities(logits)
    return {
        **measure(scores, classifier.threshold),
        "frames": measure_frames(labels, logits, chances, classifier.threshold),
        "threshold": {**threshold, "probability": probability},
        "hold": classifier.hold,
        "inputs": list(classifier.fields),
        "calibration": classifier.calibration["method"],
    }


def examined(config: Config, path: Path) -> int:
    """Test an existing classifier on all episodes of the data, and write the relabelled copy if requested."""
    section, device = config.success, choose_device(config.run)
    classifier = load_classifier(path, device)
    if section.relabelled is not None:
        return rewritten(config, classifier)
    folder = open_fresh_run(config, "success", VERB.sections)
    episodes, labels, names = labelled(config, classifier)
    result = test(classifier, episodes, labels)
    save_examples(folder.path, classifier, episodes, labels, names)
    print_measured(result, "all episodes of this data")
    finish(config, folder, {"classifier": result, "checkpoint": str(path), "trained_on": classifier.trained_on})
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def rewritten(config: Config, classifier: SuccessClassifier) -> int:
    """Write a copy of the dataset whose success and reward for success the classifier sets."""
    section = config.success
    assert section.relabelled is not None
    path = default_path(config, "collect", "dataset", section.dataset, "success.dataset")
    if section.extra_datasets or section.positives or section.negatives:
        raise ConfigError("success.relabelled copies one dataset: name only success.dataset.")
    episodes = read_dataset(path, rename=section.rename)
    if section.instruction:
        episodes = episodes.select(numbers_of(section.instruction, episodes))
    new = relabelled(episodes, classifier)
    write_dataset(new, section.relabelled, images="png", origin=recorded_origin(path))
    assert new.success is not None
    counted = int(new.success.sum())
    before = "did not record success"
    if episodes.success is not None:
        changed = int((episodes.success != new.success).sum())
        before = f"recorded {int(episodes.success.sum())}; {changed} episodes differ"
    output.print(
        f"{len(new)} episodes, {counted} successful by the classifier (the data {before}) -> {section.relabelled}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def print_data(labels: Labels, fields: dict[str, Field], counts: list[int]) -> None:
    """Print the inputs, the number of labels, and the sizes of the parts."""
    frames = labels.frames
    sizes = ", ".join(f"{key.removeprefix(IMAGE_PREFIX)} {list(field.shape)}" for key, field in fields.items())
    output.print(
        f"{len(labels.episodes)} episodes, {int(labels.episodes.sum())} successful; {int((frames == 1).sum())} frames "
        f"show success, {int((frames == 0).sum())} do not, {int((frames == UNKNOWN).sum())} are not labelled. Reads "
        f"{sizes}. Episodes: {counts[0]} training, {counts[1]} calibration, {counts[2]} test.",
        markup=False,
        soft_wrap=True,
    )


def print_measured(result: dict[str, Any], where: str = "test episodes") -> None:
    """Print the error rates, and whether the requested false-accept rate is proven."""
    names = {
        "precision": "precision (of counted episodes)",
        "false_accepts": "false accepts (of failed episodes)",
        "false_rejects": "false rejects (of successful episodes)",
        "early_accepts": "counted before success",
    }
    frames = result["frames"]
    rows = [
        [text, percent(result[name]), percent(frames[name]) if name in frames else ""] for name, text in names.items()
    ]
    print_table(f"Success classifier on {where}", ("", "episodes [95 %]", "frames [95 %]"), rows)
    delay = "" if result["delay"] is None else f" Success is counted {result['delay']:.1f} steps late on average."
    threshold = result["threshold"]
    output.print(
        f"Threshold: probability {threshold['probability']:.3f} in {result['hold']} consecutive frames. Calibration "
        f"error {frames['calibration_error']:.3f}, Brier score {frames['brier']:.3f}.{delay}",
        soft_wrap=True,
    )
    if not threshold["met"]:
        needed = failures_needed(threshold["rate"], threshold["confidence"])
        output.print(
            f"Note: false accepts of at most {threshold['rate']:.0%} are not proven. {threshold['failures']} failed "
            f"calibration episodes, of which {threshold['accepted']} are accepted, prove at most "
            f"{threshold['bound']:.1%}; {needed} without an accepted one would prove it. Add failed episodes "
            "(success.extra_datasets=[DATASET]) or set a larger success.max_false_accepts.",
            soft_wrap=True,
        )
