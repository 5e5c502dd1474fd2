"""A student is taught where it leads itself: who plays, who says what is right, and that a killed run ends the same."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, Field, PolicySpec
from robopolicy.core.storage import write_json
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import Reach, reach_of
from robopolicy.policies.lerobot.configuration import LeRobotStart
from robopolicy.policies.loading import load_policy
from robopolicy.training import teaching
from robopolicy.training.configuration import FitConfig, TeachConfig
from robopolicy.training.teaching import Teacher, teach
from robopolicy.verbs.teach import the_expert, world_for_both
from sims.registry import load_task, make_world

pytestmark = pytest.mark.long

SMALL = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=2, denoising_steps=10, chunk=2, prediction_steps=2)


class Constant:
    """Does and says one thing, in chunks of two."""

    def __init__(self, value: float):
        self.value = value
        self.spec = PolicySpec({STATE: load_task("push_cube").observation[STATE]}, ACTION, 1, 2, 2, 0, 10.0)

    def act(self, observation, generator, *, deterministic=False):
        return Decision(torch.full((len(observation[STATE]), 2, 2), self.value))

    def reset(self, rows=None): ...


ACTION = Field((2,), low=-1.0, high=1.0)
FIT = FitConfig(steps=4, warmup=1, checkpoint_every=100)
CONFIG = TeachConfig(rounds=3, episodes=8, teacher_fraction=0.5, batch_size=16, fit=FIT, last_round_steps=6)


def student_for(episodes):
    seeing = any(key.startswith(IMAGE_PREFIX) for key in episodes.observation)
    return DenoisingPolicy(
        SEEING if seeing else SMALL,
        episodes.observation_fields,
        ACTION,
        fps=10,
        values={**episodes.observation, "action": episodes.actions},
    )


SEEING = replace(
    SMALL, observation_keys=(STATE, IMAGE_PREFIX + "top"), image=ImageEncoderConfig(features=8, channels=(8, 8, 8))
)


def taught(folder, config: TeachConfig = CONFIG, **shown):
    world = make_world("push_cube", 8, **shown)
    teacher = Teacher(says=Constant(0.25), plays=lambda _: Constant(0.75))
    result = teach(teacher, world, student_for, load_policy, config, RunFolder(folder), seed=3)
    world.close()
    return result


def test_the_teachers_share_shrinks_and_it_labels_whoever_plays(tmp_path, monkeypatch):
    episode_lists, imitate = [], teaching.imitate
    monkeypatch.setattr(
        teaching, "imitate", lambda *args: (episode_lists.append(Episodes.concatenate(args[1])), imitate(*args))[1]
    )
    result = taught(tmp_path)
    assert [len(episodes) for episodes in episode_lists] == [8, 16, 24]  # everything so far
    last = episode_lists[-1]
    assert (last.labels == 0.25).all() and last.labels.shape[1:] == (2, 2)
    by_teacher = torch.stack([(last.select([number]).actions == 0.75).all() for number in range(24)])
    assert by_teacher.tolist() == [True] * 8 + [True] * 4 + [False] * 4 + [True] * 2 + [False] * 6
    assert result.env_steps == last.step_count == sum(row["played_steps"] for row in result.rounds)
    records = RunFolder(tmp_path).metrics()
    assert [row["round"] for row in records] == [0, 1, 2]
    assert [row["student_episodes"] for row in records] == [0, 4, 6]
    own = [int(last.select(range(*span)).success.sum()) for span in ((8, 8), (12, 16), (18, 24))]
    assert [row["student_successes"] for row in records] == own


@pytest.mark.parametrize("seeing", [False, True])
def test_a_run_that_was_killed_in_any_round_ends_in_the_same_place(seeing: bool, tmp_path, monkeypatch):
    shown = {"cameras": ("top",), "image_size": 16} if seeing else {}
    config = replace(CONFIG, auxiliary_keys=(ENVIRONMENT_STATE,)) if seeing else CONFIG
    whole = taught(tmp_path / "whole", config, **shown)
    assert (tmp_path / "whole/rounds/1/auxiliary_head").exists() == seeing
    weights = {name: value.clone() for name, value in whole.student.state_dict().items()}
    play, imitate = teaching._play, teaching.imitate
    for name, function in (("_play", play), ("imitate", imitate)):
        folder = tmp_path / name
        for stop in (0, 1, 2):
            calls = []

            def once(*args, function=function, stop=stop, calls=calls, **settings):
                calls.append(1)
                if len(calls) > (1 if stop else 0):
                    raise KeyboardInterrupt
                return function(*args, **settings)

            monkeypatch.setattr(teaching, name, once)
            with pytest.raises(KeyboardInterrupt):
                taught(folder, config, **shown)
            monkeypatch.setattr(teaching, name, function)
        again = taught(folder, config, **shown)
        assert all(torch.equal(value, weights[key]) for key, value in again.student.state_dict().items())
        assert again.rounds == whole.rounds
        assert RunFolder(folder).metrics() == RunFolder(tmp_path / "whole").metrics()


def test_sizes_that_cannot_be_are_refused():
    sizes = "rounds", "episodes", "last_round_steps", "batch_size"
    for wrong in ({"teacher_fraction": 1.5}, *({name: 0} for name in sizes)):
        with pytest.raises(ConfigError, match="at least 1"):
            TeachConfig(**wrong)


def test_a_student_with_a_camera_learns_from_a_teacher_that_sees_the_state(tmp_path, capsys):
    world = make_world("push_cube", 1)
    fields, action = dict(world.spec.observation), world.spec.action
    teacher = DenoisingPolicy(SMALL, fields, action, fps=10)
    teacher.save(tmp_path / "teacher")
    shared = [f"run.root={tmp_path}", "run.threads=1", "world=push_cube", "world.cameras=[top]", "world.image_size=16"]
    student = ["policy.observation_keys=[observation.state,observation.images.top]", "policy.image.channels=[8,8,8]"]
    student += ["policy.width=16", "policy.depth=1", "policy.sampling_steps=2", "policy.chunk=2"]
    short = ["teach.rounds=2", "teach.episodes=3", "teach.fit.steps=2", "teach.last_round_steps=2"]
    short += ["teach.batch_size=8", "teach.evaluate_episodes=3"]
    command = ["teach", str(tmp_path / "teacher"), *shared, *student, *short]
    assert main(command) == 0
    run = tmp_path / "teach/push_cube/0"
    made = load_policy(run / "checkpoint")
    assert made.spec.cameras == ("top",) and "observation.environment_state" not in made.spec.observation
    result = json.loads((run / "result.json").read_text())
    assert {"teacher", "student", "difference", "rounds", "env_steps"} <= set(result)
    assert "Success by round" in (run / "report.html").read_text() and (run / "student.mp4").stat().st_size > 1000
    assert main(command) == 0 and "already trained" in capsys.readouterr().out
    assert main(["teach", str(tmp_path / "nobody"), *shared, "run.name=other"]) == 2
    assert "teach.teacher" in capsys.readouterr().err
    assert main([*command, "teach.cache_encoder_outputs=true", "run.name=kept"]) == 2
    assert "freeze the encoder" in capsys.readouterr().err
    assert main([*command, "teach.auxiliary_keys=[observation.state]", "run.name=kept"]) == 2
    assert "already reads 'observation.state'" in capsys.readouterr().err
    assert not (tmp_path / "teach/kept/0/rounds").exists(), "nobody has played"


@pytest.mark.slow
def test_it_learns_what_the_expert_does(tmp_path):
    world = ["world=reach_planar", f"run.root={tmp_path}", "run.threads=1"]
    assert (
        main(["teach", "expert", *world, "teach.rounds=4", "teach.fit.steps=200", "teach.last_round_steps=1000"]) == 0
    )
    result = json.loads((tmp_path / "teach/reach_planar/0/result.json").read_text())
    rate = result["student"]["deterministic"]["success_rate"]
    played = [row["student_successes"] / row["student_episodes"] for row in result["rounds"][1:]]
    assert rate > 0.8 and played[-1] > played[0], (rate, played)
    assert np.isfinite(result["student"]["deterministic"]["low"])


@pytest.mark.parametrize(("teacher", "student"), [(1, 3), (3, 1), (2, 2)])
def test_teacher_and_student_may_look_back_differently(teacher: int, student: int, tmp_path):
    """The world shows as much of the past as either reads, and each sees its own window."""
    shared = [f"run.root={tmp_path}", "run.threads=1", "world=push_cube", "policy.width=8", "policy.depth=1"]
    quick = ["collect.episodes=2", "train.fit.steps=1", "train.evaluate_episodes=0"]
    assert main(["collect", *shared[:3], quick[0]]) == 0
    assert main(["train", *shared, quick[1], quick[2], f"policy.history={teacher}", "run.name=teacher",
                 f"train.data={tmp_path / 'collect/push_cube/0/dataset'}"]) == 0  # fmt: skip
    few = [
        "teach.rounds=2",
        "teach.episodes=4",
        "teach.fit.steps=1",
        "teach.last_round_steps=1",
        "teach.evaluate_episodes=0",
    ]
    given = [*shared, *few, f"policy.history={student}", f"teach.teacher={tmp_path / 'train/teacher/0/checkpoint'}"]
    assert main(["teach", *given]) == 0
    spec = load_policy(tmp_path / "teach/push_cube/0/checkpoint").spec
    assert spec.history == student


def test_a_student_that_would_execute_more_than_it_is_told_is_refused():
    told = Reach(history=1, chunk=8, prediction=8)
    section = compose(["world=push_cube"]).world
    with pytest.raises(ConfigError, match=r"policy\.chunk=2 or less"):
        world_for_both(section, Constant(0.0), told)
    assert world_for_both(section, Constant(0.0), Reach(4, 2, 8)).options["history"] == 4
    assert world_for_both(section, None, Reach(1, 8, 8)) == section
    assert world_for_both(section, Constant(0.0), None) == section


def test_the_experts_noise_of_a_round_does_not_depend_on_the_rounds_before():
    config = compose(["world=push_cube", "run.seed=3"])
    world = make_world("push_cube", 2)
    observation = world.reset(seeds=[0, 1])
    played = [the_expert(config, world, None).plays(number).act(observation) for number in (0, 1, 1)]
    teacher = the_expert(config, world, None)
    teacher.plays(0).act(observation)
    assert np.array_equal(played[1], played[2]) and np.array_equal(teacher.plays(1).act(observation), played[1])
    assert not np.array_equal(played[0], played[1])
    world.close()


def test_a_policy_of_lerobots_is_told_as_far_as_it_predicts(tmp_path):
    for settings, expected in (
        ({"type": "diffusion", "n_obs_steps": 2, "horizon": 16, "n_action_steps": 8}, Reach(2, 8, 15)),
        ({"type": "act", "n_obs_steps": 1, "chunk_size": 100, "n_action_steps": 50}, Reach(1, 50, 100)),
        ({"type": "pi0_fast", "n_obs_steps": 1, "chunk_size": 50, "n_action_steps": 50}, Reach(1, 50, 50)),
    ):
        write_json(tmp_path / "config.json", settings)
        assert reach_of(LeRobotStart(tmp_path)) == expected
    with pytest.raises(ConfigError, match=r"policy\.path=FOLDER"):
        reach_of(LeRobotStart())
    assert reach_of(SMALL) == Reach(1, 2, 2) and reach_of(object()) is None
