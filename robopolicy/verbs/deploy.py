"""Simulates a staged rollout that replaces a known policy by a new one while success stays above a lower bound.

The base acts during the first decisions of an episode and the new policy during the others (StepMix), or one of them,
drawn per episode, throughout (EpsMix, deploy.mix_per=episode). The new policy's share is the largest for which the
lower confidence bound of success exceeds the required minimum, deploy.max_success_drop below the base's success. For
comparison, the new policy also replaces the base at once, from the same initial states. On a real robot, use
robopolicy.evaluation.deployment.Deployment: report each batch of episodes to it and it returns the share.
"""

import numpy as np
import torch

from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.world import World
from robopolicy.evaluation.deployment import Deployed, Deployment, deploy, known_base, most_decisions
from robopolicy.evaluation.intervals import plus_minus
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import require_success
from robopolicy.runs import default_path, finish, open_fresh_run, output, print_table
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Simulate a staged rollout of a new policy with a minimum success rate",
    sections=("run", "world", "deploy"),
    example="robopolicy deploy runs/finetune/push_t/0/checkpoint runs/train/push_t/0/checkpoint",
    targets=("deploy.policy", "deploy.base"),
    world_from={"deploy.policy": "finetune/checkpoint", "deploy.base": "train/checkpoint"},
)


def run(config: Config) -> int:
    """Measure the base, simulate the staged and the immediate replacement, and report both."""
    section, seed = config.deploy, config.run.seed
    device = choose_device(config.run)
    paths = {
        "policy": default_path(config, "finetune", "checkpoint", section.policy, "deploy.policy"),
        "base": default_path(config, "train", "checkpoint", section.base, "deploy.base"),
    }
    folder = open_fresh_run(config, "deploy", VERB.sections)
    tuned_policy, base = (load_policy(paths[name], device) for name in ("policy", "base"))
    world = build_world(config.world, base, batch_size=section.update_every, device=device)
    require_success(world)
    tuned_policy, base = adapt_policy_to_world(world, tuned_policy), adapt_policy_to_world(world, base)
    base_results = known_base(
        world, base, episode_seeds(seed, "known", section.base_episodes), seed=seed, device=device
    )
    rate = float(np.mean(base_results["success"]))
    floor = (1 - section.max_success_drop) * rate
    deployment = Deployment(floor, most_decisions(world, base), section.mix_per, section.confidence)
    deployment.tell(0.0, **base_results)
    deployments = both(config, world, base, tuned_policy, deployment, device)
    world.close()
    print_table(
        f"{section.episodes} episodes, minimum success {deployment.floor:.1%} ({section.max_success_drop:.0%} below "
        f"the base's {rate:.1%})",
        ("", "success", "final share of the new policy", "largest shortfall below the minimum (standard errors)"),
        [
            [name, f"{each.success.mean():.1%}", f"{each.shares[-1]:.0%}", plus_minus(each.margin, "+.1f")]
            for name, each in deployments.items()
        ],
    )
    deployed = {name: each.to_json() for name, each in deployments.items()}
    finish(config, folder, {"deployed": deployed, "known": rate, **{name: str(path) for name, path in paths.items()}})
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def both(
    config: Config, world: World, base: Policy, tuned: Policy, deployment: Deployment, device: torch.device
) -> dict[str, Deployed]:
    """Return the results of the staged rollout and of replacing the base at once, from the same initial states."""
    section, seed = config.deploy, config.run.seed
    seeds = episode_seeds(seed, "deploy", section.episodes)
    ways = {"mixed": deployment, "replaced": None}
    return {
        name: deploy(world, base, tuned, seeds, way, floor=deployment.floor, seed=seed, device=device)
        for name, way in ways.items()
    }
