"""Success rates of policies: seeded episodes in any world, with a Wilson interval, and paired comparisons.

Reproducibility comes before speed. An outcome depends only on the policy, the episode's seed, the noise seed and the
mode, never on the world's batch size, the batch of episodes or other rows, because all random numbers belong to the
episode (see `episode_batches`). Equal settings repeat bit for bit; with another batch size the last digits of returns
may round differently.
"""

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from robopolicy.core.action_bounds import OutsideBounds
from robopolicy.core.errors import ConfigError, DataError, RobopolicyNote
from robopolicy.core.faulty import NO_FAULT, FaultPlan, fault_plan
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.player import PlayedStep
from robopolicy.core.policy import Policy
from robopolicy.core.progress import progress
from robopolicy.core.spec import WorldSpec
from robopolicy.core.temporal import specification_of
from robopolicy.core.world import ClassifiesSuccess, Controller, World, episode_notes, task_names
from robopolicy.evaluation.episode_batches import (
    BatchPlayer,
    EpisodeBatch,
    SavedBatches,
    episode_batches,
    play_episode_batch,
)
from robopolicy.evaluation.intervals import (
    PairedComparison,
    PairedReturns,
    compare_paired,
    compare_returns,
    mean_interval,
    wilson,
)
from robopolicy.evaluation.smoothness import Smoothness, SmoothnessMeter


@dataclass(frozen=True)
class EvaluationResult:
    """Outcomes of E episodes, in the caller's order of seeds.

    success [E] bool; returns [E] sums of reward; lengths [E] control steps; cut [E] bool: imagination was truncated
    before the episode's end (a failure unless it had succeeded); seconds: wall time; steps: control steps executed;
    reports_success: False if the world does not report success, so that only returns are meaningful; instructions [E]:
    instruction of each episode, () if the world has one instruction; tasks [E]: name of each episode's task, () if the
    world has one; outside: number of actions beyond the world's bounds and how they were handled, "" for none;
    classifier: description of the classifier that supplies success, as in `core.world.ClassifiesSuccess`, with the
    world's own success [E] in `own_success` if it reports one; faults [E]: planted fault of each episode, "" for none,
    and the control steps before it begins in fault_begins [E]; () and None in a world without faults; benchmark_score:
    the benchmark's own score [E], such as Push-T's largest coverage, None if it has none; specification: formula of
    signal temporal logic that the episodes were measured by, "" for none, with its robustness [E], see `core.temporal`.
    """

    world: str
    seeds: np.ndarray
    success: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray
    deterministic: bool
    seconds: float
    steps: int
    confidence: float = 0.95
    reports_success: bool = True
    instructions: tuple[str, ...] = ()
    outside: str = ""
    tasks: tuple[str, ...] = ()
    classifier: Mapping[str, Any] | None = None
    own_success: np.ndarray | None = None
    faults: tuple[str, ...] = ()
    fault_begins: np.ndarray | None = None
    benchmark_score: np.ndarray | None = None
    specification: str = ""
    robustness: np.ndarray | None = None

    @property
    def episodes(self) -> int:
        """Number of episodes E."""
        return len(self.seeds)

    @property
    def successes(self) -> int:
        """Number of successful episodes."""
        return int(self.success.sum())

    @property
    def success_rate(self) -> float:
        """Fraction of successful episodes."""
        return self.successes / self.episodes

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Wilson interval (low, high) of the success rate."""
        return wilson(self.successes, self.episodes, self.confidence)

    @cached_property
    def return_interval(self) -> tuple[float, float]:
        """Bootstrap interval (low, high) of the mean return."""
        return mean_interval(self.returns, self.confidence)

    @property
    def score(self) -> float:
        """Metric for comparing policies: the success rate, or the mean return if success is not reported."""
        return self.success_rate if self.reports_success else float(self.returns.mean())

    def by_instruction(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each instruction's episodes, in the order of the texts; {} if there is only one."""
        return self._metrics_by(self.instructions)

    def by_task(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each task's episodes, in the order of their numbers or names; {} if there is one."""
        return self._metrics_by(self.tasks)

    def by_fault(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each planted fault's episodes, and in how many it began before they ended; {} without
        faults.
        """
        metrics = self._metrics_by([name or NO_FAULT for name in self.faults])
        for name, each in metrics.items():
            planted = np.array([fault == name for fault in self.faults])
            each["began"] = int((planted & self.began).sum())
        return metrics

    @property
    def began(self) -> np.ndarray:
        """[E] bool: episodes whose planted fault began before they ended."""
        if self.fault_begins is None:
            return np.zeros(len(self.seeds), dtype=bool)
        return np.array([bool(name) for name in self.faults]) & (self.fault_begins < self.lengths)

    def _metrics_by(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the metrics of the episodes under each of the names [E]."""
        metrics_of_text: dict[str, dict[str, Any]] = {}
        for text in sorted(set(names), key=_in_order):
            mask = np.array([each == text for each in names])
            successes, episodes = int(self.success[mask].sum()), int(mask.sum())
            low, high = wilson(successes, episodes, self.confidence)
            counts = {"episodes": episodes, "successes": successes, "success_rate": successes / episodes}
            metrics_of_text[text] = {
                **counts,
                "low": low,
                "high": high,
                "return_mean": float(self.returns[mask].mean()),
            }
        return metrics_of_text

    def figures(self) -> dict[str, float]:
        """Return the metrics that fine-tuning stores for a validation: success and its interval, or the return in its
        place.
        """
        low, high = self.interval if self.reports_success else self.return_interval
        judged_by_return = {} if self.reports_success else {"return": self.score}
        return {"success": self.success_rate, "low": low, "high": high, **judged_by_return}

    @property
    def text(self) -> str:
        """The main metric of this policy with its interval: success, or the return if success is not reported."""
        if self.reports_success:
            return f"{self.success_rate:.1%} [{self.interval[0]:.1%}, {self.interval[1]:.1%}]"
        low, high = self.return_interval
        return f"return {self.returns.mean():.4g} [{low:.4g}, {high:.4g}]"

    def classified(self) -> dict[str, Any]:
        """Return the classifier that supplies success and its errors in these episodes; {} without one.

        own: the world's own success rate; false_accepts: of the episodes that failed by it, those that the classifier
        counts as successful; false_rejects: of the successful ones, those that it does not count.
        """
        if self.classifier is None:
            return {}
        described = {"checkpoint": self.classifier["checkpoint"], "tested": dict(self.classifier["false_accepts"])}
        described["max_false_accepts"] = self.classifier["max_false_accepts"]
        if self.own_success is None:
            return described
        own, counted = self.own_success, self.success
        return described | {
            "own": counted_rate(int(own.sum()), len(own)),
            "false_accepts": counted_rate(int((counted & ~own).sum()), int((~own).sum())),
            "false_rejects": counted_rate(int((own & ~counted).sum()), int(own.sum())),
        }

    def summary(self) -> dict[str, Any]:
        """Return the metrics without the per-episode lists, for a metrics line."""
        low, high = self.interval
        instruction_metrics = {"by_instruction": self.by_instruction()} if self.instructions else {}
        if self.tasks:
            instruction_metrics = {"by_task": self.by_task()}
        if self.faults:
            instruction_metrics["by_fault"] = self.by_fault()
        beyond: dict[str, Any] = {"actions_outside": self.outside} if self.outside else {}
        if self.classifier is not None:
            beyond["classifier"] = self.classified()
        if self.benchmark_score is not None:
            low_score, high_score = mean_interval(self.benchmark_score, self.confidence)
            mean = float(self.benchmark_score.mean())
            beyond["benchmark_score"] = {"mean": mean, "low": low_score, "high": high_score}
        if self.robustness is not None:
            low_margin, high_margin = mean_interval(self.robustness, self.confidence)
            margins = {"mean": float(self.robustness.mean()), "low": low_margin, "high": high_margin}
            fulfilled = counted_rate(int((self.robustness >= 0).sum()), self.episodes, self.confidence)
            beyond["specification"] = {"formula": self.specification, "fulfilled": fulfilled, "robustness": margins}
        return {
            "world": self.world,
            "episodes": self.episodes,
            "successes": self.successes,
            "success_rate": self.success_rate,
            "low": low,
            "high": high,
            "confidence": self.confidence,
            "reports_success": self.reports_success,
            "return_mean": float(self.returns.mean()),
            "return_low": self.return_interval[0],
            "return_high": self.return_interval[1],
            "length_mean": float(self.lengths.mean()),
            "cut": int(self.cut.sum()),
            "deterministic": self.deterministic,
            "seconds": self.seconds,
            "steps": self.steps,
            **instruction_metrics,
            **beyond,
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: the summary and the outcome of every episode."""
        per_episode = {name: getattr(self, name).tolist() for name in ("seeds", "success", "returns", "lengths", "cut")}
        if self.instructions:
            per_episode["instructions"] = list(self.instructions)
        if self.tasks:
            per_episode["tasks"] = list(self.tasks)
        if self.own_success is not None:
            per_episode["own_success"] = self.own_success.tolist()
        if self.fault_begins is not None:
            per_episode |= {"faults": list(self.faults), "fault_begins": self.fault_begins.tolist()}
        if self.benchmark_score is not None:
            per_episode["benchmark_score"] = self.benchmark_score.tolist()
        if self.robustness is not None:
            per_episode["robustness"] = self.robustness.tolist()
        return {**self.summary(), "per_episode": per_episode}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "EvaluationResult":
        """Rebuild from `to_json`."""
        episodes = data["per_episode"]
        return EvaluationResult(
            world=data["world"],
            seeds=np.asarray(episodes["seeds"], dtype=np.int64),
            success=np.asarray(episodes["success"], dtype=bool),
            returns=np.asarray(episodes["returns"], dtype=np.float64),
            lengths=np.asarray(episodes["lengths"], dtype=np.int64),
            cut=np.asarray(episodes["cut"], dtype=bool),
            deterministic=data["deterministic"],
            seconds=data["seconds"],
            steps=data["steps"],
            confidence=data["confidence"],
            reports_success=data.get("reports_success", True),
            instructions=tuple(episodes.get("instructions", ())),
            tasks=tuple(episodes.get("tasks", ())),
            outside=data.get("actions_outside", ""),
            classifier=_description(data["classifier"]) if "classifier" in data else None,
            own_success=np.asarray(episodes["own_success"], dtype=bool) if "own_success" in episodes else None,
            faults=tuple(episodes.get("faults", ())),
            fault_begins=np.asarray(episodes["fault_begins"]) if "fault_begins" in episodes else None,
            benchmark_score=np.asarray(episodes["benchmark_score"]) if "benchmark_score" in episodes else None,
            specification=data["specification"]["formula"] if "specification" in data else "",
            robustness=np.asarray(episodes["robustness"]) if "robustness" in episodes else None,
        )


def _description(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a classifier's description from `EvaluationResult.classified`."""
    names = ("checkpoint", "max_false_accepts")
    return {**{name: figures[name] for name in names}, "false_accepts": figures["tested"]}


def counted_rate(count: int, total: int, confidence: float = 0.95) -> dict[str, Any]:
    """Return a rate with its Wilson interval, JSON-ready; [0, 1] without episodes."""
    low, high = wilson(count, total, confidence) if total else (0.0, 1.0)
    return {"count": count, "total": total, "rate": count / total if total else 0.0, "low": low, "high": high}


def evaluate_policy(
    world: World,
    policy: Policy | Controller,
    seeds: Sequence[int] | np.ndarray,
    *,
    deterministic: bool = True,
    generator_seed: int = 0,
    device: torch.device | str = "cpu",
    confidence: float = 0.95,
    label: str = "evaluate",
    watch: Callable[[PlayedStep[object] | None], None] | None = None,
    kept: SavedBatches | None = None,
    players: BatchPlayer | None = None,
) -> EvaluationResult:
    """Play one episode per seed [E] and return every outcome.

    deterministic: act without exploration noise (a denoising policy's initial noise remains); generator_seed: of the
    noise, which belongs to the episodes; device: device of the policy; label: text of the progress bar, and this
    evaluation's name in `kept`, which provides batches played before and stores new ones; watch: see
    `play_episode_batch`; players: plays the same policy in the same world on workers, with equal outcomes, unless there
    is a `watch`. Raises ConfigError for no or repeated seeds, SpecError when the policy and the world do not fit.
    """
    evaluation = Evaluation.of(world, seeds, deterministic, confidence)
    seeds, batches = evaluation.seeds, evaluation.batches

    def new(places: Sequence[int]) -> Iterator[tuple[int, EpisodeBatch, float]]:
        parts = [seeds[batches[place]] for place in places]
        if players is not None and watch is None:
            return players.play(parts, generator_seed, deterministic)
        return _here(world, policy, parts, generator_seed, deterministic=deterministic, device=device, watch=watch)

    with progress(label, len(seeds)) as advance:
        saved = {i: kept.known(label, seeds[index]) for i, index in enumerate(batches)} if kept is not None else {}
        known = {place: entry for place, entry in saved.items() if entry is not None}
        seconds, start = sum(spent for _, spent in known.values()), time.perf_counter()
        played = {place: wave for place, (wave, _) in known.items()}
        advance(sum(len(batches[place]) for place in known))
        missing = [place for place in range(len(batches)) if place not in known]
        for number, wave, spent in new(missing):
            played[place := missing[number]] = wave
            if kept is not None:
                kept.keep(label, seeds[batches[place]], wave, spent)
            advance(len(batches[place]))
        seconds += time.perf_counter() - start
    return evaluation.result(played, seconds)


@dataclass(frozen=True)
class Evaluation:
    """Episodes of one policy in one world before they are played. seeds: [E]; batches: indices [n] into them; tasks:
    [E] names of their tasks, () if there is only one; faults: those that the world plants, None for none;
    specification: formula that measures the episodes, "" for none.
    """

    spec: WorldSpec
    seeds: np.ndarray
    batches: tuple[np.ndarray, ...]
    deterministic: bool = True
    confidence: float = 0.95
    tasks: tuple[str, ...] = ()
    classifier: Mapping[str, Any] | None = None
    faults: FaultPlan | None = None
    specification: str = ""

    @staticmethod
    def of(
        world: World, seeds: Sequence[int] | np.ndarray, deterministic: bool = True, confidence: float = 0.95
    ) -> "Evaluation":
        """Divide episodes with `seeds` [E] into batches of the size of `world`; raises ConfigError for no or repeated
        seeds.
        """
        distinct = _distinct(seeds)
        batches = tuple(episode_batches(distinct, world.batch_size))
        classifier = world.success_classifier if isinstance(world, ClassifiesSuccess) else None
        tasks = task_names(world, distinct)
        for note in episode_notes(world, distinct):
            warnings.warn(note, RobopolicyNote, stacklevel=3)
        plan = fault_plan(world, distinct)
        formula = specification_of(world)
        text = "" if formula is None else formula.text
        return Evaluation(world.spec, distinct, batches, deterministic, confidence, tasks, classifier, plan, text)

    @property
    def parts(self) -> list[np.ndarray]:
        """Seeds [n] of every batch."""
        return [self.seeds[index] for index in self.batches]

    def result(self, played: Mapping[int, EpisodeBatch], seconds: float) -> EvaluationResult:
        """Return the result, given the outcomes of every batch by its place and the seconds that they took."""
        seeds, spec = self.seeds, self.spec
        success, truncated = np.zeros(len(seeds), dtype=bool), np.zeros(len(seeds), dtype=bool)
        returns, lengths = np.zeros(len(seeds)), np.zeros(len(seeds), dtype=np.int64)
        instructions = np.full(len(seeds), "", dtype=object)
        outside_bounds = OutsideBounds(spec)
        own_success = None if any(wave.own_success is None for wave in played.values()) else np.zeros_like(success)
        scored = all(wave.benchmark_score is not None for wave in played.values())
        benchmark_score = np.zeros(len(seeds)) if scored else None
        robustness = np.zeros(len(seeds)) if self.specification else None
        for place, index in enumerate(self.batches):
            wave = played[place]
            if benchmark_score is not None:
                benchmark_score[index] = wave.benchmark_score
            if robustness is not None:
                robustness[index] = wave.robustness
            if own_success is not None:
                own_success[index] = wave.own_success
            success[index], returns[index] = wave.success, wave.returns
            lengths[index], truncated[index] = wave.lengths, wave.cut
            outside_bounds.steps += int(wave.lengths.sum())
            outside_bounds.counts += 0 if wave.outside is None else wave.outside
            instructions[index] = [spec.meaning(text) for text in wave.instructions]
        return EvaluationResult(
            world=spec.name,
            seeds=seeds,
            success=success,
            returns=returns,
            lengths=lengths,
            cut=truncated,
            deterministic=self.deterministic,
            seconds=seconds,
            steps=int(lengths.sum()),
            confidence=self.confidence,
            reports_success=spec.reports_success,
            instructions=tuple(instructions) if len(spec.goals) > 1 else (),
            outside=outside_bounds.text,
            tasks=self.tasks,
            classifier=self.classifier,
            own_success=own_success,
            faults=() if self.faults is None else self.faults.names,
            fault_begins=None if self.faults is None else self.faults.begins,
            benchmark_score=benchmark_score,
            specification=self.specification,
            robustness=robustness,
        )


def _in_order(name: str) -> tuple[int, str]:
    """Return a sort key for names: those that start with a number by that number, the others after them."""
    number = re.match(r"\d+", name)
    return int(number.group()) if number else 2**31, name


def _distinct(seeds: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return seeds as [E] int64; raises ConfigError for no or repeated ones."""
    seeds = np.asarray(seeds, dtype=np.int64)
    if seeds.ndim != 1 or len(seeds) == 0:
        raise ConfigError("Evaluation needs at least one seed: set episodes=1 or more.")
    if len(np.unique(seeds)) != len(seeds):
        raise ConfigError("Evaluation seeds are repeated: repeated episodes are not independent, pass distinct seeds.")
    return seeds


def _here(
    world: World, policy: Policy | Controller, batches: Sequence[np.ndarray], noise_seed: int, **options: Any
) -> Iterator[tuple[int, EpisodeBatch, float]]:
    """Play batches of seeds [n] in this process, as `BatchPlayer.play`; options: of `play_episode_batch`."""
    for place, batch in enumerate(batches):
        start = time.perf_counter()
        wave = play_episode_batch(world, policy, batch, noise_seed, **options)
        yield place, wave, time.perf_counter() - start


def require_success(world: World, instead: str = "") -> None:
    """Raise ConfigError when `world` does not report success; instead: alternative, in words, for the error message."""
    if not world.spec.reports_success:
        raise ConfigError(
            f"'{world.spec.name}' does not report which episodes succeed: define success with "
            "world.options.success=package.module:function (or terminated), or \"world.options.success='return >= "
            f"NUMBER'\" with both quotes{instead and f', or {instead}'}."
        )


def compare(base: EvaluationResult, tuned: EvaluationResult) -> PairedComparison | PairedReturns:
    """Compare two policies paired by seed: their success, or returns if success is not reported.

    Raises DataError unless both played the same seeds.
    """
    if not np.array_equal(np.sort(base.seeds), np.sort(tuned.seeds)):
        raise DataError(
            "The two evaluations used different seeds: evaluate both with the same seed and number of episodes."
        )
    first, second = np.argsort(base.seeds), np.argsort(tuned.seeds)
    if not (base.reports_success and tuned.reports_success):
        return compare_returns(base.returns[first], tuned.returns[second], base.confidence)
    return compare_paired(base.success[first], tuned.success[second], base.confidence)


@dataclass(frozen=True)
class PolicyEvaluation:
    """Evaluation of one policy in one world, without and with exploration noise on the same seeds.

    smoothness: smoothness of each mode, by its name, if measured.
    """

    deterministic: EvaluationResult
    stochastic: EvaluationResult
    smoothness: Mapping[str, Smoothness] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the summaries and outcomes of both modes."""
        smoothness = {mode: each.to_json() for mode, each in self.smoothness.items()}
        results = {"deterministic": self.deterministic.to_json(), "stochastic": self.stochastic.to_json()}
        return {**results, "smoothness": smoothness} if smoothness else results


def evaluate_both_modes(
    world: World,
    policy: Policy,
    seeds: np.ndarray,
    device: torch.device,
    generator_seed: int,
    label: str,
    *,
    meter: Callable[[], SmoothnessMeter] | None = None,
    kept: SavedBatches | None = None,
    players: BatchPlayer | None = None,
) -> PolicyEvaluation:
    """Evaluate `policy`, in the form that acts in `world`, on `seeds` [E], deterministic and stochastic.

    meter: creates smoothness meters; they need all actions, so nothing is then taken from `kept` or played by
    `players`.
    """
    smoothness: dict[str, Smoothness] = {}

    def result(deterministic: bool) -> EvaluationResult:
        kind = "deterministic" if deterministic else "stochastic"
        watch = meter() if meter is not None else None
        evaluation = evaluate_policy(
            world,
            policy,
            seeds,
            deterministic=deterministic,
            generator_seed=generator_seed,
            device=device,
            label=f"{label}, {kind}",
            watch=watch,
            kept=kept if watch is None else None,
            players=players,
        )
        if watch is not None:
            smoothness[kind] = watch.measured()
        return evaluation

    return PolicyEvaluation(result(True), result(False), smoothness)


def compared(verdicts: Mapping[str, PolicyEvaluation]) -> dict[str, Any]:
    """Return every result by name and, as "difference", the paired comparison of the last with the first, without
    noise.
    """
    first, *_, last = verdicts.values()
    difference = compare(first.deterministic, last.deterministic)
    return {**{name: each.to_json() for name, each in verdicts.items()}, "difference": difference.to_json()}


keep_former_names(__name__, {"Verdict": "PolicyEvaluation", "judge": "evaluate_both_modes"})
