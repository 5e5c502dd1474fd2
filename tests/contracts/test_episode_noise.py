"""An outcome belongs to its episode: whoever acts, wherever, another batch size plays the same episodes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.core.policy import Decision, Policy
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.configuration import CorrectConfig
from robopolicy.data.record import record, record_corrected
from robopolicy.evaluation.deployment import MixedPolicy
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.policies import DenoisingPolicyConfig, TokenConfig, TokenPolicyConfig
from robopolicy.policies.configuration import JointConfig, Likelihood, MemoryPolicyConfig, PolicyKind
from robopolicy.policies.lerobot.acting import load_lerobot_policy
from robopolicy.policies.loading import build_policy
from robopolicy.policies.registry import LEFT_BEHIND, POLICIES
from robopolicy.policies.token.configuration import TokenDecoding
from robopolicy.rl.offline.configuration import AGENTS, RlpdConfig
from robopolicy.rl.offline.edit import Edit
from robopolicy.training.critics import AgentPolicy, BestOfPolicy, interface_of, steer
from robopolicy.training.editing import EditedPolicy
from robopolicy.training.offline.configuration import LatentSeekConfig
from robopolicy.training.offline.seeking import SeekingPolicy
from sims.engine import MujocoWorld
from sims.experts import NoisyController, noise_level
from sims.registry import load_task
from worldmodels.configuration import EnsembleConfig, JointVideoConfig, PlanConfig, VideoConfig
from worldmodels.ensemble import EnsembleModel
from worldmodels.env import ImaginedWorld
from worldmodels.planning import PlannedPolicy
from worldmodels.protocol import Context

TASK, ROWS, SEEDS = replace(load_task("reach_planar"), horizon=12), (3, 8), episode_seeds(0, "noise", 11)
DENOISING = {"width": 16, "depth": 1, "sampling_steps": 3, "denoising_steps": 10, "prediction_steps": 4, "chunk": 4}
TOKENS = {"width": 16, "depth": 1, "heads": 2, "feed_forward": 32, "bins": 7}


@cache
def shown():
    """Episodes of the expert in disorder, which give a policy its units."""
    world = MujocoWorld(TASK, 8)
    noisy = NoisyController(TASK.expert(), noise_level("high"), 0, world.spec.action)
    return world.spec, record(world, noisy, np.arange(8))


def built(kind: str, config: Any) -> Policy:
    """A policy with random weights, which are large enough to matter."""
    spec, episodes = shown()
    policy = build_policy(kind, config, spec, episodes, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return policy.eval()


def diffusion(**changed: Any) -> Policy:
    return built("diffusion", DenoisingPolicyConfig(**{**DENOISING, **changed}))


def tokens(decoding: TokenDecoding) -> Policy:
    return built("token", TokenPolicyConfig(chunk=4, token=TokenConfig(**TOKENS, decoding=decoding, decode_steps=4)))


def memory() -> Policy:
    return built("memory", MemoryPolicyConfig(chunk=4, history=1, width=16, depth=1))


def joint(candidates: int = 1) -> Policy:
    return built("joint", JointConfig(width=16, depth=1, heads=2, chunk=4, candidates=candidates, values=2))


def agent(kind: str = "rlpd", chunk: int = 4) -> tuple[Any, Any]:
    spec, _ = shown()
    base = diffusion()
    interface = interface_of(base, spec.observation, spec.action, spec.instructions, chunk=chunk)
    return AGENTS.builds(kind)(RlpdConfig(width=16, depth=1), interface.size, interface.actions, 0), interface


def steering() -> Policy:
    spec, _ = shown()
    settings = RlpdConfig(width=16, depth=1)
    return steer(diffusion(), settings, spec.observation, spec.instructions, bound=2.0, seed=0, kind="rlpd")


def editing() -> Policy:
    spec, _ = shown()
    base = diffusion()
    interface = interface_of(base, spec.observation, spec.action, spec.instructions)
    agent = Edit(RlpdConfig(width=16, depth=1), interface.size, interface.actions, 0, scale=0.3)
    return EditedPolicy(base, agent, interface, count=3)


def seeking() -> Policy:
    base = diffusion()
    return SeekingPolicy(base, *agent(), LatentSeekConfig(), 2)


def planned() -> Policy:
    spec, episodes = shown()
    model = EnsembleModel.build(EnsembleConfig(members=2, width=16, depth=1, head_width=16), spec, episodes, seed=0)
    return PlannedPolicy(diffusion(), model.eval(), PlanConfig(candidates=3, rollouts=2, horizon=6))


class Stranger:
    """Draws for all rows by torch's own functions: from the generator, and from the global one."""

    def __init__(self) -> None:
        self.inner = diffusion()
        self.spec = self.inner.spec

    def reset(self, rows: Any = None) -> None: ...

    def act(self, observation: Any, generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        actions = self.inner.act(observation, generator, deterministic=deterministic).actions
        noise = torch.randn(actions.shape, generator=generator, device=generator.device) + torch.rand_like(actions)
        return Decision((actions + 0.3 * noise).clamp(-1, 1))


MAKERS: dict[str, Callable[[], Policy]] = {
    "diffusion": diffusion,
    "diffusion, some steps noisy": lambda: diffusion(noisy_steps=1),
    "diffusion, log-probabilities by matching": lambda: diffusion(likelihood=Likelihood.MATCHING),
    "flow": lambda: built("flow", DenoisingPolicyConfig(**DENOISING, kind=PolicyKind.FLOW)),
    "token": lambda: tokens(TokenDecoding.CAUSAL),
    "memory": memory,
    "token, masked": lambda: tokens(TokenDecoding.MASKED),
    "token, parallel": lambda: tokens(TokenDecoding.PARALLEL),
    "joint": joint,
    "joint, planning": lambda: joint(3),
    "agent": lambda: AgentPolicy(*agent(), shown()[0].fps),
    "best_of": lambda: BestOfPolicy(diffusion(), *agent(), 3),
    "steered": steering,
    "seeking": seeking,
    "edited": editing,
    "planned": planned,
    "mixed": lambda: MixedPolicy(diffusion(), diffusion(), 0.5, 10, "step"),
    "stranger": Stranger,
}


def same(first: Any, second: Any) -> None:
    """The same episodes, but for the rounding of matrix products of few rows."""
    assert first.success.tolist() == second.success.tolist() and first.lengths.tolist() == second.lengths.tolist()
    np.testing.assert_allclose(first.returns, second.returns, atol=1e-3)


def check(policy: Policy, world: Callable[[int], Any], *, draws: bool = True) -> None:
    for deterministic in (True, False):
        few, many = (evaluate_policy(world(rows), policy, SEEDS, deterministic=deterministic) for rows in ROWS)
        same(few, many)
    other = evaluate_policy(world(ROWS[1]), policy, SEEDS, deterministic=False, generator_seed=1)
    assert draws == (not np.allclose(other.returns, many.returns, atol=1e-3)), "it draws from the noise seed"


def test_every_registered_kind_is_here():
    kinds = {name.split(",")[0] for name in MAKERS} | {"lerobot", "joint_video"}
    assert {*POLICIES.ours, *LEFT_BEHIND.ours} <= kinds


@pytest.mark.parametrize("name", MAKERS)
def test_an_outcome_does_not_depend_on_the_batch_size(name: str):
    check(MAKERS[name](), lambda rows: MujocoWorld(TASK, rows))


@pytest.mark.long
@pytest.mark.parametrize("candidates", [1, 2])
def test_nor_does_that_of_a_policy_that_is_a_video_model(candidates: int):
    def world(rows: int) -> MujocoWorld:
        return MujocoWorld(TASK, rows, cameras=("front",), image_size=16)

    recorder = world(8)
    noisy = NoisyController(TASK.expert(), noise_level("high"), 0, recorder.spec.action)
    episodes = record(recorder, noisy, np.arange(8))
    video = VideoConfig(size="tiny", precision="float32")
    policy = build_policy("joint_video", JointVideoConfig(video=video), recorder.spec, episodes, 0).eval()
    check(policy.planning(candidates), world)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_nor_does_that_of_lerobots(kind: str, tmp_path: Path):
    policy = load_lerobot_policy(lerobot(kind, tmp_path))
    check(policy, lambda rows: MujocoWorld(TASK, rows, history=policy.spec.history), draws=kind != "act")


def lerobot(kind: str, folder: Path) -> Path:
    """A tiny policy of LeRobot's for the task, with random weights."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot_models import tiny_act

    spec, episodes = shown()
    types = {STATE: FeatureType.STATE, ENVIRONMENT_STATE: FeatureType.ENV}
    inputs = {key: PolicyFeature(types[key], field.shape) for key, field in spec.observation.items() if key in types}
    outputs = {"action": PolicyFeature(FeatureType.ACTION, spec.action.shape)}
    if kind == "act":
        config: Any = tiny_act(inputs, outputs)
    else:
        config = DiffusionConfig(
            input_features=inputs, output_features=outputs, horizon=8, n_action_steps=3, down_dims=(16, 32),
            n_groups=4, num_train_timesteps=10, num_inference_steps=4, device="cpu", push_to_hub=False,
            pretrained_backbone_weights=None, crop_shape=None,
        )  # fmt: skip
    torch.manual_seed(0)
    made: Any = get_policy_class(config.type)(config)
    values = {**{key: episodes.observation[key] for key in inputs}, "action": episodes.actions}
    known = {
        key: {"min": value.amin(0), "max": value.amax(0), "mean": value.mean(0), "std": value.std(0) + 0.1}
        for key, value in values.items()
    }
    for part in (made, *make_pre_post_processors(config, dataset_stats=known)):
        part.save_pretrained(folder)
    return folder


@cache
def imagination() -> EnsembleModel:
    spec, episodes = shown()
    model = EnsembleModel.build(EnsembleConfig(members=3, width=16, depth=1, head_width=16), spec, episodes, seed=0)
    return model.eval()


def imagined(rows: int) -> ImaginedWorld:
    spec, _ = shown()
    simulator = MujocoWorld(TASK, len(SEEDS))
    first = simulator.reset(seeds=SEEDS)
    at = {int(seed): row for row, seed in enumerate(SEEDS)}

    def starts(seeds: np.ndarray) -> Context:
        index = [at[int(seed)] for seed in seeds]
        return Context({key: first[key][index] for key in spec.observation})

    return ImaginedWorld(imagination(), starts, rows)


def test_an_imagined_world_draws_for_the_episode_too():
    assert imagination().config.members > 1  # of which every step draws one
    check(diffusion(), imagined)


def played(rows: int, actor: Any, **options: Any) -> Any:
    return record(MujocoWorld(TASK, rows), actor, SEEDS, generator=torch.Generator().manual_seed(5), **options)


def same_episodes(first: Any, second: Any) -> None:
    assert first.lengths.tolist() == second.lengths.tolist()
    torch.testing.assert_close(first.actions, second.actions, rtol=0, atol=1e-3)


def noisy(level: str) -> NoisyController:
    return NoisyController(TASK.expert(), noise_level(level), 3, MujocoWorld(TASK, 1).spec.action)


@pytest.mark.parametrize("actor", [diffusion, Stranger, lambda: noisy("medium"), lambda: noisy("high")])
def test_recorded_episodes_do_not_depend_on_the_batch_size(actor: Callable[[], Any]):
    few, many = (played(rows, actor()) for rows in ROWS)
    same_episodes(few, many)
    again = played(ROWS[0], actor(), episodes=6)
    torch.testing.assert_close(again.actions, few.select(range(6)).actions, rtol=0, atol=1e-3)


def test_labels_of_a_teacher_that_draws_and_corrections_do_not_either():
    few, many = (played(rows, noisy("low"), teacher=diffusion()) for rows in ROWS)
    same_episodes(few, many)
    torch.testing.assert_close(few.labels, many.labels, rtol=0, atol=1e-3)
    config = CorrectConfig(no_progress_steps=4, rewind=2)
    few, many = (
        record_corrected(
            MujocoWorld(TASK, rows), diffusion(), noisy("medium"), SEEDS, config, generator=torch.Generator()
        )
        for rows in ROWS
    )
    same_episodes(few, many)
    assert few.actor.tolist() == many.actor.tolist() and 0 < few.actor.float().mean() < 1


def test_two_controllers_disturb_their_episodes_apart():
    """The disturbance of an episode and a step is a function of both and of the controller's seed."""
    spec = MujocoWorld(TASK, 1).spec
    observation = MujocoWorld(TASK, 4).reset(seeds=SEEDS[:4])

    def acted(seed: int, begun: np.ndarray, steps: int = 3) -> np.ndarray:
        controller = NoisyController(TASK.expert(), noise_level("high"), seed, spec.action)
        controller.begin(begun)
        return np.stack([controller.act(observation) for _ in range(steps)], 1)

    first = acted(0, SEEDS[:4])
    assert np.array_equal(acted(0, SEEDS[:4]), first) and not np.array_equal(acted(1, SEEDS[:4]), first)
    assert not np.array_equal(first[:, 0], first[:, 1])
