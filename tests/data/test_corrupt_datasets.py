"""Datasets that lie, miss something or reach outside: each is refused in one sentence that names the place."""

import io
import json
import os
import resource
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moving_episodes import FRONT, moving_episodes
from PIL import Image

from robopolicy.core.errors import DataError, RobopolicyWarning
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
    assert len(str(error.value).replace(str(folder.parent), "")) < 400


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
    refused(copy, r"frame 0 of episode 0.*no such file")


def test_a_damaged_image_is_named(copy):
    def damaged(table):
        images = table.column(FRONT).to_pylist()
        images[8] = {"bytes": images[8]["bytes"][:40] + b"\0" * 20, "path": None}
        return put(table, FRONT, images)

    edit(copy, damaged)
    refused(copy, r"frame 2 of episode 1.*damaged")


def test_images_of_several_sizes_are_named(copy):
    def shrunk(table):
        from robopolicy.data.lerobot_media import encode_png

        images = table.column(FRONT).to_pylist()
        images[7] = {"bytes": encode_png(np.zeros((4, 5, 3), np.uint8)), "path": None}
        return put(table, FRONT, images)

    edit(copy, shrunk)
    refused(copy, r"frame 1 of episode 1.*4 x 5 pixels.*declares 64 x 64")


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


def picture(size=(64, 64), form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size).save(file, format=form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["EPS", "TIFF", "PDF", "GIF", "WEBP"])
def test_an_image_is_decoded_as_png_or_jpeg_whatever_its_bytes_say(copy, form, tmp_path, monkeypatch):
    """PIL starts Ghostscript on PostScript: a program of that name must not be started."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    images = [{"bytes": picture(form=form), "path": "frame.png"}]
    edit(copy, lambda table: put(table, FRONT, images * table.num_rows))
    refused(copy, r"frame 0 of episode 0.*damaged, or not PNG or JPEG")
    assert not (tmp_path / "started").exists()
    edit(copy, lambda table: put(table, FRONT, [{"bytes": picture(form="JPEG"), "path": None}] * table.num_rows))
    assert len(read_dataset(copy)) == 3


@pytest.mark.parametrize("playlist", ["ffconcat version 1.0\nfile {}\n", "#EXTM3U\n#EXTINF:1,\n{}\n", "v=0\n"])
def test_a_video_that_names_other_files_is_refused(filmed, tmp_path, playlist):
    copy = shutil.copytree(filmed, tmp_path / "copy")
    video = next((copy / "videos").rglob("*.mp4"))
    shutil.move(video, video.with_name("other.mp4"))
    video.write_text(playlist.format("other.mp4"))
    refused(copy, r"damaged or not an MP4")


def film(path, size, frames=19, codec="libx264"):
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, 10, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame(*size, "yuv420p")))
        container.mux(stream.encode(None))


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def test_videos_of_another_size_or_codec_are_refused_before_they_are_decoded(filmed, tmp_path):
    copy = shutil.copytree(filmed, tmp_path / "copy")
    video = next((copy / "videos").rglob("*.mp4"))
    film(video, (1024, 1024))
    before = memory()
    refused(copy, r"1024 x 1024 pixels.*declares 64 x 64")
    assert memory() - before < 40  # MB, and the frames take 60
    film(video, (64, 64), codec="mpeg4")
    refused(copy, r"not a video in h264, hevc, av1, vp9")


def test_images_of_another_size_are_refused_before_they_are_decoded(copy):
    large = {"bytes": picture((4000, 4000)), "path": None}
    edit(copy, lambda table: put(table, FRONT, [large] * table.num_rows))
    before = memory()
    refused(copy, r"4000 x 4000 pixels.*declares 64 x 64")
    assert memory() - before < 40  # MB, and one takes 48


@pytest.mark.parametrize("column", ["action", FRONT])
def test_more_rows_or_values_than_promised_are_refused_before_they_are_read(copy, column):
    path = next((copy / "data").glob("*/*.parquet"))
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table] * 3), path)
    refused(copy, r"declares 19 frames but its data files contain 57")
    kind = table.schema.field(column).type
    value = {"bytes": b"\0" * 10**7, "path": None} if column == FRONT else [0.5] * 10**6
    values = pa.array([value] + [None] * 18, kind if column == FRONT else pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index(column), column, values), path)
    refused(copy, rf"column '{column}' contains other values, or more")


def test_a_text_where_numbers_are_promised_is_refused(copy):
    def texts(table):
        place = table.column_names.index("action")
        return table.set_column(place, "action", pa.array(["1.0"] * table.num_rows))

    edit(copy, texts)
    refused(copy, r"column 'action' contains other values, or more")


def test_tables_of_tasks_and_episodes_are_no_larger_than_promised(copy, filmed, tmp_path):
    tasks = copy / "meta" / "tasks.parquet"
    for table, text in (
        (pa.table({"task_index": range(50_000), "task": ["x"] * 50_000}), "50000 rows"),
        (pa.table({"task_index": range(1000), "task": ["x" * 70_000] * 1000}), "contains more than"),
        (pa.table({"task_index": [[0] * 9000], "task": ["x"]}), "lists"),
        (pa.table({"task_index": [0]}), "no column 'task'"),
    ):
        pq.write_table(table, tasks)
        refused(copy, text)
    filmed = shutil.copytree(filmed, tmp_path / "filmed")
    path = next((filmed / "meta" / "episodes").rglob("*.parquet"))
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table] * 40), path)
    refused(filmed, "120 rows")


@pytest.mark.parametrize(
    "field",
    [
        "{video_key:>30000000}",
        "{video_key.__class__}",
        "{video_key[0]}",
        "{video_key!r}",
        "{}",
        "{0}",
        "{chunk_index:999d}",
    ],
)
def test_a_video_path_holds_three_plain_fields(filmed, tmp_path, field):
    copy = shutil.copytree(filmed, tmp_path / "copy")
    inform(copy, video_path=f"videos/{field}.mp4")
    refused(copy, r"video_path cannot be formatted.*video_key")


@pytest.mark.parametrize("start", [float("nan"), float("inf"), -1.0, None])
def test_a_video_that_begins_at_no_time_is_refused(filmed, tmp_path, start):
    copy = shutil.copytree(filmed, tmp_path / "copy")
    path = next((copy / "meta" / "episodes").rglob("*.parquet"))
    table = pq.read_table(path)
    pq.write_table(put(table, f"videos/{FRONT}/from_timestamp", [start] * table.num_rows), path)
    refused(copy, r"meta/episodes places episode 0")


def test_a_promise_that_no_memory_holds_is_refused(copy, monkeypatch):
    monkeypatch.setattr("robopolicy.data.lerobot_checks.free_memory", lambda device: 100_000)
    refused(copy, r"needs .* MB of memory, but only 0.1 MB are free")
    assert len(read_dataset(copy, cameras=())) == 3


@pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.parquet", "data", "meta/robopolicy"])
def test_links_that_lead_outside_are_not_followed(copy, tmp_path, name):
    shutil.move(copy / name, tmp_path / "outside")
    (copy / name).symlink_to(tmp_path / "outside")
    refused(copy, "outside")


@pytest.mark.parametrize("column", ["episode_index", "frame_index", "task_index", "next.done"])
def test_numbers_that_are_missing_are_named(copy, column):
    edit(copy, lambda table: put(table, column, [None] * table.num_rows))
    refused(copy, rf"column '{column}' is empty in 19 of 19 frames")


@pytest.mark.parametrize("names", [["a", "b"], ["a"] * 4, {"x": [1]}, 3, [1, 2, 3], {"motors": 3}, [["a", "b", "c"]]])
def test_names_that_are_not_of_the_elements_are_no_names(copy, names):
    """One more or one less shifted every message about an element, or ended in a traceback."""
    shutil.rmtree(copy / "meta" / "robopolicy")
    information = json.loads((copy / "meta" / "info.json").read_text())
    state = information["features"]["observation.state"]
    assert state["shape"] == [3]
    state["names"] = names
    inform(copy, features=information["features"])
    assert read_dataset(copy).observation_fields["observation.state"].names == ()


def test_names_of_rows_are_no_names_of_elements(copy):
    shutil.rmtree(copy / "meta" / "robopolicy")
    information = json.loads((copy / "meta" / "info.json").read_text())
    information["features"]["observation.state"].update(shape=[3, 1], names=["a", "b", "c"])
    inform(copy, features=information["features"])
    field = read_dataset(copy).observation_fields["observation.state"]
    assert field.shape == (3, 1) and field.names == ("a", "b", "c")
    information["features"]["observation.state"].update(shape=[1, 3], names=["row"])
    inform(copy, features=information["features"])
    assert read_dataset(copy).observation_fields["observation.state"].names == ()


@pytest.fixture
def foreign(copy):
    """A dataset without our side table, as others record it."""
    shutil.rmtree(copy / "meta" / "robopolicy")
    return copy


def declare(folder, key, **changes):
    features = json.loads((folder / "meta" / "info.json").read_text())["features"]
    features[key].update(changes)
    inform(folder, features=features)


def retyped(table, name, values, kind):
    return table.set_column(table.column_names.index(name), name, pa.array(values, kind))


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64", "int16"])
def test_whole_numbers_of_every_type_are_numbers(foreign, kind):
    declare(foreign, "observation.state", dtype=kind)
    rows = [[row, 2 * row, 3] for row in range(19)]
    edit(foreign, lambda table: retyped(table, "observation.state", rows, pa.list_(getattr(pa, kind)())))
    state = read_dataset(foreign).observation["observation.state"]
    assert state[:3].tolist() == [[0, 0, 3], [1, 2, 3], [2, 4, 3]]


def test_texts_alone_are_no_observation(foreign):
    features = json.loads((foreign / "meta" / "info.json").read_text())["features"]
    features = {key: what for key, what in features.items() if not key.startswith("observation.")}
    inform(foreign, features={**features, "observation.note": {"dtype": "string", "shape": [1]}})
    refused(foreign, r"no numeric or image observations. It has observation.note \(string \[1\]\)")


@pytest.mark.parametrize("begin", [3.7, 1.7e9])
def test_where_a_recorders_clock_began_says_nothing(foreign, begin):
    fps = json.loads((foreign / "meta" / "info.json").read_text())["fps"]
    declare(foreign, "timestamp", dtype="float64")
    times = [begin + step / fps for length in (6, 4, 9) for step in range(length)]
    edit(foreign, lambda table: retyped(table, "timestamp", times, pa.float64()))
    assert len(read_dataset(foreign)) == 3


@pytest.mark.parametrize("value", [0.5, 2.0, float("nan")])
def test_a_success_that_is_no_truth_is_none_and_said(foreign, value):
    declare(foreign, "next.success", dtype="float32")
    edit(foreign, lambda table: retyped(table, "next.success", [0.0] * 18 + [value], pa.float32()))
    with pytest.warns(RobopolicyWarning, match=rf"next.success is {value:g} in a step.*Write only true or false"):
        assert read_dataset(foreign).step_success is None
    edit(foreign, lambda table: retyped(table, "next.success", [0.0] * 18 + [1.0], pa.float32()))
    assert read_dataset(foreign).step_success.sum() == 1


def test_names_that_two_elements_have_are_said_or_told_apart_by_their_arm(foreign):
    declare(foreign, "observation.state", names=["x", "y", "x"])
    with pytest.warns(RobopolicyWarning, match=r"gives the name 'x' to more than one element of 'observation.state'"):
        assert read_dataset(foreign).observation_fields["observation.state"].names == ()
    declare(foreign, "observation.state", names={"left": ["x", "y"], "right": ["x"]})
    assert read_dataset(foreign).observation_fields["observation.state"].names == ("left.x", "left.y", "right.x")
