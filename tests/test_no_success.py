"""A world in which nobody says what success is: every verb says so at once, and judges by return."""

import json
import warnings

import pytest

from robopolicy.building.policies import load_policy
from robopolicy.building.workers import Workers
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.verbs.rank import score
from robopolicy.verbs.verb import VERBS

pytestmark = pytest.mark.filterwarnings("always::robopolicy.core.errors.RobopolicyWarning")

POINT = "silent_point:SilentPoint"
CODE = """
import gymnasium
import numpy as np
from gymnasium import spaces


class SilentPoint(gymnasium.Env):
    metadata = {"render_modes": [], "render_fps": 10}
    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Box(-1, 1, (1,))
    max_episode_steps = 6

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform()
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += float(action[0])
        return np.array([self.place], np.float32), float(action[0]), False, False, {}


class Right:
    def reset(self, rows=None): ...

    def act(self, observation):
        return np.full((len(observation["observation.state"]), 1), 0.5)


def far(observation):
    return observation["observation.state"][0] > 1.5
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "silent_point.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(verb, *settings, home):
    small = {
        "collect": ["collect.controller=silent_point:Right", "collect.episodes=8"],
        "train": ["policy.width=16", "policy.depth=1", "train.fit.steps=5", "train.evaluate_episodes=8"],
        "finetune": [
            "finetune.iterations=2",
            "finetune.num_envs=8",
            "finetune.rollout_length=4",
            "finetune.minibatch=16",
            "finetune.evaluate_every=1",
            "finetune.evaluate_episodes=8",
            "finetune.critic_width=8",
        ],
    }
    world = [f"world.name={POINT}", "world.options.reward=environment", "world.batch_size=8", "run.name=point"]
    return main([verb, *world, *small.get(verb, []), *settings, f"run.root={home}/runs"])


def result(home, verb):
    return json.loads((home / "runs" / verb / "point" / "0" / "result.json").read_text())


def test_returns_stand_for_success(home, capsys):
    assert run("collect", home=home) == 0
    output = capsys.readouterr()
    assert "no success reported, return 3" in output.out
    assert "world.options.success=package.module:function" in " ".join(output.err.split())
    assert result(home, "collect")["success_rate"] is None
    assert run("train", home=home) == 0
    output = capsys.readouterr()
    assert "0.0%" not in output.out
    assert "return" in output.out
    assert run("finetune", home=home) == 0
    output = capsys.readouterr()
    judged = result(home, "finetune")
    assert judged["difference"]["of"] == "return"
    assert judged["difference"]["low"] <= judged["difference"]["difference"] <= judged["difference"]["high"]
    assert not judged["tuned"]["deterministic"]["reports_success"]
    assert "did not raise success" not in output.out
    page = (home / "runs" / "finetune" / "point" / "0" / "report.html").read_text()
    assert "no success reported" in page
    assert run("doctor", home=home) == 1
    first = capsys.readouterr().out.splitlines()[1]
    assert "bad" in first
    assert "success" in first


def test_what_needs_success_is_refused_before_any_work(home, capsys):
    assert run("collect", "collect.successes_only=true", home=home) == 2
    assert "does not report success, so successes_only" in " ".join(capsys.readouterr().err.split())
    assert run("collect", home=home) == 0
    assert run("train", home=home) == 0
    assert run("finetune", "finetune.target_success=0.9", home=home) == 2
    assert "target_success" in capsys.readouterr().err


@pytest.mark.long
def test_nobody_is_judged_by_a_success_that_is_not_said(home, capsys):
    """It would be 0 of everybody, and what imagines success would be wrong about all."""
    policies = []
    for seed in range(3):
        for verb in ("collect", "train"):
            assert run(verb, f"run.seed={seed}", home=home) == 0
        policies.append(f"{home}/runs/train/point/{seed}/checkpoint")
    every, trials = ",".join(policies), "gate.evaluators=[world]"
    for verb, *settings in (["bakeoff", f"bakeoff.policies=[{every}]", trials], ["gate", *policies[:2], trials]):
        capsys.readouterr()
        assert run(verb, *settings, home=home) == 2
        assert "define success with world.options.success" in " ".join(capsys.readouterr().err.split())
        assert run(verb, *settings, "gate.metric=return", "run.name=paid", home=home) in (0, 1)
    assert run("deploy", *policies[:2], home=home) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "define success with world.options.success" in refused and "target_success" not in refused
    config = compose([f"world.name={POINT}", "world.options.reward=environment", f"run.root={home}/runs"])
    with pytest.raises(ConfigError, match="does not report which episodes succeed"):
        score(config, {"simulator": config.world}, {"first": load_policy(policies[0])}, Workers(config, None))


def test_success_that_is_given_is_measured(home, capsys):
    assert run("collect", "world.options.success=silent_point:far", home=home) == 0
    assert "success 100%" in capsys.readouterr().out
    assert run("collect", "world.options.success='return >= 99'", "run.seed=1", home=home) == 0
    assert "success 0%" in capsys.readouterr().out


def test_a_note_is_printed_once_in_a_command(capsys, monkeypatch):
    def verb(config):
        for text in ("not reported", "not reported", "something else"):
            warnings.warn(text, RobopolicyWarning, stacklevel=1)
            with warnings.catch_warnings():  # after which Python shows again what it has shown
                warnings.simplefilter("ignore")
        return 0

    monkeypatch.setattr(VERBS, "load", lambda name: verb)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert main(["doctor"]) == 0
        told = capsys.readouterr().err
        assert told.count("not reported") == 1 and told.count("something else") == 1
