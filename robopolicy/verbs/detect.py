"""Calibrates failure detectors of a policy, scores them, and stores them next to its checkpoint.

A detector reads what the policy observes and samples, and raises an alarm while an episode that is going to fail still
runs. Thresholds are conformal: at most detect.false_alarms of successful episodes cause an alarm. Prints, per detector,
AUROC among the episodes that still run after 25, 50 and 75 % of the time limit, detected failures and false alarms with
intervals, and the time from alarm to failure; a clock is the yardstick. detect.faults=[slip,latency] repeats this with
planted faults. Detectors are valid for one checkpoint, engine and choice of cameras: calibrate them for another by the
same command with these settings and detect.output=FOLDER.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from robopolicy.building.policies import adapt_policy_to_world, choose_device, fitted_for, load_acting, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.delayed import episodes_for_policy
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.faults import FAULTS
from robopolicy.core.faulty import FAULTS_OPTION, RATE_OPTION, without_faults
from robopolicy.core.origin import renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy, require_success
from robopolicy.evaluation.tables import detected_fault_rows, detector_rows
from robopolicy.failures import DETECTORS
from robopolicy.failures.conformal import THRESHOLDS
from robopolicy.failures.detector import Calibrated, FailureDetector, Rollout, indices_of
from robopolicy.failures.scoring import Scored
from robopolicy.failures.watcher import Observer, Recorder, Watcher
from robopolicy.policies.loading import checkpoint_in
from robopolicy.runs import default_path, finish, open_fresh_run, output, print_table
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Calibrate and score detectors of a policy's failures",
    sections=("run", "world", "inference", "detect"),
    example="robopolicy detect runs/train/pick_place/0/checkpoint detect.faults=[slip,moved_goal,latency]",
    targets=("detect.policy",),
    world_from={"detect.policy": ""},
)
SHOWN = 12
"""Number of successful and of failed episodes whose indices are drawn."""


def run(config: Config) -> int:
    """Calibrate, score and store the detectors."""
    section = config.detect
    if section.policy is None:
        raise ConfigError("No policy given. Usage: robopolicy detect CHECKPOINT")
    for fault in section.faults:
        FAULTS.path(fault)
    device = choose_device(config.run)
    demonstrations = default_path(config, "collect", "dataset", section.demonstrations, "detect.demonstrations")
    detectors: dict[str, FailureDetector] = {name: DETECTORS.load(name)() for name in section.detectors}
    folder = open_fresh_run(config, "detect", VERB.sections)
    clock = folder.clock()
    policy = load_acting(config.inference, section.policy, device)
    spec = policy.spec
    episodes = read_dataset(demonstrations, cameras=spec.cameras, rename=renaming_of(policy))
    samples = section.samples if any(each.reads_chunks for each in detectors.values()) else 0
    observer = Observer(policy, load_policy(section.policy, device), samples)
    embedded = observer.fit(episodes_for_policy(policy, episodes))
    plain = replace(config.world, options=without_faults(config.world.options))
    result, rollouts, (horizon, fps) = play(config, plain, policy, observer, section.episodes, "detect", device)
    decisions = -(-horizon // spec.chunk)
    quarter = len(rollouts) // 4
    fitting, calibrating = rollouts[:quarter], rollouts[quarter : 2 * quarter]
    testing = rollouts[2 * quarter :]
    usable = fitted(detectors, embedded, fitting, decisions)
    thresholds, milliseconds = {}, {}
    for name, detector in usable.items():
        calibration_rollouts = calibrating if detector.learns_from_rollouts else [*fitting, *calibrating]
        indices = indices_of(detector, [each for each in calibration_rollouts if each.success])
        thresholds[name] = THRESHOLDS[section.threshold](indices, decisions, section.false_alarms)
        milliseconds[name] = time_of(detector, testing)

    def scored(tested: Sequence[Rollout]) -> dict[str, Scored]:
        return {
            name: Scored(tested, indices_of(detector, tested), thresholds[name], spec.chunk, fps)
            for name, detector in usable.items()
        }

    tested = scored(testing)
    figures = {
        name: {**each.summary(section.false_alarms), "milliseconds": milliseconds[name]}
        for name, each in tested.items()
    }
    print_table("Detectors, on episodes that calibration has not seen", *detector_rows(figures))
    faults: dict[str, dict[str, Any]] = {}
    for fault in section.faults:
        world = replace(plain, options={**plain.options, FAULTS_OPTION: [fault], RATE_OPTION: 1.0})
        try:
            _, fault_rollouts, _ = play(config, world, policy, observer, section.fault_episodes, fault, device)
        except ConfigError as error:
            output.print(f"{fault} is left out: {error}", markup=False, soft_wrap=True)
            continue
        faults[fault] = {name: each.after_fault() for name, each in scored(fault_rollouts).items()}
    if faults:
        print_table("Failures detected after a planted fault began", *detected_fault_rows(faults))
    described = fitted_for(config.inference, section.policy, policy)
    calibrated = {name: Calibrated(name, each, thresholds[name], described) for name, each in usable.items()}
    place = section.output or checkpoint_in(section.policy).parent / "detectors"
    Watcher(observer, calibrated).save(place)
    scores = {"detectors": figures, "faults": faults, "success": result.summary(), "stored": str(place)}
    scores["curves"] = {name: curves(each) for name, each in tested.items()}
    scores["calibrated_on"] = sum(each.success for each in rollouts[: 2 * quarter])
    finish(config, folder, {**scores, "seconds": clock.seconds})
    output.print(f"Detectors: {place}\nReport: {report_for_run(folder.path)}")
    return 0


def play(
    config: Config,
    section: WorldSection,
    policy: Policy,
    observer: Observer,
    episodes: int,
    label: str,
    device: torch.device,
) -> tuple[EvaluationResult, list[Rollout], tuple[int, float]]:
    """Play episodes without exploration noise and record what detectors read; also return horizon and control rate."""
    world = build_world(section, policy, episodes=episodes, seed=config.run.seed, device=device)
    require_success(world, "")
    seeds = episode_seeds(config.run.seed, f"detect/{label}", episodes)
    recorder = Recorder(observer, seeds, world.batch_size, derive_seed(config.run.seed, "detect/samples"))
    acting = adapt_policy_to_world(world, policy)
    options = {"generator_seed": config.run.seed, "device": device, "label": label, "watch": recorder.watch}
    result = evaluate_policy(world, acting, seeds, **options)
    about = world.spec.horizon, world.spec.fps
    world.close()
    return result, recorder.rollouts(result), about


def fitted(
    detectors: Mapping[str, FailureDetector],
    demonstrations: Sequence[np.ndarray],
    rollouts: Sequence[Rollout],
    decisions: int,
) -> dict[str, FailureDetector]:
    """Fit detectors; those that cannot be fitted, because an outcome is missing, are left out with a note."""
    usable: dict[str, FailureDetector] = {}
    for name, detector in detectors.items():
        try:
            detector.fit(demonstrations, rollouts, decisions)
        except DataError as error:
            output.print(f"{name} is left out: {error}", markup=False, soft_wrap=True)
            continue
        usable[name] = detector
    return usable


def time_of(detector: FailureDetector, rollouts: Sequence[Rollout], episodes: int = 4) -> float:
    """Return the milliseconds of processor time that a decision of one row takes, without embedding and sampling."""
    begin, some = time.process_time(), rollouts[:episodes]
    indices_of(detector, some, batch_size=1)
    return 1000 * (time.process_time() - begin) / max(sum(len(each.embedding) for each in some), 1)


def curves(scored: Scored) -> list[dict[str, Any]]:
    """Return the indices of some successful and failed episodes, and the threshold, for the page."""
    kinds: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for each, index in zip(scored.rollouts, scored.indices, strict=True):
        if len(kinds[each.success]) < SHOWN:
            kinds[each.success].append({"success": each.success, "index": np.round(index, 5).tolist()})
    return [*kinds[True], *kinds[False], {"threshold": np.round(scored.threshold, 5).tolist()}]
