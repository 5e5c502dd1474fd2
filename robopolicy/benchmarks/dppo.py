"""DPPO's own code next to robopolicy's on push_t: processor time per environment step, and success after equal steps.

Theirs is a checkout of https://github.com/irom-lab/dppo (bench.dppo=FOLDER; Ren et al. 2024, arXiv:2409.00588), whose
classes run unchanged: TrainPPODiffusionAgent, PPODiffusion, DiffusionMLP, CriticObs, SyncVectorEnv, MultiStep. Only
the creation of environments (hand-written push_t environments, see `push_t_env`), wandb (not used) and the saving of
models are replaced. Both have the same sizes, rollouts, minibatches, epochs, learning rates, clip width, discount and
exploration noise, and take turns, an iteration each, in one process. Differences that remain: theirs samples with DDPM
at its five training steps, ours at five of 100; ReLU and SiLU; theirs stops no epoch by KL.
"""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks.push_t_env import OBSERVATION_SIZE, PushT
from robopolicy.benchmarks.runs import demonstrations, pretrained, settings_of
from robopolicy.building.policies import load_policy, load_trainable
from robopolicy.building.worlds import build_critic, build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.errors import ConfigError, require_extra
from robopolicy.core.policy import Policy
from robopolicy.core.progress import progress
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.structured import narrowed
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.verbs.bench import Benchmark, Table

SOURCE = "https://github.com/irom-lab/dppo"
EQUAL = (
    "finetune.minibatch=1920",
    "finetune.evaluate_every=1",
    "finetune.checkpoint_every=1000000",
    "finetune.target_success=null",
)
"""Settings of ours, in addition to `FORMER_PPO`. 256 x 15 chunks are two minibatches: theirs skips a partial one."""
PARTS = ("collect", "prepare", "update")
CHUNK, DECISIONS = 8, 15


@dataclass
class Clock:
    """Processor seconds of an iteration by part, in all threads: a part ends where the next one is first marked."""

    parts: list[list[float]] = field(default_factory=list)
    _marks: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Note the first time in this iteration that part `name` begins; "collect" begins an iteration."""
        if name == "collect":
            self._marks.clear()
        self._marks.setdefault(name, time.process_time())

    def stop(self) -> None:
        """End the iteration, and its last part."""
        begins = [self._marks[name] for name in PARTS]
        ends = [*begins[1:], time.process_time()]
        self.parts.append([end - begin for begin, end in zip(begins, ends, strict=True)])


def require_checkout(folder: Path | None) -> Path:
    """Return the checkout of DPPO at bench.dppo; raises ConfigError when there is none."""
    if folder is None or not (folder / "model" / "diffusion" / "diffusion_ppo.py").is_file():
        place = "dppo" if folder is None else folder
        missing = "No checkout of DPPO is given" if folder is None else f"{folder} is not a checkout of DPPO"
        raise ConfigError(f"{missing}: git clone {SOURCE} {place}, then set bench.dppo={place}.")
    return folder


def modules_of(folder: Path) -> tuple[Any, Any, Any, Any]:
    """Import gym 0.22 and DPPO's vector environment, wrapper and agent; raises ConfigError without the extra `dppo`."""
    with contextlib.redirect_stderr(io.StringIO()):  # its notice that it is unmaintained
        gym = require_extra("gym", "dppo")
    sys.modules.setdefault("wandb", ModuleType("wandb"))  # imported by their agents, not used without a project
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # where hydra finds the classes that its configuration names
    try:
        from agent.finetune import train_agent  # pyright: ignore[reportMissingImports]
        from agent.finetune.train_ppo_diffusion_agent import (  # pyright: ignore[reportMissingImports]
            TrainPPODiffusionAgent,
        )
        from env.gym_utils.sync_vector_env import SyncVectorEnv  # pyright: ignore[reportMissingImports]
        from env.gym_utils.wrapper import multi_step  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"DPPO in {folder} cannot be imported: {error}.") from error
    return gym, train_agent, TrainPPODiffusionAgent, (SyncVectorEnv, multi_step.MultiStep)


class Normalizer:
    """Observations scaled to [-1, 1] by the range of the demonstrations, as DPPO's wrappers do."""

    def __init__(self, observations: np.ndarray):
        self.low = observations.min(0)
        self.scale = 2.0 / (observations.max(0) - self.low + 1e-6)

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """Return scaled observations [..., 19]."""
        return (observation - self.low) * self.scale - 1.0


def environment_class(gym: Any, normalize: Normalizer, counted: list[int]) -> Any:
    """Return the gym environment class around `PushT`; counted[0] is the number of control steps played by all."""

    class Environment(gym.Env):
        def __init__(self) -> None:
            self.inner, self.draws = PushT(), np.random.default_rng(0)
            self.observation_space = gym.spaces.Dict(
                {"state": gym.spaces.Box(-10.0, 10.0, (OBSERVATION_SIZE,), np.float32)}
            )
            self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

        def seed(self, seed: int | None = None) -> None:
            self.draws = np.random.default_rng(seed)

        def reset(self, **_: Any) -> dict[str, np.ndarray]:
            return {"state": normalize(self.inner.start(int(self.draws.integers(2**62))))}

        def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict]:
            observation, reward, done = self.inner.advance(action)
            counted[0] += 1
            return {"state": normalize(observation)}, reward, done, {}

    return Environment


def configuration(task_settings: FinetuneConfig, rows: int, seed: int, folder: Path, network: Path) -> dict[str, Any]:
    """Return the configuration of their agent with the sizes and rates of ours."""
    rate, critic_rate = task_settings.learning_rate, task_settings.critic_learning_rate
    constant = {"first_cycle_steps": 1000, "warmup_steps": 1}
    train = {
        "n_train_itr": 0,
        "n_critic_warmup_itr": task_settings.critic_warmup,
        "n_steps": task_settings.rollout_length,
        "gamma": task_settings.discount**CHUNK,
        "gae_lambda": task_settings.gae_lambda,
        "actor_lr": rate,
        "actor_weight_decay": 0.0,
        "actor_lr_scheduler": {**constant, "min_lr": rate},
        "critic_lr": critic_rate,
        "critic_weight_decay": 0.0,
        "critic_lr_scheduler": {**constant, "min_lr": critic_rate},
        "batch_size": task_settings.minibatch,
        "update_epochs": task_settings.epochs,
        "logprob_batch_size": rows * task_settings.rollout_length,
        "reward_scale_running": True,
        "vf_coef": 0.5,
        "target_kl": None,
        "val_freq": 1,
        "force_train": True,
        "save_model_freq": 1,
        "render": {"freq": 1, "num": 0},
    }
    env = {"n_envs": rows, "name": "push_t", "max_episode_steps": 120, "best_reward_threshold_for_success": 1}
    sizes = {"obs_dim": OBSERVATION_SIZE, "action_dim": 2, "horizon_steps": CHUNK}
    critic = {"_target_": "model.common.critic.CriticObs", "cond_dim": OBSERVATION_SIZE, "mlp_dims": [256, 256]}
    model = {
        "_target_": "model.diffusion.diffusion_ppo.PPODiffusion",
        **model_settings(),
        "gamma_denoising": 0.99,
        "clip_ploss_coef": task_settings.clip,
        "clip_ploss_coef_base": task_settings.clip_base,
        "clip_ploss_coef_rate": 3,
        "randn_clip_value": 3,
        "min_sampling_denoising_std": 0.2,
        "min_logprob_denoising_std": 0.2,
        "ft_denoising_steps": 5,
        "network_path": str(network),
        "actor": network_settings(),
        "critic": {**critic, "activation_type": "Mish"},
    }
    general = {"seed": seed, "device": "cpu", "wandb": None, "cond_steps": 1, "act_steps": CHUNK, "logdir": str(folder)}
    return {**general, **sizes, "env": env, "train": train, "model": model}


def model_settings() -> dict[str, Any]:
    """Return the settings of diffusion that pre-training and fine-tuning share."""
    sizes = {"horizon_steps": CHUNK, "obs_dim": OBSERVATION_SIZE, "action_dim": 2}
    return {**sizes, "denoising_steps": 5, "predict_epsilon": False, "denoised_clip_value": 1.0, "device": "cpu"}


def network_settings() -> dict[str, Any]:
    """Return the settings of their network: 3 x 256, as ours."""
    sizes = {"action_dim": 2, "horizon_steps": CHUNK, "cond_dim": OBSERVATION_SIZE, "mlp_dims": [256, 256, 256]}
    kind = {"_target_": "model.diffusion.mlp_diffusion.DiffusionMLP", "time_dim": 16}
    return {**kind, **sizes, "activation_type": "ReLU", "residual_style": True}


def chunks_of(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return observations [N, 19] and the action chunks [N, 8, 2] that follow them, of every complete chunk."""
    episodes = read_dataset(data)
    first, starts = 0, []
    for length in episodes.lengths.tolist():
        starts.append(torch.arange(first, first + max(0, length - CHUNK + 1)))
        first += length
    batch = episodes.windows(torch.cat(starts), 1, CHUNK, (STATE, ENVIRONMENT_STATE))
    observation = torch.cat([batch["observation"][key][:, -1] for key in (STATE, ENVIRONMENT_STATE)], -1)
    return observation.numpy(), batch["actions"].numpy()


def imitated(observations: np.ndarray, chunks: np.ndarray, steps: int, batch: int, seed: int, target: Path) -> float:
    """Pre-train their network on scaled observations with their loss and our schedule, and save it at `target`.

    Returns the processor seconds.
    """
    from hydra.utils import instantiate

    torch.manual_seed(derive_seed(seed, "dppo"))
    start = time.process_time()
    settings = {"_target_": "model.diffusion.diffusion.DiffusionModel", **model_settings()}
    model = instantiate({**settings, "network": network_settings()})
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 1e-5)
    state, action = torch.from_numpy(observations).float()[:, None], torch.from_numpy(chunks).float()
    with progress("DPPO: imitation", steps) as advance:
        for _ in range(steps):
            index = torch.randint(len(action), (batch,))
            loss = model.loss(action[index], {"state": state[index]})
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            average.update_parameters(model)
            advance()
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"ema": average.module.state_dict()}, target)
    return time.process_time() - start


class Theirs:
    """Their agent, an iteration at a time, in environments that continue from one iteration to the next."""

    def __init__(self, checkout: Path, settings: Callable[[], dict[str, Any]], normalize: Normalizer):
        from omegaconf import OmegaConf

        gym, train_agent, agent_class, (vector_class, multi_step) = modules_of(checkout)
        self.steps, self.clock = [0], Clock()
        self.normalize = normalize
        environment = environment_class(gym, normalize, self.steps)

        class Vector(vector_class):
            """Their vector environment, with the reset that their asynchronous one has; later calls reset nothing."""

            started = False

            def reset_arg(self, options_list: Any) -> Any:
                if not self.started:
                    self.started = True
                    return self.reset()
                return self.observations

        def opened(*_: Any, num_envs: int, max_episode_steps: int, **__: Any) -> Any:
            options = {"n_obs_steps": 1, "n_action_steps": CHUNK, "max_episode_steps": max_episode_steps}
            return Vector([lambda: multi_step(environment(), **options, reset_within_step=True)] * num_envs)

        train_agent.make_async = opened
        self.agent = agent_class(OmegaConf.create(settings()))
        self.agent.save_model = lambda: None
        self.model = self.agent.model
        loss = self.model.loss

        def marked(*arguments: Any, **options: Any) -> Any:
            self.clock.mark("update")
            return loss(*arguments, **options)

        self.model.loss = marked
        self.model.critic.register_forward_pre_hook(lambda *_: self.clock.mark("prepare"))

    def iterate(self) -> None:
        """Run one iteration."""
        self.agent.n_train_itr = self.agent.itr + 1
        self.clock.mark("collect")
        with contextlib.redirect_stdout(io.StringIO()):
            self.agent.run()
        self.clock.stop()

    def success(self, world: World, seeds: np.ndarray, *, deterministic: bool) -> float:
        """Return the success rate of their policy in our world."""
        observation = world.reset(seeds=seeds)
        success = np.zeros(len(seeds), dtype=bool)
        self.model.eval()
        for _ in range(DECISIONS):
            parts = np.concatenate([observation[key][:, -1] for key in (STATE, ENVIRONMENT_STATE)], -1)
            state = torch.from_numpy(self.normalize(parts)).float()[:, None]
            with torch.no_grad():  # without the chain their sampling fails when every step is fine-tuned
                sample = self.model({"state": state}, deterministic=deterministic, return_chain=True)
            step = world.step(sample.trajectories.numpy().clip(-1, 1))
            observation, success = step.observation, step.success
        return float(success.mean())


def measured(config: Config, root: Path, seed: int) -> dict[str, Any]:
    """Pre-train both, then fine-tune both in turns; return processor seconds and success by iteration."""
    checkout = require_checkout(config.bench.dppo)
    size = TINY if config.bench.tiny else FULL
    base = pretrained(config, root, TASK, "diffusion", seed) / "checkpoint"
    folder = root / TASK / "dppo" / str(seed)
    arguments = f"run.name=dppo_{seed}", f"finetune.iterations={size.iterations}", f"finetune.num_envs={size.rows}"
    run_config = compose([*settings_of(config, root, TASK, seed), *EQUAL, *arguments])
    section = run_config.finetune
    learning = narrowed(FinetuneConfig, section)
    observations, chunks = chunks_of(demonstrations(root, TASK, seed))
    normalize = Normalizer(observations)
    modules_of(checkout)
    network = folder / "imitated.pt"
    training = run_config.train
    steps = size.imitation or training.fit.steps
    imitation_seconds = imitated(normalize(observations), chunks, steps, training.batch_size, seed, network)

    policy, frozen = load_trainable(base, run_config.lerobot), load_policy(base)
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    world = build_world(run_config.world, frozen, batch_size=size.rows)
    judge = build_world(run_config.world, frozen, batch_size=size.episodes)
    critic = build_critic(world, section, seed)
    settings = partial(configuration, learning, size.rows, seed, folder, network)
    arms = Arms(Theirs(checkout, settings, normalize), judge, size, seed)
    critic.register_forward_pre_hook(lambda *_: arms.clock.mark("update" if torch.is_grad_enabled() else "prepare"))
    run = RunFolder(folder / "ours")
    finetune(policy, critic, world, learning, run, evaluate=arms.evaluate, seed=seed)
    world.close()
    judge.close()
    ours_steps = [record["env_steps"] for record in run.metrics()]
    return {
        "parts": {"ours": arms.clock.parts, "theirs": arms.theirs.clock.parts},
        "env_steps": {"ours": ours_steps, "theirs": arms.steps},
        "success": arms.success,
        "imitation_seconds": imitation_seconds,
    }


@dataclass(frozen=True)
class Size:
    """iterations; parallel environments; episodes of an evaluation, and iterations between two; steps of imitation, 0
    for the recipe's.
    """

    iterations: int
    rows: int
    episodes: int
    every: int
    imitation: int


TASK = "push_t"
FULL, TINY = Size(10, 256, 200, 5, 0), Size(5, 8, 8, 5, 20)
WARM_UP = 3
"""Iterations in which only the critics learn, which are not timed."""


class Arms:
    """Evaluations of ours, during which theirs has its turn."""

    def __init__(self, theirs: Theirs, judge: World, size: Size, seed: int):
        self.theirs, self.judge = theirs, judge
        self.size, self.clock = size, Clock()
        self.seeds = episode_seeds(seed, "validate", size.episodes)
        self.iteration, self.steps = 0, [0]
        self.success: dict[str, dict[str, list[float]]] = {"ours": {}, "theirs": {}}

    def evaluate(self, policy: Policy, deterministic: bool) -> dict[str, float]:
        """Called after every iteration of ours and before the first, without noise and then with it."""
        if deterministic and self.iteration:
            self.clock.stop()
            self.theirs.iterate()
            self.steps.append(self.theirs.steps[0])
        if self.iteration % self.size.every == 0:
            ours = evaluate_policy(self.judge, policy, self.seeds, deterministic=deterministic).success_rate
            theirs = self.theirs.success(self.judge, self.seeds, deterministic=deterministic)
            for name, rate in {"ours": ours, "theirs": theirs}.items():
                self.success[name].setdefault(str(self.iteration), []).append(rate)
        if not deterministic:
            self.iteration += 1
            self.clock.mark("collect")
        return {"success": 0.0}


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"seeds": {seed: measurements}}, measuring what is missing; raises ConfigError without a checkout."""
    require_checkout(config.bench.dppo)
    results = {}
    for seed in config.bench.seeds:
        path = root / f"{seed}.json"
        if not path.exists():
            write_json(path, measured(config, root, seed))
        results[str(seed)] = read_json(path)
    return {"seeds": results}


def per_thousand(run: Mapping[str, Any], arm: str) -> np.ndarray:
    """Return processor seconds per 1,000 environment steps [iterations, 4], by part and in all, after the warm-up."""
    steps = np.diff(run["env_steps"][arm])[WARM_UP:]
    parts = np.asarray(run["parts"][arm])[WARM_UP:]
    return 1000 * np.concatenate([parts, parts.sum(1, keepdims=True)], 1) / steps[:, None]


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return processor time per environment step, and success after equal numbers of steps."""
    runs = figures["seeds"]
    theirs, ours = (np.concatenate([per_thousand(run, arm) for run in runs.values()]) for arm in ("theirs", "ours"))
    lines = []
    for part, name in enumerate((*PARTS, "whole iteration")):
        ratios = np.median(theirs[:, part] / ours[:, part]), theirs[:, part].min() / ours[:, part].min()
        seconds = [f"{np.median(arm[:, part]):.4f}" for arm in (theirs, ours)]
        lines.append([name, *seconds, *(f"{ratio:.2f}" for ratio in ratios)])
    header = ["CPU s per 1,000 environment steps", "DPPO's code", "robopolicy", "ratio", "ratio of minima"]
    speed = Table("push_t: processor time, medians over iterations that take turns", header, lines)
    lines = []
    for seed, run in runs.items():
        for iteration in run["success"]["ours"]:
            steps = [run["env_steps"][arm][int(iteration)] / 1000 for arm in ("theirs", "ours")]
            rates = [run["success"][arm][iteration] for arm in ("theirs", "ours")]
            texts = [f"{100 * plain:.1f} % / {100 * noisy:.1f} %" for plain, noisy in rates]
            lines.append([seed, iteration, f"{steps[0]:,.0f} / {steps[1]:,.0f}", *texts])
    header = ["seed", "iterations", "steps / 1e3, theirs / ours", "DPPO's code", "robopolicy"]
    title = "push_t: success of 200 episodes, without exploration noise / with it"
    return [speed, Table(title, header, lines)]


BENCHMARK = Benchmark(
    "How fast is robopolicy's PPO on denoising chains next to DPPO's own code, and how far do equal steps get?",
    ("seeds", "dppo", "tiny", "overrides"),
    benchmark,
    tables,
)
