"""Small datasets in the layouts of other projects, written by h5py, zarr, numpy, pyarrow and PyAV."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from robopolicy.data.lerobot_media import write_videos

LENGTHS = (6, 5, 7)
HEIGHT, WIDTH = 16, 24


@dataclass
class Recorded:
    """What every layout holds: [L + 1, ...] observed, [L, ...] done."""

    state: np.ndarray
    image: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    success: np.ndarray


def recorded() -> list[Recorded]:
    draws = np.random.default_rng(0)
    return [
        Recorded(
            state=draws.normal(size=(length + 1, 5)),
            image=pictures(length + 1, episode),
            action=draws.uniform(-1, 1, (length, 3)),
            reward=draws.uniform(size=length),
            success=np.arange(length) >= length - 2,
        )
        for episode, length in enumerate(LENGTHS)
    ]


def pictures(count: int, episode: int) -> np.ndarray:
    """Return smooth pictures [n, h, w, 3] whose top is red and whose left is blue, which tell how they are turned."""
    image = np.zeros((count, HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0] = np.linspace(230, 20, HEIGHT)[None, :, None]
    image[..., 2] = np.linspace(200, 40, WIDTH)[None, None, :]
    image[..., 1] = (20 * episode + 10 * np.arange(count))[:, None, None]
    return image


def write_robomimic(path: Path, *, libero: bool = False, states_only: bool = False, upto: int = 3) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        options = {"control_freq": 20, "reward_shaping": False}
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": options})
        if libero:
            data.attrs["problem_info"] = json.dumps({"language_instruction": "lift the cube"})
            data.attrs["macros_image_convention"] = "opengl"
        for number, each in list(enumerate(recorded()))[:upto]:
            group = data.create_group(f"demo_{number}")
            group.attrs["num_samples"] = len(each.action)
            group["actions"], group["rewards"] = each.action, each.success.astype(float)
            group["dones"], group["states"] = each.success.astype(np.int64), each.state[:-1]
            if states_only:
                continue
            for name, part in (("obs", slice(None, -1)), ("next_obs", slice(1, None))):
                if libero and name == "next_obs":
                    continue
                obs = group.create_group(name)
                obs["object"] = each.state[part, 3:]
                image = each.image[part]
                if libero:
                    obs["ee_pos"], obs["gripper_states"] = each.state[part, :2], each.state[part, 2:3]
                    obs["agentview_rgb"] = image[:, ::-1]
                else:
                    obs["robot0_gripper_qpos"], obs["robot0_eef_pos"] = each.state[part, 2:3], each.state[part, :2]
                    obs.create_dataset("agentview_image", data=image, compression="gzip")
    return path


def write_aloha(folder: Path, *, encoded: str = "") -> Path:
    """encoded: "" for raw pictures, else jpeg in rows of "padded" bytes, of "bytes" texts or of "ragged" arrays."""
    import h5py

    folder.mkdir(parents=True)
    for number, each in enumerate(recorded()):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"], file.attrs["compress"] = True, bool(encoded)
            observations = file.create_group("observations")
            observations["qpos"], observations["qvel"] = each.state[:-1], each.state[1:] - each.state[:-1]
            observations["effort"] = each.state[:-1] * 2
            images = observations.create_group("images")
            for camera in ("cam_high", "cam_left_wrist"):
                _write_camera(images, camera, each.image[:-1], encoded)
            file["action"] = each.action
    return folder


def _write_camera(group, name: str, frames: np.ndarray, encoded: str) -> None:
    import h5py

    if not encoded:
        group.create_dataset(name, data=frames, chunks=(1, *frames.shape[1:]))
        return
    files = [jpeg(frame) for frame in frames]
    longest = max(map(len, files))
    if encoded == "bytes":
        group[name] = np.array(files, dtype=f"S{longest}")
    elif encoded == "padded":
        rows = np.stack([np.frombuffer(file.ljust(longest, b"\0"), np.uint8) for file in files])
        group.create_dataset(name, data=rows, chunks=(1, longest))
    else:
        dataset = group.create_dataset(name, (len(files),), dtype=h5py.vlen_dtype(np.uint8))
        for row, file in enumerate(files):
            dataset[row] = np.frombuffer(file, np.uint8)


def jpeg(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="JPEG", quality=97, subsampling=0)
    return file.getvalue()


def write_push_t(path: Path, *, version: int = 2, keypoints: bool = True, ends: bool = True, codec=None) -> Path:
    """A folder NAME.zarr or a file NAME.zarr.zip, with pictures as floats from 0 to 255, as Push-T's are."""
    import zarr

    every = recorded()
    store = zarr.storage.ZipStore(path, mode="w") if path.suffix == ".zip" else zarr.storage.LocalStore(path)
    root = zarr.create_group(store, zarr_format=version)
    data, meta = root.create_group("data"), root.create_group("meta")
    columns = {
        "action": np.concatenate([each.action for each in every]).astype(np.float32),
        "img": np.concatenate([each.image[:-1] for each in every]),
        "state": np.concatenate([each.state[:-1] for each in every]).astype(np.float32),
        "n_contacts": np.ones((sum(LENGTHS), 1), np.float32),
    }
    if keypoints:
        columns["keypoint"] = columns["state"][:, None, :2].repeat(9, 1)
    for name, values in columns.items():
        values = values if name != "img" or codec is not None else values.astype(np.float32)
        more = {"compressors": codec} if codec is not None and name == "img" else {}
        chunks = (1 if more else 4, *values.shape[1:])
        data.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype, **more)[:] = values
    if ends:
        meta.create_array("episode_ends", shape=(3,), chunks=(3,), dtype="i8")[:] = np.cumsum(LENGTHS)
    store.close()
    return path


def write_minari(folder: Path) -> Path:
    import h5py

    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w", track_order=True) as file:
        for number, each in enumerate(recorded()):
            group = file.create_group(f"episode_{number}")
            group.attrs["id"], group.attrs["seed"], group.attrs["total_steps"] = number, 40 + number, len(each.action)
            _write_camera(group.create_group("observations"), "pixels", each.image, "ragged")  # as Minari 0.5.4 does
            group["observations/observation"] = each.state
            group["observations/desired_goal"] = each.state[:, :2]
            group["observations/achieved_goal"] = each.state[:, 2:4]
            group["actions"], group["rewards"] = each.action, each.reward
            group["terminations"] = np.arange(len(each.action)) == (len(each.action) - 1 if number else -1)
            group["truncations"] = np.zeros(len(each.action), bool)
            group["infos/success"] = np.append(False, each.success)
    metadata = {"dataset_id": "toy/v0", "total_episodes": 3, "total_steps": sum(LENGTHS), "data_format": "hdf5"}
    (folder / "data" / "metadata.json").write_text(json.dumps(metadata))
    return folder


def write_older_lerobot(folder: Path, version: str = "v2.1", images: str = "video") -> Path:
    names = {"motors": ["a", "b", "c"]}
    whole = {"dtype": "int64", "shape": [1], "names": None}
    features = {
        "observation.state": {"dtype": "float32", "shape": [5], "names": None},
        "action": {"dtype": "float32", "shape": [3], "names": names},
        "observation.images.top": {"dtype": images, "shape": [3, HEIGHT, WIDTH], "names": ["c", "h", "w"]},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), whole),
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    }  # fmt: skip
    first, texts = 0, ("push", "pull")
    for number, each in enumerate(recorded()):
        length = len(each.action)
        step = np.arange(length)
        columns = {
            "observation.state": _lists(each.state[:-1]),
            "action": _lists(each.action),
            "next.reward": pa.array(each.reward.astype(np.float32)),
            "next.done": pa.array(step == length - 1),
            "timestamp": pa.array((step / 10).astype(np.float32)),
            "frame_index": pa.array(step),
            "episode_index": pa.array(np.full(length, number)),
            "index": pa.array(first + step),
            "task_index": pa.array(np.full(length, number % 2)),
        }
        if images == "image":
            columns["observation.images.top"] = pa.array([{"bytes": png(each.image[at]), "path": None} for at in step])
        else:
            video = folder / f"videos/chunk-000/observation.images.top/episode_{number:06d}.mp4"
            frames = each.image[:-1]
            write_videos(
                np.array([length]), lambda _, frames=frames: frames, 10, lambda _, video=video: video, 1e9, int
            )
        path = folder / f"data/chunk-000/episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
        first += length
    meta = folder / "meta"
    meta.mkdir(parents=True)
    information = {
        "codebase_version": version,
        "fps": 10,
        "total_episodes": 3,
        "total_frames": sum(LENGTHS),
        "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": features,
    }
    (meta / "info.json").write_text(json.dumps(information))
    lines = [{"episode_index": e, "tasks": [texts[e % 2]], "length": length} for e, length in enumerate(LENGTHS)]
    (meta / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = [{"task_index": index, "task": text} for index, text in enumerate(texts)]
    (meta / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tasks))
    return folder


def _lists(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.astype(np.float32).reshape(-1)), values.shape[1])


def png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="PNG")
    return file.getvalue()


def arrays(*, channels_first: bool = False, floats: bool = False) -> dict[str, np.ndarray]:
    """The arrays of an npz file, without what says where episodes end."""
    every = recorded()
    images = np.concatenate([each.image[:-1] for each in every])
    images = np.moveaxis(images, -1, 1) if channels_first else images
    return {
        "states": np.concatenate([each.state[:-1] for each in every]),
        "actions": np.concatenate([each.action for each in every]),
        "images": (images / 255).astype(np.float32) if floats else images,
        "rewards": np.concatenate([each.reward for each in every]),
        "success": np.concatenate([each.success for each in every]),
        "fps": np.array(10),
    }
