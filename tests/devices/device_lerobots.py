"""LeRobot's policies on a device, as they are loaded from a checkpoint folder of LeRobot's."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from device_policies import at_work, generator
from lerobot_models import (
    FRONT,
    SIZE,
    fast_folders,
    pi0_fast_config,
    pi_config,
    smolvla_config,
    tiny_act,
    tiny_pi,
    tiny_smolvlm,
    without_code,
    word_tokenizer,
    xvla_config,
)

from robopolicy.benchmarks.tiny_vla import pi_processors
from robopolicy.core.examples import example_observation
from robopolicy.core.policy import require_trainable
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.policies.lerobot.acting import LeRobotPolicy, load_lerobot_policy
from robopolicy.policies.lerobot.families import FAMILIES, WITHOUT_STEPS
from robopolicy.policies.lerobot.features import CHUNK_KEYS

VOCABULARY = 240
"""Of the tiny pi0 and pi0_fast: as many words as the latter's tokenizer has, and more than the former's."""
UNTRIED = {
    "pi05": "its network is pi0's, and its processors write the state into a text on the CPU",
    "multi_task_dit": "its CLIP needs a tokenizer's files; what is ours of it is the same for every kind",
    "vqbet": "its codes are trained first; what is ours of it is the same for every kind",
}
"""Kinds that are not tried, and why."""


def kinds() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every kind that can be loaded: name, device -> what comes of it."""
    for kind in CHUNK_KEYS:
        if kind not in UNTRIED:
            yield f"lerobot, {kind}", lambda device, kind=kind: acted(kind, device)
        if kind not in UNTRIED and kind in (*FAMILIES, *WITHOUT_STEPS):
            yield f"lerobot, {kind}, learning", lambda device, kind=kind: learning(kind, device)


def _config(kind: str, folder: Path) -> Any:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    shared = {
        "input_features": {
            STATE: PolicyFeature(FeatureType.STATE, (4,)),
            ENVIRONMENT_STATE: PolicyFeature(FeatureType.ENV, (3,)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (2,))},
        "device": "cpu",
        "pretrained_backbone_weights": None,
        "push_to_hub": False,
    }
    if kind == "act":
        return tiny_act(shared["input_features"], shared["output_features"], n_action_steps=2)
    if kind == "diffusion":
        sizes = {"horizon": 8, "n_action_steps": 2, "down_dims": (16, 32), "n_groups": 4, "crop_shape": None}
        return DiffusionConfig(**shared, **sizes, num_train_timesteps=10, num_inference_steps=4)
    camera = {FRONT: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE))}
    language = {STATE: shared["input_features"][STATE], **camera}, shared["output_features"]
    if kind == "smolvla":
        return smolvla_config(tiny_smolvlm(folder / "vlm"), *language, n_action_steps=2)
    if kind == "xvla":
        word_tokenizer().save_pretrained(folder / "words")
        return xvla_config(folder / "words", *language, n_action_steps=2)
    if kind == "pi0":
        return pi_config(kind, *language, n_action_steps=2)
    if kind == "pi0_fast":
        return pi0_fast_config(*fast_folders(folder), *language, chunk_size=2, n_action_steps=2)
    raise AssertionError(f"Say here how a small policy of LeRobot's '{kind}' is made, or in UNTRIED why it is not.")


def _saved(kind: str, folder: Path) -> None:
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = _config(kind, folder)
    with torch.random.fork_rng(devices=[]), without_code():
        torch.manual_seed(0)
        policy: Any = get_policy_class(config.type)(config)
    known = {}
    for key, feature in {**config.input_features, **config.output_features}.items():
        ones = torch.ones((3, 1, 1) if len(feature.shape) == 3 else feature.shape)
        known[key] = {"min": -ones, "max": ones, "mean": 0.1 * ones, "std": 0.5 * ones}
    if kind == "pi0":
        word_tokenizer().save_pretrained(folder / "words")
        parts = pi_processors(config, known, folder / "words")
    else:
        with without_code():
            parts = make_pre_post_processors(config, dataset_stats=known)
    for part in (policy, *parts):
        part.save_pretrained(folder)


@contextmanager
def _loaded(kind: str, device: str) -> Iterator[LeRobotPolicy]:
    """Save a small policy of a kind, and load it to a device."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        tiny_pi(VOCABULARY),
    ):
        with torch.device("cpu"):
            _saved(kind, Path(folder))
        yield load_lerobot_policy(Path(folder), device)


def acted(kind: str, device: str) -> list[Any]:
    """Load a checkpoint to a device and let it decide."""
    with _loaded(kind, device) as policy:
        observation = example_observation(policy.spec, 3, generator("cpu", 1), device)
        return [policy.act(observation, generator(device), deterministic=each).actions for each in (True, False)]


def learning(kind: str, device: str) -> dict[str, Any]:
    """Load a checkpoint to a device, and do with it what can be done with policies that learn."""
    with _loaded(kind, device) as policy:
        return at_work(require_trainable(policy), device)
