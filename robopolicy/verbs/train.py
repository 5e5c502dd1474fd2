"""Pre-trains a policy by behaviour cloning on a LeRobotDataset, then measures its success.

Killed? Run the same command again: it goes on and ends in the same place. train.evaluate_episodes=0 skips the judgement
(for data of a robot that has no simulator here).
"""

from typing import Any

from robopolicy.build import build_world, choose_device
from robopolicy.configuration import Config
from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import derive
from robopolicy.core.structured import narrowed
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.evaluation.report import report_for_run
from robopolicy.policies import (
    DenoisingPolicy,
    DenoisingPolicyConfig,
    TokenPolicy,
    TokenPolicyConfig,
    build_policy,
    build_token_policy,
)
from robopolicy.policies.configuration import PolicyKind
from robopolicy.runs import default_path, finish, finished, open_run, output
from robopolicy.training.pretrain import PretrainConfig, pretrain
from robopolicy.verbs.evaluate import evaluation_seeds, judge, print_verdicts

SECTIONS = ("run", "world", "policy", "train")


def run(config: Config) -> int:
    """Train, save, judge."""
    folder = open_run(config, "train", SECTIONS)
    if finished(folder) is not None:
        output.print(f"{folder.path} is already trained; run.fresh=true trains anew.")
        return 0
    device = choose_device(config.run)
    data = default_path(config, "collect", "dataset", config.train.data, "train.data")
    episodes = read_dataset(data)
    if config.train.episodes:
        episodes = episodes.select(range(min(config.train.episodes, len(episodes))))
    policy = new_policy(config, episodes).to(device)
    fitted = pretrain(policy, episodes, narrowed(PretrainConfig, config.train), folder, seed=config.run.seed)
    result: dict[str, Any] = {
        "data": str(data),
        "episodes": len(episodes),
        "steps": episodes.step_count,
        "losses": dict(fitted.losses),
        "seconds": fitted.seconds,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
    }
    if config.train.evaluate_episodes:
        count = config.train.evaluate_episodes
        world = build_world(config.world, policy, episodes=count, seed=config.run.seed, device=device)
        seeds = evaluation_seeds(config, count)
        verdict = judge(world, policy, seeds, device, config.run.seed, "trained policy")
        world.close()
        print_verdicts({"trained": verdict})
        result["policy"] = verdict.to_json()
    finish(config, folder, result)
    output.print(f"Policy: {folder.checkpoint}\nReport: {report_for_run(folder.path)}")
    return 0


def new_policy(config: Config, episodes: Episodes) -> DenoisingPolicy | TokenPolicy:
    """Build the configured policy with fields and normalisers from `episodes`; its weights follow from run.seed."""
    known: dict[str, Any] = {
        "fps": episodes.fps,
        "instructions": tuple(sorted(set(episodes.tasks))),
        "values": {**episodes.observation, "action": episodes.actions},
        "seed": derive(config.run.seed, "initial weights"),
    }
    fields, action = episodes.observation_fields, episodes.action_field
    if config.policy.kind is PolicyKind.TOKEN:
        return build_token_policy(narrowed(TokenPolicyConfig, config.policy), fields, action, **known)
    return build_policy(narrowed(DenoisingPolicyConfig, config.policy), fields, action, **known)
