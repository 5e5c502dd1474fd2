"""Sections in the form that the help page shows."""

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from robopolicy.configuration.config import Config
from robopolicy.core.registry import load_dotted
from robopolicy.core.structured import REGISTRY, Tagged, choices, explanations, to_plain

_BARE = re.compile(r"(?<![\w.:/\[({'\"-])([a-z][a-z0-9_]*)=(?=[\w\[{\"'-])")
"""A setting without its section in a message; excludes parts of paths, calls and lists."""


RARE = {
    "MemoryPolicyConfig": "sink_variant",
    "FinetuneConfig": "packed_images proximal_decay teacher_decay_fraction actor_warmup weight_decay"
    " gradient_clip clip_rate fsdp overlap_evaluation critic_learning_rate teacher_episode_fraction",
    "TrainSection": "exclude_episodes rename micro_batch",
    "FinetuneSection": "critic_width expert",
    "FitConfig": "warmup final_rate weight_decay gradient_clip ema_decay ema_power log_every checkpoint_every",
    "DistillConfig": "teacher_chain_fraction",
    "TeachConfig": "teacher_fraction",
    "DenoisingPolicyConfig": "heads denoising_steps timestep_spacing clip noise_clip logp_clamp flow_noise_bounds"
    " noisy_steps matching_samples",
    "EdmConfig": "sigma_data log_mean log_std sigma_min sigma_max order churn offset_noise",
    "JointConfig": "heads policy_fraction aggregate",
    "JointVideoConfig": "discount aggregate",
    "TokenConfig": "frequencies heads prompt lora_alpha entropy_temperature",
    "EnsembleConfig": "head_width success sample beta positive_fraction rollout_step_ratio rollout_steps",
    "LatentEnsembleConfig": "encoder_step_ratio readout_step_ratio drawing_step_ratio",
    "RssmConfig": "deter blocks hidden stochastic classes channels reward_scale observed_fraction sample",
    "PixelDiffusionConfig": "grid channels layers context_noise change_threshold",
    "VideoConfig": "channels latent patch width heads recent stride view_batch_size motion_weight kl_weight"
    " autoencoder_step_fraction readout_step_fraction memory_noise present_noise repeat_present_fraction"
    " bootstrap_steps change_threshold",
    "ReadoutConfig": "positive_fraction imagined_fraction members",
    "GuidedConfig": "length width batch_size",
    "IqlConfig": "max_weight",
    "SacConfig": "target_entropy entropy_backup actor_learning_rate",
    "GateSection": "metric per_decision",
    "OnlineConfig": "base_policy_fraction conservative",
    "ServerConfig": "max_batch_size max_queue_size request_timeout hang_timeout chunking_options session_expiry"
    " record_limit detectors probation max_alarm_rate",
    "AssistConfig": "operator_options",
    "DriveAssist": "no_progress_steps random_rate rewind operators",
    "WeightedImitationConfig": "max_weight",
    "FilteredImitationConfig": "positive_fraction",
    "RecapConfig": "indicator_dropout positive_fraction",
}
"""Settings that no recipe, benchmark or README sets, by their class: a verb's page of help only names them."""


@dataclass(frozen=True)
class Described:
    """A section for the help page: its path, such as world.imagination, its summary, one line per key (name, value,
    meaning), and the rarely used keys.
    """

    path: str
    text: str
    keys: list[tuple[str, str, str]]
    rare: frozenset[str] = frozenset()


def described(names: tuple[str, ...], config: Config) -> list[Described]:
    """Return sections of a configuration with their subsections; for sections of several kinds, the selected kind."""
    return [part for name in names for part in _described(name, getattr(config, name))]


def with_sections(message: str, names: Sequence[str], config: Config) -> str:
    """Return a message in which each bare `key=value` of the sections `names` is written as on the command line:
    section.key=value.

    Library code that raises the message has no sections. A key in several sections gets the first in `names`; unknown
    keys stay as they are.
    """
    paths: dict[str, str] = {}
    for part in described(tuple(names), config):
        for key, _, _ in part.keys:
            paths.setdefault(key, f"{part.path}.{key}")
    return _BARE.sub(lambda found: f"{paths.get(found[1], found[1])}=", message)


def _described(path: str, section: Any) -> Iterator[Described]:
    kind = type(section)
    keys = []
    inner = []
    rare = frozenset(name for each in kind.__mro__ for name in RARE.get(each.__name__, "").split())
    hints, texts = typing.get_type_hints(kind), explanations(kind)
    for item in dataclasses.fields(kind):
        value = getattr(section, item.name)
        if isinstance(section, Tagged) and section.beside and item.name == "config":
            first, *deeper = _described(path, value)
            keys += [row for row in first.keys if row[0] != "kind"]
            rare |= first.rare
            inner += deeper
            continue
        if dataclasses.is_dataclass(value):
            inner += _described(f"{path}.{item.name}", value)
            continue
        text = texts.get(item.name, "")
        names = choices(hints[item.name])
        if isinstance(section, Tagged) and item.name == "kind":
            names = section.kinds.names()
        elif REGISTRY in item.metadata:
            names = load_dotted(item.metadata[REGISTRY], "Registry").names()
        if any(name not in text for name in names):
            text = f"{text} One of {', '.join(names)}."
        keys.append((item.name, _as_written(to_plain(value)), text))
    yield Described(path, " ".join((kind.__doc__ or "").split("\n\n")[0].split()), keys, rare)
    yield from inner


def _as_written(value: Any) -> str:
    """Return a value as it is written after `=` on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_as_written, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return '""' if value == "" else str(value)
