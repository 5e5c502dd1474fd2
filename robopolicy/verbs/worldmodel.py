"""Trains an ensemble world model on recorded episodes plus fresh rollouts with failures in them, and examines it.

Data: worldmodel.data (default: what collect wrote), then rollouts of the expert at every level of worldmodel.noise and
of worldmodel.policies, until worldmodel.transitions control steps are there. The report has one-step and open-loop
errors, the shuffled-action test, and precision and recall of the learned success head.
"""

from typing import Any

import torch

from robopolicy.build import build_noisy_expert, build_world, choose_device, open_policy
from robopolicy.configuration import Config
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.randomness import Generators, derive, episode_seeds
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.data.record import record
from robopolicy.evaluation.report import report_for_run
from robopolicy.runs import default_path, finish, finished, open_run, output
from robopolicy.training.fit import fit
from worldmodels import save_world_model
from worldmodels.diagnostics import examine
from worldmodels.ensemble import EnsembleConfig, TransitionData, build_ensemble

SECTIONS = ("run", "world", "worldmodel")
SUCCESS = "success"


def run(config: Config) -> int:
    """Gather data, train, calibrate, examine, save."""
    folder = open_run(config, "worldmodel", SECTIONS)
    if finished(folder) is not None:
        output.print(f"{folder.path} is already trained; run.fresh=true trains anew.")
        return 0
    section, device = config.worldmodel, choose_device(config.run)
    generators = Generators(config.run.seed, device)
    world = build_world(config.world, seed=config.run.seed)
    episodes = gather(config, world, generators["rollouts"])
    data, bonus = transition_data(episodes)
    training, validation = data.split(0.1, torch.Generator().manual_seed(derive(config.run.seed, "split")))
    seed = derive(config.run.seed, "world model weights")
    model = build_ensemble(narrowed(EnsembleConfig, section), world.spec, training, bonus, seed)
    world.close()
    model.to(device)
    batches = model.batches(training, generators["world model batches"])
    fitted = fit(model, batches, section.fit, generators, run=folder, label="World model")
    model.calibrate_success(validation)
    result = {
        "episodes": len(episodes),
        "success_rate": float(data.success.sum()) / len(episodes),
        "losses": dict(fitted.losses),
        "seconds": fitted.seconds,
        "validation": examine(model, validation, generators["examine"]),
    }
    save_world_model(model, folder.checkpoint)
    finish(config, folder, result)
    show(result["validation"])
    output.print(f"World model: {folder.checkpoint}\nReport: {report_for_run(folder.path)}")
    return 0


def gather(config: Config, world: World, generator: torch.Generator) -> Episodes:
    """Return recorded episodes and fresh rollouts, an equal share of steps from each source."""
    section, seed = config.worldmodel, config.run.seed
    paths = section.data or (default_path(config, "collect", "dataset", None, "worldmodel.data"),)
    parts = [read_dataset(path, cameras=()) for path in paths]
    missing = max(0, section.transitions - sum(part.step_count for part in parts))
    actors: list[Any] = [open_policy(path, generator.device) for path in section.policies]
    actors += [
        build_noisy_expert(config.world, world.spec, level, derive(seed, f"worldmodel/noise/{level}"))
        for level in section.noise
    ]
    for index, actor in enumerate(actors):
        share, recorded, turn = missing // len(actors), 0, 0
        while recorded < share:
            seeds = episode_seeds(seed, f"worldmodel/{index}/{turn}", world.batch_size)
            parts.append(record(world, actor, seeds, generator=generator))
            recorded, turn = recorded + parts[-1].step_count, turn + 1
    return Episodes.concatenate(parts)


def transition_data(episodes: Episodes) -> tuple[TransitionData, float]:
    """Return the steps of `episodes`, and the mean reward for success; DataError where reward or success is missing."""
    steps = episodes.transitions()
    if steps.success is None or steps.terminated is None or episodes.rewards is None:
        raise DataError("A world model learns reward and success: this dataset records neither.")
    if episodes.final_known is not None and not bool(episodes.final_known.all()):
        raise DataError("The dataset lacks final observations: record it with 'robopolicy collect'.")
    bonus = episodes.rewards.get(SUCCESS, torch.zeros(episodes.step_count))
    others = [value for name, value in episodes.rewards.items() if name != SUCCESS]
    progress = torch.stack(others).sum(0) if others else torch.zeros(episodes.step_count)
    paid = bonus[bonus != 0]
    data = TransitionData(
        steps.state, steps.action, steps.next_state, progress, steps.success, steps.terminated, steps.episode
    )
    return data, float(paid.mean()) if len(paid) else 0.0


def show(validation: dict[str, Any]) -> None:
    """Print the figures that say whether the model can be trusted."""
    success = validation["success"]
    output.print(
        f"One-step error {validation['one_step_error']:.3f} of the variance "
        f"(actions shuffled: {validation['shuffled_action_error']:.3f}); success head precision "
        f"{success['precision']:.2f}, recall {success['recall']:.2f}"
    )
    for horizon, error in validation["open_loop"].items():
        if error is not None:
            output.print(f"  {horizon:>3} steps: error {error['error']:.3f}, copying {error['copy_first_state']:.3f}")
