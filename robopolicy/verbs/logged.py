"""Data loading of `offline`: datasets from any source, checked against the policy, with a printed summary of what is
read.

Nothing is dropped silently: unread columns, omitted episodes and omitted decisions are printed. Data that cannot be
used raises an error that names the column, the episode and a remedy.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor

from robopolicy.configuration import Config
from robopolicy.configuration.sections.recorded import OfflineSection
from robopolicy.core.delayed import delay_episodes, steps_ahead
from robopolicy.core.episodes import Episodes, select_episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.finite_values import nonfinite_columns, require_finite_columns
from robopolicy.core.interventions import interventions_in_words
from robopolicy.core.origin import renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import derive_seed
from robopolicy.core.registry import load_dotted
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.data.lerobot_reading import read_dataset, read_information, require_known
from robopolicy.rl.offline.decisions import Decisions
from robopolicy.runs import default_path, output
from robopolicy.success.relabelling import relabelled_by
from robopolicy.training.reading import describe_reading, require_fit_of
from worldmodels import load_world_model
from worldmodels.heads.state import StepHeads

HEAD = "head:"
"""Prefix of offline.reward that selects a world model's success head."""


def split_data(config: Config, policy: Policy, device: torch.device) -> tuple[Episodes, Episodes]:
    """Return the training episodes and the episodes held out for the evaluators; prints what is read.

    Raises DataError when the data do not fit the policy, rewards or task ends are missing, or values are not finite.
    """
    section = config.offline
    first = default_path(config, "collect", "dataset", section.dataset, "offline.dataset")
    require_known(section.rename, (first, *section.extra_datasets))
    success = config.world.success
    parts = [read_log(first, policy, section, section.exclude_episodes, success)]
    parts += [read_log(path, policy, section, success=success) for path in section.extra_datasets]
    episodes = Episodes.concatenate(parts)
    draws = torch.Generator().manual_seed(derive_seed(config.run.seed, "offline/holdout"))
    training, held_out = episodes.split(config.gate.holdout, draws)
    output.print(f"{len(held_out)} of {len(episodes)} episodes are held out for the evaluators.")
    return training.to(device), held_out.to(device)


def read_log(
    path: Path, policy: Policy, section: OfflineSection, without: tuple[int, ...] = (), success: Path | None = None
) -> Episodes:
    """Return the episodes of a dataset except those in `without`, with rewards as offline.reward specifies; raises as
    `split_data`.

    success: checkpoint of a classifier that sets success and its reward, None for the recorded ones.
    """
    renaming = section.rename or renaming_of(policy)
    dataset = read_dataset(path, rename=renaming)
    delayed_episodes = delay_episodes(dataset, steps_ahead(policy.spec.observation, policy.spec.action))
    require_fit_of(path, delayed_episodes, policy.spec)
    episodes = select_episodes(delayed_episodes, path, "offline", without=without)
    vectors = [key for key in episodes.observation if not key.startswith(IMAGE_PREFIX)]
    columns = dict.fromkeys((*policy.spec.observation, *vectors))
    reading = describe_reading(path, read_information(path, renaming)["features"], episodes, tuple(columns))
    output.print(escape("\n".join(reading.lines())), soft_wrap=True)
    if without:
        output.print(f"Excluded by offline.exclude_episodes: {len(without)} episodes.")
    if text := interventions_in_words(episodes):
        output.print(f"{text}; the critic is trained on all steps.", soft_wrap=True)
    if nonfinite_columns(episodes):
        try:
            require_finite_columns(delayed_episodes, rewards=True)
        except DataError as error:
            raise DataError(f"{path}: {error} offline.exclude_episodes=[NUMBER] excludes episodes.") from error
    if success is not None:
        episodes = relabelled_by(success, episodes)
        assert episodes.success is not None
        counted = f"{int(episodes.success.sum())} of {len(episodes)} episodes"
        output.print(f"{path}: {counted} are successful by the classifier {success}.", markup=False, soft_wrap=True)
    return require_rewards(path, with_reward(episodes, section.reward))


def require_rewards(path: Path, episodes: Episodes) -> Episodes:
    """Return the episodes with rewards and task ends; raises DataError when they cannot be determined.

    If only success is recorded, the task ends with success and every other end counts as a time limit; this is printed.
    """
    if episodes.terminated is None and episodes.success is not None:
        success_count = int(episodes.success.sum())
        output.print(
            f"{path} does not record where the task ended (next.terminated): {success_count} episodes end by "
            f"success; the other {len(episodes) - success_count} are treated as truncated by a time limit.",
            markup=False,
            soft_wrap=True,
        )
        episodes = replace(episodes, terminated=episodes.success)
    if episodes.reward is None or episodes.terminated is None:
        missing_column = "rewards (next.reward)" if episodes.reward is None else "task ends (next.terminated)"
        raise DataError(
            f"{path} records no {missing_column} in any episode, which critics need. Use offline.reward=success "
            "(reward from next.success), offline.reward=head:WORLDMODEL (reward from a world model's success head), "
            "or offline.reward=package.module:function (custom reward); or improve the policy in a world model "
            "(robopolicy imagine)."
        )
    return episodes


def with_reward(episodes: Episodes, reward: str) -> Episodes:
    """Return the episodes with rewards from "success", a success head or a function given by import path; unchanged for
    "".

    With "success" they terminate at success unless the data records termination; with a head, always.
    """
    if not reward:
        return episodes
    if reward == "success":
        if episodes.step_success is None:
            raise DataError(
                "offline.reward=success needs the success of every step (next.success), which the data does not "
                "record: offline.reward=head:WORLDMODEL uses the success head of a world model."
            )
        terminated = episodes.terminated if episodes.terminated is not None else episodes.success
        return replace(episodes, rewards={"success": _first(episodes, episodes.step_success)}, terminated=terminated)
    if reward.startswith(HEAD):
        step_success = label_success(episodes, Path(reward.removeprefix(HEAD)))
        rewarded = replace(episodes, step_success=step_success, rewards={"success": _first(episodes, step_success)})
        return replace(rewarded, terminated=rewarded.success)
    rewards = load_dotted(reward, "offline.reward")(episodes)
    if not isinstance(rewards, torch.Tensor) or rewards.shape != (episodes.step_count,):
        raise ConfigError(f"{reward} must return a tensor [{episodes.step_count}] with one reward per step.")
    return replace(episodes, rewards={"reward": rewards.float()})


@torch.no_grad()
def label_success(episodes: Episodes, path: Path) -> Tensor:
    """Return for each step [N] bool whether the episode has succeeded by then, according to a world model's success
    head.

    Prints the number of successes. Raises ConfigError when the model has no head that reads states, DataError when the
    episodes lack the head's inputs.
    """
    heads: Any = getattr(load_world_model(path), "heads", None)
    if not isinstance(heads, StepHeads):
        raise ConfigError(
            f"offline.reward=head:{path} needs a success head that reads states (as an ensemble has), and this world "
            "model has none."
        )
    vector = heads.state_vector
    shapes = {key: field.shape for key, field in episodes.observation_fields.items()}
    for key, field in vector.fields.items():
        if shapes.get(key) != field.shape:
            raise DataError(
                f"The success head of {path} reads '{key}' with shape {list(field.shape)}, but the data "
                f"{'lacks it' if key not in shapes else f'has it as {list(shapes[key])}'}: train a world model on "
                "such data (robopolicy worldmodel)."
            )
    steps = torch.arange(episodes.step_count)
    states = vector.pack(episodes.observation)[steps + episodes.episode_of_step + 1]
    success_now = torch.cat([heads.succeeded(part) for part in states.split(8192)])
    before = success_now.long().cumsum(0) - success_now.long()
    has_succeeded = success_now | (before > before[episodes.starts][episodes.episode_of_step])
    episode_success = replace(episodes, step_success=has_succeeded).success
    assert episode_success is not None
    output.print(
        f"The success head of {path} detects success in {int(episode_success.sum())} of {len(episodes)} episodes."
    )
    return has_succeeded


def print_decisions(data: Decisions) -> None:
    """Print the number of action chunks used and why others are omitted; raises DataError when none is left."""
    steps = data.episodes.step_count
    left_out = steps - len(data)
    reason = (
        f"; {left_out} steps are omitted: their chunk would end at the observation after the episode's last action, "
        "which is not recorded, and the task had not ended"
    )
    if not len(data):
        raise DataError(
            f"None of {steps} recorded steps can start an action chunk{reason}. Record longer episodes, or "
            "record the task end."
        )
    output.print(
        f"Action chunks for the critic: {len(data)} of {steps} steps{reason if left_out else ''}.", soft_wrap=True
    )


def _first(episodes: Episodes, success: Tensor) -> Tensor:
    """Return 1 at the first successful step [N] of each episode, else 0."""
    before = torch.cat([torch.zeros(1, dtype=torch.bool), success[:-1]])
    before[episodes.starts] = False
    return (success & ~before).float()
