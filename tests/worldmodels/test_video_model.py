"""Latent video imagines a moving dot, minds its actions, remembers as it was trained to, and branches exactly."""

import copy
from dataclasses import replace

import numpy as np
import point_world
import pytest
import torch
from dot_world import IMAGE, PIXELS, SPEC, check_round_trip, imagined_world, recorded

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from robopolicy.evaluation.image_quality import SSIM, psnr
from robopolicy.evaluation.world_model import examine, follow
from robopolicy.testing.world import check_world
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels.configuration import ReadoutConfig, VideoConfig
from worldmodels.env import Truncation
from worldmodels.initial_states import context_at
from worldmodels.protocol import Context
from worldmodels.video.model import VideoModel
from worldmodels.video.training import DynamicsStage, LatentVideo, subsequence_at

READOUT = ReadoutConfig(batch_size=64, imagined_steps=256, members=3)
TINY = VideoConfig(
    size="tiny",
    memory=2,
    stride=2,
    chunk=3,
    view_batch_size=32,
    autoencoder_step_fraction=1.0,
    motion_weight=1.0,
    bootstrap_steps=100,
    readout=READOUT,
    precision="float32",
)


@pytest.fixture(scope="module")
def learned():
    return trained(300)


@pytest.fixture(scope="module")
def begun():
    """A model that has hardly learned: for what holds of any weights."""
    return trained(20)


def trained(steps: int):
    torch.set_num_threads(1)
    training = recorded()
    model = VideoModel.build(TINY, SPEC, training, 0)
    config = FitConfig(steps=steps, learning_rate=3e-3, warmup=min(20, steps // 2), ema_decay=0.98)
    fit_stages(model, training, config, Generators(0))
    held = recorded(100, seed=1)
    model.calibrate(held)
    return model.eval(), held


@pytest.fixture(scope="module")
def fresh():
    data = recorded(20)
    model = VideoModel.build(replace(TINY, readout=replace(READOUT, imagined_steps=8)), SPEC, data, 0).eval()
    model.encode_episodes(data)  # keeps the statistics of latents, as training does before anything is imagined
    return model, data


def latent_at(model, data, steps):
    return model.initial(context_at(data, steps, model.context), steps.numpy())


@pytest.mark.slow
def test_it_imagines_the_image_and_depends_on_its_actions(learned):
    model, held = learned
    figures = examine(model, held, torch.Generator().manual_seed(0), rows=100, steps=400, horizons=(1, 2, 3, 4, 5))
    for ahead, figures_of_keys in figures["open_loop"].items():
        assert figures_of_keys[IMAGE]["model"] > figures_of_keys[IMAGE]["copy"] + 1.5, ahead
        assert figures_of_keys[IMAGE]["model"] > figures_of_keys[IMAGE]["shuffled"] + 1.0, ahead
        assert figures_of_keys[IMAGE + SSIM]["model"] > figures_of_keys[IMAGE + SSIM]["shuffled"] + 0.02, ahead
        assert figures_of_keys[STATE]["model"] < 0.5 * figures_of_keys[STATE]["copy"], ahead
    assert figures["reward_error"] < 1.0
    assert figures["success"]["f1"] > 0.3


@pytest.mark.long
def test_imagined_worlds_conform(begun):
    check_world(lambda rows: imagined_world(begun[0], rows), renders=False, tolerance=1e-4)


def test_an_episode_depends_on_its_seed_and_actions_alone(begun):
    model, held = begun
    steps = torch.arange(4)
    latent = latent_at(model, held, steps)
    _, prediction = model.imagine(latent, held.actions[:4])
    _, twice = model.imagine({name: value.clone() for name, value in latent.items()}, held.actions[:4])
    assert all(torch.equal(prediction.observation[key], twice.observation[key]) for key in prediction.observation)
    order = [2, 0]
    _, again = model.imagine({name: value[order] for name, value in latent.items()}, held.actions[order])
    assert torch.allclose(again.observation[STATE], prediction.observation[STATE][order], atol=1e-4)
    difference = again.observation[IMAGE].int() - prediction.observation[IMAGE][order].int()
    assert float((difference.abs() > 1).float().mean()) < 0.01
    chunk = held.actions[steps[:, None] + torch.arange(TINY.chunk)]
    other, _ = model.generate({**latent, "seed": latent["seed"] + 1}, chunk)
    moved, _ = model.generate(latent, chunk)
    assert not torch.equal(other["latents"], moved["latents"])
    cold = VideoModel.restore(model.description(), SPEC, model.state_dict())
    cold.load_state_dict(model.state_dict())
    cold.config = replace(model.config, temperature=0.0)
    first, _ = cold.generate(latent, chunk)
    second, _ = cold.generate({**latent, "seed": latent["seed"] + 1}, chunk)
    assert torch.equal(first["latents"], second["latents"])


def test_frames_are_the_same_one_by_one_and_in_chunks(begun):
    model, held = begun
    steps = torch.arange(6)
    latent = latent_at(model, held, steps)
    actions = held.actions[steps[:, None] + torch.arange(7)]
    kept = {name: value.clone() for name, value in latent.items()}
    moved, chunks = model.generate(latent, actions)
    assert len(chunks) == 7 and torch.equal(moved["step"], torch.full((6,), 7))
    assert all(torch.equal(latent[name], kept[name]) for name in latent)
    single, apart = latent, []
    for step in range(7):
        single, prediction = model.imagine(single, actions[:, step])
        apart.append(prediction)
    for first, second in zip(chunks, apart, strict=True):
        assert torch.allclose(first.observation[STATE], second.observation[STATE], atol=1e-3)
        assert float((first.observation[IMAGE] != second.observation[IMAGE]).float().mean()) < 0.02
    for name in ("latents", "states", "actions", "since", "moves", "phase"):
        assert torch.allclose(moved[name].float(), single[name].float(), atol=1e-3), name


def test_a_world_imagines_chunks_together_and_only_rows_that_run(fresh, monkeypatch):
    model = copy.deepcopy(fresh[0])
    model.reader.success_threshold.fill_(torch.inf)
    asked, advance = [], VideoModel._advance
    monkeypatch.setattr(
        VideoModel, "_advance", lambda self, *given: asked.append(given[1].shape[:2]) or advance(self, *given)
    )
    together, apart = (imagined_world(model, 3, truncation=Truncation(steps=5)) for _ in range(2))
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 4, SPEC.action.size)).astype(np.float32)
    for world in (together, apart):
        world.reset(seeds=[1, 2, 3])
    step = together.step(actions)
    assert asked == [(3, 3), (3, 1)], "as far as the model's own chunks of 3 reach"
    for index in range(4):
        single = apart.step(actions[:, [index]])
    for key in (STATE, IMAGE):
        np.testing.assert_allclose(step.observation[key], single.observation[key], atol=1 if key == IMAGE else 1e-4)
    together.reset(rows=[0], seeds=[4])
    asked.clear()
    step = together.step(actions)
    assert step.valid.sum(1).tolist() == [4, 1, 1] and step.horizon_end.tolist() == [False, True, True]
    assert sorted(asked) == [(1, 1), (1, 3), (2, 2), (2, 2)], "rows at the same place of their chunks go together"
    ended = step.observation[STATE][1:]
    asked.clear()
    step = together.step(actions)
    assert asked == [(1, 1)], "rows that have ended are left alone, and nothing is imagined past the time limit"
    np.testing.assert_array_equal(step.observation[STATE][1:], ended)


def test_rows_at_different_places_of_their_chunks_do_not_mind_each_other(begun):
    model, held = begun
    steps = torch.arange(4)
    latent = latent_at(model, held, steps)
    ahead, _ = model.generate(latent, held.actions[steps[:, None] + torch.arange(2)])
    mixed = {name: torch.cat([value[:2], ahead[name][2:]]) for name, value in latent.items()}
    actions = held.actions[steps[:, None] + torch.arange(4)]
    last, predictions = model.generate(mixed, actions)
    for rows, alone in ((slice(0, 2), latent), (slice(2, 4), ahead)):
        end, wanted = model.generate({name: value[rows] for name, value in alone.items()}, actions[rows])
        assert torch.allclose(wanted[-1].observation[STATE], predictions[-1].observation[STATE][rows], atol=1e-3)
        assert torch.equal(end["phase"], last["phase"][rows])


def test_checkpoints_round_trip(begun, tmp_path):
    check_round_trip(begun[0], tmp_path / "model")


@pytest.mark.checks("Ctrl-World")
def test_history_is_spaced_in_rollouts_as_in_training(fresh, monkeypatch):
    """The frames, poses and actions that training gathers are those that a rollout over the same frames remembers."""
    model, data = fresh
    assert model.config.history_offsets == (5, 3, 1, 0) and model.config.history_span == 6
    assert replace(TINY, memory=0).history_offsets == (1, 0)
    video = model.encode_episodes(data)
    long = int((data.lengths >= 8).nonzero()[0, 0])
    steps = data.starts[long] + torch.tensor([0, 2, 7])
    present = steps + data.episode_of_step[steps]
    trained = subsequence_at(video, present, model.config)
    memory = {}

    def remember(history, actions, poses, noise):
        memory.update(history=history, history_actions=actions, history_poses=poses)
        return original(history, actions, poses, noise)

    original = model.transformer.remember
    monkeypatch.setattr(model.transformer, "remember", remember)
    model.imagine(latent_at(model, data, steps), data.actions[steps])
    for name, value in memory.items():
        assert torch.allclose(value, getattr(trained, name), atol=1e-4), name
    assert torch.allclose(trained.history_actions[0], trained.history_actions[0, :1])


@pytest.mark.checks("Ctrl-World")
def test_what_is_remembered_moves_on_with_every_chunk(fresh):
    model, data = fresh
    long = int((data.lengths >= 8).nonzero()[0, 0])
    start, chunk = data.starts[long : long + 1], TINY.chunk
    first = latent = latent_at(model, data, start)
    states, actions = [], data.actions[start[:, None] + torch.arange(2 * chunk)]
    for step in range(2 * chunk):
        assert int(latent["phase"]) == step % chunk
        latent, _ = model.imagine(latent, actions[:, step])
        states.append(latent["state"])
        if step < chunk - 1:
            assert torch.equal(latent["latents"], first["latents"])
    span = model.config.history_span
    assert torch.equal(latent["actions"], torch.cat([first["actions"], actions], 1)[:, -span:])
    assert torch.equal(latent["states"], torch.cat([first["states"], torch.stack(states, 1)], 1)[:, -span:])
    assert bool((latent["moves"] == 0).all()) and int(latent["phase"]) == 0


def test_a_history_that_is_too_short_repeats_its_first_frame(fresh):
    model, data = fresh
    steps = torch.arange(3)
    whole = context_at(data, steps, 1)
    latent = model.initial(whole, np.arange(3))
    assert latent["latents"].shape[1] == model.config.history_span
    assert bool((latent["latents"] == latent["latents"][:, :1]).all()) and bool((latent["actions"] == 0).all())
    context = context_at(data, steps + 4, 3)
    short = model.initial(context, np.arange(3))
    assert torch.equal(short["latents"][:, 0], short["latents"][:, -3])
    assert not torch.equal(short["latents"][:, -3], short["latents"][:, -1])
    assert torch.equal(short["actions"][:, -2:], torch.from_numpy(np.asarray(context.actions)))
    assert bool((short["actions"][:, :-2] == 0).all())


def test_only_future_frames_of_the_episode_are_learned_from(fresh):
    model, data = fresh
    stage, _ = model.stages()["dynamics"]
    assert isinstance(stage, DynamicsStage)
    first, again = (next(stage.batches(data, torch.Generator().manual_seed(0))) for _ in range(2))
    subsequence = first["subsequence"]
    assert torch.equal(subsequence.future, again["subsequence"].future) and bool((~subsequence.valid).any())

    def loss(changed):
        return stage.eval().loss({"subsequence": changed}, torch.Generator().manual_seed(0))["latents"]

    kept = loss(subsequence)
    assert kept.shape == (TINY.batch_size,)
    beyond = torch.where(subsequence.valid[..., None, None, None], subsequence.future, 1e3)
    assert torch.allclose(loss(replace(subsequence, future=beyond)), kept, rtol=1e-3)
    within = torch.where(subsequence.valid[..., None, None, None], subsequence.future + 1, subsequence.future)
    assert not torch.allclose(loss(replace(subsequence, future=within)), kept)


def test_an_earlier_frame_does_not_see_later_ones(begun):
    model, held = begun
    latent = latent_at(model, held, torch.arange(5))
    actions = held.actions[torch.arange(5)[:, None] + torch.arange(3)]
    other = actions.clone()
    other[:, 2] = -other[:, 2]
    first, second = (model._predict(latent, moves) for moves in (actions, other))
    assert torch.allclose(first[:, :2], second[:, :2], atol=1e-5)
    assert not torch.allclose(first[:, 2], second[:, 2], atol=1e-3)


@pytest.mark.checks("Sword")
def test_own_predictions_take_the_place_of_true_history():
    data = recorded(20)
    config = replace(
        TINY,
        bootstrap_fraction=1.0,
        bootstrap_steps=1,
        repeat_present_fraction=0.0,
        max_noise_fraction=1.0,
        memory_noise=0.0,
    )
    model = VideoModel.build(replace(config, present_noise=0.0), SPEC, data, 0)
    stage, _ = model.stages()["dynamics"]
    assert isinstance(stage, DynamicsStage)
    batches = stage.batches(data, torch.Generator().manual_seed(0))
    generator, true = torch.Generator().manual_seed(0), stage.cache.clone()
    batch = next(batches)
    stage.train().loss(batch, generator)
    changed = (stage.cache != true).flatten(1).any(1)
    subsequence = batch["subsequence"]
    predicted = subsequence.places[:, -TINY.chunk :][subsequence.valid]
    assert int(stage.updates) == 1 and bool(changed.any())
    assert set(changed.nonzero()[:, 0].tolist()) <= set(predicted.tolist())
    stage.cache += 1
    history, _, _ = stage._degraded(subsequence, lambda *shape: torch.rand(shape, generator=generator))
    assert torch.equal(history, stage.cache[subsequence.places[:, : -TINY.chunk]].float())
    off, _ = VideoModel.build(replace(config, bootstrap_fraction=0.0), SPEC, data, 0).stages()["dynamics"]
    assert isinstance(off, DynamicsStage)
    batch = next(off.batches(data, torch.Generator().manual_seed(0)))
    off.train().loss(batch, generator)
    assert not len(off.cache) and int(off.updates) == 0


def test_an_untrained_model_repeats_the_last_frame(fresh):
    model, data = fresh
    steps = torch.arange(3)
    _, predictions = model.generate(latent_at(model, data, steps), data.actions[steps[:, None] + torch.arange(4)])
    last = torch.from_numpy(context_at(data, steps).last(IMAGE))
    for imagined in predictions:
        assert float((psnr(imagined.observation[IMAGE], last)).min()) > 20


def test_several_cameras_are_predicted_together():
    second = "observation.images.side"
    spec = replace(SPEC, observation={**SPEC.observation, second: Field((PIXELS, PIXELS, 3), "uint8")})
    data = recorded(10)
    observation = {**data.observation, second: 255 - data.observation[IMAGE]}
    data = replace(data, observation_fields=spec.observation, observation=observation)
    model = VideoModel.build(TINY, spec, data, 0)
    latent = model.initial(context_at(data, torch.arange(3)), np.arange(3))
    assert latent["latents"].shape == (3, 6, 4, 8, 4) and latent["frames"].shape == (3, 2, 2 * PIXELS, PIXELS, 3)
    _, prediction = model.imagine(latent, data.actions[:3])
    for key in (IMAGE, second):
        assert (
            prediction.observation[key].shape == (3, PIXELS, PIXELS, 3)
            and prediction.observation[key].dtype == torch.uint8
        )
    followed = follow(model, data, data.starts[:2], 3)
    assert followed.imagined[second].shape == followed.real[second].shape == (2, 4, PIXELS, PIXELS, 3)
    assert np.array_equal(followed.imagined[IMAGE][:, 0], followed.real[IMAGE][:, 0])


def test_images_alone_are_enough():
    spec = replace(SPEC, observation={IMAGE: SPEC.observation[IMAGE]})
    data = recorded(6)
    data = replace(data, observation_fields=spec.observation, observation={IMAGE: data.observation[IMAGE]})
    model = VideoModel.build(replace(TINY, memory=0), spec, data, 0)
    video = model.encode_episodes(data)
    assert isinstance(video, LatentVideo) and video.poses.shape[1] == 1
    context = Context({IMAGE: data.observation[IMAGE][:2, None].numpy()})
    _, prediction = model.imagine(model.initial(context, np.arange(2)), data.actions[:2])
    assert set(prediction.observation) == {IMAGE}


def test_bad_settings_and_data_are_refused():
    data = recorded(4)
    with pytest.raises(DataError, match="another world"):
        VideoModel.build(TINY, SPEC, replace(data, actions=data.actions[:, :1]), 0)
    with pytest.raises(ConfigError, match="no images"):
        VideoModel.build(TINY, point_world.SPEC, point_world.recorded(4), 0)
    for height, width, text in ((PIXELS, 2 * PIXELS, "the same width"), (2 * PIXELS, PIXELS, "the same size")):
        wide = {**SPEC.observation, "observation.images.side": Field((height, width, 3), "uint8")}
        side = torch.zeros(len(data.observation[IMAGE]), height, width, 3, dtype=torch.uint8)
        more = {**data.observation, "observation.images.side": side}
        unequal = replace(data, observation_fields=wide, observation=more)
        with pytest.raises(ConfigError, match=text):
            VideoModel.build(TINY, replace(SPEC, observation=wide), unequal, 0)
    with pytest.raises(ConfigError, match="does not divide"):
        VideoModel.build(replace(TINY, channels=(8, 8, 8, 8, 8)), SPEC, data, 0)
    with pytest.raises(ConfigError, match="patches of 3"):
        VideoModel.build(replace(TINY, patch=3), SPEC, data, 0)
    with pytest.raises(ConfigError, match="multiple of heads"):
        VideoModel.build(replace(TINY, width=65), SPEC, data, 0)
    for wrong in (
        {"size": "huge"},
        {"memory": -1},
        {"repeat_present_fraction": 1.5},
        {"channels": (12, 24)},
        {"temperature": -1.0},
    ):
        with pytest.raises(ConfigError):
            replace(TINY, **wrong)
    with pytest.raises(ConfigError, match="above 0"):
        replace(TINY, readout_step_fraction=0.0)
    assert ENVIRONMENT_STATE in SPEC.observation
