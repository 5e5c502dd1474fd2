"""Images and videos of a LeRobotDataset v3: decoded with checks, because they may come from others, and written
exactly.

Files of unknown origin must not choose the decoder: PIL and FFmpeg support formats that start other programs
(PostScript) or read other files (playlists), and a few kilobytes may decode to gigabytes. Therefore an image must be
PNG or JPEG, a video an MP4 with one of `CODECS`, and its size is compared with meta/info.json before decoding.

Written are exact PNGs, and one H.264 video a camera through all episodes. LeRobot encodes one video an episode and
joins them, which copies all earlier episodes each time. Here a camera's episodes run through one encoder, with a key
frame where each begins, so that an episode can still be cut out.
"""

import io
import math
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError, in_one_line
from robopolicy.core.machine import usable_threads
from robopolicy.data.lerobot_checks import file_within, require_room, table_within

IMAGE_FORMATS = ("PNG", "JPEG")
"""PIL names of the image formats used by LeRobot and `write_dataset`."""
CODECS = ("h264", "hevc", "av1", "vp9")
"""FFmpeg names of the video codecs used by LeRobot and `write_dataset`."""
_DECODERS = ("h264", "hevc", "libdav1d", "av1", "libaom-av1", "vp9", "libvpx-vp9")
PLACE = ("chunk_index", "file_index", "from_timestamp")
"""Columns of meta/episodes with an episode's location in a camera's videos."""
_AT_ONCE, _MOST_ROWS = 2**28, 256
"""Maximum bytes and rows of encoded images in memory."""
_COLOURS = ((1,), (2,), (3,), (4,))
_PADDING = 128
"""Maximum pixels by which codecs pad a frame's sides."""

_DEEP = (
    "has grey pixels of more than 8 bits, like a depth image, which RGB cannot represent. To ignore this column, "
    'add to its feature in meta/info.json: "info": {"is_depth_map": true}.'
)

Sizes = Collection[tuple[int, int]]
"""Height and width declared by a feature's shape."""


def promised_sizes(folder: Path, key: str, feature: Mapping[str, Any]) -> Sizes:
    """Return the (height, width) declared by the shape of an image or video feature, channels first or last.

    Raises DataError if it is not the shape of an image.
    """
    shape = tuple(feature["shape"])
    sizes: set[tuple[int, int]] = {shape[:2]} if len(shape) == 2 or shape[2:] in _COLOURS else set()
    if len(shape) == 3 and shape[:1] in _COLOURS:
        sizes.add(shape[1:])
    if not sizes or 0 in shape:
        raise DataError(
            f"{folder}/meta/info.json declares '{key}' with shape {list(shape)}, which is not an image shape."
        )
    return sizes


def read_images(
    folder: Path,
    paths: Iterable[Path],
    key: str,
    feature: Mapping[str, Any],
    positions: np.ndarray,
    columns: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Decode the images of a column, uint8 [N, height, width, 3]; only files inside `folder` are read.

    paths: the data files in order, containing R rows in total; positions: [R], index in the result of each row's image,
    -1 to skip it; columns: the frame_index and episode_index [N] of the result. Raises DataError if an image is
    damaged, of another format, or of another size than declared.
    """
    import pyarrow.parquet as pq

    sizes = promised_sizes(folder, key, feature)
    row = 0
    count = len(columns["frame_index"])
    images: np.ndarray | None = None
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_rows_at_once(folder, file, key), columns=[key]):
                for item in batch.column(key):
                    position, row = positions[row], row + 1
                    if position < 0:
                        continue
                    frame, episode = columns["frame_index"][position], columns["episode_index"][position]
                    label = f"'{key}', frame {frame} of episode {episode},"
                    image = decode_image(folder, label, item.as_py(), sizes)
                    if images is None:
                        require_room(folder, f"'{key}'", 2 * count * image.size)
                        images = np.empty((count, *image.shape), dtype=np.uint8)
                    if image.shape != images.shape[1:]:
                        first_shape = list(images.shape[1:])
                        raise DataError(
                            f"{folder}: {label} has shape {list(image.shape)}, but another frame has {first_shape}."
                        )
                    images[position] = image
    assert images is not None
    return images


def _rows_at_once(folder: Path, file: Any, key: str) -> int:
    """Return the number of rows of encoded images to read at once; parquet stores equal images once, but memory holds
    one per row.
    """
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    sizes = [
        group.column(index).total_uncompressed_size
        for group in groups
        for index in range(file.metadata.num_columns)
        if group.column(index).path_in_schema == f"{key}.bytes"
    ]
    largest = max(sizes, default=1)
    require_room(folder, f"'{key}', encoded,", largest)
    return max(1, min(_MOST_ROWS, _AT_ONCE // max(1, largest)))


def decode_image(folder: Path, what: str, item: object, sizes: Sizes) -> np.ndarray:
    """Decode an image as stored by LeRobot (bytes or a path) to uint8 [height, width, 3]."""
    from PIL import Image

    entry: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
    data = entry.get("bytes")
    source = io.BytesIO(data) if data is not None else file_within(folder, str(entry.get("path")), what)
    try:
        with Image.open(source, formats=IMAGE_FORMATS) as image:
            _require_size(folder, what, (image.height, image.width), sizes)
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{folder}: {what} {_DEEP}")
            return np.asarray(image.convert("RGB"))
    except DataError:
        raise
    except Image.UnidentifiedImageError as error:
        raise DataError(f"{folder}: {what} is damaged, or not {' or '.join(IMAGE_FORMATS)}.") from error
    except Exception as error:  # PIL's decoders raise whatever they stumble over
        raise DataError(
            f"{folder}: {what} is damaged ({in_one_line(error)}). Restore the dataset from a copy."
        ) from error


def read_videos(
    folder: Path, information: Mapping[str, Any], key: str, chosen: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Decode the frames of the chosen episodes, uint8 [n, height, width, 3], reading each video file once from its
    start.

    chosen, lengths: [E], indices and lengths of the episodes. Raises DataError as `read_images`.
    """
    sizes = promised_sizes(folder, key, information["features"][key])
    pieces_of_files: dict[Path, list[tuple[int, int, int]]] = {}
    offset = 0
    places = _places(folder, information, key, chosen)
    for episode, length in zip(chosen.tolist(), lengths.tolist(), strict=True):
        path, start = places[episode]
        pieces_of_files.setdefault(path, []).append((round(start * information["fps"]), offset, length))
        offset += length
    frames: np.ndarray | None = None
    for path, pieces in pieces_of_files.items():
        target = {first + step: position + step for first, position, length in pieces for step in range(length)}
        count = 0
        for index, frame in enumerate(decode_video(folder, path, max(target), sizes)):
            if index in target:
                if frames is None:
                    require_room(folder, f"'{key}'", 2 * offset * frame.size)
                    frames = np.empty((offset, *frame.shape), dtype=np.uint8)
                if frame.shape != frames.shape[1:]:
                    raise DataError(f"{path} has frames of several sizes.")
                frames[target[index]] = frame
                count += 1
        if count != len(target):
            raise DataError(
                f"{path} is incomplete: {len(target) - count} frames are missing at its end. Restore it from a copy."
            )
    assert frames is not None
    return frames


def _places(
    folder: Path, information: Mapping[str, Any], key: str, chosen: np.ndarray
) -> dict[int, tuple[Path, float]]:
    """Return the file of each chosen episode and its start time in the file, in seconds."""
    names = [f"videos/{key}/{name}" for name in PLACE]
    rows: list[dict[str, Any]] = []
    try:
        for path in sorted((folder / "meta" / "episodes").glob("*/*.parquet")):
            table = table_within(folder, path, information["total_episodes"], ["episode_index", *names])
            rows += table.to_pylist()
    except DataError as error:
        raise DataError(f"{folder}/meta/episodes does not contain the location of '{key}': {error}") from error
    place_of_episode = {row["episode_index"]: tuple(row[name] for name in names) for row in rows}
    places: dict[int, tuple[Path, float]] = {}
    for episode in chosen.tolist():
        if episode not in place_of_episode:
            raise DataError(
                f"{folder}/meta/episodes does not contain the location of the video '{key}' of episode {episode}: "
                "the copy of the dataset is incomplete."
            )
        chunk, file, start = place_of_episode[episode]
        if not all(isinstance(number, int) for number in (chunk, file)) or not _is_time(start):
            raise DataError(
                f"{folder}/meta/episodes places episode {episode} of '{key}' at {chunk}, {file}, {start} s, "
                "which is invalid."
            )
        name = filled_in(folder, information.get("video_path"), video_key=key, chunk_index=chunk, file_index=file)
        places[episode] = file_within(folder, name, f"The video '{key}' of episode {episode}"), start
    return places


def _is_time(value: object) -> bool:
    return isinstance(value, float | int) and 0 <= value < math.inf


def filled_in(folder: Path, template: object, **given: str | int) -> str:
    """Fill a path template from a dataset's meta/info.json: strings unchanged, numbers zero-padded.

    Raises DataError on any other format field: format strings can access attributes, and a width can request any amount
    of memory.
    """
    try:
        for _, name, form, conversion in string.Formatter().parse(str(template)):
            value = given.get(name or "")
            allowed_form = re.fullmatch(r"(0?\d?d)?" if isinstance(value, int) else "", form or "")
            if name is not None and (value is None or conversion or not allowed_form):
                raise ValueError(f"it has the field '{name}{f':{form}'[:20] if form else ''}'")
        return str(template).format(**given)
    except ValueError as error:
        raise DataError(
            f"{folder}/meta/info.json: video_path cannot be formatted ({error}): it may contain {{video_key}}, "
            "{chunk_index:03d} and {file_index:03d}."
        ) from error


def decode_video(folder: Path, path: Path, last: int, sizes: Sizes) -> Iterator[np.ndarray]:
    """Yield the frames of a video, uint8 [height, width, 3], from the first to index `last`."""
    import av
    from av.error import FFmpegError

    pixel_limit = str(max((height + _PADDING) * (width + _PADDING) for height, width in sizes))
    restrictions = {
        "options": {"codec_whitelist": ",".join(_DECODERS)},
        "stream_options": [{"max_pixels": pixel_limit}],
    }
    try:
        # From an open file, for FFmpeg takes some names for addresses, and as MP4, for others name further files
        with open(path, "rb") as file, av.open(file, format="mp4", **restrictions) as container:
            if not container.streams.video or container.streams.video[0].codec_context.name not in _DECODERS:
                raise DataError(f"{path} is not a video in {', '.join(CODECS)}: encode it again with LeRobot's tools.")
            stream = container.streams.video[0]
            _require_size(folder, f"the video {path.name} of {path.parent}", (stream.height, stream.width), sizes)
            stream.codec_context.options = {"max_pixels": pixel_limit}
            stream.codec_context.thread_count = usable_threads()
            for index, frame in enumerate(container.decode(stream)):
                _require_size(folder, f"frame {index} of {path}", (frame.height, frame.width), sizes)
                if len(frame.format.components) == 1 and frame.format.components[0].bits > 8:
                    raise DataError(f"{path} {_DEEP}")
                yield frame.to_ndarray(format="rgb24")
                if index >= last:
                    return
    except (FFmpegError, OSError) as error:
        raise DataError(
            f"{path} is missing, damaged or not an MP4 file ({in_one_line(error)}). Restore the dataset from a copy."
        ) from error


def _require_size(folder: Path, what: str, size: tuple[int, int], sizes: Sizes) -> None:
    if size not in sizes:
        expected = " or ".join(f"{height} x {width}" for height, width in sorted(sizes))
        raise DataError(
            f"{folder}: {what} has {size[0]} x {size[1]} pixels (height x width), but meta/info.json declares "
            f"{expected}: correct the feature's shape there, or restore the dataset from a copy."
        )


VIDEO_INFORMATION = {
    "video.codec": "h264",
    "video.pix_fmt": "yuv444p",
    "video.channels": 3,
    "has_audio": False,
    "video.g": 2,
    "video.crf": 10,
    "video.preset": None,
    "video.fast_decode": 0,
    "video.video_backend": "pyav",
    "video.extra_options": {},
    "is_depth_map": False,
}
"""Entries of `meta/info.json` common to every video written here, in addition to height, width and frames per
second.
"""


def encode_png(frame: np.ndarray) -> bytes:
    """Encode `frame`, uint8 [height, width, 3], as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="PNG", compress_level=6)
    return file.getvalue()


def write_videos(
    lengths: np.ndarray,
    frames: Callable[[int], np.ndarray],
    fps: int,
    path: Callable[[int], Path],
    limit: float,
    finished: Callable[[], None],
) -> list[tuple[int, float]]:
    """Encode all episodes of one camera; return the file number of each and its start time in that file in seconds.

    lengths: [E], number of frames; frames: episode -> uint8 [L, height, width, 3]; path: number from 0 -> file; limit:
    bytes after which the next episode starts a new file; finished: called after each episode.
    """
    places: list[tuple[int, float]] = []
    number, episode = 0, 0
    while episode < len(lengths):
        path(number).parent.mkdir(parents=True, exist_ok=True)
        with _encoder(path(number), *frames(episode).shape[1:3], fps) as write:
            position, byte_count = 0, 0
            while episode < len(lengths):
                # The size that this episode will have is guessed from the average frame so far.
                if position and byte_count * (1 + lengths[episode] / position) >= limit:
                    break
                places.append((number, position / fps))
                for step, frame in enumerate(frames(episode)):
                    byte_count += write(frame, position + step, step == 0)
                position += int(lengths[episode])
                episode += 1
                finished()
        number += 1
    return places


def video_information(shape: tuple[int, ...], fps: int) -> dict[str, Any]:
    """Return the `info` of a video feature whose frames are `shape` (height, width, channels)."""
    return {"video.height": shape[0], "video.width": shape[1], "video.fps": fps, **VIDEO_INFORMATION}


@contextmanager
def _encoder(path: Path, height: int, width: int, fps: int) -> Iterator[Callable[[np.ndarray, int, bool], int]]:
    """Open an H.264 file; yield a function that adds a frame and returns the number of bytes written by the encoder.

    Its arguments: uint8 [height, width, 3], frame number in the file, whether it must be a key frame.
    """
    import av
    from av.video.frame import PictureType

    settings: Mapping[str, Any] = VIDEO_INFORMATION
    with av.open(str(path), "w") as container:
        options = {"g": str(settings["video.g"]), "crf": str(settings["video.crf"])}
        stream = container.add_stream(settings["video.codec"], fps, options=options)
        stream.pix_fmt = settings["video.pix_fmt"]
        stream.width = width
        stream.height = height
        stream.time_base = Fraction(1, fps)
        stream.codec_context.thread_count = usable_threads()

        def write(image: np.ndarray, number: int, key: bool) -> int:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            if key:
                frame.pict_type = PictureType.I
            packets = stream.encode(frame)
            container.mux(packets)
            return sum(packet.size for packet in packets)

        yield write
        container.mux(stream.encode())


@contextmanager
def quiet_encoder() -> Iterator[None]:
    """Suppress the encoder's banner (several lines per video) on the terminal."""
    from av import logging as av_logging

    av_logging.set_libav_level(av_logging.ERROR)
    try:
        yield
    finally:
        av_logging.set_libav_level(av_logging.INFO)
