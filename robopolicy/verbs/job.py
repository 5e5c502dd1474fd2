"""Common parts of verbs that learn: a resumable run, an evaluation from fixed initial states, a result.

A verb opens its job, learns, evaluates the result against the initial policy, and finishes the job:

    job = Job.open(config, "finetune", VERB.sections)
    if job is None:  # it has ended already
        return 0
    base, clock = load_policy(path, job.device), job.folder.clock()
    ...
    verdicts = job.judge(world, {"base": base, "tuned": policy}, episodes)
    print_evaluations(verdicts)
    job.finish(compared(verdicts) | {**starting_checkpoint(path), "seconds": clock.seconds})
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn

from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.workers import Built, Workers, open_workers
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.core import replicas
from robopolicy.core.checkpoints import WEIGHTS
from robopolicy.core.errors import DataError
from robopolicy.core.exchange import broadcast
from robopolicy.core.machine import free_memory
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.regression import Regressor
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import PolicySpec
from robopolicy.core.tensors import file_hash
from robopolicy.core.world import World, can_render
from robopolicy.evaluation.classifier_page import classifier_text
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.scores import Anchors, normalised_score
from robopolicy.evaluation.success import (
    BatchPlayer,
    PolicyEvaluation,
    evaluate_both_modes,
    evaluate_policy,
    require_success,
)
from robopolicy.evaluation.tables import fault_table, instruction_table, specification_table, task_table
from robopolicy.evaluation.video import beside, record_grid, write_video
from robopolicy.nn.precision import training_precision
from robopolicy.policies.abilities import DescribesReading, is_pretrained
from robopolicy.policies.loading import checkpoint_in
from robopolicy.runs import finish, finished, open_run, output, run_path
from robopolicy.training.configuration import RegressionConfig
from robopolicy.training.memory import plan_pretraining
from sims.variations.protocol import only_visible


@dataclass(frozen=True)
class Job:
    """A run of one verb: its settings, its folder, and its device."""

    config: Config
    folder: RunFolder
    device: torch.device

    @staticmethod
    def open(
        config: Config, verb: str, sections: tuple[str, ...], done: str = "is done; run.overwrite=true starts over."
    ) -> "Job | None":
        """Open the job of `verb` with these settings; print `done` and return None if it has already finished.

        Raises ConfigError when its folder contains another run, as `open_run` does, or run.device cannot be used, and
        DataError when the run has finished but its checkpoint is missing.
        """
        # The leader first: it may start the folder over.
        opened = open_run(config, verb, sections) if replicas.leads() else None
        is_done = broadcast(lambda: opened is not None and finished(opened) is not None)
        folder = opened or RunFolder(run_path(config, verb))
        if is_done:
            if replicas.leads() and not folder.checkpoint.is_dir():
                raise DataError(
                    f"{folder.path} has ended, but its checkpoint is missing: {folder.checkpoint} is not a folder. "
                    "Restore it, or train again with run.overwrite=true."
                )
            output.print(f"{folder.path} {done}")
            return None
        return Job(config, folder, choose_device(config.run))

    @property
    def is_over(self) -> bool:
        """Whether the rest of the job, its evaluation and result, is left to another process of a data-parallel run."""
        return not replicas.leads()

    def evaluator(
        self, world: World, episodes: int, players: Callable[[Policy], BatchPlayer | None] = lambda policy: None
    ) -> Callable[..., dict[str, float]]:
        """Return the validation function of a learning policy: (policy, deterministic=True) -> metrics.

        It plays the same episodes every time, on seeds that the final evaluation does not use. players: returns
        the workers that play a policy, None for this process.
        """
        seeds = episode_seeds(self.config.run.seed, "validate", episodes)

        def evaluate(policy: Policy, deterministic: bool = True) -> dict[str, float]:
            result = evaluate_policy(
                world,
                policy,
                seeds,
                deterministic=deterministic,
                device=self.device,
                label="validate",
                players=players(policy),
            )
            return result.figures()

        return evaluate

    def judge(
        self, world: World, policies: Mapping[str, Policy], episodes: int, saved: "Saved | None" = None
    ) -> dict[str, PolicyEvaluation]:
        """Return the evaluation result of each policy, by name, on the evaluation seeds that all verbs share.

        saved: where policies are saved, to be played on the workers of config.workers.
        """
        return evaluate_all(self.config, world, policies, episodes, self.device, saved)

    def film(self, world: World, policies: Mapping[str, Policy], episodes: int, videos: int) -> None:
        """Write base_and_tuned.mp4: the labelled policies side by side, from the first evaluation seeds.

        Writes nothing if no videos are requested or the world renders no images.
        """
        if not videos or not can_render(world):
            return
        seeds = evaluation_seeds(self.config, episodes)[:videos]
        clips = [
            record_grid(world, policy, seeds, columns=4, label=label, device=self.device)
            for label, policy in policies.items()
        ]
        write_video(beside(*clips), self.folder.path / "base_and_tuned.mp4")

    def finish(self, result: Mapping[str, Any], what: str = "Policy") -> None:
        """Write the result, which completes the run, and its report; print the paths of `what` was learned and of the
        report.
        """
        finish(self.config, self.folder, result)
        output.print(f"{what}: {self.folder.checkpoint}\nReport: {report_for_run(self.folder.path)}")


def evaluation_seeds(config: Config, episodes: int) -> np.ndarray:
    """Return the evaluation seeds that all verbs share: equal run.seed, equal initial states."""
    return episode_seeds(config.run.seed, "evaluate", episodes)


def confirming_seeds(config: Config, iteration: int, episodes: int) -> np.ndarray:
    """Return the seeds [episodes] used to confirm a target that was reached at `iteration`."""
    return episode_seeds(config.run.seed, f"confirm/{iteration}", episodes)


@dataclass(frozen=True)
class Saved:
    """Checkpoints of policies that are evaluated, from which workers load them.

    paths: name -> checkpoint; like: checkpoint of the policy for which the world was built; seed: of that world;
    workers: those that are open already, None to open them.
    """

    paths: Mapping[str, Path]
    like: Path
    seed: int = 0
    workers: Workers | None = None

    def opened(self, config: Config) -> AbstractContextManager[Workers]:
        """Return the workers, which end afterwards if they were not open before."""
        return open_workers(config) if self.workers is None else nullcontext(self.workers)

    def of(self, name: str, policy: Policy, device: torch.device) -> Path | None:
        """Return the checkpoint of `policy`; None if there is none that is equal to it."""
        path = self.paths.get(name)
        if path is None or not isinstance(policy, nn.Module) or is_pretrained(policy):
            return None
        loaded = load_policy(path, device)
        if type(loaded) is not type(policy) or not isinstance(loaded, nn.Module):
            return None
        here, there = policy.state_dict(), loaded.state_dict()
        same = here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here)
        return path if same else None


def evaluate_all(
    config: Config,
    world: World,
    policies: Mapping[str, Policy],
    episodes: int,
    device: torch.device,
    saved: Saved | None = None,
) -> dict[str, PolicyEvaluation]:
    """Return the evaluation result of each policy in `world`, by name, on the evaluation seeds that all verbs share.

    Policies whose checkpoint is in `saved` play on workers, others in this process.
    """
    seeds, verdicts = evaluation_seeds(config, episodes), dict[str, PolicyEvaluation]()
    with nullcontext(Workers(config, None)) if saved is None else saved.opened(config) as workers:
        for name, each in policies.items():
            players = None
            if saved is not None and workers.pool is not None:
                if (path := saved.of(name, each, device)) is not None:
                    given = {"path": str(path), "like": str(saved.like), "episodes": episodes, "seed": saved.seed}
                    players = workers.players("robopolicy.verbs.job:in_worker", **given)
                else:
                    output.print(f"{name}: no checkpoint is exactly this policy, so it is evaluated in this process.")
            seen = adapt_policy_to_world(world, each)
            verdicts[name] = evaluate_both_modes(world, seen, seeds, device, config.run.seed, name, players=players)
    return verdicts


def in_worker(config: Config, path: str, like: str, episodes: int, seed: int) -> Built:
    """Build in a worker the configured world for the policy at `like`, and the policy at `path`."""
    device = choose_device(config.run)
    world = build_world(config.world, load_policy(like, device), episodes=episodes, seed=seed, device=device)
    return world, adapt_policy_to_world(world, load_policy(path, device)), device


def evaluate_in_own_world(
    config: Config,
    policies: Mapping[str, Policy],
    episodes: int,
    device: torch.device,
    paths: Mapping[str, Path] | None = None,
) -> dict[str, PolicyEvaluation]:
    """Evaluate each policy in the configured world, built for the first policy; print and return the results.

    paths: checkpoints of policies, the first of which workers need.
    """
    world = build_world(config.world, next(iter(policies.values())), episodes=episodes, device=device)
    saved = None if not paths else Saved(paths, next(iter(paths.values())))
    verdicts = evaluate_all(config, world, policies, episodes, device, saved)
    world.close()
    print_evaluations(verdicts)
    return verdicts


def record_video(
    world: World, policy: Policy, seeds: np.ndarray, folder: RunFolder, name: str, device: torch.device
) -> None:
    """Write <name>.mp4 of a policy's episodes with these seeds; nothing without seeds or if the world renders no
    images.
    """
    if len(seeds) and can_render(world):
        clip = record_grid(world, policy, seeds, label=name, device=device)
        write_video(clip, folder.path / f"{name.replace(' ', '_')}.mp4")


def require_target(target: float | None, world: World) -> None:
    """Raise ConfigError when a run should end at a target success rate that the world does not report."""
    if target is not None:
        require_success(world, "set finetune.target_success=null")


def starting_checkpoint(checkpoint: Path) -> dict[str, str]:
    """Return the result entries of the initial checkpoint: its path and the hash of its weights."""
    weights = checkpoint_in(checkpoint) / WEIGHTS
    entry = {"base_checkpoint": str(checkpoint)}
    return {**entry, "base_weights": file_hash(weights)} if weights.is_file() else entry


def print_model(policy: Trainable, section: RegressionConfig, lesson: Regressor | None = None) -> None:
    """Print how a checkpoint reads images and the memory that training takes; raises ConfigError when less is free.

    The memory is printed for token policies built from a checkpoint and for LeRobot policies only; others are small.
    lesson: the training loss, if it is not the policy's own.
    """
    if isinstance(policy, DescribesReading) and policy.described:
        output.print(policy.described, soft_wrap=True, highlight=False)
    if not is_pretrained(policy):
        return
    free_bytes = free_memory(next(policy.parameters()).device)
    with training_precision(section.precision):
        sizes = section.batch_size, free_bytes, section.micro_batch
        message = plan_pretraining(policy, *sizes, section.fit.optimiser, lesson, replicas.count())
    output.print(message, soft_wrap=True, highlight=False)


def say_replicas(rows: int, batch: str, unit: str, noise: bool = False) -> None:
    """Print how data-parallel processes divide a `batch` of `rows` (0: not fixed); nothing with one process.

    noise: whether each process draws the noise of the loss for its own rows.
    """
    if replicas.count() == 1:
        return
    each = f" {-(-rows // replicas.count())} of {rows} {unit} each," if rows else ""
    equal = "up to rounding" if not noise else "up to the noise of the loss, which each draws for its rows"
    output.print(
        f"Data-parallel training in {replicas.count()} processes: they divide every {batch},{each} so its size and the "
        f"results are those of one process, {equal}.",
        soft_wrap=True,
        highlight=False,
    )


def print_evaluations(verdicts: dict[str, PolicyEvaluation]) -> None:
    """Print success rates (or returns, if success is not reported) with intervals, one row per policy; then success by
    instruction.
    """
    table = Table(box=None, padding=(0, 2))
    for column in ("", "world", "deterministic", "stochastic", "episodes"):
        table.add_column(column, justify="left" if column in ("", "world") else "right")
    for name, verdict in verdicts.items():
        modes = (verdict.deterministic, verdict.stochastic)
        table.add_row(name, modes[0].world, *(mode.text for mode in modes), str(modes[0].episodes))
    output.print(table)
    for name, verdict in verdicts.items():
        for mode, smoothness in verdict.smoothness.items():
            output.print(f"{name}, {mode}: {smoothness.text}", markup=False)
        for mode in (verdict.deterministic, verdict.stochastic):
            kind = "deterministic" if mode.deterministic else "stochastic"
            if score := mode.summary().get("benchmark_score"):
                interval = f"[{score['low']:.3f}, {score['high']:.3f}]"
                output.print(f"{name}, {kind}: benchmark's own score {score['mean']:.3f} {interval}", markup=False)
            if mode.outside:
                output.print(f"{name}, {kind}: {mode.outside}", markup=False, soft_wrap=True)
        if text := classifier_text(name, verdict.deterministic.summary()):
            output.print(text, markup=False, soft_wrap=True)
    print_instructions(verdicts)


def print_instructions(verdicts: Mapping[str, PolicyEvaluation]) -> None:
    """Print deterministic success per task or instruction and per planted fault, and the formula of the episodes, one
    column per policy; nothing if there is only one.
    """
    judged = [(name, verdict.deterministic.summary()) for name, verdict in verdicts.items()]
    tables = task_table(judged) or instruction_table(judged), fault_table(judged), specification_table(judged)
    for table_rows in tables:
        if table_rows is None:
            continue
        table = Table(box=None, padding=(0, 2))
        for column in table_rows[0]:
            table.add_column(column, justify="left" if column == table_rows[0][0] else "right")
        for row in table_rows[1]:
            table.add_row(*row)
        output.print(table)


def normalised(verdicts: Mapping[str, PolicyEvaluation], anchors: Anchors | None) -> dict[str, Any]:
    """Print and return {"normalised": {name: {mode: score}}}; {} without anchors.

    Raises DataError when the results are from another world than the anchors.
    """
    if anchors is None:
        return {}
    scores_of: dict[str, dict[str, Any]] = {}
    for name, verdict in verdicts.items():
        modes = {"deterministic": verdict.deterministic, "stochastic": verdict.stochastic}
        scores = {mode: normalised_score(result, anchors) for mode, result in modes.items()}
        output.print(f"{name}: {', '.join(f'{mode} {score.text}' for mode, score in scores.items())}", markup=False)
        scores_of[name] = {mode: score.to_json() for mode, score in scores.items()}
    return {"normalised": scores_of}


def note_invisible(variations: Mapping[str, Mapping[str, Any]], policies: Iterable[PolicySpec]) -> None:
    """Print which of the variations, as of `sims.variations.protocol.sweep`, none of the policies can see."""
    names = only_visible(variations)
    if names and not any(policy.cameras for policy in policies):
        changes = f"Note: only images change with {' and '.join(names)}"
        output.print(f"{changes}, and none are read here: success stays as it is.", soft_wrap=True)
