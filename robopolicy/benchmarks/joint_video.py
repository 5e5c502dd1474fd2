"""A joint policy over the frames of a video model, from pictures: does it act, does planning help, does video help?

After Cosmos Policy (arXiv:2601.16163): reach_planar through one camera of 32 px. The same autoencoder serves both
models. One starts from a transformer that has learned the video, one from a new one; both learn the joint frames for
equally many steps, on demonstrations and on failures. Each acts with one decision and with the best of several. Beside
them an ordinary diffusion policy with a small convolutional encoder, taught with the same successful episodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from robopolicy.benchmarks.rates import pooled, rate_of, rate_text, spread_text
from robopolicy.benchmarks.runs import each_seed, expert_episodes
from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.regression import Regression
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.world import World
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.loading import build_policy
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.fit import fit, fit_stages
from robopolicy.training.pretrain import pretrain
from robopolicy.verbs.bench import Benchmark, Table
from sims.registry import make_world
from worldmodels.checkpoint import load_world_model, save_world_model
from worldmodels.configuration import JointVideoConfig, VideoConfig
from worldmodels.video.joint import JointVideoPolicy
from worldmodels.video.model import VideoModel

TASK = "reach_planar"
YARDSTICK = "diffusion policy with a convolutional encoder"


@dataclass(frozen=True)
class Scale:
    """Sizes. episodes: recorded at each noise level of the expert; autoencoder, video, joint, yardstick: steps of
    training; candidates: of planning; judged: evaluation episodes.
    """

    episodes: int = 300
    noise: tuple[float, ...] = (0.5, 2.0, 4.0)
    autoencoder: int = 500
    video: int = 800
    joint: int = 3000
    yardstick: int = 800
    candidates: int = 8
    judged: int = 200
    model: JointVideoConfig = field(
        default_factory=lambda: JointVideoConfig(
            chunk=4,
            batch_size=64,
            futures=3,
            values=5,
            video=VideoConfig(
                size="tiny", patch=4, width=96, depth=3, heads=4, recent=1, memory=0, chunk=4, bootstrap_fraction=0.0
            ),
        )
    )


def make(rows: int, seed: int) -> World:
    """Return the world, seen by the top camera with 32 px."""
    return make_world(TASK, rows, seed=seed, cameras=["top"], image_size=32)


def learn_stage(model: nn.Module, stage: Regression, episodes: Episodes, steps: int, seed: int, name: str) -> None:
    """Fit one stage of a video model."""
    generators = Generators(derive_seed(seed, name))
    fit(stage, stage.batches(episodes, generators["batches"]), fitted(steps, 2e-3), generators, label=name)
    model.eval()


def fitted(steps: int, rate: float = 1e-3) -> FitConfig:
    """Return the settings of a fit."""
    return FitConfig(steps=steps, learning_rate=rate, checkpoint_every=10**9)


def video_models(seed: int, scale: Scale, episodes: Episodes, folder: Path) -> dict[str, Path]:
    """Return checkpoints of a video model, by arm: with its dynamics trained, and with its autoencoder alone."""
    video, autoencoder = folder / "video", folder / "autoencoder"
    world = make(1, seed)
    if not autoencoder.exists():
        model = VideoModel.build(scale.model.video, world.spec, episodes, derive_seed(seed, "video"))
        learn_stage(model, model.stages()["autoencoder"][0], episodes, scale.autoencoder, seed, "autoencoder")
        model.encode_episodes(episodes)
        save_world_model(model, autoencoder)
    if not video.exists():
        model = load_world_model(autoencoder)
        assert isinstance(model, VideoModel)
        learn_stage(model.train(), model.stages()["dynamics"][0], episodes, scale.video, seed, "dynamics")
        save_world_model(model, video)
    world.close()
    return {"from the video model": video, "from scratch": autoencoder}


def measure(seed: int, folder: Path, scale: Scale) -> dict[str, Any]:
    """Return the success of every arm, by deciding once and by planning, and of the ordinary policy.

    Models and the success of each arm are kept in the folder, so an interrupted measurement goes on with the next arm.
    """
    episodes = expert_episodes(make(64, seed), scale.noise, scale.episodes, seed)
    assert episodes.success is not None
    starts = video_models(seed, scale, episodes, folder)
    results: dict[str, Any] = {"data_success": float(episodes.success.float().mean())}
    world = make(scale.judged, seed)
    judge = partial(judged, world, episode_seeds(seed, "judge", scale.judged))

    def joint(start: Path) -> dict[str, Any]:
        model = JointVideoPolicy.build(
            replace(scale.model, model=start), world.spec, episodes, derive_seed(seed, "joint")
        )
        fit_stages(model, episodes, fitted(scale.joint), Generators(seed))
        actor = model.eval()
        return {"one decision": judge(actor), f"best of {scale.candidates}": judge(actor.planning(scale.candidates))}

    def yardstick() -> dict[str, Any]:
        keys = tuple(key for key in world.spec.observation if "environment" not in key)
        config = DenoisingPolicyConfig(
            observation_keys=keys, sampling_steps=5, image=ImageEncoderConfig(channels=(16, 32, 32))
        )
        data = episodes.select(episodes.success)
        policy = build_policy("diffusion", config, world.spec, data, derive_seed(seed, "yardstick"))
        settings = PretrainConfig(batch_size=128, fit=fitted(scale.yardstick))
        pretrain(policy, data, settings, seed=seed)
        return {"one decision": judge(policy)}

    measures = {YARDSTICK: yardstick} | {name: partial(joint, start) for name, start in starts.items()}
    for name, each in measures.items():
        path = folder / f"{name}.json"
        if not path.exists():
            write_json(path, each())
        results |= {f"{name}, {decides}": rate for decides, rate in read_json(path).items()}
    world.close()
    return results


def judged(world: World, seeds: Array, policy: Policy) -> dict[str, float]:
    """Return the success rate of a policy with its interval."""
    evaluation = evaluate_policy(world, policy, seeds)
    return rate_of(round(evaluation.success_rate * len(seeds)), len(seeds))


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the success of every arm."""
    runs, lines = list(figures["seeds"].values()), []
    for name in runs[0]:
        if isinstance(runs[0][name], Mapping):
            rates = [run[name] for run in runs]
            spread = spread_text(rate["success_rate"] for rate in rates)
            lines.append([name, spread, rate_text(pooled(rates)), ", ".join(map(rate_text, rates))])
    header = ["starts from, and decides by", "mean over seeds (range)", "pooled (Wilson 95 %)", "each seed"]
    return [Table(f"Success on {TASK} from pictures of 32 px", header, lines)]


BENCHMARK = Benchmark(
    "Does a joint policy over a video model's frames act from pictures, and do planning and the video help it?",
    ("seeds",),
    each_seed(lambda seed, folder: measure(seed, folder, Scale())),
    tables,
)
