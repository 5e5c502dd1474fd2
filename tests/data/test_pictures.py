"""What is a picture in somebody's dataset is decided by its type, not by its name; what is left out is said."""

import json

import numpy as np
import pytest

from robopolicy.core.errors import DataError, RobopolicyWarning, SpecError
from robopolicy.core.spec import STATE, Field, PolicySpec, camera_key, require_cameras_named
from robopolicy.data.lerobot_reading import read_dataset, read_information
from robopolicy.doctor.data import check_columns, check_statistics
from robopolicy.nn.encoders import ObservationEncoder
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.serving.inputs import Session
from robopolicy.training.reading import describe_reading

HEIGHT, WIDTH, STEPS = 16, 24, 3
IMAGE = "observation.images.image"
NAMES = {"image": ["height", "width", "channels"], "first": ["channels", "height", "width"]}


def pictures(steps: int = STEPS) -> np.ndarray:
    """Distinct colours and a gradient across, so that a mirrored, turned or mixed picture is seen."""
    frames = np.zeros((steps, HEIGHT, WIDTH, 3), np.uint8)
    frames[..., 0] = np.arange(WIDTH) * 10
    frames[..., 1] = np.arange(HEIGHT)[:, None] * 15
    frames[..., 2] = np.arange(steps)[:, None, None] * 40
    return frames


def written(folder, features, values, action="action"):
    """Write one episode with LeRobot's own writer; features: name -> (dtype, shape, names), values: [T, *shape]."""
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {**features, action: ("float32", (2,), ["x", "y"])}
    declared = {key: {"dtype": kind, "shape": shape, "names": names} for key, (kind, shape, names) in features.items()}
    encoder = RGBEncoderConfig(vcodec="h264", pix_fmt="yuv444p", crf=10)
    dataset = LeRobotDataset.create("their/data", 10, declared, root=folder, rgb_encoder=encoder)
    moves = np.linspace(-1, 1, 2 * STEPS, dtype=np.float32).reshape(STEPS, 2)
    for step in range(STEPS):
        dataset.add_frame({**{key: value[step] for key, value in values.items()}, action: moves[step], "task": "push"})
    dataset.save_episode()
    dataset.finalize()
    return folder


def state() -> np.ndarray:
    return np.linspace(0, 1, 2 * STEPS, dtype=np.float32).reshape(STEPS, 2)


def with_picture(folder, name, dtype="image"):
    shape = (HEIGHT, WIDTH, 3)
    features = {STATE: ("float32", (2,), ["x", "y"]), name: (dtype, shape, NAMES["image"])}
    return written(folder, features, {STATE: state(), name: pictures()})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("observation.image", "image"),
        ("observation.image", "video"),
        ("observation.wrist_image", "image"),
        ("observation.rgb", "uint8"),
        ("observation.images", "image"),
        ("observation.images.top", "image"),
    ],
)
def test_a_column_of_pictures_is_a_camera_whatever_it_is_called(name, dtype, tmp_path):
    folder = with_picture(tmp_path / "data", name, dtype)
    episodes = read_dataset(folder)
    key = camera_key(name)
    assert set(episodes.observation) == {STATE, key} and episodes.cameras == (key.removeprefix("observation.images."),)
    assert episodes.observation_fields[key] == Field((HEIGHT, WIDTH, 3), "uint8", 0, 255)
    shown = episodes.observation[key][:STEPS].numpy().astype(int)
    assert np.abs(shown - pictures()).mean() < (4 if dtype == "video" else 0.01)
    assert {finding.health.value for finding in check_statistics(episodes, folder)} == {"good"}
    config = DenoisingPolicyConfig(width=8, depth=1, sampling_steps=2, denoising_steps=4)
    policy = DenoisingPolicy(config, episodes.observation_fields, episodes.action_field, fps=10.0)
    assert policy.spec.cameras == episodes.cameras
    assert not any("normalizers" in name and "image" in name for name in policy.state_dict())
    reading = describe_reading(folder, read_information(folder)["features"], episodes, policy.spec.observation)
    assert not reading.skipped
    assert reading.columns == (STATE, key if key == name else f"{key} (from {name})", "action")
    # A client that knows the dataset's name, or openpi's, is understood.
    for sent in (name, name.replace(".", "/"), key):
        observed = Session(policy.spec).observe({STATE: state()[0], sent: pictures()[1]})
        assert (observed[key][0, -1] == pictures()[1]).all()


def test_pictures_declared_channels_first_are_read_upright(tmp_path):
    features = {"observation.image": ("image", (3, HEIGHT, WIDTH), NAMES["first"])}
    episodes = read_dataset(
        written(tmp_path / "stored", features, {"observation.image": pictures().transpose(0, 3, 1, 2)})
    )
    assert (episodes.observation[IMAGE][:STEPS].numpy() == pictures()).all()
    features = {"observation.image": ("uint8", (3, HEIGHT, WIDTH), None), STATE: ("float32", (2,), None)}
    values = {"observation.image": pictures().transpose(0, 3, 1, 2), STATE: state()}
    folder = written(tmp_path / "numbers", features, values)
    assert (read_dataset(folder).observation[IMAGE][:STEPS].numpy() == pictures()).all()
    assert set(read_dataset(folder, cameras=()).observation) == {STATE}


def test_depth_is_left_out_and_said_or_refused_where_nobody_marked_it(tmp_path):
    depth = (np.arange(STEPS * HEIGHT * WIDTH, dtype=np.uint16) * 9).reshape(STEPS, HEIGHT, WIDTH, 1)
    features = {
        STATE: ("float32", (2,), None),
        "observation.images.depth": ("image", (HEIGHT, WIDTH, 1), NAMES["image"]),
    }
    folder = written(tmp_path / "data", features, {STATE: state(), "observation.images.depth": depth})
    with pytest.raises(DataError, match=r"observation\.images\.depth.*8 bits.*\"is_depth_map\": true"):
        read_dataset(folder)
    path = folder / "meta" / "info.json"
    information = json.loads(path.read_text())
    information["features"]["observation.images.depth"]["info"] = {"is_depth_map": True}
    path.write_text(json.dumps(information))
    episodes = read_dataset(folder)
    assert set(episodes.observation) == {STATE}
    reading = describe_reading(folder, information["features"], episodes, {STATE})
    assert reading.skipped == {"observation.images.depth": "depth [16, 24, 1]; only colour images are read"}
    assert "observation.images.depth (depth [16, 24, 1])" in check_columns(folder)[0].measured


def test_columns_without_the_prefix_are_named_with_their_kinds(tmp_path):
    shape = (HEIGHT, WIDTH, 3)
    features = {"image": ("image", shape, NAMES["image"]), "wrist_image": ("image", shape, NAMES["image"])}
    values = {"image": pictures(), "wrist_image": pictures(), "state": state()}
    folder = written(tmp_path / "data", {**features, "state": ("float32", (2,), None)}, values)
    columns = r"image \(images \[16, 24, 3\]\), wrist_image \(images \[16, 24, 3\]\), state \(float32 \[2\]\)"
    with pytest.raises(DataError, match=rf"no column 'observation\.\*'.* {columns}"):
        read_dataset(folder)


def test_two_columns_of_one_camera_are_refused(tmp_path):
    shape = (HEIGHT, WIDTH, 3)
    features = dict.fromkeys(("observation.top", "observation.images.top"), ("image", shape, NAMES["image"]))
    folder = written(tmp_path / "data", features, dict.fromkeys(features, pictures()))
    with pytest.raises(DataError, match=r"'observation\.top' and 'observation\.images\.top' both map to the camera"):
        read_dataset(folder)


def test_very_long_vectors_are_not_read_without_a_word():
    with pytest.warns(RobopolicyWarning, match=r"'observation\.depth' \(\[48, 64\]\) is read as a plain vector"):
        ObservationEncoder({"observation.depth": Field((48, 64))}, 1)
    ObservationEncoder({STATE: Field((2000,))}, 1)


def test_a_world_that_shows_a_picture_under_another_name_is_refused():
    picture = Field((8, 8, 3), "uint8", 0, 255)
    require_cameras_named({STATE: Field((2,)), IMAGE: picture}, "The world 'slide'")
    with pytest.raises(SpecError, match=r"'slide' outputs an image.*name it 'observation\.images\.rgb'"):
        require_cameras_named({"observation.rgb": picture}, "The world 'slide'")
    with pytest.raises(SpecError, match=r"outputs the camera 'observation\.images\.image' as float32 \[8, 8, 3\]"):
        require_cameras_named({IMAGE: Field((8, 8, 3))}, "The world 'slide'")


def test_a_name_that_fits_two_cameras_says_neither():
    fields = {
        f"observation.images.{name}": Field((8, 8, 3), "uint8", 0, 255) for name in ("top", "image", "wrist_image")
    }
    session = Session(PolicySpec(fields, Field((2,)), 1, 1, 1, 0, 10.0))
    shown = {name: np.full((8, 8, 3), value, np.uint8) for value, name in enumerate(("top", "image", "wrist_image"))}
    observation = session.observe({f"observation/{name}": value for name, value in shown.items()})
    assert [int(observation[key].max()) for key in fields] == [0, 1, 2]
    with pytest.raises(SpecError, match="no camera 'top'"):
        session.observe({f"observation/{name}": value for name, value in shown.items() if name != "top"})
