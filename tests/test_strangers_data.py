"""`offline` on data that somebody else recorded: every defect is worked with and said, or refused in one sentence."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.training.reading import require_fit_of
from robopolicy.verbs.logged import with_reward
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig
from worldmodels.ensemble import EnsembleModel

CAMERA = "observation.images.top"
FIELDS = {STATE: Field((2,), names=("x", "y"))}
ACTION = Field((2,), low=-1.0, high=1.0, names=("right", "up"))
LENGTHS = (5, 4, 6, 3, 5, 4)
OUTCOMES = ("next.reward", "next.reward.progress", "next.success", "next.terminated", "next.done", "episode_seed")


def episodes(camera: bool = False) -> Episodes:
    steps, count, draws = sum(LENGTHS), len(LENGTHS), torch.Generator().manual_seed(0)
    observation = {STATE: torch.rand(steps + count, 2, generator=draws)}
    fields = dict(FIELDS)
    if camera:
        fields[CAMERA] = Field((16, 16, 3), "uint8", 0, 255)
        observation[CAMERA] = torch.zeros(steps + count, 16, 16, 3, dtype=torch.uint8)
    won = torch.zeros(steps, dtype=torch.bool)
    won[torch.tensor(LENGTHS).cumsum(0)[::2] - 1] = True  # every second episode, at its end
    return Episodes(
        observation_fields=fields,
        action_field=ACTION,
        fps=10.0,
        observation=observation,
        actions=torch.rand(steps, 2, generator=draws) * 2 - 1,
        lengths=torch.tensor(LENGTHS),
        tasks=("",) * count,
        rewards={"progress": torch.rand(steps, generator=draws)},
        step_success=won,
        terminated=torch.tensor([True, False] * (count // 2)),
        final_known=torch.ones(count, dtype=torch.bool),
    )


def a_policy(camera: bool = False) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(chunk=2, prediction_steps=2, width=8, depth=1, sampling_steps=2, denoising_steps=4)
    return DenoisingPolicy(config, episodes(camera).observation_fields, ACTION, fps=10.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset as LeRobot would have written it, without our side table; the same with images; policies; a model."""
    root = tmp_path_factory.mktemp("strangers")
    for name, camera in (("plain", False), ("seeing", True)):
        write_dataset(episodes(camera), root / name / "data", images="png")
        shutil.rmtree(root / name / "data/meta/robopolicy")
        a_policy(camera).save(root / name / "policy")
    spec = WorldSpec("theirs", FIELDS, ACTION, 10.0, 6, rewards=("progress",))
    model = EnsembleModel.build(EnsembleConfig(members=2, width=8, head_width=8), spec, episodes(), 0)
    save_world_model(model, root / "model")
    return root


class Folder:
    """A copy of a dataset to be spoilt."""

    def __init__(self, path):
        self.path, self.info = path, path / "meta" / "info.json"
        self.data = next((path / "data").glob("*/*.parquet"))

    def drop(self, *names):
        table = pq.read_table(self.data)
        pq.write_table(table.drop_columns([name for name in names if name in table.column_names]), self.data)
        self.describe(lambda features: [features.pop(name, None) for name in names])

    def put(self, name, values, kind, shape=(1,)):
        table = pq.read_table(self.data)
        column = pa.array(values, pa.list_(kind, shape[0]) if shape != (1,) else kind)
        place = table.column_names.index(name) if name in table.column_names else None
        table = table.append_column(name, column) if place is None else table.set_column(place, name, column)
        pq.write_table(table, self.data)
        dtype = {pa.float64(): "float64", pa.float32(): "float32", pa.bool_(): "bool"}[kind]
        names = [*(FIELDS[STATE] if name == STATE else ACTION).names] if shape == (2,) else None
        self.describe(lambda features: features.update({name: {"dtype": dtype, "shape": list(shape), "names": names}}))

    def describe(self, change):
        information = json.loads(self.info.read_text())
        change(information["features"])
        self.info.write_text(json.dumps(information))

    def inform(self, **changes):
        self.info.write_text(json.dumps(json.loads(self.info.read_text()) | changes))

    def column(self, name):
        return pq.read_table(self.data)[name].to_pylist()


def spoil_nan(folder):
    states = folder.column(STATE)
    states[6][1] = float("nan")
    folder.put(STATE, states, pa.float32(), (2,))


def double(folder):
    for name in (STATE, "action"):
        folder.put(name, folder.column(name), pa.float64(), (2,))
    for name in ("next.reward", "next.reward.progress"):
        folder.put(name, folder.column(name), pa.float64())


def swap(folder):
    folder.describe(lambda features: features["action"].update(names=["up", "right"]))


def slower(folder):
    folder.inform(fps=5)


def slow_throughout(folder):
    folder.inform(fps=5)
    folder.put("timestamp", [step / 5 for length in LENGTHS for step in range(length)], pa.float32())


def done_and_truncated(folder):
    last = np.cumsum(LENGTHS) - 1
    cut = np.isin(np.arange(sum(LENGTHS)), last[1::2])
    folder.put("next.truncated", cut.tolist(), pa.bool_())
    folder.drop("next.terminated")


def short(folder):
    alone = replace(episodes().select([0]), final_known=torch.zeros(1, dtype=torch.bool))
    single = replace(
        alone,
        observation={STATE: alone.observation[STATE][:4]},
        actions=alone.actions[:2],
        lengths=torch.ones(2, dtype=torch.int64),
        tasks=("", ""),
        rewards={"progress": torch.ones(2)},
        step_success=torch.tensor([True, False]),
        terminated=torch.tensor([True, False]),
        final_known=torch.zeros(2, dtype=torch.bool),
    )
    shutil.rmtree(folder.path)
    write_dataset(Episodes.concatenate([single, episodes()]), folder.path)
    shutil.rmtree(folder.path / "meta/robopolicy")


WAY = "which critics need. Use offline.reward=success"
ROWS = {
    # defect: (how it comes about, settings, status, what is said)
    "no rewards": (lambda f: f.drop("next.reward", "next.reward.progress"), [], 2, ["no rewards (next.reward)", WAY]),
    "no rewards, paid for success": (
        lambda f: f.drop("next.reward", "next.reward.progress", "next.terminated"),
        ["offline.reward=success"],
        0,
        ["of 6 episodes", "Action chunks for the critic: "],
    ),
    "no outcomes at all": (lambda f: f.drop(*OUTCOMES), [], 2, ["no rewards", "in any episode", "head:WORLDMODEL"]),
    "no success label, and paid for it": (
        lambda f: f.drop(*OUTCOMES),
        ["offline.reward=success"],
        2,
        ["needs the success of every step (next.success)", "head:WORLDMODEL"],
    ),
    "no success label, a head sees it": (
        lambda f: f.drop(*OUTCOMES),
        ["offline.reward=head:{root}/model"],
        0,
        ["detects success in", "of 6 episodes", "Action chunks for the critic:"],
    ),
    "no end of the task, but success": (
        lambda f: f.drop("next.terminated"),
        [],
        0,
        ["3 episodes end by success; the other 3 are treated as truncated by a time limit"],
    ),
    "no end of the task and no success": (
        lambda f: f.drop("next.terminated", "next.success"),
        [],
        2,
        ["records no task ends (next.terminated)", "offline.reward=head:WORLDMODEL"],
    ),
    "done and truncated instead of terminated": (done_and_truncated, [], 0, ["Action chunks for the critic: "]),
    "episodes of one step": (
        short,
        [],
        0,
        ["8 episodes, 29 frames", "steps are omitted", "is not recorded"],
    ),
    "NaN": (
        spoil_nan,
        [],
        2,
        [f"{STATE}: 1 of 27 rows contain NaN", "(y; episodes 1)", "offline.exclude_episodes=[NUMBER]"],
    ),
    "NaN, left out": (
        spoil_nan,
        ["offline.exclude_episodes=[1]"],
        0,
        ["Excluded by offline.exclude_episodes: 1 episodes", "5 episodes"],
    ),
    "an episode that is not there": (
        spoil_nan,
        ["offline.exclude_episodes=[9]"],
        2,
        ["contains episode 9", "has episodes 0 to 5"],
    ),
    "frame rate against timestamps": (slower, [], 2, ["episode 0 has frame 1", "fps 5", "correct fps"]),
    "another frame rate": (slow_throughout, [], 2, ["has 5 steps per second, but the policy acts at 10", "resample"]),
    "columns of float64": (double, [], 0, ["Action chunks for the critic: "]),
    "actions in another order": (
        swap,
        [],
        2,
        ["Element 0 of 'action' is 'up' in", "but 'right' for the policy", "in different order"],
    ),
    "columns that nobody knows": (
        lambda f: f.put("gripper.temperature", [20.0] * sum(LENGTHS), pa.float64()),
        [],
        0,
        ["Skipped: gripper.temperature (float64 [1]; only observation.* and action are read)"],
    ),
    "a column that the policy reads is missing": (
        lambda f: f.drop(STATE),
        [],
        2,
        [f"has no column '{STATE}', which the policy reads", "Rename the column"],
    ),
    "fewer actions": (
        lambda f: f.put("action", [each[0] for each in f.column("action")], pa.float32()),
        [],
        2,
        ["has 'action' with shape [1], but the policy reads shape [2]"],
    ),
}


def offline(root, kind, data, tmp_path, *settings) -> int:
    small = [
        "world=push_cube",
        "offline.gated=false",
        "offline.evaluate_episodes=0",
        "offline.rounds=1",
        "offline.agent=td3_bc",
    ]
    small += ["offline.critic.steps=1", "offline.critic.batch_size=8", "offline.improve.steps=1"]
    small += ["offline.improve.observations=8", "offline.improve.candidates=2", "offline.agent.width=8"]
    given = [f"offline.policy={root / kind / 'policy'}", f"run.root={tmp_path}", "run.name=tried"]
    return main(["offline", str(data), *small, *given, *settings])


def test_a_policy_that_says_no_rate_is_told_where_to_write_it(tmp_path):
    """The data is not at fault: meta/info.json is not to be changed."""
    spec = PolicySpec(FIELDS, ACTION, history=1, chunk=1, prediction=1, scored_steps=0, fps=0.0)
    with pytest.raises(DataError, match=r'"fps": N.*to robopolicy\.json') as refused:
        require_fit_of(tmp_path, episodes(), spec)
    assert "info.json" not in str(refused.value)
    require_fit_of(tmp_path, episodes(), replace(spec, fps=10.0))


@pytest.mark.long
@pytest.mark.parametrize("defect", ROWS)
def test_every_defect_is_worked_with_or_refused_with_a_way_out(defect, made, tmp_path, capsys):
    spoil, settings, status, texts = ROWS[defect]
    folder = Folder(shutil.copytree(made / "plain/data", tmp_path / "data"))
    spoil(folder)
    assert offline(made, "plain", folder.path, tmp_path, *(each.format(root=made) for each in settings)) == status
    output = capsys.readouterr()
    shown = " ".join((output.err if status else output.out).split())
    for text in texts:
        assert text in shown
    if not status:
        kept, steps, missing = re.findall(
            r"Action chunks for the critic: (\d+) of (\d+) steps(?:; (\d+) steps are omitted)?", shown
        )[0]
        assert 0 < int(kept) == int(steps) - int(missing or 0)
    else:
        assert len([line for line in output.err.splitlines() if line.strip()]) <= 6 and "Traceback" not in output.err


def test_images_of_another_size_are_refused_with_both_sizes(made, tmp_path, capsys):
    small = replace(
        episodes(True),
        observation_fields={**FIELDS, CAMERA: Field((8, 8, 3), "uint8", 0, 255)},
        observation={**episodes(True).observation, CAMERA: torch.zeros(33, 8, 8, 3, dtype=torch.uint8)},
    )
    write_dataset(small, tmp_path / "data", images="png")
    assert offline(made, "seeing", tmp_path / "data", tmp_path) == 2
    assert f"has '{CAMERA}' with shape [8, 8, 3], but the policy reads shape [16, 16, 3]" in " ".join(
        capsys.readouterr().err.split()
    )
    assert offline(made, "seeing", made / "seeing/data", tmp_path) == 0


def test_a_head_pays_the_first_step_that_it_takes_for_success_and_ends_the_task(made):
    data = read_dataset(made / "plain/data")
    model = load_world_model(made / "model")
    assert isinstance(model, EnsembleModel)
    heads = model.heads
    with torch.no_grad():  # half of all frames succeed, and none is so near that rounding decides
        logits = heads.success_logit(data.observation[STATE]).sort().values
        heads.success_threshold.copy_(logits[len(logits) // 2 - 1 : len(logits) // 2 + 1].mean())
    save_world_model(model, made / "median")
    paid = with_reward(data, f"head:{made / 'median'}")
    assert paid.success is not None and int(paid.success.sum()) > 0
    frame = 0
    for number, length in enumerate(LENGTHS):
        after = data.observation[STATE][frame + 1 : frame + 1 + length]
        reached = [bool(each) for each in heads.succeeded(after)]
        first = reached.index(True) if any(reached) else None
        one = paid.select([number])
        assert one.reward.tolist() == [float(step == first) for step in range(length)]
        assert one.step_success.tolist() == [first is not None and step >= first for step in range(length)]
        assert bool(one.terminated[0]) == (first is not None)
        frame += length + 1
