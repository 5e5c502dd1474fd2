"""Success and reward of recorded episodes, set by a classifier."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.returns import SUCCESS
from robopolicy.success.classifier import SuccessClassifier, require_one_task, shared_classifier
from robopolicy.success.labels import frames_of
from robopolicy.success.measures import held_scores

ONE_INSTRUCTION = (
    "relabel those of one with robopolicy success DATASET success.classifier=CHECKPOINT success.instruction='TEXT' "
    "success.relabelled=FOLDER"
)
"""Way out for data with several instructions."""


def relabelled(episodes: Episodes, classifier: SuccessClassifier, only_reward: bool = False) -> Episodes:
    """Return the episodes with the success that `classifier` would have counted in a world.

    Success stays counted after its first step. The reward term of success is 1 at that step; other terms stay unless
    `only_reward`. An episode terminated if it did and the classifier counts it, or if success is counted at its last
    step. Raises SpecError when the episodes lack what the classifier reads, or have several tasks.
    """
    require_one_task(classifier, sorted(set(episodes.tasks)), "the dataset", ONE_INSTRUCTION)
    logits = classifier.logits(episodes.observation)
    accepted = np.zeros(episodes.step_count, dtype=bool)
    for episode in range(len(episodes)):
        part, start = frames_of(episodes, episode), int(episodes.starts[episode])
        held = held_scores(logits[part.start + 1 : part.stop], classifier.hold) > classifier.threshold
        accepted[start : start + len(held)] = np.logical_or.accumulate(held)
    success = torch.from_numpy(accepted).to(episodes.device)
    first = success.clone()
    inside = torch.ones_like(success)
    inside[episodes.starts] = False
    first[1:] &= ~(success[:-1] & inside[1:])
    last = episodes.starts + episodes.lengths - 1
    counted, ends_there = success[last], first[last]
    terminated = ends_there if episodes.terminated is None else ends_there | (episodes.terminated & counted)
    bonus = {SUCCESS: first.float()}
    keeps_others = episodes.rewards is not None and not only_reward
    rewards = {**(episodes.rewards or {}), **bonus} if keeps_others else bonus
    return replace(episodes, step_success=success, terminated=terminated, rewards=rewards)


def relabelled_by(path: Path | None, episodes: Episodes, only_reward: bool = False) -> Episodes:
    """Return the episodes relabelled by the classifier at `path`; unchanged for None."""
    return episodes if path is None else relabelled(episodes, shared_classifier(path), only_reward)
