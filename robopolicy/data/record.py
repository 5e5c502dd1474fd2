"""Record demonstrations and rollouts: run a controller or a policy in a world, one seed per episode."""

import itertools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.action_bounds import OutsideBounds, clip_if_bounded, union_of_bounds, widen_bounds
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, RobopolicyNote
from robopolicy.core.interventions import Segment
from robopolicy.core.player import Actor, PlayedStep, Player, actor_of
from robopolicy.core.policy import Policy, is_policy
from robopolicy.core.progress import progress
from robopolicy.core.randomness import EpisodeGenerator, derive_seed
from robopolicy.core.spec import IMAGE_PREFIX, TASK, WorldSpec
from robopolicy.core.world import Controller, Step, World, begin_episodes
from robopolicy.data.chains import Chains, chain_of
from robopolicy.data.configuration import CorrectConfig
from robopolicy.data.corrections import AssistedPolicy, with_recovery
from robopolicy.data.lookahead import LookaheadController
from robopolicy.data.recording_cache import Recording, RecordingCache, from_arrays, to_arrays
from robopolicy.operators.alarms import Alarm
from robopolicy.operators.assistance import Turn
from robopolicy.operators.operator import Operator, ScriptedOperator, Site


class Recorders(Protocol):
    """Records batches of episodes of one actor elsewhere, on workers, each with a `Recorder`."""

    def record(self, seeds: np.ndarray, batches: Sequence[np.ndarray]) -> Iterator[Mapping[str, Any]]:
        """Yield the result of `Recorder.record` for every batch of positions [n] in `seeds` [E], in any order."""
        ...


@dataclass(frozen=True)
class Recorder:
    """How the episodes of one recording are played, in this process and in workers; fields as in `record`.

    actor: positions [n] of episodes in the recording -> what acts in them; chains: store denoising chains.
    """

    world: World
    actor: "Callable[[np.ndarray], Controller | Policy | AssistedPolicy]"
    generator: torch.Generator
    deterministic: bool = False
    teacher: Controller | Policy | Actor[None] | None = None
    chains: bool = False

    def close(self) -> None:
        """Close the world, and the teacher's if it has one."""
        self.world.close()
        if isinstance(self.teacher, LookaheadController):
            self.teacher.close()

    def record(self, seeds: np.ndarray, positions: np.ndarray) -> dict[str, Any]:
        """Record the episodes with `seeds` [n] at these positions [n]; return the episodes and the counts of
        out-of-bounds actions as plain data.
        """
        labels = _labels(self.teacher, self.generator)
        takes = _Takes(self.world, np.asarray(seeds), self.chains, labels, None)
        for _ in _record_here(takes, self.actor(positions), self.generator, self.deterministic):
            pass
        episodes = [replace(item, position=int(positions[place])) for place, item in sorted(takes.done.items())]
        return {"episodes": to_arrays(episodes), "steps": takes.outside.steps, "outside": takes.outside.counts}


def record(
    world: World,
    actor: Controller | Policy,
    seeds: Sequence[int] | np.ndarray,
    *,
    episodes: int | None = None,
    successes_only: bool = False,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    teacher: Controller | Policy | Actor[None] | None = None,
    kept: RecordingCache | None = None,
) -> Episodes:
    """Run the episodes of `seeds` and return them in that order, including failures unless `successes_only`.

    episodes: stop after this many (kept) episodes. generator: provides seed and device of a policy's noise, which
    depends on the episode (`EpisodeGenerator`), so the same episodes result for any batch size of the world;
    deterministic: no exploration noise; teacher: labels every step with its own action, without exploration noise
    (`Episodes.labels`); kept: storage for finished episodes; stored ones are not run again. Actions are stored as
    executed, i.e. clipped if the world clips; a warning reports out-of-bounds actions. A policy's chunks run step by
    step if in-chunk images, success times or labels are needed. Raises DataError (seeds used up, nothing kept),
    SpecError (actor, teacher and world do not fit) and ConfigError (successes only, but the world reports none).
    """
    labels = _labels(teacher, torch.Generator() if generator is None else generator)
    takes = _play(world, actor, seeds, episodes, successes_only, generator, deterministic, teacher=labels, kept=kept)
    return _gather(takes, world.spec, episodes, successes_only)


def record_chains(
    world: World,
    policy: Policy,
    seeds: Sequence[int] | np.ndarray,
    *,
    generator: torch.Generator,
    kept: RecordingCache | None = None,
    recorders: Recorders | None = None,
) -> tuple[Episodes, Chains]:
    """`record` the episodes of a denoising policy, with exploration noise, and the denoising chain of each action
    chunk.

    Raises ConfigError when its decisions contain no chain or only randomly chosen steps are noisy, in addition to the
    errors of `record`.
    """
    takes = _play(world, policy, seeds, None, False, generator, False, chains=True, kept=kept, recorders=recorders)
    recordings = [takes.done[position] for position in sorted(takes.done)]
    first = np.cumsum([0, *(len(item.success) for item in recordings[:-1])])
    chain_starts = [start + begins for start, item in zip(first, recordings, strict=True) for begins in item.begins]
    chains, masks = (np.stack([pair[place] for item in recordings for pair in item.chains]) for place in range(2))
    if (masks != masks[0]).any():
        raise ConfigError(
            "Denoising chains with randomly chosen noisy steps (noisy_steps) have no density and cannot be "
            "recorded: set noisy_steps=null."
        )
    return _gather(takes, world.spec, None, False), Chains(torch.tensor(chain_starts), torch.from_numpy(chains))


def record_corrected(
    world: World,
    policy: Policy,
    expert: Controller,
    seeds: Sequence[int] | np.ndarray,
    config: CorrectConfig,
    *,
    generator: torch.Generator,
    kept: RecordingCache | None = None,
) -> Episodes:
    """Record episodes of a policy with exploration noise, corrected by `expert`; every step stores who acted.

    Raises ConfigError when actions to be undone have no range, in addition to the errors of `record`.
    """
    operator: Operator = ScriptedOperator(Site(world.spec.action, world.spec.fps, world.batch_size, lambda: expert))
    if config.recover_steps:
        operator = with_recovery(operator, expert, config, world.spec, world.batch_size)
    actor = corrected(world, policy, operator, config, generator)
    return record_with(Recorder(world, lambda _: actor, generator), seeds, kept=kept, frames=config.frames)


def record_with(
    recorder: Recorder,
    seeds: Sequence[int] | np.ndarray,
    *,
    successes_only: bool = False,
    kept: RecordingCache | None = None,
    recorders: Recorders | None = None,
    frames: int = 0,
) -> Episodes:
    """Record the episodes of `seeds` [E] as `record` does, in this process or with equal `recorders` on workers.

    frames: control steps of operators after which no further episode begins, 0 for no limit. Returned are the first
    episodes that together have as many, or all if they have less.
    """
    positions = np.array(range(len(seeds)) if kept is None else kept.left(len(seeds)), dtype=np.int64)
    actor, labels = recorder.actor(positions), _labels(recorder.teacher, recorder.generator)
    options = {"teacher": labels, "kept": kept, "recorders": recorders, "frames": frames}
    draws, deterministic = recorder.generator, recorder.deterministic
    takes = _play(recorder.world, actor, seeds, None, successes_only, draws, deterministic, **options)
    return _gather(takes, recorder.world.spec, takes.within(frames) if frames else None, successes_only)


def corrected(
    world: World,
    policy: Policy,
    operator: Operator,
    config: CorrectConfig,
    generator: torch.Generator,
    alarms: Sequence[Alarm] = (),
) -> AssistedPolicy:
    """Return a policy that `operator` corrects, on the alarms of `config` and on `alarms`."""
    draws = EpisodeGenerator.of(generator)
    return AssistedPolicy(world.spec, world.batch_size, policy, operator, config, draws, alarms)


def _labels(teacher: Controller | Policy | Actor[None] | None, generator: torch.Generator) -> Actor[Any] | None:
    """Return the actor that labels every step, None without a teacher."""
    draws = EpisodeGenerator.of(generator)
    noise = EpisodeGenerator(derive_seed(draws.initial_seed(), "teacher"), draws.device)
    return None if teacher is None else actor_of(teacher, noise, deterministic=True)


def _play(
    world: World,
    actor: Controller | Policy | AssistedPolicy,
    seeds: Sequence[int] | np.ndarray,
    episodes: int | None,
    successes_only: bool,
    generator: torch.Generator | None,
    deterministic: bool,
    *,
    chains: bool = False,
    teacher: Actor[Any] | None = None,
    kept: RecordingCache | None = None,
    recorders: Recorders | None = None,
    frames: int = 0,
) -> "_Takes":
    """Run episodes as described in `record`; chains: store every denoising chain; teacher: labels every step; frames:
    control steps of operators after which no further episode begins, 0 for no limit.
    """
    spec = world.spec
    seeds = np.asarray(seeds, dtype=np.int64)
    target = len(seeds) if episodes is None else episodes
    if not len(seeds) or target < 1:
        raise DataError("Nothing to record: pass at least one seed and request at least one episode.")
    if is_policy(actor) and generator is None:
        raise DataError("A policy samples noise: pass the generator that it uses.")
    if successes_only and not spec.reports_success:
        raise ConfigError(f"'{spec.name}' does not report success, so successes_only would discard every episode.")
    generator = torch.Generator() if generator is None else generator
    takes = _Takes(world, seeds, chains, teacher, kept)
    if frames and max(takes.operated(), default=0) >= frames:
        return takes
    exact = episodes is None and not successes_only

    def wanted(running: int) -> bool:
        if frames and max(takes.operated(), default=0) >= frames:
            return False
        pending = takes.successes if successes_only else takes.finished
        return exact or pending + running < target

    with progress(f"recording {spec.name}", target) as advance, _written(kept):

        def tell(ended: Iterable[Recording]) -> None:
            """Show the number of finished episodes and of successes."""
            count = sum(item.success[-1] or not successes_only for item in ended)
            advance(count, f"{takes.successes}/{takes.finished} succeeded" if spec.reports_success else "")

        tell(takes.done.values())
        if recorders is not None:
            parts = _record_elsewhere(takes, recorders, world.batch_size)
        else:
            parts = _record_here(takes, actor, generator, deterministic, wanted)
        for finished in parts:
            if kept is not None:
                kept.add(finished)
            tell(finished)
    if text := takes.outside.text:
        warnings.warn(f"Recording '{spec.name}': {text}", RobopolicyNote, stacklevel=3)
    return takes


def _record_here(
    takes: "_Takes",
    actor: Controller | Policy | AssistedPolicy,
    generator: torch.Generator,
    deterministic: bool,
    wanted: Callable[[int], bool] = lambda running: True,
) -> Iterator[list[Recording]]:
    """Run the waiting episodes in this process and yield those that have ended, at least once per chunk.

    wanted: number of running rows -> whether further episodes should start.
    """
    world = takes.world
    generator = EpisodeGenerator.of(generator)
    player_actor = (
        actor if isinstance(actor, AssistedPolicy) else actor_of(actor, generator, deterministic=deterministic)
    )
    stepwise = bool(world.spec.cameras) or not world.spec.terminate_on_success or takes.teacher is not None
    player: Player[Any] = Player(world, player_actor, stepwise=stepwise)
    takes.begin(player)
    takes.label()
    for part in player:
        takes.add(part)
        if isinstance(actor, AssistedPolicy):
            actor.watch(part)
        if not part.chunk_done:
            takes.label()
            continue
        yield takes.collect()
        if wanted(int(player.running.sum())):
            takes.start_next()
        takes.label()


def _record_elsewhere(takes: "_Takes", recorders: Recorders, batch: int) -> Iterator[list[Recording]]:
    """Record the waiting episodes on workers, in batches of this size, and yield those that have ended."""
    waiting = np.array(takes.waiting, dtype=np.int64)
    batches = [waiting[first : first + batch] for first in range(0, len(waiting), batch)]
    for part in recorders.record(takes.seeds, batches):
        takes.outside.steps += int(part["steps"])
        takes.outside.counts += np.asarray(part["outside"])
        yield takes.took(from_arrays(part["episodes"].items()))


@contextmanager
def _written(kept: RecordingCache | None) -> Generator[None]:
    """Context that writes pending episodes at the end, including after errors."""
    try:
        yield
    finally:
        if kept is not None:
            kept.write()


def record_until(steps: float, play: Callable[[int], Episodes]) -> Episodes:
    """Return the episodes of `play`, called with the round index, until they have at least `steps` control steps."""
    parts = [play(0)]
    while sum(part.step_count for part in parts) < steps:
        parts.append(play(len(parts)))
    return of_one_world(parts)


def of_one_world(parts: Sequence[Episodes]) -> Episodes:
    """Join recordings of one world, with action bounds widened to contain all of them."""
    action = union_of_bounds(*(part.action_field for part in parts))
    return Episodes.concatenate([replace(part, action_field=action) for part in parts])


class _Takes:
    """Assignment of episodes to a player's rows, and the data recorded so far."""

    player: Player[Any]

    def __init__(
        self,
        world: World,
        seeds: np.ndarray,
        chains: bool,
        teacher: Actor[Any] | None,
        kept: RecordingCache | None,
    ):
        self.world = world
        self.seeds = seeds
        self.teacher = teacher
        self.labels: np.ndarray | None = None  # [B, L, A]
        self.chains, self.decided = chains, True
        self.outside = OutsideBounds(world.spec)
        self.done = {} if kept is None else dict(kept.known)
        self.current: list[Recording | None] = [None] * world.batch_size
        self.finished, self.successes = len(self.done), sum(item.success[-1] for item in self.done.values())
        self.waiting = list(range(len(seeds))) if kept is None else kept.left(len(seeds))

    def operated(self) -> list[int]:
        """Return the sums of control steps of operators in the first episodes, as far as all before have finished."""
        finished = itertools.takewhile(lambda position: position in self.done, range(len(self.seeds)))
        return list(itertools.accumulate(_operated(self.done[position]) for position in finished))

    def within(self, frames: int) -> int:
        """Return the number of first episodes that have `frames` control steps of operators together, at most all."""
        sums = self.operated()
        return min(sum(each < frames for each in sums) + 1, len(sums))

    def begin(self, player: Player[Any]) -> None:
        """Start the first episodes in the rows of `player`."""
        self.player = player
        if self.waiting:
            first = self.seeds[self.waiting[: self.world.batch_size]]
            player.start_batch(first)
            begin_episodes(self.teacher, np.resize(first, self.world.batch_size))
            self._open(np.arange(len(first)))

    def add(self, played: PlayedStep[Any]) -> None:
        """Store the results of the rows that were running."""
        spec = self.player.world.spec
        done = clip_if_bounded(spec, played.actions)
        self.outside.add(played.actions, played.step.valid & played.running[:, None])
        for row in played.running.nonzero()[0]:
            recording = self.current[row]
            assert recording is not None
            if isinstance(played.info, Turn):
                recording.turns.append((int(played.info.actor[row]), int(played.info.segment[row])))
            elif self.chains and self.decided:
                recording.begins.append(len(recording.success))
                recording.chains.append(chain_of(played.info.decision, row))
            if self.labels is not None and played.step.valid[row].any():
                recording.labels.append(clip_if_bounded(spec, self.labels[row]))
                if isinstance(self.teacher, LookaheadController):
                    recording.label_steps.append(int(self.teacher.before_end[row]))
            _append(recording, played.step, done, row, spec)
        self.decided = played.chunk_done

    def label(self) -> None:
        """Query the teacher, if any, for its actions in the next steps."""
        if self.teacher is not None and self.player.running.any():
            self.labels = self.teacher.choose(self.player.observation)[0]

    def collect(self) -> list[Recording]:
        """Remove and return the episodes that ended since the last call."""
        finished: dict[int, Recording] = {}
        for row, recording in enumerate(self.current):
            if recording is not None and not self.player.running[row]:
                finished[recording.position] = recording
                self.current[row] = None
        return self.took(finished)

    def took(self, finished: Mapping[int, Recording]) -> list[Recording]:
        """Store and return finished episodes, given by position."""
        self.done |= finished
        self.finished += len(finished)
        self.successes += sum(item.success[-1] for item in finished.values())
        return list(finished.values())

    def start_next(self) -> None:
        """Assign the next seeds, in order, to the free rows."""
        free_rows = np.array([row for row, item in enumerate(self.current) if item is None], dtype=np.int64)
        rows = free_rows[: len(self.waiting)]
        if len(rows):
            new_seeds = self.seeds[self.waiting[: len(rows)]]
            self.player.start(new_seeds, rows)
            begin_episodes(self.teacher, new_seeds, rows)
            self._open(rows)

    def _open(self, rows: np.ndarray) -> None:
        observation = self.player.observation
        if self.teacher is not None:
            self.teacher.reset(rows)
        for row in rows:
            frames = {key: [observation[key][row, -1:].copy()] for key in self.player.world.spec.observation}
            task = str(observation[TASK][row]) if TASK in observation else ""
            self.current[row] = Recording(self.waiting.pop(0), task, frames)


def _operated(recording: Recording) -> int:
    """Return the number of control steps in which an operator recovered or corrected."""
    return sum(segment >= Segment.RECOVER for _, segment in recording.turns)


def _append(recording: Recording, step: Step, actions: np.ndarray, row: int, spec: WorldSpec) -> None:
    count = int(step.valid[row].sum())
    for key, frames in recording.observation.items():
        image = key.startswith(IMAGE_PREFIX)
        frames.append(step.observation[key][row, -1:].copy() if image else step.trace[key][row, :count].copy())
    recording.actions.append(actions[row, :count])
    for name in spec.rewards:
        recording.rewards.setdefault(name, []).append(step.rewards[name][row, :count].copy())
    before = bool(recording.success) and recording.success[-1]
    recording.success += [before] * (count - 1) + [bool(step.success[row])]
    recording.terminated = bool(step.terminated[row])


def _all_actions(kept: Sequence[Recording]) -> list[np.ndarray]:
    """Return all executed actions and all teacher actions, [N, A] each."""
    labels = [label.reshape(-1, label.shape[-1]) for item in kept for label in item.labels]
    return [piece for item in kept for piece in item.actions] + labels


def _gather(takes: _Takes, spec: WorldSpec, wanted: int | None, successes_only: bool) -> Episodes:
    done = [takes.done[position] for position in sorted(takes.done)]
    recordings = [item for item in done if item.success[-1]] if successes_only else done
    if wanted is not None and len(recordings) < wanted:
        raise DataError(
            f"Only {len(recordings)} of {wanted} requested episodes were obtained from {len(takes.seeds)} seeds on "
            f"'{spec.name}': use more seeds or a better actor."
        )
    recordings = recordings[:wanted]
    if not recordings:
        raise DataError(
            f"None of {len(done)} episodes on '{spec.name}' succeeded: record failures too "
            "(successes_only=false) or use a better actor."
        )

    turns = torch.tensor([turn for item in recordings for turn in item.turns], dtype=torch.int64).reshape(-1, 2)

    def joined(parts: list[np.ndarray], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    return Episodes(
        observation_fields=dict(spec.observation),
        # Whoever learns from them may do what was done here, also where the bounds are none.
        action_field=widen_bounds(spec.action, *_all_actions(recordings)),
        fps=float(spec.fps),  # which is how it comes back from the disk
        observation={
            key: joined(
                [frame for item in recordings for frame in item.observation[key]],
                torch.uint8 if key.startswith(IMAGE_PREFIX) else torch.float32,
            )
            for key in spec.observation
        },
        actions=joined([piece for item in recordings for piece in item.actions]),
        lengths=torch.tensor([len(item.success) for item in recordings]),
        tasks=tuple(item.task for item in recordings),
        rewards={name: joined([piece for item in recordings for piece in item.rewards[name]]) for name in spec.rewards},
        step_success=torch.tensor([value for item in recordings for value in item.success])
        if spec.reports_success
        else None,
        terminated=torch.tensor([item.terminated for item in recordings]),
        seeds=torch.from_numpy(takes.seeds[[item.position for item in recordings]]),
        final_known=torch.ones(len(recordings), dtype=torch.bool),
        actor=turns[:, 0].contiguous() if len(turns) else None,
        segment=turns[:, 1].contiguous() if len(turns) else None,
        labels=None
        if takes.teacher is None
        else torch.from_numpy(np.stack([label for item in recordings for label in item.labels])).float(),
        label_steps=torch.tensor([count for item in recordings for count in item.label_steps])
        if isinstance(takes.teacher, LookaheadController)
        else None,
    )
