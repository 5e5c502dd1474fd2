"""Cameras of robots: any size, layout and range that is a picture for certain arrives as the policy reads it."""

import numpy as np
import pytest
from PIL import Image

from robopolicy.client import images
from robopolicy.client.images import downscale, pixels, resize_with_padding
from robopolicy.client.policy_client import _fitted
from robopolicy.client.policy_description import camera_shapes
from robopolicy.client.protocol import IMAGE_BYTES, Limits, pack, unpack
from robopolicy.core.errors import SpecError
from robopolicy.core.spec import IMAGE_PREFIX, STATE, Field, PolicySpec
from robopolicy.serving.inputs import Session

TOP, WRIST = IMAGE_PREFIX + "top", IMAGE_PREFIX + "wrist"
SPEC = PolicySpec(
    {STATE: Field((2,)), TOP: Field((32, 32, 3), "uint8", 0, 255), WRIST: Field((24, 48, 3), "uint8", 0, 255)},
    Field((1,)),
    2,
    1,
    1,
    1,
    10.0,
)
METADATA = {"observation": {key: field.to_json() for key, field in SPEC.observation.items()}, "rename": {"cam": TOP}}


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def seen(**cameras):
    return {STATE: np.zeros(2), TOP: picture(32, 32), WRIST: picture(24, 48), **cameras}


def read(message):
    return Session(SPEC).observe(unpack(pack(message)))


@pytest.mark.parametrize("size", [(1, 1), (3, 40), (72, 96), (37, 53), (200, 31)])
def test_pictures_are_scaled_as_pillow_does_where_there_is_none(size, monkeypatch):
    for number, (height, width) in enumerate([(72, 96), (108, 192), (5, 7), (96, 54), (1, 9)]):
        image = picture(height, width, number)
        with monkeypatch.context() as patch:
            patch.setattr(images, "fromarray", None)
            own = resize_with_padding(image, size)
        assert np.array_equal(own, resize_with_padding(image, size))
    direct = np.asarray(Image.fromarray(picture(72, 96)).resize((32, 24), Image.Resampling.BILINEAR))
    assert np.array_equal(resize_with_padding(picture(72, 96), (24, 32)), direct)


def test_a_client_makes_pictures_smaller_to_what_the_server_would_make_of_them():
    large = seen() | {"observation": {"images": {"top": picture(72, 128)}}, WRIST: picture(96, 54).transpose(2, 0, 1)}
    del large[TOP]
    sent = _fitted(large, camera_shapes(METADATA))
    assert sent["observation"]["images"]["top"].shape == (32, 32, 3) and sent[WRIST].shape == (24, 48, 3)
    for key, value in read(large).items():
        assert np.array_equal(read(sent)[key], value), key
    assert np.array_equal(
        _fitted({"cam": picture(64, 64)}, camera_shapes(METADATA))["cam"],
        resize_with_padding(picture(64, 64), (32, 32)),
    )


def test_what_is_small_or_no_picture_is_sent_as_it_is():
    shapes = camera_shapes(METADATA)
    for value in (
        picture(8, 8),
        picture(32, 32),
        np.zeros((900, 900)),
        np.zeros((90, 90, 4), np.uint8),
        np.zeros((0, 9, 3), np.uint8),
    ):
        assert _fitted({TOP: value}, shapes)[TOP] is value
    assert _fitted({"state": np.zeros((90, 90, 3)), TOP: "text"}, shapes)[TOP] == "text"
    frames = np.stack([picture(64, 96, 1), picture(64, 96, 2)])
    assert np.array_equal(
        downscale(frames, (32, 32, 3)), np.stack([resize_with_padding(each, (32, 32)) for each in frames])
    )


def test_names_that_may_be_either_of_two_cameras_and_lying_servers_leave_pictures_alone():
    assert camera_shapes(METADATA)["images/top"] == (32, 32, 3)
    two = {IMAGE_PREFIX + "wrist_a": {"shape": [8, 8, 3]}, IMAGE_PREFIX + "wrist_b": {"shape": [9, 9, 3]}}
    assert "observation/wrist_image" not in camera_shapes({"observation": two})
    assert camera_shapes({"observation": two})["wrist_a"] == (8, 8, 3)
    for lie in ({}, {"observation": 5}, {"observation": {TOP: None}}, {"observation": {TOP: {"shape": [10**9] * 3}}}):
        assert camera_shapes(lie) == {}
    assert camera_shapes(METADATA | {"rename": {"cam": "nothing"}}) == {}


def test_a_camera_beyond_the_limit_is_told_its_size_and_the_limit():
    large = seen() | {TOP: np.zeros((1080, 1920, 3), np.uint8)}
    with pytest.raises(
        SpecError, match=r"'observation/images/top' is 1920 x 1080, more than 1280 x 720 pixels: reduce"
    ):
        Session(SPEC).observe(large)
    with pytest.raises(SpecError, match="is 1080 x 1440, more than 1280 x 720"):
        Session(SPEC).observe(seen() | {TOP: np.zeros((3, 1440, 1080), np.uint8)})
    tall = Session(SPEC).observe(seen() | {TOP: np.zeros((1280, 720, 3), np.uint8)})
    assert tall[TOP].shape == (1, 2, 32, 32, 3)
    with pytest.raises(SpecError, match="more than 1000000 pixels"):
        Session(SPEC, limits=Limits(image=3_000_000)).observe(large)
    assert Limits.of(SPEC).image == IMAGE_BYTES


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_floats_from_0_to_1_are_pictures_and_others_are_refused(kind):
    image = picture(32, 32)
    for sent in (image / 255, image.transpose(2, 0, 1) / 255):
        assert np.abs(read(seen() | {TOP: sent.astype(kind)})[TOP][0, 0].astype(int) - image).max() <= (
            kind == np.float16
        )
    for wrong in (image.astype(kind), image / 127.5 - 1, np.full((32, 32, 3), np.nan)):
        with pytest.raises(SpecError, match=r"has dtype float.* needs uint8 \(or floats from 0 to 1\), RGB"):
            read(seen() | {TOP: wrong})
    assert pixels(image.astype(np.int32)) is None


def test_a_missing_camera_proposes_pictures_that_nobody_has_used():
    sent = seen() | {"images": {"high": picture(32, 32)}, "prompt": "go"}
    del sent[TOP]
    with pytest.raises(
        SpecError,
        match=r"no camera 'top'.*it is 'images/high': start .* serve\.rename={images/high: observation\.images\.top}",
    ):
        read(sent)
    sent["images"]["tip"] = picture(8, 8)
    with pytest.raises(SpecError, match=r"no camera 'top'.* (Did you mean|Known).*images/") as caught:
        read(sent)
    assert "state'?" not in str(caught.value)
    with pytest.raises(SpecError) as caught:
        read({STATE: np.zeros(2), WRIST: picture(24, 48)})
    assert "Did you mean" not in str(caught.value) and "Known" not in str(caught.value)
    with pytest.raises(SpecError, match=r"no field 'observation\.state'.*Did you mean 'observation/states'"):
        read({"observation.states": np.zeros(2), TOP: picture(32, 32), WRIST: picture(24, 48)})
