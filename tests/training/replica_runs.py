"""Jobs of one process and of several (`forked_ranks.py`), and command lines in which process 1 suffers a fault.

Each process writes what it has seen to FOLDER/COUNT-RANK.pt: the first gradients, the final weights, the KL stops.
`replica_runs.py FAULT CALL VERB ...`, started by torchrun, runs a command line.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from seeing_toys import STATE, SeeingWorld, denoising_policy, token_policy

from robopolicy import cli
from robopolicy.core import replicas
from robopolicy.core.errors import ConfigError
from robopolicy.core.exchange import is_divided
from robopolicy.core.policy import Scores
from robopolicy.core.randomness import Generators
from robopolicy.data.record import record
from robopolicy.nn.fsdp import whole_tree
from robopolicy.policies import DenoisingPolicy
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood, PolicyKind
from robopolicy.policies.lerobot.configuration import LeRobotTuning, TrainableWeights
from robopolicy.rl.critic import state_critic
from robopolicy.rl.presets import PRESETS
from robopolicy.training import fit, update
from robopolicy.training.configuration import DistillConfig, FinetuneConfig, FitConfig
from robopolicy.training.distill import Distillation
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.pretrain import regression_batches
from sims.registry import load_task, make_world

BY_MATCHING = {"ac_flow", "afd", "fpo"}
NEED_TEACHER = {"distillation", "afd"}
CONFIG = FinetuneConfig(
    iterations=1,
    rollout_length=4,
    groups=4,
    group_size=3,
    epochs=1,
    minibatch=21,
    clip=0.1,
    target_kl=None,
    discount=0.9,
    critic_warmup=0,
    evaluate_every=0,
)
AUXILIARIES = {
    "bc": {},
    "experts": {},
    "dagger": {},
    "velocity": {},
    "kl_base": {},
    "kl_convex": {},
    "distill": {},
    "best_of_n": {"models": ("q_ensemble",), "options": {"best_of_n": {"warmup": 0, "decisions": 16}}},
    "spo": {"models": ("q_ensemble",), "options": {"spo": {"warmup": 0, "decisions": 16, "gap": 0.0}}},
}
JOBS = {
    **{name: {"algorithm": name} for name in PRESETS},
    **{f"with {name}": {"algorithm": "grpo", "auxiliaries": (name,), **more} for name, more in AUXILIARIES.items()},
    "episodes": {"algorithm": "gspo", "minibatch_episodes": 5},
    "random steps": {"scored_steps": 1},
    "average": {"proximal_policy": "average", "iterations": 2},
    "micro-batches": {"micro_batch": 4},
    "few rows": {"minibatch": 3},
    "finished": {"algorithm": "truncated_ppo", "rollout_length": 12},
    "two iterations": {"algorithm": "grpo", "iterations": 2},
    "KL stop": {"target_kl": 1e-4, "epochs": 4, "learning_rate": 1e-3},
    "staleness": {"staleness": 1, "iterations": 3},
    "shards of streams": {"shards": 2, "iterations": 2},
    "shards of groups": {"algorithm": "grpo", "shards": 2, "overprovision": 0.5, "iterations": 2},
    "shards in the background": {"shards": 2, "staleness": 1, "iterations": 3},
    "divided weights": {"target_kl": 1e-4, "epochs": 4, "learning_rate": 1e-3, "iterations": 2},
    "divided in micro-batches": {"micro_batch": 5},
    "divided weights of tokens": {"algorithm": "ppo", "iterations": 2},
    "images": {},
    "packed images": {"packed_images": True},
    "tokens": {"algorithm": "ppo", "auxiliaries": ("entropy",)},
}
JOBS["another KL in process 1"] = JOBS["KL stop"]
JOBS["a loss that compares rows"] = {"algorithm": "grpo", "auxiliaries": ("replica_runs:shuffled",)}
REFUSED = {
    "a loss that compares rows": "randperm",
    "scores of another type": "FSDP has found no gradients",
    "parts of different sizes": "different numbers of rows",
}
"""Jobs that several processes refuse, with a word of the error."""
REGRESSIONS = {
    "fit a diffusion policy": ({}, 0),
    "fit a flow policy": ({"kind": PolicyKind.FLOW}, 0),
    "fit in micro-batches": ({}, 10),
    "fit tokens": ({}, 0),
    "distil": ({}, 0),
    "parts of different sizes": ({}, 0),
}
"""Behaviour cloning and distillation: settings of the policy, and the micro-batch."""
MODELS = ("ensemble", "rssm", "pixel diffusion", "video", "latent ensemble")
"""Kinds of world models, as in tests/worldmodels/test_conformance.py."""
WITH_NOISE = {"rssm": 0, "pixel diffusion": 0, "video": 0, "latent ensemble": 1}
"""Models whose processes draw the noise of their losses for their own rows, with the number of stages that draw none.
"""
JOBS["scores of another type"] = {}
SLOW = {"SmolVLA": {"rollout_length": 2, "minibatch": 8}}
"""Jobs that are run when they are asked for."""
DIVIDED = {
    "SmolVLA",
    "scores of another type",
    "divided weights",
    "divided weights of tokens",
    "divided in micro-batches",
}
"""Jobs whose processes divide the weights (fsdp)."""
SEEING = {
    "divided weights of tokens": token_policy,
    "images": denoising_policy,
    "packed images": denoising_policy,
    "tokens": token_policy,
}
"""Jobs of policies with cameras."""


def shuffled(inputs) -> torch.Tensor:
    """An auxiliary loss of somebody's own, which draws a permutation of the rows."""
    order = torch.randperm(len(inputs.mask), generator=inputs.context.generator)
    return (inputs.scores.logp[order] - inputs.scores.logp).square().mean()


class OwnScores(Scores):
    """Log-probabilities in a type that nobody has registered as a pytree."""


class OtherPolicy(DenoisingPolicy):
    def log_prob(self, observation, latents):
        scores = super().log_prob(observation, latents)
        return OwnScores(scores.logp, scores.entropy, scores.extras)


def small_policy(world, policy_class: Any = DenoisingPolicy, **changes: Any):
    config = DenoisingPolicyConfig(width=16, depth=1, sampling_steps=3, **changes)
    spec = world.spec
    policy = policy_class(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)
    policy.prepare_finetuning(2)
    with torch.no_grad():  # so that a base, a teacher and the policy differ
        for parameter in policy.trainable_parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return policy


def tiny_smolvla() -> Any:
    """Return a policy of LeRobot's class, with all its weights trained."""
    from test_lerobot_learns import save  # imports LeRobot

    from robopolicy.building.policies import load_trainable

    with TemporaryDirectory() as folder:
        tuning = LeRobotTuning(flow_noise_level=0.15, trainable=TrainableWeights.ALL)
        policy = load_trainable(save("smolvla", Path(folder)), tuning)
    policy.prepare_finetuning()
    return policy


def run(job: str) -> dict:
    """Run a job; return the first gradients of policy and critic, the weights, and the number of actor steps."""
    torch.manual_seed(0)
    changes = {**(JOBS | SLOW)[job], "fsdp": job in DIVIDED and replicas.count() > 1}
    name = changes.get("algorithm", "dppo")
    world = SeeingWorld(8) if job in SEEING else make_world("reach_planar", 8)
    policy = (
        SEEING[job](world, cameras=True)
        if job in SEEING
        else small_policy(world, **({"likelihood": Likelihood.MATCHING} if name in BY_MATCHING else {}))
    )
    if job == "SmolVLA":
        world, policy = SeeingWorld(8), tiny_smolvla()
    if job in SEEING:
        policy.prepare_finetuning(2)
    has_cameras = isinstance(world, SeeingWorld)
    critic = state_critic({STATE: world.spec.observation[STATE]}, 1, width=16) if has_cameras else None
    critic = critic or state_critic(world.spec.observation, 1, width=16)
    teacher = small_policy(world) if name in NEED_TEACHER or job in ("with dagger", "with distill") else None
    experts = None
    if job == "with experts":
        experts = record(world, load_task("reach_planar").expert(), range(8), generator=torch.Generator())
    if job == "scores of another type":
        policy = small_policy(world, OtherPolicy)
    gradients: dict[int, torch.Tensor] = {}
    divided: list[bool] = []
    clip = update.clip_gradients

    def seen(parameters, limit, where):
        if len(parameters) not in gradients:
            divided.append(all(map(is_divided, parameters)))
            found = [whole_tree(each.grad) for each in parameters if each.grad is not None]
            gradients[len(parameters)] = torch.cat([each.flatten() for each in found])
        return clip(parameters, limit, where)

    update.clip_gradients = seen
    divergence = update.approximate_kl
    if job == "another KL in process 1" and replicas.rank() == 1:
        update.approximate_kl = lambda *arguments: 0.0 * divergence(*arguments)
    stats: list[float] = []
    first = update.Learner.update

    def counted(self, *arguments, **keywords):
        result = first(self, *arguments, **keywords)
        stats.extend([result["actor_steps"], result["kl_stop"]])
        return result

    update.Learner.update = counted
    try:
        config = replace(CONFIG, branch_at=(1,) if name == "branch_grpo" else (), **changes)
        finetune(policy, critic, world, config, seed=0, guidance=Guidance(teacher, experts=experts))
    finally:
        update.clip_gradients, update.Learner.update, update.approximate_kl = clip, first, divergence
    assert any(divided) == changes["fsdp"]
    weights = torch.cat([each.detach().flatten() for each in policy.parameters()])
    return {
        **{f"gradient {size}": value for size, value in gradients.items()},
        "weights": weights,
        "stats": torch.tensor(stats),
    }


def regression(job: str) -> dict:
    """Fit a policy or a world model for two steps a stage; return the first gradients and the weights."""
    torch.manual_seed(0)
    generators = Generators(0)
    if job in MODELS:
        # In a folder that pytest may not have on its path.
        from test_conformance import KINDS  # pyright: ignore[reportMissingImports]

        kind, config, where = KINDS[job]
        config = replace(config, batch_size=10)
        data = where.recorded(12)
        model = kind.build(config, where.SPEC, data, 0)
        stages = {
            name: (part, part.batches(data, generators[f"{name} data"])) for name, (part, _) in model.stages().items()
        }
    else:
        world: Any = make_world("reach_planar", 8)
        data = record(world, load_task("reach_planar").expert(), range(8), generator=torch.Generator())
        policy: Any = token_policy(world) if "tokens" in job else small_policy(world, **REGRESSIONS[job][0])
        part = Distillation(policy, DistillConfig()) if "distil" in job else policy
        batches = regression_batches(policy, data, 33, generators["data"])
        if job == "parts of different sizes":
            batches = ({"one": each, "other": each["actions"][:2]} for each in batches)
        stages = {"policy": (part, batches)}
    gradients: list[torch.Tensor] = []
    clip = fit.clip_gradients

    def seen(parameters, limit, where):
        gradients.append(torch.cat([each.grad.flatten() for each in parameters if each.grad is not None]))
        return clip(parameters, limit, where)

    fit.clip_gradients = seen
    micro_batch = REGRESSIONS[job][1] if job in REGRESSIONS else 0
    try:
        for name, (part, batches) in stages.items():
            fit.fit(part, batches, FitConfig(steps=2, log_every=1), generators, label=name, micro_batch=micro_batch)
    finally:
        fit.clip_gradients = clip
    weights = torch.cat([each.detach().flatten() for part, _ in stages.values() for each in part.parameters()])
    states = torch.cat(list(generators.state().values()))
    return {
        **{f"gradient {2 * index}": value for index, value in enumerate(gradients[::2])},
        "weights": weights,
        "stats": states,
    }


def command(fault: str, call: int, arguments: list[str]) -> int:
    """Run a command line; process 1 suffers a fault at this call of the policy's log-probability or loss. Return the
    exit status.
    """
    calls: list[int] = []
    scores_of, log = update.scores_of, DenoisingPolicy.loss

    def suffer(value):
        calls.append(1)
        if len(calls) != call or os.environ["RANK"] != "1":
            return value
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            raise ConfigError("Process 1 has a problem of its own.")
        if fault == "hangs":
            time.sleep(60)
        return value * float("nan") if fault == "nan" else value

    def scores(policy, observation, latents):
        result = scores_of(policy, observation, latents)
        return replace(result, logp=suffer(result.logp))

    def loss(self, batch, generator):
        return {name: suffer(value) for name, value in log(self, batch, generator).items()}

    update.scores_of, DenoisingPolicy.loss = scores, loss
    return cli.main(arguments)


def main(folder: Path, *jobs: str) -> None:
    """Compute these jobs, or all that are not slow."""
    replicas.join()
    results, errors = {}, {}
    for job in jobs or (*JOBS, *REGRESSIONS, *MODELS):
        try:
            results[job] = run(job) if job in JOBS | SLOW else regression(job)
        except Exception as error:
            errors[job] = f"{type(error).__name__}: {error}"
    torch.save((results, errors), folder / f"{replicas.count()}-{replicas.rank()}.pt")
    replicas.leave()


if __name__ == "__main__":
    sys.exit(command(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
