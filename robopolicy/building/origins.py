"""World of a verb when none is named: the world of the given policy, dataset or server.

A file can name a world, but never decides what is imported: code that is neither built in nor installed must be named
by the user, as for checkpoints.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from robopolicy.configuration import Config
from robopolicy.configuration.sections.run import DEMONSTRATIONS, WORLD_MODEL, WorldSection
from robopolicy.core.delayed import with_latency_options
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import WorldOrigin, origin_of
from robopolicy.core.registry import import_plugins
from robopolicy.core.storage import recover_folder
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import recorded_origin
from robopolicy.data.lerobot_reading import is_dataset
from robopolicy.policies.loading import saved_origin, untrusted_kind
from robopolicy.runs import input_path, output
from sims.registry import require_trusted, trusted_options

SERVER, UNASSUMED = "server", "unassumed"
ALONE = "alone"


def with_origin(config: Config, sources: Mapping[str, str]) -> Config:
    """Return `config`, which names no world, with the world of the first of `sources` that exists.

    sources: setting of checkpoints or datasets -> default location "verb/part", as a verb declares in `world_from`. ""
    means no default, "server" the policy behind drive.port. "unassumed" means no default either, and a world named ""
    if no trusted world is recorded; "alone": where this one is given, a world named "". If none of them records its
    world, the episodes of a dataset are used as the world; without a dataset, a warning names the assumed world. Raises
    CheckpointError or DataError when one is damaged or names a world that the user must name, ConfigError when several
    come from different worlds.
    """
    if SERVER in sources.values():
        return _as_served(config)
    if any(default == ALONE and _places(config, key, "") for key, default in sources.items()):
        return config.replaced(world=dataclasses.replace(config.world, name=""))
    places = [path for key, default in sources.items() for path in _places(config, key, default)]
    paths = [path for path in places if path.exists() or recover_folder(path).exists()]
    origin_of_path = {path: _origin(path) for path in paths}
    known_origins = {path: origin for path, origin in origin_of_path.items() if origin is not None}
    if UNASSUMED in sources.values():
        return _unless_unknown(config, known_origins) if origin_of_path else config
    if not known_origins:
        dataset = next((path for path in origin_of_path if is_dataset(path)), None)
        if dataset is not None:
            return _in_recordings(config, dataset)
        if origin_of_path:
            _say_assumed(paths[0], config)
        return config
    (first_path, origin), *other_origins = known_origins.items()
    for path, other in other_origins:
        if other != origin:
            raise ConfigError(
                f"{first_path} comes from {_described(origin)}, but {path} from {_described(other)}: choose one, "
                "world=NAME."
            )
    return config.replaced(world=with_world_of(config.world, origin, first_path, config.run.plugins))


def _unless_unknown(config: Config, known: Mapping[Path, WorldOrigin]) -> Config:
    """Return `config` in the world of the single entry of `known`, or in a world named "" if none is trusted."""
    for path, origin in known.items():
        with suppress(CheckpointError):
            return config.replaced(world=with_world_of(config.world, origin, path, config.run.plugins))
    return config.replaced(world=dataclasses.replace(config.world, name=""))


def _as_served(config: Config) -> Config:
    """Return `config` with the world that the policy server reports for its policy; raises ServingError."""
    from robopolicy.client.policy_client import connected  # imports websockets, which only this needs

    section = config.drive
    if section.robot:
        return config
    with connected(section, section.server_timeout) as client:
        world_entry = client.metadata.get("world")
    source = f"The policy of the server at {client.address.partition('://')[2]}"
    origin = WorldOrigin.from_json(world_entry, source)
    if origin is None:
        _say_assumed(source, config)
        return config
    return config.replaced(world=with_world_of(config.world, origin, source, config.run.plugins))


def _in_recordings(config: Config, data: Path) -> Config:
    """Return `config` with the recorded episodes of `data` as its world, and warn about it."""
    _say_unknown(
        data,
        "its own recorded episodes are used as the world if one is needed (world=demonstrations). To choose another",
    )
    return config.replaced(world=dataclasses.replace(config.world, name=DEMONSTRATIONS, data=data))


def _say_assumed(where: object, config: Config) -> None:
    hint = "To use recorded episodes instead: world=demonstrations world.data=DATASET."
    _say_unknown(where, f"{config.world.name} is assumed if a world is needed. {hint} To choose another")


def _say_unknown(where: object, instead: str) -> None:
    warnings.warn(
        f"{where} does not record which world it comes from, and no world is set: {instead}: world=NAME.",
        RobopolicyWarning,
        stacklevel=4,
    )


def with_world_of(
    section: WorldSection, origin: WorldOrigin, where: object, plugins: Iterable[str] = ()
) -> WorldSection:
    """Return `section` in the world that `where` comes from; options given by the user override its own.

    plugins: modules that the user trusts. Raises CheckpointError when the world or an option refers to other modules;
    the error also names the module of an untrusted class in the checkpoint `where`.
    """
    import_plugins(plugins)
    kind = untrusted_kind(where) if isinstance(where, Path) else ""
    hint = (
        (f" run.plugins=[{kind.partition(':')[0]}], because it uses '{kind}', which is not part of robopolicy, either")
        if kind
        else ""
    )
    require_trusted(origin.name, where, f"world.name={origin.name}{hint}")
    saved_options = trusted_options(origin, where, section.options)
    if saved_options:
        listing = ", ".join(f"{key}={value}" for key, value in saved_options.items())
        output.print(f"World options from {where}: {listing}", markup=False, soft_wrap=True)
    return dataclasses.replace(section, name=origin.name, options={**saved_options, **section.options})


def origin_of_section(section: WorldSection, world: World | None = None) -> WorldOrigin | None:
    """Return the world origin to store in a checkpoint or dataset made in `section`'s world, None if unknown.

    For imagination it is the simulator that the model imitates (world: the imagined one), for demonstrations their
    recorded origin.
    """
    if section.name == DEMONSTRATIONS:
        origin = None if section.data is None else recorded_origin(section.data)
        return with_latency_options(origin, section.options)
    if section.name != WORLD_MODEL:
        return WorldOrigin(section.name, _plain(section.options))
    if section.simulator:
        return WorldOrigin(section.simulator, _plain(section.options))
    model: Any = getattr(world, "model", None)
    if model is None:
        return None
    imitated = origin_of(model) or WorldOrigin(model.spec.name)
    return WorldOrigin(imitated.name, {**imitated.options, **_plain(section.options)})


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options after a JSON round trip, so that stored and new ones compare as equal."""
    return json.loads(json.dumps(dict(options), default=str))


def _origin(path: Path) -> WorldOrigin | None:
    return saved_origin(path) if (path / "config.json").is_file() else recorded_origin(path)


def _places(config: Config, key: str, default: str) -> list[Path]:
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    if value and isinstance(value, list | tuple):
        return [Path(path) for path in value]
    if value:
        return [Path(value)]
    verb, _, part = default.partition("/")
    return [input_path(config, verb) / part] if part else []


def _described(origin: WorldOrigin) -> str:
    options = ", ".join(f"{key}={value}" for key, value in origin.options.items())
    return f"'{origin.name}'" + (f" with {options}" if options else "")


keep_former_names(__name__, {"in_world": "with_world_of"})
