"""`train` says what it reads of a dataset, what it leaves out and what came of it; NaN is named before any fitting."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.spec import STATE, TASK, Field
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.pretrain import pretrain

EFFORT = "observation.effort"
SMALL = [
    "world=reach_planar",
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "train.fit.steps=20",
    "train.fit.log_every=5",
]


def made(tasks=("lift", "push", "lift"), known=True) -> Episodes:
    generator = torch.Generator().manual_seed(0)
    count = len(tasks)
    fields = {STATE: Field((2,), names=("x", "vx")), EFFORT: Field((1,))}
    return Episodes(
        fields,
        Field((2,), low=-1, high=1, names=("a", "b")),
        10.0,
        {key: torch.rand(6 * count, field.size, generator=generator) for key, field in fields.items()},
        torch.rand(5 * count, 2, generator=generator),
        torch.full((count,), 5),
        tuple(tasks),
        final_known=torch.full((count,), known),
    )


def damaged(folder, key, row, element, value):
    """Write a sound dataset, then put `value` into one element of one row."""
    write_dataset(made(), folder)
    path = next((folder / "data").glob("*/*.parquet"))
    table = pq.read_table(path)
    rows = [list(values) if isinstance(values, list) else values for values in table.column(key).to_pylist()]
    if isinstance(rows[row], list):
        rows[row][element] = value
    else:
        rows[row] = value
    place = table.column_names.index(key)
    pq.write_table(table.set_column(place, key, pa.array(rows, table.schema.field(key).type)), path)


def train(data, root, *arguments):
    """Return exit status and result.json."""
    status = main(["train", *SMALL, "train.evaluate_episodes=0", f"train.data={data}", f"run.root={root}", *arguments])
    paths = list(root.glob("train/*/*/result.json"))
    return status, json.loads(paths[0].read_text()) if paths else None


def test_nan_is_named_by_column_element_and_episode_before_any_fitting(tmp_path, capsys):
    damaged(tmp_path / "data", STATE, 7, 1, float("nan"))
    status, result = train(tmp_path / "data", tmp_path / "runs")
    output = " ".join(capsys.readouterr().err.split())
    assert (status, result) == (2, None)
    assert "observation.state: 1 of 18 rows contain NaN or infinity (vx; episodes 1)" in output
    assert "robopolicy doctor" in output
    assert not list((tmp_path / "runs").glob("train/*/*/metrics.jsonl"))


def test_a_column_that_the_policy_does_not_read_may_hold_nan(tmp_path):
    damaged(tmp_path / "data", EFFORT, 3, 0, float("inf"))
    assert train(tmp_path / "data", tmp_path / "runs", "policy.observation_keys=[observation.state]")[0] == 0


def test_frames_that_the_data_lacks_are_not_counted_as_rows():
    data = made(known=False)
    data.observation[STATE][[8, 11], 0] = float("nan")  # the second one is the frame after the last action
    policy = DenoisingPolicy(
        DenoisingPolicyConfig(width=8, depth=1), data.observation_fields, data.action_field, fps=10.0
    )
    with pytest.raises(DataError, match=r"observation.state: 1 of 15 rows contain NaN or infinity \(x; episodes 1\)"):
        pretrain(policy, data, PretrainConfig(batch_size=4, fit=FitConfig(steps=2)))


def test_train_says_what_it_reads_and_what_it_leaves_out(tmp_path, capsys):
    write_dataset(made(), tmp_path / "data")
    path = tmp_path / "data" / "meta" / "info.json"
    information = json.loads(path.read_text())
    information["features"]["tactile"] = {"dtype": "float32", "shape": [4], "names": None}
    information["features"]["observation.note"] = {"dtype": "string", "shape": [1], "names": None}
    path.write_text(json.dumps(information))
    status, result = train(tmp_path / "data", tmp_path / "runs", "policy.observation_keys=[observation.state]")
    assert status == 0
    read = result["read"]
    assert (read["episodes"], read["frames"], read["columns"]) == (3, 15, [STATE, "action"])
    assert set(read["skipped"]) == {EFFORT, "tactile", "observation.note"}
    assert (read["instructions"], read["reads_text"]) == (["lift", "push"], False)
    assert result["training_steps"] == 20
    assert set(result["first_losses"]) == set(result["losses"]) == {"denoising"}
    output = " ".join(capsys.readouterr().out.split())
    assert "3 episodes, 15 frames" in output
    assert "Skipped: observation.effort (not read by the policy; built-in policies read" in output
    assert "tactile (float32 [4]; only observation.* and action are read)" in output
    assert "observation.note (its values are of type string" in output
    assert "Instructions: 2, 'lift', 'push': the policy reads no text" in output
    assert "policy.text_encoder=words makes the policy read them" in output
    first, last = result["first_losses"]["denoising"], result["losses"]["denoising"]
    assert first != last
    assert f"Loss 'denoising': {first:.4g} at first, {last:.4g} at the end Training steps: 20" in output


def test_a_policy_with_a_text_encoder_reads_the_instructions(tmp_path, capsys):
    write_dataset(made(), tmp_path / "data")
    status, result = train(tmp_path / "data", tmp_path / "runs", "policy.text_encoder=words")
    assert status == 0 and result["read"]["reads_text"] is True and "task" in result["read"]["columns"]
    output = " ".join(capsys.readouterr().out.split())
    assert "Instructions: 2, 'lift', 'push': the policy reads them" in output and "policy.text_encoder" not in output
    policy = load_policy(next((tmp_path / "runs" / "train").glob("*/*/checkpoint")))
    observation = {key: torch.zeros(2, 1, field.size) for key, field in policy.spec.observation.items()}
    actions = policy.act({**observation, TASK: ["lift", "push"]}, torch.Generator().manual_seed(0)).actions
    assert actions.shape == (2, 4, 2)


def test_one_instruction_needs_no_line(tmp_path, capsys):
    write_dataset(made(("lift",) * 3), tmp_path / "data")
    assert train(tmp_path / "data", tmp_path / "runs")[0] == 0
    assert "Instruction" not in capsys.readouterr().out
