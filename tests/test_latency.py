"""A world whose decisions take time, by the verbs: recorded, learned, fine-tuned, judged, imagined, driven."""

import json

import pytest

from robopolicy.building.worlds import build_world
from robopolicy.cli import main
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.delayed import QUEUE
from robopolicy.core.errors import RobopolicyWarning
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy
from sims.registry import make_world

pytestmark = pytest.mark.long

LATE = "world.options.latency_steps=3"
SMALL = [
    "recipe=push_cube",
    "run.threads=1",
    "collect.episodes=8",
    "policy.width=32",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "train.fit.steps=40",
    "train.evaluate_episodes=4",
    "finetune.iterations=1",
    "finetune.num_envs=4",
    "finetune.rollout_length=8",
    "finetune.minibatch=16",
    "finetune.evaluate_episodes=4",
    "finetune.critic_width=16",
    "finetune.critic_warmup=0",
    "finetune.videos=0",
    "evaluate.episodes=4",
    "evaluate.videos=0",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Run folders of collect, train and finetune in a world with a delay."""
    folder = tmp_path_factory.mktemp("late")
    for verb in ("collect", "train", "finetune"):
        assert main([verb, *SMALL, LATE, f"run.root={folder}"]) == 0, verb
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A dataset of the world without a delay."""
    folder = tmp_path_factory.mktemp("now")
    assert main(["collect", *SMALL, f"run.root={folder}"]) == 0
    return folder / "collect" / "push_cube" / "0" / "dataset"


def test_everything_that_is_made_there_remembers_the_delay(root, capsys):
    data = root / "collect" / "push_cube" / "0" / "dataset"
    episodes = read_dataset(data)
    assert episodes.success is not None and bool(episodes.success.all())  # the expert looks ahead
    assert episodes.observation[QUEUE].shape[1] == 6
    tuned = root / "finetune" / "push_cube" / "0" / "checkpoint"
    assert QUEUE in load_policy(tuned).spec.observation
    assert main(["evaluate", str(tuned), *SMALL[1:], f"run.root={root}"]) == 0  # the world is the checkpoint's own
    capsys.readouterr()
    assert main(["evaluate", str(tuned), "world=push_cube", *SMALL[1:], f"run.root={root}", "run.name=now"]) == 2
    assert "'observation.action_queue', which the world 'push_cube' does not output" in capsys.readouterr().err


def test_what_was_recorded_without_a_delay_teaches_a_policy_that_decides_ahead(root, recorded, tmp_path, capsys):
    shared = [*SMALL, f"run.root={tmp_path}"]
    assert QUEUE not in read_dataset(recorded).observation
    assert main(["train", *shared, LATE, f"train.data={recorded}"]) == 0
    policy = tmp_path / "train" / "push_cube" / "0" / "checkpoint"
    assert QUEUE in load_policy(policy).spec.observation
    # A robot that takes positions, and data of a world that nobody can simulate.
    known = "world=demonstrations", f"world.data={recorded}", "world.options.latency_hold=last", "run.name=known"
    assert main(["train", *shared, LATE, f"train.data={recorded}", *known]) == 0
    late = root / "collect" / "push_cube" / "0" / "dataset"
    other = "world.options.latency_steps=2"
    capsys.readouterr()
    assert main(["train", *shared, other, f"train.data={late}", "run.name=other"]) == 2
    assert "recorded with latency_steps=3, not 2" in capsys.readouterr().err

    model = ["worldmodel.fit.steps=20", "worldmodel.validation_episodes=4", "worldmodel.transitions=1"]
    data = f"worldmodel.data=[{recorded}]"
    assert main(["worldmodel", *shared, LATE, data, "worldmodel.include_base=false", *model]) == 0
    spec = json.loads((tmp_path / "worldmodel" / "push_cube" / "0" / "checkpoint" / "config.json").read_text())
    assert QUEUE in json.dumps(spec)
    critic = ["offline.critic.steps=5", "offline.improve.steps=5", "offline.rounds=1", "offline.gated=false"]
    judged = ["offline.evaluate_episodes=4", "offline.agent.width=16"]
    given = f"offline.dataset={recorded}", f"offline.policy={policy}"
    # The world is that of the policy, and the log is read as if it had been recorded there.
    assert main(["offline", "run.threads=1", f"run.root={tmp_path}", *given, *critic, *judged]) == 0


def test_a_policy_of_data_without_a_delay_takes_its_delay_with_it(recorded, tmp_path, capsys):
    shared, late = [*SMALL, f"run.root={tmp_path}"], [LATE, "world.options.latency_hold=last"]
    assert main(["train", *shared, *late, f"train.data={recorded}", "train.evaluate_episodes=0"]) == 0
    policy = tmp_path / "train" / "push_cube" / "0" / "checkpoint"
    options = json.loads((policy / "config.json").read_text())["world"]["options"]
    assert (options["latency_steps"], options["latency_hold"]) == (3, "last")
    alone = ["run.threads=1", f"run.root={tmp_path}"]
    judged = ["evaluate.episodes=4", "evaluate.videos=0"]
    assert main(["evaluate", str(policy), *alone, *judged]) == 0
    # What asks it at recordings without a delay reads them as it learned them.
    steps = ["distill.fit.steps=2", "distill.batch_size=8", "distill.evaluate_episodes=0"]
    assert main(["distill", str(policy), *alone, *steps, f"distill.data=[{recorded}]"]) == 0
    ways = ["optimize.rounds=1", "optimize.engines=[lean]", "optimize.evaluate_episodes=0", "optimize.observations=8"]
    assert main(["optimize", str(policy), *alone, *ways, f"optimize.data=[{recorded}]"]) == 0
    capsys.readouterr()
    given = "world=push_cube", f"doctor.data={recorded}", f"doctor.policy={policy}"
    assert main(["doctor", *given, *alone]) in (0, 1)
    assert "standard deviations from the reference" in " ".join(capsys.readouterr().out.split())
    # Its delay is its world's, and another one would add to it.
    assert main(["evaluate", str(policy), *alone, *judged, "evaluate.latency_steps=3", "run.name=twice"]) == 2
    assert "this policy was trained with a latency of 3 steps" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["latency_steps=-2"], "latency_steps is -2"),
        (["latency_steps=2.5"], "latency_steps is 2.5"),
        (["latency_steps=2", "latency_hold=lst"], "latency_hold is lst"),
    ],
)
def test_recordings_are_not_read_with_a_delay_of_no_sense(root, capsys, options, said):
    data = root / "collect" / "push_cube" / "0" / "dataset"
    given = [f"world.options.{option}" for option in options]
    chosen = [*SMALL, f"run.root={root}", f"train.data={data}", "train.evaluate_episodes=0", "run.name=no_sense"]
    assert main(["train", *chosen, *given]) == 2
    assert said in capsys.readouterr().err


def test_a_world_model_of_a_world_without_a_delay_imagines_none(recorded, tmp_path, capsys):
    shared = [*SMALL, f"run.root={tmp_path}"]
    assert main(["train", *shared, f"train.data={recorded}", "train.evaluate_episodes=0"]) == 0
    model = ["worldmodel.fit.steps=5", "worldmodel.validation_episodes=2", "worldmodel.transitions=1"]
    model += [f"worldmodel.data=[{recorded}]"]
    assert main(["worldmodel", *shared, "worldmodel.include_base=false", *model]) == 0
    imagined = "world=worldmodel", f"world.model={tmp_path / 'worldmodel' / 'push_cube' / '0' / 'checkpoint'}"
    policy = tmp_path / "train" / "push_cube" / "0" / "checkpoint"
    capsys.readouterr()
    assert main(["evaluate", str(policy), *imagined, LATE, f"run.root={tmp_path}", "evaluate.episodes=4"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "latency_steps is 3, but this world model was trained with a latency of 0 control steps" in output


def test_a_teacher_that_looks_ahead_teaches_there(tmp_path):
    settings = ["teach.teacher=expert", "teach.rounds=2", "teach.episodes=4", "teach.evaluate_episodes=4"]
    settings += ["teach.fit.steps=5", "teach.last_round_steps=5", "teach.batch_size=16"]
    small = [each for each in SMALL if each.startswith(("recipe", "run", "policy"))]
    assert main(["teach", *small, LATE, *settings, f"run.root={tmp_path}"]) == 0


def test_a_delay_of_no_sense_is_refused(tmp_path, capsys):
    assert main(["collect", *SMALL, "world.options.latency_steps=-2", f"run.root={tmp_path}"]) == 2
    assert "latency_steps is -2: it must be an integer from 0 to 1000" in capsys.readouterr().err


def test_a_policy_that_does_not_see_what_is_underway_is_warned_of():
    with pytest.warns(RobopolicyWarning, match=r"does not read the action queue \(observation.action_queue\)"):
        build_world(WorldSection(name="reach_planar", options={"latency_steps": 2}), _plain(), batch_size=1).close()


def _plain():
    spec = make_world("reach_planar", 1).spec
    config = DenoisingPolicyConfig(width=8, depth=1, sampling_steps=2)
    return DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps)
