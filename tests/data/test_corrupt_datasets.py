"""Datasets that lie, miss something or reach outside: each is refused in one sentence that names the place."""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moving_episodes import FRONT, moving_episodes

from robopolicy.core.errors import DataError
from robopolicy.data.lerobot_format import read_dataset, write_dataset


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "sound"
    write_dataset(moving_episodes(), folder, images="png")
    return folder


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "filmed"
    write_dataset(moving_episodes(), folder)
    return folder


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "copy")


def edit(folder, change):
    """Replace the data file's table by what `change` makes of it."""
    path = next((folder / "data").glob("*/*.parquet"))
    pq.write_table(change(pq.read_table(path)), path)


def put(table, name, values):
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


def inform(folder, **changes):
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder, text, **options):
    with pytest.raises(DataError, match=text) as error:
        read_dataset(folder, **options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_frame_numbers_with_a_gap_or_a_repeat_are_refused_because_images_would_shift(copy):
    numbers = [*range(6), *range(4), *range(9)]

    def gap(table):
        return put(table, "frame_index", [77 if index == 1 else number for index, number in enumerate(numbers)])

    edit(copy, gap)
    refused(copy, r"episode 0 .*frame_index.*0, 2, 3, 4, 5, 77.*not 0 to 5")
    edit(copy, lambda table: put(table, "frame_index", [*range(6), 0, 1, 1, 3, *range(9)]))
    refused(copy, r"episode 1 .*frame_index")


def test_timestamps_off_the_frame_rate_are_refused(copy):
    fps = json.loads((copy / "meta" / "info.json").read_text())["fps"]
    times = [step / fps for length in (6, 4, 9) for step in range(length)]
    times[12] += 0.7 / fps
    edit(copy, lambda table: put(table, "timestamp", times))
    refused(copy, rf"episode 2 .*frame 2.*timestamp.*{fps}")


def test_a_column_that_is_promised_and_absent_is_named(copy):
    edit(copy, lambda table: table.drop_columns(["observation.state"]))
    refused(copy, r"file-000\.parquet lacks the column 'observation\.state'")


def test_a_column_of_another_width_is_named(copy):
    information = json.loads((copy / "meta" / "info.json").read_text())
    information["features"]["observation.state"]["shape"] = [5]
    inform(copy, features=information["features"])
    refused(copy, r"observation\.state.*\[5\]")


@pytest.mark.parametrize("fps", [0, -1, "x", None, float("inf")])
def test_a_frame_rate_that_is_none_is_refused(copy, fps):
    inform(copy, fps=fps)
    refused(copy, r"info\.json.*fps")


def test_frames_without_numbers_are_refused(copy):
    information = json.loads((copy / "meta" / "info.json").read_text())
    del information["features"]["frame_index"]
    inform(copy, features=information["features"])
    refused(copy, r"info\.json.*frame_index")


@pytest.mark.parametrize("features", [None, [], {"action": {}}, {"action": {"dtype": "float32", "shape": "x"}}])
def test_features_that_are_none_are_refused(copy, features):
    inform(copy, features=features)
    refused(copy, r"info\.json")


def test_images_are_never_opened_outside_the_dataset(copy, tmp_path):
    secret = tmp_path / "secret.png"
    image = pq.read_table(next((copy / "data").glob("*/*.parquet"))).column(FRONT)[0].as_py()
    secret.write_bytes(image["bytes"])
    for path in (str(secret), "../secret.png"):
        edit(copy, lambda table, path=path: put(table, FRONT, [{"bytes": None, "path": path}] * table.num_rows))
        refused(copy, r"frame 0 of episode 0.*outside")
    inside = copy / "images" / "frame.png"
    inside.parent.mkdir()
    shutil.copy(secret, inside)
    edit(copy, lambda table: put(table, FRONT, [{"bytes": None, "path": "images/frame.png"}] * table.num_rows))
    assert len(read_dataset(copy)) == 3
    inside.unlink()
    os.mkfifo(inside)
    refused(copy, r"frame 0 of episode 0.*no file")


def test_a_damaged_image_is_named(copy):
    def damaged(table):
        images = table.column(FRONT).to_pylist()
        images[8] = {"bytes": images[8]["bytes"][:40] + b"\0" * 20, "path": None}
        return put(table, FRONT, images)

    edit(copy, damaged)
    refused(copy, r"frame 2 of episode 1.*damaged")


def test_images_of_several_sizes_are_named(copy):
    def shrunk(table):
        from robopolicy.data.lerobot_images import encode_png

        images = table.column(FRONT).to_pylist()
        images[7] = {"bytes": encode_png(np.zeros((4, 5, 3), np.uint8)), "path": None}
        return put(table, FRONT, images)

    edit(copy, shrunk)
    refused(copy, r"frame 1 of episode 1.*\[4, 5, 3\]")


def test_missing_episode_tables_are_named(filmed, tmp_path):
    copy = shutil.copytree(filmed, tmp_path / "copy")
    shutil.rmtree(copy / "meta" / "episodes")
    refused(copy, "meta/episodes")
    assert len(read_dataset(copy, cameras=())) == 3


def test_a_video_path_that_leads_outside_is_refused(filmed, tmp_path):
    copy = shutil.copytree(filmed, tmp_path / "copy")
    inform(copy, video_path="../../{video_key}/{chunk_index}/{file_index}.mp4")
    refused(copy, "outside")
    inform(copy, video_path="videos/{nonsense}.mp4")
    refused(copy, "video_path")


def test_a_task_that_no_table_names_is_refused(copy):
    edit(copy, lambda table: put(table, "task_index", [9] * table.num_rows))
    refused(copy, r"tasks\.parquet.*9")
