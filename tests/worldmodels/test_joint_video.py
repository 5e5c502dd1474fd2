"""One video model that acts, imagines what follows and values it: numbers as frames, roles, planning, checkpoints."""

from dataclasses import replace

import pytest
import torch
from dot_world import IMAGE, SPEC, recorded

from robopolicy.core.candidates import AGGREGATED
from robopolicy.core.errors import CheckpointError, ConfigError, DataError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import STATE
from robopolicy.nn import edm
from robopolicy.nn.configuration import EdmConfig
from robopolicy.policies import load_policy
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels import save_world_model
from worldmodels.configuration import JointVideoConfig, ReadoutConfig, VideoConfig
from worldmodels.video.joint import ACTION, FRAMES, ROLES, VALUE, VIEW, JointVideoPolicy, tiled, untiled
from worldmodels.video.model import VideoModel

VIDEO = VideoConfig(
    size="tiny",
    memory=2,
    stride=2,
    chunk=3,
    view_batch_size=32,
    bootstrap_steps=100,
    readout=ReadoutConfig(batch_size=32, imagined_steps=8, members=2),
    precision="float32",
)
CONFIG = JointVideoConfig(
    chunk=1, batch_size=16, video=VIDEO, edm=EdmConfig(sigma_data=1.0, log_mean=0.0, sigma_max=20.0, steps=6, order=1)
)
pytestmark = pytest.mark.checks("Cosmos Policy")


def trained(config: JointVideoConfig, steps: int, episodes=None) -> JointVideoPolicy:
    torch.set_num_threads(1)
    episodes = recorded(60) if episodes is None else episodes
    model = JointVideoPolicy.build(config, SPEC, episodes, 0)
    fitting = FitConfig(steps=steps, learning_rate=3e-3, warmup=min(20, steps // 2))
    fit_stages(model, episodes, fitting, Generators(0))
    return model.eval()


@pytest.fixture(scope="module")
def begun() -> JointVideoPolicy:
    """A model that has hardly learned, whose untrained parts are no longer zero: for what holds of any weights."""
    model = trained(CONFIG, 8)
    with torch.no_grad():
        for weight in (*model.video.transformer.parameters(), *model.tags.parameters()):
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return model


def one_batch(model: JointVideoPolicy):
    return next(model.batches(recorded(20), torch.Generator().manual_seed(0)))


def observed(episodes, rows: int):
    return {key: value[:rows, None] for key, value in episodes.observation.items() if key in (STATE, IMAGE)}


def test_numbers_fill_a_frame_and_are_read_as_the_mean_of_their_copies():
    numbers = torch.tensor([[-1.0, -0.5, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0]])
    frames = tiled(numbers, (4, 8, 8))
    assert frames.shape == (1, 4, 8, 8) and torch.equal(frames.flatten()[8:16], numbers[0])
    assert torch.allclose(untiled(frames, 8), numbers)
    noise = torch.randn(4000, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert float(untiled(noise, 8).std()) == pytest.approx(32**-0.5, rel=0.02)  # 256 / 8 copies
    uneven = torch.tensor([[1.0, 2.0, 3.0]])  # 8 = 3 + 3 + 2: the last number has one copy less
    assert torch.equal(untiled(tiled(uneven, (2, 2, 2)), 3), uneven)
    with pytest.raises(ConfigError, match="9 numbers do not fit into a frame of 8"):
        tiled(torch.zeros(1, 9), (2, 2, 2))


def test_values_are_scaled_to_what_was_recorded(begun):
    low, high = float(begun.value_low), float(begun.value_high)
    frame = torch.full((1, *begun.video.latent), 0.2)
    assert float(begun._numbers(VALUE, frame)) == pytest.approx(low + (1 + 0.2) / 2 * (high - low), rel=1e-5)
    numbers = torch.tensor([[low], [high]])
    assert torch.allclose(begun._framed(VALUE, numbers).flatten(1).mean(1), torch.tensor([-1.0, 1.0]), atol=1e-5)
    assert float(AGGREGATED["majority"](torch.tensor([[0.1, 0.2, 0.9, 0.8, 0.85]]))) == pytest.approx(0.85)


def test_the_papers_majority_tells_success_from_failure_by_a_threshold():
    """Above .05 is success: the mean of successes if they are at least half, else 0."""
    scores = torch.tensor([[0.5, 0.6, 0.9, 0.02], [0.02, 0.6, 0.8, 0.01], [0.02, 0.05, 0.9, 0.01]])
    assert AGGREGATED["median"](torch.tensor([[0.1, 0.2, 0.4, 0.8]])).tolist() == pytest.approx([0.3])
    assert AGGREGATED["successes"](scores).tolist() == pytest.approx([2 / 3, 0.7, 0.0])


def test_half_of_a_batch_imitates_successes_and_the_rest_is_world_and_value(begun):
    batch = one_batch(begun)
    assert {role: len(rows["frames"]) for role, rows in batch.items()} == {"policy": 8, "world": 4, "value": 4}
    assert all(rows["frames"].shape[1:] == (4, *begun.video.latent) for rows in batch.values())
    assert (
        float(batch["value"]["frames"].abs().amax()) < 50
        and float(batch["policy"]["frames"][:, 0].abs().max()) <= 1.001
    )


def test_a_role_learns_the_frames_that_are_not_given_from_those_before_them(begun):
    """What a frame is predicted from: the given ones and earlier noisy ones, never itself clean and no later one."""
    batch = one_batch(begun)
    for role, given in ROLES.items():
        rows = {role: {name: value.clone() for name, value in batch[role].items()}}
        frames = rows[role]["frames"].requires_grad_()
        memory = begun._memory(rows[role]["present"], rows[role]["pose"])
        network = begun._network(memory, rows[role]["present"], frames[:, :given])
        noisy = torch.randn(frames[:, given:].shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        output = network(noisy, torch.zeros(len(frames)))
        assert output.shape == noisy.shape
        gradient, own = torch.autograd.grad(output[:, 0].sum(), [frames, noisy], allow_unused=True)
        assert bool(given) == (gradient is not None and bool(gradient[:, :given].abs().sum() > 0))
        assert float(own[:, 0].abs().amax()) > 0 and float(own[:, 1:].abs().sum()) == 0
        loss = begun.loss(rows, torch.Generator().manual_seed(0))
        assert list(loss) == [role] and loss[role].shape == (len(frames),)


def test_most_chunks_are_learned_through_noise_that_hides_them(begun, monkeypatch):
    """The mean over 32 copies of a number tells it through noise of 1; what it depends on is learned above that."""
    levels = []
    weigh = edm.weighted_error

    def watched(denoised, clean, sigma, config):
        levels.append(sigma)
        return weigh(denoised, clean, sigma, config)

    monkeypatch.setattr(edm, "weighted_error", watched)
    rows = one_batch(begun)["policy"]
    for seed in range(40):
        begun.loss({"policy": rows}, torch.Generator().manual_seed(seed))
    copies = torch.Size(begun.video.latent).numel() / begun.sizes[ACTION]
    hidden = torch.cat(levels) / copies**0.5 > 0.5  # in units of half a number's range
    assert float(hidden.float().mean()) > 0.7


def test_given_frames_come_back_bit_by_bit_and_a_chunk_does_not_depend_on_what_follows(begun):
    rows = one_batch(begun)["value"]
    memory = begun._memory(rows["present"], rows["pose"])
    given = rows["frames"][:, :1]
    drawn = begun.draw(memory, rows["present"], given, 2, torch.Generator().manual_seed(1))
    assert torch.equal(drawn[:, :1], given) and drawn.shape[1] == 3
    nothing = given[:, :0]
    alone = begun._network(memory, rows["present"], nothing)(rows["frames"][:, :1], torch.zeros(4))
    together = begun._network(memory, rows["present"], nothing)(rows["frames"], torch.zeros(4))
    assert torch.allclose(alone[:, 0], together[:, 0], atol=1e-5)


def test_the_chunk_with_the_highest_score_is_taken(begun, monkeypatch):
    planner = begun.planning(4)
    rows = one_batch(begun)["value"]
    chosen = torch.tensor([2, 0, 3, 1])
    drawn = []

    def draw(memory, present, given, count, generator):
        frames = JointVideoPolicy.draw(planner, memory, present, given, count, generator)
        if count == 1 and not given.shape[1]:
            drawn.append(frames)
        if given.shape[1] == 3:  # values: one for the chosen candidate, -1 for the others
            best = torch.zeros(4, 4, CONFIG.futures * CONFIG.values)
            best[torch.arange(4), chosen] = 2
            frames[:, FRAMES.index(VALUE)] = (best.flatten() - 1)[:, None, None, None]
        return frames

    monkeypatch.setattr(planner, "draw", draw)
    flat, scores = planner.plan(rows["present"], rows["pose"], torch.Generator().manual_seed(0))
    actions = begun._numbers(ACTION, drawn[0][:, 0]).reshape(4, 4, -1)
    assert torch.equal(flat, actions[torch.arange(4), chosen])
    assert torch.allclose(scores, torch.nn.functional.one_hot(chosen, 4).float())
    assert begun.without_planning() is None and planner.without_planning().config.candidates == 1


@pytest.mark.long
def test_it_is_a_policy_that_is_saved_with_its_video_model(begun, tmp_path):
    begun.save(tmp_path / "joint")
    again = load_policy(tmp_path / "joint")
    observation = observed(recorded(3), 3)
    first, second = (each.act(observation, torch.Generator().manual_seed(0)).actions for each in (begun, again))
    assert isinstance(again, JointVideoPolicy) and torch.equal(first, second)
    assert check_policy(begun, load_policy, level=Level.ACTS).level == Level.ACTS
    described = (tmp_path / "joint" / "config.json").read_text()
    (tmp_path / "joint" / "config.json").write_text(described.replace('"chunk": 1', '"chunk": 2', 1))
    with pytest.raises(CheckpointError):
        load_policy(tmp_path / "joint")


@pytest.mark.long
def test_it_starts_from_a_video_model_and_keeps_its_pictures(tmp_path):
    episodes = recorded(40)
    video = VideoModel.build(VIDEO, SPEC, episodes, 0)
    video.encode_episodes(episodes)
    save_world_model(video, tmp_path / "video")
    config = replace(CONFIG, model=tmp_path / "video")
    model = JointVideoPolicy.build(config, SPEC, episodes, 0)
    assert list(model.stages()) == ["joint"] and list(trained(CONFIG, 2).stages()) == ["autoencoder", "joint"]
    fit_stages(model, episodes, FitConfig(steps=4, learning_rate=1e-3, warmup=1), Generators(0))
    after = model.video.state_dict()
    changed = {name for name, weight in video.state_dict().items() if not torch.equal(after[name], weight)}
    assert "transformer.head.weight" in changed and all(name.startswith("transformer.") for name in changed)
    other = replace(SPEC, observation={**SPEC.observation, IMAGE: replace(SPEC.observation[IMAGE], shape=(32, 32, 3))})
    with pytest.raises(ConfigError, match=f"trained on other data: '{IMAGE}' differs"):
        JointVideoPolicy.build(config, other, episodes, 0)
    with pytest.raises(DataError, match="records no rewards"):
        JointVideoPolicy.build(config, SPEC, replace(episodes, rewards=None), 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # four CPU minutes
def test_it_learns_to_act_and_what_actions_do():
    episodes = recorded(300)
    model = trained(replace(CONFIG, batch_size=64), 1500, episodes)
    batch = next(model.batches(recorded(100, seed=1), torch.Generator().manual_seed(0)))["value"]
    memory = model._memory(batch["present"], batch["pose"])
    drawn = model.draw(memory, batch["present"], batch["frames"][:, :1], 2, torch.Generator().manual_seed(0))
    shuffled = model.draw(
        memory, batch["present"], batch["frames"].roll(1, 0)[:, :1], 2, torch.Generator().manual_seed(0)
    )
    place = FRAMES.index(VIEW)
    errors = [float((each[:, place] - batch["frames"][:, place]).square().mean()) for each in (drawn, shuffled)]
    assert errors[0] < 0.3 * errors[1]
    observation = observed(recorded(100, seed=1), 100)
    action = model.act(observation, torch.Generator().manual_seed(0)).actions[:, 0]
    frames = recorded(100, seed=1).observation
    offset = frames["observation.environment_state"][:100, :2] - frames[STATE][:100]
    towards = torch.nn.functional.cosine_similarity(action, offset)[offset.norm(dim=1) > 0.4]
    assert float(towards.mean()) > 0.6
