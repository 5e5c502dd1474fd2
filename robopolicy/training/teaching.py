"""DAgger: train a student on a teacher's labels in the states that the student visits.

Ross, Gordon and Bagnell 2011, arXiv:1011.0686. In round i the teacher plays a fraction beta^i of the episodes, the
student the rest. The teacher labels every step with its own action, and the student is trained on all labels. It thus
learns to recover from its own errors, which demonstrations do not show. The teacher may read more than the student (the
simulator's state, where the student has cameras). Deviations: the player changes per episode, not per step, and a round
continues from the previous round's student. Axes: N step, E episode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.core import replicas
from robopolicy.core.checkpoints import read_weights, write_checkpoint
from robopolicy.core.episodes import Episodes
from robopolicy.core.exchange import broadcast
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import require_fit
from robopolicy.core.storage import remove_leftovers
from robopolicy.core.world import Controller, World
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.lookahead import LookaheadController
from robopolicy.data.record import record
from robopolicy.training.auxiliary import FieldHead, build_state_head
from robopolicy.training.configuration import TeachConfig
from robopolicy.training.pretrain import imitate

HEAD = "auxiliary_head"
"""Folder in which a round saves the head that predicts config.auxiliary_keys, for the next round."""


@dataclass(frozen=True)
class Teacher:
    """Teacher of DAgger: labels states with its actions, and acts (with disturbances) in a part of the episodes.

    says: the labelling policy, without noise; plays: round number -> the noisy policy that acts in it, so that it
    visits states off its path. It is built anew in every round, so a round is the same whether earlier rounds were just
    run or loaded.
    """

    says: Policy | Controller | LookaheadController
    plays: Callable[[int], Policy | Controller]


@dataclass(frozen=True)
class TeachResult:
    """The student, the total number of control steps, and the result of each round."""

    student: Trainable
    env_steps: int
    rounds: list[dict[str, Any]]


def teach(
    teacher: Teacher,
    world: World,
    new_student: Callable[[Episodes], Trainable],
    load_student: Callable[[Path], Trainable],
    config: TeachConfig,
    folder: RunFolder,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> TeachResult:
    """Train a student for config.rounds rounds; each saves its dataset and its student in folder/rounds.

    world: provides the observations of both; new_student: builds a student for the first round's episodes;
    load_student: loads a saved round's student. A killed run continues with the round that it was in. Raises SpecError
    when the student does not match the world, and the errors of `record` and `fit`.
    """
    datasets: list[Episodes] = []
    conditions: list[dict[str, Tensor]] = []
    student: Trainable | None = None
    head: FieldHead | None = None
    for number in range(config.rounds):
        place = RunFolder(folder.path / "rounds" / str(number))
        played: Episodes | None = None
        is_played, is_complete = broadcast(partial(_progress, place))
        dataset_path = place.path / "dataset"
        if not is_played:
            if replicas.leads():
                played = _play(teacher, student, world, config, number, seed, device)
                write_dataset(played, dataset_path, images="png", existing="replace")
            broadcast(lambda: True)  # it is written
        datasets.append(read_dataset(dataset_path) if played is None else played)
        if is_complete:
            student = load_student(place.checkpoint)
            continue
        if student is None:
            student = new_student(datasets[0])
            require_fit(student.spec, world.spec)
        if config.auxiliary_keys and head is None:
            head = build_state_head(student, datasets[0], config, seed)
            # The head has no place in the policy's checkpoint, but goes on learning from round to round.
            before = place.path.parent / str(number - 1) / HEAD
            head = read_weights(head, before, device) if number else head
        losses = _learn(student, datasets, config, number, place, seed, conditions, head)
        if not replicas.leads():
            continue
        folder.rewind("round", number - 1)
        counts = {"episodes": sum(map(len, datasets)), "steps": sum(part.step_count for part in datasets)}
        folder.log({**_outcome(datasets[-1], config, number), **counts, **losses})
        if head is not None:
            write_checkpoint(place.path / HEAD, {"kind": HEAD}, head)
        student.save(place.checkpoint)  # which comes last: the round is over
    assert student is not None  # there is a first round
    rounds = [_outcome(part, config, number) for number, part in enumerate(datasets)]
    return TeachResult(student, sum(part.step_count for part in datasets), rounds)


def _progress(place: RunFolder) -> tuple[bool, bool]:
    """Return whether a round's episodes are saved, and whether the round is complete."""
    remove_leftovers(place.path)
    # The checkpoint is written last, so where it exists the round is complete.
    return (place.path / "dataset").exists(), place.checkpoint.exists()


def _play(
    teacher: Teacher,
    student: Trainable | None,
    world: World,
    config: TeachConfig,
    number: int,
    seed: int,
    device: torch.device | str,
) -> Episodes:
    """Return the labelled episodes of a round: first the teacher's, then the student's."""
    seeds = episode_seeds(seed, f"teach/{number}", config.episodes)
    # Seeds and draws of a round depend on its number alone: one that is played again is the same.
    draws = Generators(derive_seed(seed, f"teach/play/{number}"), torch.device(device))["act"]
    share = config.played_by_teacher(number)
    parts: list[Episodes] = []
    for player, part_seeds in ((teacher.plays(number), seeds[:share]), (student, seeds[share:])):
        if player is not None and len(part_seeds):
            parts.append(record(world, player, part_seeds, generator=draws, teacher=teacher.says))
    return Episodes.concatenate(parts)


def _learn(
    student: Trainable,
    played: Sequence[Episodes],
    config: TeachConfig,
    number: int,
    place: RunFolder,
    seed: int,
    read: list[dict[str, Tensor]],
    head: FieldHead | None,
) -> dict[str, float]:
    """Fit the student to all episodes so far; return the last losses. read, head: see `imitate`."""
    generators = Generators(derive_seed(seed, f"teach/fit/{number}"), next(student.parameters()).device)
    # Earlier students only have to play the next round; the last one is what is kept, and learns longer.
    round_config = replace(config, fit=config.last_fit) if number + 1 == config.rounds else config
    fit_result = imitate(
        student, played, round_config, generators, place, f"Round {number + 1} of {config.rounds}", read, head
    )
    return dict(fit_result.losses)


def _outcome(episodes: Episodes, config: TeachConfig, number: int) -> dict[str, Any]:
    """Return the number of steps of a round and, when the world reports success, the number of student episodes and
    successes.

    The student plays with exploration, with the weights of the previous rounds.
    """
    outcome: dict[str, Any] = {"round": number, "played_steps": episodes.step_count}
    if episodes.success is None:
        return outcome
    student_success = episodes.success[config.played_by_teacher(number) :]
    return {**outcome, "student_episodes": len(student_success), "student_successes": int(student_success.sum())}


keep_former_names(__name__, {"Taught": "TeachResult"})
