"""LeRobot on its own terms, for comparison: its training step on a dataset, and its `select_action` loop in a world."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from robopolicy.core.spec import TASK
from robopolicy.core.world import World

BATCH = 64


def train(config: Any, data: Path, folder: Path, steps: int, seed: int = 0) -> list[float]:
    """Train a fresh policy of LeRobot's `config` on the dataset in `data`, save it to `folder`, return its losses.

    Everything is LeRobot's own: dataset class, statistics, processors, optimiser and schedule, the step itself. The
    items of the dataset are read once and kept, and batches drawn from them, where its data loader reads them anew.
    """
    from accelerate import Accelerator
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
    from lerobot.datasets.factory import resolve_delta_timestamps
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot.scripts.lerobot_train import update_policy
    from lerobot.utils.feature_utils import dataset_to_policy_features
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

    torch.manual_seed(seed)
    metadata = LeRobotDatasetMetadata("local/data", root=data)
    features = dataset_to_policy_features(metadata.features)
    config.output_features = {"action": features["action"]}
    config.input_features = {key: value for key, value in features.items() if key.startswith("observation.")}
    dataset = LeRobotDataset("local/data", root=data, delta_timestamps=resolve_delta_timestamps(config, metadata))
    policy = get_policy_class(config.type)(config)
    preprocess, postprocess = make_pre_post_processors(config, dataset_stats=metadata.stats)
    preset, schedule = config.get_optimizer_preset(), config.get_scheduler_preset()
    optimiser = preset.build(policy.get_optim_params())
    scheduler = schedule.build(optimiser, steps) if schedule is not None else None
    accelerator = Accelerator(cpu=True)
    names = ("loss", "grad_norm", "lr", "update_s")
    meters = {name: AverageMeter(name, ":.3f") for name in names}
    tracker = MetricsTracker(BATCH, metadata.total_frames, metadata.total_episodes, meters, initial_step=0)
    whole = default_collate([dataset[index] for index in range(len(dataset))])
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(dataset), (BATCH,))
        drawn = {key: value[chosen] for key, value in whole.items() if isinstance(value, torch.Tensor)}
        batch = preprocess({**drawn, TASK: [whole[TASK][index] for index in chosen.tolist()]})
        update_policy(tracker, policy, batch, optimiser, preset.grad_clip_norm, accelerator, scheduler)
        losses.append(tracker.loss.val)
    for part in (policy, preprocess, postprocess):
        part.save_pretrained(folder)
    return losses


def play(
    folder: Path, world: World, seeds: Sequence[int] | np.ndarray, noise: Callable[[], torch.Tensor] | None = None
) -> np.ndarray:
    """Play one episode a seed in `world` (of one row) as LeRobot's own loop does; return which succeeded, bool [E].

    noise: a diffusion policy's next initial noise, asked for whenever its queue is empty.
    """
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy: Any = get_policy_class(config.type).from_pretrained(folder)
    preprocess, postprocess = make_pre_post_processors(config, str(folder))
    outcomes = []
    for seed in seeds:
        observation, ended, success = world.reset(seeds=np.array([seed])), False, False
        policy.reset()
        while not ended:
            frame: dict[str, Any] = {
                key: torch.from_numpy(value[:, -1]) for key, value in observation.items() if key != TASK
            }
            frame[TASK] = list(observation[TASK])
            options = {}
            if noise is not None and not policy._queues["action"]:
                options["noise"] = noise()
            action = postprocess(policy.select_action(preprocess(frame), **options))
            step = world.step(action[:, None].numpy())
            observation, success = step.observation, success or bool(step.success[0])
            ended = bool(step.terminated[0] or step.truncated[0])
        outcomes.append(success)
    return np.array(outcomes)
