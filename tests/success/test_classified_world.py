"""A world with a classifier's success: equal to its own for an oracle, and a lie is counted and refused."""

import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from oracle import OracleConfig, OracleNetwork, saved_oracle

from robopolicy.building.worlds import build_world
from robopolicy.configuration import compose
from robopolicy.configuration.sections.run import WorldSection
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    RobopolicyNote,
    RobopolicyWarning,
    SpecError,
)
from robopolicy.core.registry import import_plugins
from robopolicy.core.spec import IMAGE_PREFIX, STATE, Field
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record
from robopolicy.evaluation.classified import reason_to_refuse
from robopolicy.evaluation.classifier_page import classifier_text, supplied_section
from robopolicy.evaluation.evaluators import ModelEvaluator
from robopolicy.evaluation.gate import Gate
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.success.classifier import SuccessClassifier, load_classifier, new_network, require_input
from robopolicy.success.configuration import EncoderConfig
from robopolicy.success.relabelling import relabelled
from robopolicy.testing.world import check_world
from robopolicy.verbs.online import recorded_episodes
from sims.experts import Noise, NoisyController
from sims.registry import make_expert

import_plugins(["oracle"])
SEEDS = np.arange(24)
LIE = -0.4


def expert(world, random=0.97):
    noise = Noise(gaussian=0.5, random=random)
    return NoisyController(make_expert("reach_planar", world.spec), noise, 0, world.spec.action)


def world_with(path=None, **settings):
    return build_world(WorldSection("reach_planar", 8, success=path, **settings))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return saved_oracle(tmp_path_factory.mktemp("oracle") / "checkpoint")


@pytest.fixture(scope="module")
def liar(tmp_path_factory):
    return saved_oracle(tmp_path_factory.mktemp("liar") / "checkpoint", lie=LIE)


def played(path=None, random=0.97, **settings):
    world = world_with(path, **settings)
    result = evaluate_policy(world, expert(world, random), SEEDS)
    world.close()
    return result


def test_an_oracle_gives_the_worlds_own_success_at_the_same_step(oracle):
    own, classified = played(), played(oracle)
    assert np.array_equal(own.success, classified.success) and np.array_equal(own.lengths, classified.lengths)
    assert np.allclose(own.returns, classified.returns) and 0 < own.successes < len(SEEDS)
    assert np.array_equal(classified.own_success, own.success)
    figures = classified.classified()
    assert figures["false_accepts"]["count"] == figures["false_rejects"]["count"] == 0
    assert reason_to_refuse([classified]) == ""


def test_the_world_keeps_the_contract_of_worlds(oracle):
    for settings in ({}, {"options": {"terminate_on_success": False}}, {"success_reward": True}):
        check_world(
            lambda rows, settings=settings: build_world(WorldSection("reach_planar", rows, success=oracle, **settings))
        )


def test_success_must_hold(tmp_path, oracle):
    at_once = played(oracle, random=0.3)
    held = played(saved_oracle(tmp_path / "held", hold=3), random=0.3)
    both = at_once.success & held.success
    assert both.any() and (held.lengths[both] >= at_once.lengths[both] + 2).all()


def test_only_the_classifiers_success_is_rewarded(oracle):
    world = world_with(oracle, success_reward=True)
    assert world.spec.rewards == ("success",)
    result = evaluate_policy(world, expert(world), SEEDS)
    assert np.array_equal(result.returns, result.success.astype(float))
    with pytest.raises(ConfigError, match=r"world\.success=PATH"):
        WorldSection(success_reward=True)


def test_a_lie_is_counted_reported_and_refused(liar):
    result = played(liar)
    figures = result.classified()
    assert figures["false_accepts"]["rate"] > 0.3 and result.success_rate > figures["own"]["rate"]
    text = reason_to_refuse([result])
    assert "claims at most 5%" in text and "success.extra_datasets=[DATASET]" in text
    metrics = result.to_json()
    assert "false accepts" in classifier_text("policy", metrics)
    section = supplied_section([("policy", metrics)])
    assert section is not None and str(liar) in section["caption"]
    again = EvaluationResult.from_json(metrics)
    assert np.array_equal(again.own_success, result.own_success) and again.classified() == figures


def test_a_classifier_that_failed_its_own_test_is_refused_without_a_simulators_success(oracle, tmp_path):
    from dataclasses import replace

    from robopolicy.success.measures import rate

    honest, poor = played(oracle), played(saved_oracle(tmp_path / "poor", false_accepts=rate(30, 100)))
    assert reason_to_refuse([replace(honest, own_success=None)]) == ""
    assert "its own failed test episodes" in reason_to_refuse([replace(poor, own_success=None)])


def test_the_gate_rejects_trials_that_a_liar_judges(liar, oracle):
    """Both move nearly at random: false accepts are counted in the trials of either."""

    def decision(path):
        world = world_with(path)
        gate = Gate([ModelEvaluator(world, SEEDS, trials=True)])
        return gate.decide(expert(world, 0.97), expert(world, 0.99))

    lied, honest = decision(liar), decision(oracle)
    assert not lied.accepted and any("success classifier" in reason for reason in lied.reasons)
    assert not any("success classifier" in reason for reason in honest.reasons)


def test_snapshots_restore_its_flags(oracle):
    world = world_with(oracle)
    world.reset(seeds=np.arange(8))
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 3, world.spec.action.size))
    world.step(actions)
    snapshot = world.snapshot()
    first = world.step(actions)
    world.restore(snapshot)
    again = world.step(actions)
    assert np.array_equal(first.success, again.success) and np.array_equal(first.valid, again.valid)
    assert all(np.array_equal(first.observation[key], again.observation[key]) for key in first.observation)
    plain = world_with()
    plain.reset(seeds=np.arange(8))
    with pytest.raises(SpecError, match=r"world\.success"):
        world.restore(plain.snapshot())


def test_recorded_episodes_are_relabelled_as_the_world_would(oracle):
    world = world_with(options={"terminate_on_success": False})
    episodes = record(world, expert(world), SEEDS, generator=torch.Generator())
    assert episodes.step_success is not None and episodes.rewards is not None
    wrong = Episodes(**{**vars(episodes), "step_success": ~episodes.step_success, "terminated": None})
    new = relabelled(wrong, load_classifier(oracle))
    assert torch.equal(new.step_success, episodes.step_success)
    assert torch.equal(new.rewards["success"], episodes.rewards["success"].float())
    assert torch.equal(new.rewards["progress"], episodes.rewards["progress"])
    assert list(relabelled(wrong, load_classifier(oracle), only_reward=True).rewards) == ["success"]


def test_what_the_classifier_lacks_is_named(tmp_path, oracle):
    classifier = load_classifier(oracle)
    world = world_with(oracle)
    frame = {key: np.zeros((2, *field.shape), np.float32) for key, field in world.spec.observation.items()}
    key = next(iter(frame))
    with pytest.raises(NonFiniteError, match="success classifier"):
        classifier.logits({**frame, key: np.full_like(frame[key], np.nan)})
    with pytest.raises(SpecError, match="which is missing here"):
        classifier.logits({name: value for name, value in frame.items() if name != key})
    with pytest.raises(SpecError, match=r"camera 'front', which is missing here \(there are: top\)"):
        require_input(f"{IMAGE_PREFIX}front", {f"{IMAGE_PREFIX}top": None})
    with pytest.raises(SpecError, match="shape"):
        classifier.logits({**frame, key: np.zeros((2, 99), np.float32)})
    for name in ("worldmodel", "demonstrations"):
        with pytest.raises(ConfigError, match=r"success\.relabelled"):
            build_world(WorldSection(name, success=oracle))


def test_a_classifier_judges_one_task_and_says_when_it_learned_another(tmp_path, oracle):
    with pytest.raises(SpecError, match=r"'push_choice' has 4 instructions, but .*: choose one task"):
        build_world(WorldSection("push_choice", success=oracle))
    world = world_with()
    episodes = record(world, expert(world), np.arange(4))
    world.close()
    classifier = load_classifier(oracle)
    several = replace(episodes, tasks=("reach", "wait", "reach", "wait"))
    with pytest.raises(SpecError, match=r"the dataset has 2 instructions, .* success\.instruction='TEXT'"):
        relabelled(several, classifier)
    other = replace(classifier, trained_on={"instruction": "stack the cubes"})
    with pytest.warns(RobopolicyWarning, match="trained on 'stack the cubes', but the task of the dataset is"):
        relabelled(episodes, other)


def test_recorded_data_of_online_learning_have_the_classifiers_success_and_the_worlds_rewards(tmp_path, liar):
    world = world_with()
    write_dataset(record(world, expert(world), np.arange(8)), tmp_path / "data")
    world.close()
    settings = ["world.name=reach_planar", f"world.success={liar}", "online.method=actions"]
    config = compose([*settings, f"online.dataset={tmp_path / 'data'}"])
    lied_to = world_with(liar)
    found = recorded_episodes(config, None, lied_to.spec, torch.device("cpu"))
    assert found.success.sum() > read_dataset(tmp_path / "data").success.sum()
    assert float(found.rewards["success"].sum()) == int(found.success.sum())
    lied_to.close()
    other = replace(lied_to.spec, rewards=("reward",))
    with pytest.warns(RobopolicyWarning, match=r"rewards progress, success, but 'reach_planar' pays reward"):
        recorded_episodes(config, None, other, torch.device("cpu"))


def test_a_classifiers_success_that_no_reward_pays_is_noted(tmp_path):
    sys.modules.setdefault("test_classified_world", sys.modules[__name__])
    name, fields = "test_classified_world:Still", {STATE: Field((1,), names=("observation[0]",))}
    network = new_network("encoder", EncoderConfig(), fields)
    calibration, claims = {"method": "temperature", "scale": 1.0, "offset": 0.0}, {"rate": 0.05}
    measured = {"threshold": claims, "false_accepts": {"rate": 0.0, "low": 0.0, "high": 0.1, "count": 0, "total": 9}}
    SuccessClassifier(network, "encoder", fields, calibration, 0.0, 1, measured, {}).save(tmp_path / "classifier")
    with pytest.warns(RobopolicyNote, match=r"no term for success \(reward\).* world\.success_reward=true"):
        build_world(WorldSection(name, success=tmp_path / "classifier")).close()
    build_world(WorldSection(name, success=tmp_path / "classifier", success_reward=True)).close()


class Still(gymnasium.Env):
    """An environment in which nothing happens, with a reward of its own."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 4
    metadata = {"render_fps": 10}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.5, False, False, {"success": False}


def test_a_checkpoint_describes_itself_and_imports_nothing_unasked(tmp_path, oracle, monkeypatch):
    classifier = load_classifier(oracle)
    assert classifier.kind == "oracle:OracleNetwork" and classifier.hold == 1 and classifier.threshold == 0.0
    damaged = saved_oracle(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_classifier(damaged)
    with pytest.raises(CheckpointError):
        load_classifier(tmp_path)
    monkeypatch.setattr("robopolicy.core.registry._asked_for", set())
    with pytest.raises(CheckpointError, match=r"run\.plugins=\[oracle\]"):
        load_classifier(oracle)


def test_images_of_another_size_are_resized_with_a_note(tmp_path):
    fields = {f"{IMAGE_PREFIX}top": Field((16, 16, 3), dtype="uint8")}
    network = new_network("encoder", EncoderConfig(), fields)
    calibration = {"method": "temperature", "scale": 1.0, "offset": 0.0}
    classifier = SuccessClassifier(network, "encoder", fields, calibration, 0.0, 1, {}, {})

    def images(size: int) -> np.ndarray:
        row, column = np.meshgrid(np.arange(size) / size, np.arange(size) / size, indexing="ij")
        ramps = [np.stack([200 * row**power, 99 * column, 50 + 0 * row], -1) for power in (1, 2, 3)]
        return np.stack(ramps).astype(np.uint8)

    small, large = images(16), images(32)
    with pytest.warns(RobopolicyNote, match="32 x 32 pixels and are resized to the 16 x 16"):
        logits = classifier.logits({f"{IMAGE_PREFIX}top": large})
    assert np.allclose(logits, classifier.logits({f"{IMAGE_PREFIX}top": small}), atol=0.05)


def test_a_custom_kind_must_be_a_network():
    with pytest.raises(SpecError, match="SuccessNetwork"):
        new_network("oracle:NoNetwork", OracleConfig(), {})
    assert isinstance(new_network("oracle:OracleNetwork", OracleConfig(), {}), OracleNetwork)
