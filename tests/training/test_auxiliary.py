"""What a policy sees must also tell fields that it does not read: the error it is, what it teaches, and who may ask."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from seeing_toys import CAMERA, SIZE

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.policies import DenoisingPolicy
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.training.auxiliary import FIELDS, LOSS, WithStatePrediction, build_state_head, with_fields
from robopolicy.training.configuration import FitConfig, PretrainConfig, TeachConfig
from robopolicy.training.pretrain import pretrain, regression_batches

CONFIG = PretrainConfig(
    batch_size=64,
    fit=FitConfig(steps=150, learning_rate=3e-3, log_every=50, checkpoint_every=100),
    auxiliary_keys=(ENVIRONMENT_STATE,),
    auxiliary_weight=2.0,
)
GENERATOR = torch.Generator


def episodes(count: int = 200, seed: int = 0, labelled: bool = False) -> Episodes:
    """Episodes of three steps with a bright square, whose place [F, 2] in pixels only the environment's state says."""
    draws = GENERATOR().manual_seed(seed)
    place = torch.randint(0, SIZE - 4, (4 * count, 2), generator=draws)
    pictures = torch.zeros(4 * count, SIZE, SIZE, 3, dtype=torch.uint8)
    for picture, (row, column) in zip(pictures, place.tolist(), strict=True):
        picture[row : row + 5, column : column + 5] = 255
    fields = {STATE: Field((1,)), CAMERA: Field((SIZE, SIZE, 3), dtype="uint8"), ENVIRONMENT_STATE: Field((2,))}
    observation = {STATE: torch.zeros(4 * count, 1), CAMERA: pictures, ENVIRONMENT_STATE: place.float()}
    actions, lengths = torch.rand(3 * count, 2, generator=draws), torch.full((count,), 3)
    made = Episodes(fields, Field((2,)), 10.0, observation, actions, lengths, ("",) * count)
    return replace(made, labels=made.actions_ahead(2)) if labelled else made


def student(data: Episodes, keys: tuple[str, ...] = (STATE, CAMERA), **image: object) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(
        width=8, depth=1, sampling_steps=2, chunk=1, prediction_steps=1, observation_keys=keys, levels_per_sample=2,
        image=ImageEncoderConfig(features=8, channels=(8, 8, 8), random_shift=0, **image),
    )  # fmt: skip
    return DenoisingPolicy(config, data.observation_fields, data.action_field, fps=10)


@pytest.mark.parametrize("labelled", [False, True])
def test_it_is_the_mean_squared_error_in_ranges_beside_the_policys_own_loss(labelled):
    data = episodes(labelled=labelled)
    policy = student(data)
    head = build_state_head(policy, data, CONFIG, seed=1)
    head.fit_units(data)
    drawn = regression_batches(policy, data, 5, GENERATOR().manual_seed(2))
    batch = next(with_fields(drawn, data, CONFIG.auxiliary_keys))
    losses = WithStatePrediction(policy, head).loss(batch, GENERATOR().manual_seed(3))
    own = policy.loss(batch, GENERATOR().manual_seed(3))
    assert set(losses) == {"denoising", LOSS} and torch.equal(losses["denoising"], own["denoising"])
    # The square is where the picture of the same step has it
    where = batch["observation"][CAMERA][:, 0, :, :, 0].flatten(1).argmax(1)
    place = torch.stack([where // SIZE, where % SIZE], -1).float()
    assert torch.equal(batch[FIELDS][ENVIRONMENT_STATE], place)
    every = data.observation[ENVIRONMENT_STATE]
    told = head.layers(policy.network.encoder(batch["observation"]))
    low, high = every.amin(0), every.amax(0)
    wanted = 2 * (place - low) / (high - low) - 1
    assert torch.allclose(losses[LOSS], 2 * (told - wanted).square().mean(-1), rtol=1e-4)


def test_it_reaches_the_convolutions_and_reads_pictures_once():
    data = episodes()
    policy = student(data)
    model = WithStatePrediction(policy, build_state_head(policy, data, CONFIG, seed=1))
    batch = next(with_fields(regression_batches(policy, data, 5, GENERATOR()), data, CONFIG.auxiliary_keys))
    read = []
    policy.network.encoder.register_forward_hook(lambda *_: read.append(1))
    model.loss(batch, GENERATOR())[LOSS].sum().backward()
    assert read == [1]
    camera = policy.network.encoder.cameras
    assert all(weight.grad.abs().max() > 0 for weight in camera.parameters())
    assert all(weight.grad is None for weight in policy.network.denoiser.parameters())


@pytest.mark.long
def test_what_it_sees_tells_where_things_lie_in_pictures_that_it_never_saw(tmp_path):
    data, others = episodes(), episodes(seed=1)

    @torch.no_grad()
    def seen(policy, data: Episodes) -> torch.Tensor:
        features = policy.network.encoder({key: value[:, None] for key, value in data.observation.items()})
        return torch.cat([features, torch.ones(len(features), 1)], -1)

    def wrong(policy) -> float:
        """Share of the places' variance that the best line through what is seen of `data` leaves in `others`."""
        line, *_ = np.linalg.lstsq(seen(policy, data).numpy(), data.observation[ENVIRONMENT_STATE].numpy())
        place = others.observation[ENVIRONMENT_STATE].numpy()
        return float(np.square(seen(policy, others).numpy() @ line - place).mean() / place.var())

    taught, alone = student(data), student(data)
    result = pretrain(taught, data, CONFIG, RunFolder(tmp_path))
    pretrain(alone, data, replace(CONFIG, auxiliary_keys=()))
    assert result.losses[LOSS] / CONFIG.auxiliary_weight < 0.02
    assert wrong(taught) < 0.02 < 0.2 < wrong(alone)
    assert set(taught.state_dict()) == set(alone.state_dict()), "the head is no part of the policy"


def test_a_run_that_was_killed_ends_in_the_same_place(tmp_path, monkeypatch):
    data = episodes(20)
    config = replace(CONFIG, batch_size=8, fit=replace(CONFIG.fit, steps=9, checkpoint_every=3, log_every=2))
    whole = student(data)
    pretrain(whole, data, config, RunFolder(tmp_path / "whole"), seed=4)
    stopped, loss, calls = student(data), WithStatePrediction.loss, []

    def once(self, batch, generator):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return loss(self, batch, generator)

    monkeypatch.setattr(WithStatePrediction, "loss", once)
    with pytest.raises(KeyboardInterrupt):
        pretrain(stopped, data, config, RunFolder(tmp_path / "killed"), seed=4)
    monkeypatch.setattr(WithStatePrediction, "loss", loss)
    again = student(data)
    pretrain(again, data, config, RunFolder(tmp_path / "killed"), seed=4)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_computed_in_pieces_it_comes_to_the_same():
    data, learned = episodes(20), []
    for rows in (0, 3):
        policy = student(data)
        config = replace(CONFIG, batch_size=8, micro_batch=rows, fit=FitConfig(steps=1))
        learned.append(pretrain(policy, data, config).losses[LOSS])
    assert learned[0] == pytest.approx(learned[1], rel=1e-5)


def test_who_asks_for_what_cannot_be_told_hears_why():
    data = episodes(5)
    blind, frozen = student(data, (STATE,)), student(data, frozen=True)
    for policy in (blind, frozen):
        with pytest.raises(ConfigError, match="has no built-in one"):
            pretrain(policy, data, CONFIG)
    with pytest.raises(ConfigError, match=r"already reads 'observation.environment_state'"):
        pretrain(student(data, ()), data, CONFIG)
    with pytest.raises(DataError, match=r"not a vector in the data. Did you mean 'observation.environment_state'"):
        pretrain(student(data), data, replace(CONFIG, auxiliary_keys=("observation.environment_stat",)))
    spoilt = data.observation[ENVIRONMENT_STATE].clone()
    spoilt[3] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        pretrain(student(data), replace(data, observation={**data.observation, ENVIRONMENT_STATE: spoilt}), CONFIG)
    for made in (PretrainConfig, TeachConfig):
        with pytest.raises(ConfigError, match="set only one"):
            made(cache_encoder_outputs=True, auxiliary_keys=(ENVIRONMENT_STATE,))
        with pytest.raises(ConfigError, match="above 0"):
            made(auxiliary_weight=0.0)
