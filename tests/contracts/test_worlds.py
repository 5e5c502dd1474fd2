"""Every world keeps the promises, and the check notices a world that does not."""

import dataclasses

import numpy as np
import pytest

from robopolicy.core.world import Snapshot
from robopolicy.testing.world import check_world
from sims.engine import MujocoWorld
from sims.registry import TASKS, load_task, make_world


@pytest.mark.parametrize("name", sorted(TASKS.ours))
def test_our_tasks_keep_every_promise(name):
    check_world(lambda batch: make_world(name, batch, history=2))


@pytest.mark.long
def test_a_world_with_cameras_that_runs_on_after_success_keeps_every_promise():
    check_world(
        lambda batch: make_world(
            "reach_planar", batch, history=3, cameras=("top", "front"), image_size=16, terminate_on_success=False
        )
    )


def test_a_single_thread_and_long_chunks_keep_every_promise():
    check_world(lambda batch: make_world("push_cube", batch, threads=1), chunk=7, batch_size=3, renders=False)


class ResetsInStep(MujocoWorld):
    def step(self, actions):
        step = super().step(actions)
        if step.ended.any():
            return dataclasses.replace(step, observation=self.reset(rows=np.flatnonzero(step.ended)))
        return step


class StartDependsOnRow(MujocoWorld):
    def reset(self, rows=None, seeds=None, options=None):
        seeds = None if seeds is None else np.asarray(seeds) + np.arange(len(seeds))
        return super().reset(rows, seeds, options)


class ResetsEveryRow(MujocoWorld):
    def reset(self, rows=None, seeds=None, options=None):
        if rows is not None:
            return super().reset(None, np.resize(seeds, self.batch_size), options)
        return super().reset(rows, seeds, options)


class DoublePrecision(MujocoWorld):
    def step(self, actions):
        step = super().step(actions)
        wide = {
            key: value.astype(np.float64) if value.dtype == np.float32 else value
            for key, value in step.observation.items()
        }
        return dataclasses.replace(step, observation=wide)


class EverythingIsValid(MujocoWorld):
    def step(self, actions):
        step = super().step(actions)
        return dataclasses.replace(step, valid=np.ones_like(step.valid))


class TruncationIsTermination(MujocoWorld):
    def step(self, actions):
        step = super().step(actions)
        return dataclasses.replace(step, terminated=step.terminated | step.truncated)


class SharesItsMemory(MujocoWorld):
    def reset(self, rows=None, seeds=None, options=None):
        observation = super().reset(rows, seeds, options)
        for key in self.spec.observation:
            observation[key] = self._episodes.arrays[f"history/{key}"]
        return observation


class ForgetsTheClock(MujocoWorld):
    def restore(self, snapshot, rows=None):
        return super().restore(Snapshot({**snapshot.arrays, "steps": np.zeros_like(snapshot.arrays["steps"])}), rows)


class ForgetsTheTarget(MujocoWorld):
    def restore(self, snapshot, rows=None):
        state = snapshot.arrays["state"].copy()
        state[:, -self.model.na :] *= 1.001
        return super().restore(Snapshot({**snapshot.arrays, "state": state}), rows)


class RepeatsTheFirstAction(MujocoWorld):
    def step(self, actions):
        actions = np.asarray(actions)
        if actions.ndim == 3 and actions.shape[1] > 1:
            actions = np.where(np.isfinite(actions).all(), np.repeat(actions[:, :1], actions.shape[1], axis=1), actions)
        return super().step(actions)


class TakesAnything(MujocoWorld):
    def step(self, actions):
        return super().step(np.nan_to_num(actions, posinf=1.0))


class LatePenalty(MujocoWorld):
    def step(self, actions):
        step = super().step(actions)
        return dataclasses.replace(step, rewards={name: reward - 0.1 for name, reward in step.rewards.items()})


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (ResetsInStep, "before any reset"),
        (StartDependsOnRow, "not on its row"),
        (ResetsEveryRow, "leaves other rows unchanged"),
        (DoublePrecision, "dtype float32"),
        (EverythingIsValid, "no valid step|truncation"),
        (TruncationIsTermination, "both terminated and truncated"),
        (SharesItsMemory, "never modified later"),
        (ForgetsTheClock, "repeats its later steps"),
        (ForgetsTheTarget, "repeats its later steps"),
        (RepeatsTheFirstAction, "equals C single steps"),
        (TakesAnything, "actions with NaN"),
        (LatePenalty, "zero where not valid"),
    ],
)
def test_the_check_notices_a_broken_world(broken, text):
    with pytest.raises(AssertionError, match=text):
        check_world(lambda batch: broken(load_task("reach_planar"), batch), renders=False)
