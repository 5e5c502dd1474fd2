"""`train` goes on from a checkpoint of its own, on chosen episodes, under other names; where it began is recorded."""

import json
import warnings

import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.episodes import Episodes, select_episodes
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.origin import renaming_of
from robopolicy.core.spec import STATE, Field
from robopolicy.core.tensors import file_hash
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.policies import load_policy

SMALL = ("policy.width=8", "policy.depth=1", "policy.chunk=2", "policy.prediction_steps=2", "policy.sampling_steps=2")
LENGTHS = (5, 4, 6, 3)


def recorded(scale=1.0, unit="m", fps=10.0) -> Episodes:
    steps, draws = sum(LENGTHS), torch.Generator().manual_seed(0)
    return Episodes(
        observation_fields={STATE: Field((2,), unit=unit, names=("x", "y"))},
        action_field=Field((2,), low=-9.0, high=9.0, names=("a", "b")),
        fps=fps,
        observation={STATE: scale * torch.rand(steps + len(LENGTHS), 2, generator=draws)},
        actions=scale * (torch.rand(steps, 2, generator=draws) * 2 - 1),
        lengths=torch.tensor(LENGTHS),
        tasks=("",) * len(LENGTHS),
    )


def train(root, data, name, *arguments):
    plain = (
        "world=push_t",
        "run.threads=1",
        f"run.root={root}",
        f"run.name={name}",
        "train.evaluate_episodes=0",
        "train.fit.steps=4",
    )
    return main(["train", f"train.data={data}", *plain, *arguments])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, episodes in {
        "data": recorded(),
        "wide": recorded(scale=8.0),
        "feet": recorded(unit="ft"),
        "fast": recorded(fps=20.0),
    }.items():
        write_dataset(episodes, folder / name)
    assert train(folder, folder / "data", "base", *SMALL, "train.rename={x: left, y: right}") == 0
    return folder


def test_training_goes_on_as_a_new_run_that_says_where_it_began(root, capsys):
    base = root / "train/base/0/checkpoint"
    assert (
        train(root, root / "data", "more", f"train.policy={base}", "train.episodes=[0,2]", "train.exclude_episodes=[2]")
        == 0
    )
    output = " ".join(capsys.readouterr().out.split())
    assert f"Continuing from {base}; its normalisers are unchanged." in output and "1 episodes, 5 frames" in output
    result = json.loads((root / "train/more/0/result.json").read_text())
    assert result["base_checkpoint"] == str(base)
    assert result["base_weights"] == file_hash(base / "model.safetensors")
    assert result["base_weights"] in (root / "train/more/0/report.html").read_text()
    before, after = load_policy(base), load_policy(root / "train/more/0/checkpoint")
    assert after.config == before.config and after.spec.observation[STATE].names == ("left", "right")
    assert renaming_of(after) == {"x": "left", "y": "right"}
    old, new = before.state_dict(), after.state_dict()
    changed = [name for name in old if not torch.equal(old[name], new[name])]
    assert changed and not [name for name in changed if "normalizer" in name]


def test_data_that_a_policy_cannot_go_on_with_is_refused_or_noted(root, capsys):
    going_on = f"train.policy={root}/train/base/0/checkpoint"
    for data, text in (
        ("feet", f"'{STATE}' is in 'ft' in {root}/feet, in 'm' for the policy"),
        ("fast", "has 20 steps per second, but the policy acts at 10"),
    ):
        assert train(root, root / data, f"on_{data}", going_on) == 2
        assert text in " ".join(capsys.readouterr().err.split())
    with warnings.catch_warnings():
        warnings.simplefilter("default", RobopolicyWarning)
        assert train(root, root / "wide", "on_wide", going_on) == 0
    assert f"{root}/wide lies outside the range that they were fitted on" in " ".join(capsys.readouterr().err.split())


def test_a_run_with_other_settings_names_the_way_to_go_on(root, capsys):
    assert train(root, root / "data", "base", *SMALL, "train.rename={x: left, y: right}", "train.fit.steps=9") == 2
    checkpoint = root / "train/base/0/checkpoint"
    output = " ".join(capsys.readouterr().err.split())
    assert f"continue training from its checkpoint with train.policy={checkpoint} run.name=NAME" in output
    assert train(root, root / "data", "base", f"train.policy={checkpoint}", "run.overwrite=true") == 2
    assert "which run.overwrite=true removes" in " ".join(capsys.readouterr().err.split())
    assert checkpoint.exists()


def test_what_was_fine_tuned_leaves_its_base_behind(root):
    policy = load_policy(root / "train/base/0/checkpoint")
    assert policy.without_base() is policy
    policy.prepare_finetuning(1, train_encoder=False)
    with torch.no_grad():
        for weight in policy.network.parameters():
            weight.add_(0.1)
    policy.save(root / "tuned")
    whole = load_policy(root / "tuned").without_base()
    assert whole.finetuning is None and whole.base is None and whole.spec.scored_steps == whole.schedule.steps
    assert all(torch.equal(a, b) for a, b in zip(whole.network.parameters(), policy.network.parameters(), strict=True))
    assert all(weight.requires_grad for weight in whole.network.parameters())
    assert renaming_of(whole) == {"x": "left", "y": "right"}


def test_episodes_are_chosen_by_number(root):
    episodes = recorded()

    def lengths(*choice, **named):
        return select_episodes(episodes, "data", "train", *choice, **named).lengths.tolist()

    assert lengths() == [5, 4, 6, 3] and lengths(2) == [5, 4] and lengths(9) == [5, 4, 6, 3]
    assert lengths([2, 0]) == [6, 5] and lengths(without=[1]) == [5, 6, 3] and lengths([0, 1], [1]) == [5]
    for choice, text in (
        (([0, 4],), r"train.episodes contains episode 4, but data has episodes 0 to 3 \(4 in all\)"),
        ((0, [7]), "train.exclude_episodes contains episode 7"),
        (([1], [1]), "exclude all episodes of data"),
    ):
        with pytest.raises(ConfigError, match=text):
            lengths(*choice)
