"""Public API of `import robopolicy`: ten names for use in notebooks, on top of the command line's code.

collect, train, finetune, imagine and rank are the verbs: they take the same settings as the command line, keep results
in the same run folders, resume where they stopped, and return their results.
"""

from pathlib import Path
from typing import Any

import torch

from robopolicy.building.origins import with_origin
from robopolicy.building.policies import choose_device
from robopolicy.building.policies import load_policy as load_checkpoint
from robopolicy.building.worlds import build_world, world_from_files
from robopolicy.configuration import Config, compose, with_downloads
from robopolicy.configuration.sections.run import DEMONSTRATIONS, WORLD_MODEL, RunSection, WorldSection
from robopolicy.core.hub import local_folder
from robopolicy.core.policy import Policy, is_policy
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.registry import import_plugins
from robopolicy.core.status import end_on_error
from robopolicy.core.storage import read_object
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.world import Controller, World
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.runs import RESULT, run_path
from robopolicy.verbs.verb import VERBS, declaration


def load_policy(path: Path | str, device: torch.device | str = "cpu") -> Policy:
    """Load the policy of a checkpoint, robopolicy's or LeRobot's. Raises CheckpointError naming what is missing.

    path: a folder, or a repository on the Hugging Face hub, USER/NAME or hf://USER/NAME@REVISION, which is downloaded.
    """
    return load_checkpoint(local_folder(path, "model"), device)


def make_world(name: str, batch_size: int = 128, **options: Any) -> World:
    """Return a world with `batch_size` parallel environments: a built-in task, a suite's task, or a custom one by
    import path.

    options: the world's options (world.options on the command line), with history, cameras and image_size. For
    "worldmodel" and "demonstrations" they are the settings of `world.` (at least model=FOLDER or data=FOLDER), with
    history, seed and device. Raises ConfigError with the closest name.
    """
    if name in (WORLD_MODEL, DEMONSTRATIONS):
        arguments = {key: options.pop(key) for key in ("history", "seed", "device") if key in options}
        return world_from_files(
            from_plain(WorldSection, to_plain({**options, "name": name}), "world"), batch_size, **arguments
        )
    from sims.registry import make_world as make

    return make(name, batch_size, **options)


def evaluate(
    policy: Policy | Controller,
    world: World | str,
    episodes: int = 200,
    *,
    seed: int = 0,
    deterministic: bool = True,
    device: str = "cpu",
) -> EvaluationResult:
    """Return the outcomes of `episodes`, with a Wilson interval; equal seeds give equal initial states, for paired
    comparison.

    world: a world, or its name, which is then built with the policy's cameras and history. deterministic: without
    exploration noise. Raises SpecError when policy and world do not fit.
    """
    own_world, torch_device = None, choose_device(RunSection(device=device))
    if isinstance(world, str):
        viewer = policy if is_policy(policy) else None
        world = own_world = build_world(WorldSection(name=world), viewer, episodes=episodes, device=torch_device)
    try:
        return evaluate_policy(
            world,
            policy,
            episode_seeds(seed, "evaluate", episodes),
            deterministic=deterministic,
            generator_seed=seed,
            device=torch_device,
        )
    finally:
        if own_world is not None:
            own_world.close()


def collect(*settings: str) -> dict[str, Any]:
    """Record demonstrations: `collect("recipe=push_cube", "collect.episodes=200")`; see `_run`."""
    return _run("collect", settings)


def train(*settings: str) -> dict[str, Any]:
    """Pre-train a policy: `train("recipe=push_cube", "policy.kind=flow")`; see `_run`."""
    return _run("train", settings)


def finetune(*settings: str) -> dict[str, Any]:
    """Fine-tune a policy: `finetune("recipe=push_cube", "run.seed=1")`; see `_run`."""
    return _run("finetune", settings)


def imagine(*settings: str) -> dict[str, Any]:
    """Fine-tune a policy inside a world model: `imagine("recipe=push_cube")`; see `_run`."""
    return _run("imagine", settings)


def rank(*settings: str) -> dict[str, Any]:
    """Rank policies in world models and in the simulator: `rank("recipe=push_cube", "rank.policies=[A,B]")`."""
    return _run("rank", settings)


def serve(policy: Policy | Path | str, *, host: str = "127.0.0.1", port: int = 8000, api_key: str = "") -> None:
    """Serve a policy, or the policy of a checkpoint, over openpi's websocket protocol until interrupted.

    Raises ConfigError when it would listen beyond loopback without an api_key.
    """
    from robopolicy.serving.server import ServerSettings
    from robopolicy.serving.server import serve as listen

    served = load_policy(policy) if isinstance(policy, (str, Path)) else policy
    listen(served, ServerSettings(host=host, port=port, api_key=api_key))


def report(run: Path | str) -> Path:
    """Rebuild and return the report.html of a run folder. Raises an error when the folder contains none."""
    return report_for_run(Path(run))


def _run(verb: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """Run a verb and return its results, with the run folder as "run". Raises as the verb does (RobopolicyError)."""
    declared = declaration(verb)

    def origin(config: Config) -> Config:
        return with_origin(with_downloads(config, declared.sections), declared.world_from)

    config = with_downloads(compose(list(settings), origin), declared.sections)
    import_plugins(config.run.plugins)
    with end_on_error():
        VERBS.load(verb)(config)
    folder = run_path(config, verb)
    return {**read_object(folder / RESULT), "run": str(folder)}
