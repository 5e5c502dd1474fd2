"""Images of a LeRobotDataset v3: exact PNGs, and one H.264 video a camera through all episodes.

LeRobot encodes one video an episode and joins them, which copies all earlier episodes each time. Here a camera's
episodes run through one encoder, with a key frame where each begins, so that an episode can still be cut out.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.machine import usable_threads

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
"""What `meta/info.json` says of every video written here, beside its height, width and frames per second."""


def encode_png(frame: np.ndarray) -> bytes:
    """Return `frame`, uint8 [height, width, 3], as a PNG file."""
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
    """Encode all episodes of one camera; return for each the number of its file and where in it it begins, seconds.

    lengths: [E], frames of each; frames: episode -> uint8 [L, height, width, 3]; path: number from 0 -> file; limit:
    bytes from which on the next episode begins another file; finished: called after each episode.
    """
    places: list[tuple[int, float]] = []
    number, episode = 0, 0
    while episode < len(lengths):
        path(number).parent.mkdir(parents=True, exist_ok=True)
        with _encoder(path(number), *frames(episode).shape[1:3], fps) as write:
            position, used = 0, 0
            while episode < len(lengths):
                # The size that this episode will have is guessed from the average frame so far.
                if position and used * (1 + lengths[episode] / position) >= limit:
                    break
                places.append((number, position / fps))
                for step, frame in enumerate(frames(episode)):
                    used += write(frame, position + step, step == 0)
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
    """Open an H.264 file; yield a function that adds a frame and returns how many bytes the encoder has let go of.

    Its arguments: uint8 [height, width, 3], the frame's number in the file, whether it is to be a key frame.
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
    """Keep the encoder's banner (several lines a video) off the terminal."""
    from av import logging as av_logging

    av_logging.set_libav_level(av_logging.ERROR)
    try:
        yield
    finally:
        av_logging.set_libav_level(av_logging.INFO)
