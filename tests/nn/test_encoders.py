"""Encoders: history, normalisation, cameras, frozen weights, augmentation."""

import pytest
import torch

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.spec import Field
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.nn.encoders import ImageEncoder, ObservationEncoder, shift_images

STATE, CAMERA = "observation.state", "observation.images.front"
FIELDS = {STATE: Field((3,)), CAMERA: Field((32, 32, 3), "uint8", 0, 255)}


def _observation(batch: int = 4, history: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (batch, history, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return {STATE: torch.randn(batch, history, 3, generator=generator), CAMERA: image}


def test_states_are_normalised_bounded_and_flattened_over_history():
    encoder = ObservationEncoder({STATE: FIELDS[STATE]}, history=2)
    encoder.normalizer(STATE).fit(torch.tensor([[-2.0, -2.0, -2.0], [2.0, 2.0, 2.0]]))
    state = torch.tensor([[[1.0, 2.0, -2.0], [0.0, 1000.0, -1000.0]]])
    assert encoder({STATE: state}).tolist() == [[0.5, 1.0, -1.0, 0.0, 10.0, -10.0]]
    assert encoder.dimension == 6


def test_each_camera_frame_has_its_own_features():
    config = ImageEncoderConfig(features=16, channels=(8, 16, 16))
    encoder = ObservationEncoder(FIELDS, history=2, image=config)
    observation = _observation()
    condition = encoder(observation)
    assert condition.shape == (4, encoder.dimension) == (4, 6 + 32)
    observation[CAMERA][:, 1] = 0
    changed = encoder(observation)
    assert torch.allclose(changed[:, :22], condition[:, :22], atol=1e-5)
    assert not torch.allclose(changed[:, 22:], condition[:, 22:], atol=1e-3)


def test_the_spatial_softmax_finds_where_something_is():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = ImageEncoder(ImageEncoderConfig(features=8, channels=(8, 16, 16)))
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    images[0, 4:10, 4:10] = 255
    images[1, 20:26, 20:26] = 255
    features = encoder(images)
    assert (features[0] - features[1]).abs().max() > 1e-3


def test_layer_norm_makes_a_frames_vector_as_large_as_a_state():
    made = []
    for layer_norm in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made.append(ImageEncoder(ImageEncoderConfig(layer_norm=layer_norm)))
    plain, normed = made
    images = torch.randint(0, 256, (5, 32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    features = plain(images)
    centred = features - features.mean(-1, keepdim=True)
    wanted = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(normed(images), wanted, atol=1e-5)
    assert features.std() < 0.3 < 0.9 < normed(images).std()
    assert set(normed.state_dict()) - set(plain.state_dict()) == {"norm.weight", "norm.bias"}, "old checkpoints fit"


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_encoders_have_no_gradient(frozen: bool):
    encoder = ObservationEncoder({CAMERA: FIELDS[CAMERA]}, history=2, image=ImageEncoderConfig(frozen=frozen))
    assert encoder(_observation()).requires_grad is not frozen


def test_random_shift_moves_pixels_only_when_asked():
    images = torch.zeros(400, 16, 16, 3, dtype=torch.uint8)
    images[:, 8, 8] = 200
    shifted = shift_images(images, 2, torch.Generator().manual_seed(0))
    assert shifted.dtype == torch.uint8
    assert torch.equal(shifted.sum((1, 2, 3)), images.sum((1, 2, 3)))
    places = {tuple(place) for place in shifted[..., 0].nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in range(6, 11) for column in range(6, 11)}
    encoder = ObservationEncoder({CAMERA: FIELDS[CAMERA]}, history=2, image=ImageEncoderConfig(random_shift=4))
    observation = _observation()
    assert torch.equal(encoder(observation), encoder(observation))
    assert not torch.equal(encoder(observation), encoder(observation, torch.Generator().manual_seed(0)))


def test_bad_inputs_are_refused():
    encoder = ObservationEncoder({CAMERA: FIELDS[CAMERA]}, history=2)
    with pytest.raises(SpecError, match="uint8"):
        encoder({CAMERA: _observation()[CAMERA].float()})
    with pytest.raises(ConfigError, match="reads no observations"):
        ObservationEncoder({}, history=1)
    with pytest.raises(ConfigError, match="a multiple of 8"):
        ImageEncoder(ImageEncoderConfig(channels=(8, 16, 20)))
