"""LeRobot's denoising policies by tables decide what LeRobot decides, with the same random numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.examples import example_observation
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK
from robopolicy.inference.caching import CachePlan, FirstBlockCaching
from robopolicy.inference.calibration import calibrate
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.inference.lerobot import Convolution, lean_lerobot, why_not_lean
from robopolicy.inference.schedules import CacheConfig, make_plan
from robopolicy.policies.lerobot.acting import LeRobotPolicy, load_lerobot_policy
from robopolicy.testing.policy import Level, check_policy

pytestmark = pytest.mark.long

FRONT, SIZE = "observation.images.front", 32
ROWS = 3


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """Write a CLIP of a few thousand weights, and a tokenizer of single letters."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    folder = tmp_path_factory.mktemp("lean") / "clip"
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir()
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "vocab_size": len(words), "eos_token_id": len(words) - 1, "bos_token_id": len(words) - 2}
    torch.manual_seed(0)
    vision = {**size, "image_size": SIZE, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[]).save_pretrained(folder)
    return folder


def saved(config: Any, folder: Path) -> LeRobotPolicy:
    """Write a policy of random weights, none of them zero, and load it."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    torch.manual_seed(0)
    policy: Any = get_policy_class(config.type)(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.1)
    known = {}
    for key, feature in {**config.input_features, **config.output_features}.items():
        shape = (3, 1, 1) if len(feature.shape) == 3 else feature.shape
        low = -torch.rand(shape) - 0.5
        known[key] = {"min": low, "max": -2 * low, "mean": -0.4 * low, "std": 0.3 - 0.2 * low}
    for part in (policy, *make_pre_post_processors(config, dataset_stats=known)):
        part.save_pretrained(folder)
    return load_lerobot_policy(folder)


def features(environment: bool, camera: bool) -> dict:
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {STATE: PolicyFeature(FeatureType.STATE, (4,))}
    if environment:
        inputs[ENVIRONMENT_STATE] = PolicyFeature(FeatureType.ENV, (3,))
    if camera:
        inputs[FRONT] = PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE))
    return {"input_features": inputs, "output_features": {"action": PolicyFeature(FeatureType.ACTION, (2,))}}


def diffusion(folder: Path, **changes: Any) -> LeRobotPolicy:
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    settings = {
        "horizon": 16, "n_action_steps": 3, "down_dims": (16, 32, 32), "n_groups": 4, "num_train_timesteps": 20,
        "spatial_softmax_num_keypoints": 4, "use_group_norm": True, "crop_shape": None, "device": "cpu",
        "pretrained_backbone_weights": None, "push_to_hub": False, **features(True, changes.pop("camera", False)),
    }  # fmt: skip
    return saved(DiffusionConfig(**{**settings, **changes}), folder)


def transformer(folder: Path, clip: Path, **changes: Any) -> LeRobotPolicy:
    from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig

    settings = {
        "n_obs_steps": 2, "horizon": 8, "n_action_steps": 4, "hidden_dim": 32, "num_layers": 2, "num_heads": 2,
        "timestep_embed_dim": 16, "num_train_timesteps": 20, "num_integration_steps": 3, "image_crop_shape": None,
        "vision_encoder_name": str(clip), "text_encoder_name": str(clip), "tokenizer_max_length": 16, "device": "cpu",
        "push_to_hub": False, **features(False, True),
    }  # fmt: skip
    return saved(MultiTaskDiTConfig(**{**settings, **changes}), folder)


def require_equal(policy: LeRobotPolicy) -> LeRobotPolicy:
    """Check that both decide alike, for three rows and for one, and return the lean one."""
    lean = lean_lerobot(policy)
    observation = example_observation(policy.spec, ROWS, torch.Generator().manual_seed(1))
    observation[TASK] = ["push", "reach", "push"]
    alone = {key: value[:1] for key, value in observation.items()}
    for seed, given in enumerate((observation, alone, alone, observation)):
        theirs = policy.act(given, torch.Generator().manual_seed(seed)).actions
        ours = lean.act(given, torch.Generator().manual_seed(seed)).actions
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5) and theirs.std() > 1e-3
        other = lean.act(given, torch.Generator().manual_seed(seed + 9)).actions
        assert not torch.allclose(ours, other, atol=1e-3)
    return lean


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"camera": True, "num_inference_steps": 5},
        {"noise_scheduler_type": "DDIM", "num_inference_steps": 5},
        {"noise_scheduler_type": "DDIM", "prediction_type": "sample", "clip_sample_range": 0.5},
        {"prediction_type": "sample", "clip_sample": False, "use_film_scale_modulation": False},
        {"down_dims": (16, 16), "beta_schedule": "linear", "kernel_size": 3},
    ],
)
def test_diffusion_decides_alike(tmp_path, changes):
    require_equal(diffusion(tmp_path / "policy", **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rope": False, "use_positional_encoding": True, "noise_scheduler_type": "DDIM", "num_inference_steps": 4},
        {"prediction_type": "sample"},
        {"objective": "flow_matching"},
        {"objective": "flow_matching", "integration_method": "rk4"},
    ],
)
def test_multi_task_dit_decides_alike(tmp_path, clip, changes):
    require_equal(transformer(tmp_path / "policy", clip, **changes))


def test_what_is_lean_is_a_policy_and_leaves_the_other_alone(tmp_path, clip):
    policy = transformer(tmp_path / "policy", clip, objective="flow_matching")
    observation = example_observation(policy.spec, ROWS, torch.Generator().manual_seed(1))
    before = policy.act(observation, torch.Generator().manual_seed(0)).actions
    lean = lean_lerobot(policy)
    assert check_policy(lean).level is Level.ACTS and lean.spec == policy.spec
    assert torch.equal(policy.act(observation, torch.Generator().manual_seed(0)).actions, before)


def test_a_text_is_encoded_once(tmp_path, clip):
    lean = lean_lerobot(transformer(tmp_path / "policy", clip, objective="flow_matching"))
    inner: Any = lean.policy
    encoded, encoder = [], inner.observation_encoder.text_encoder.encoder
    encoder.register_forward_hook(lambda module, given, result: encoded.append(len(given[0])))
    observation = example_observation(lean.spec, ROWS, torch.Generator().manual_seed(1))
    for texts in (["push", "reach", "push"], ["reach", "push", "push"], ["reach", "lift", "lift"]):
        observation[TASK] = texts
        lean.act(observation, torch.Generator().manual_seed(0))
    assert encoded == [2, 1]


@pytest.mark.parametrize("kind", ["diffusion", "transformer"])
def test_blocks_are_remembered_by_plan(tmp_path, clip, kind):
    """All of them computed in every step are the chain itself; the fewer are, the further it is off."""
    few = {"num_inference_steps": 8, "noise_scheduler_type": "DDIM"}
    if kind == "diffusion":
        policy = diffusion(tmp_path, **few)
        stages = len(policy.policy.config.down_dims)
        sizes = {"down": 2 * stages, "middle": 2, "up": 2 * (stages - 1)}
        names = [f"{part}.{place}" for part, size in sizes.items() for place in range(size)]
    else:
        policy = transformer(tmp_path, clip, objective="flow_matching", num_integration_steps=8)
        layers = policy.policy.config.num_layers
        names = [f"{place}.{part}" for place in range(layers) for part in ("attention", "feed_forward")]
    observation = example_observation(policy.spec, ROWS, torch.Generator().manual_seed(1))
    calibration = calibrate(policy, observation, torch.Generator().manual_seed(0), rows=2)
    assert list(calibration.blocks) == names and calibration.steps == 8 and calibration.rows == ROWS
    assert torch.allclose(
        calibration.similarity.diagonal(dim1=1, dim2=2), torch.ones(len(names), 8).double(), atol=1e-4
    )

    def actions(caching):
        return lean_lerobot(policy, caching).act(observation, torch.Generator().manual_seed(1)).actions

    own = actions(None)
    everything = make_plan(calibration, CacheConfig("uniform", 8))
    assert torch.equal(actions(everything), own) and torch.equal(actions(FirstBlockCaching(0.0)), own)
    plans = [make_plan(calibration, CacheConfig("shared", budget)) for budget in (6, 3)]
    errors = [float((actions(plan) - own).abs().mean()) for plan in plans]
    assert 0 < errors[0] < errors[1]
    assert float((actions(make_plan(calibration, CacheConfig("bac", 4))) - own).abs().mean()) > 0
    assert (
        with_engine(policy, InferenceConfig("lean"), everything)
        .act(observation, torch.Generator())
        .actions.isfinite()
        .all()
    )


def test_plans_that_do_not_fit_are_refused(tmp_path, clip):
    small = diffusion(tmp_path / "a", num_inference_steps=8, noise_scheduler_type="DDIM")
    plan = CachePlan(("other",), ((True,) * 8,))
    with pytest.raises(ConfigError, match="another network"):
        lean_lerobot(small, plan)
    observation = example_observation(small.spec, ROWS, torch.Generator().manual_seed(1))
    fitting = make_plan(calibrate(small, observation, torch.Generator()), CacheConfig("uniform", 4))
    longer = diffusion(tmp_path / "b", num_inference_steps=9, noise_scheduler_type="DDIM")
    with pytest.raises(ConfigError, match="chains of 8 steps"):
        lean_lerobot(longer, fitting)
    back = transformer(tmp_path / "c", clip, objective="flow_matching", integration_method="rk4")
    with pytest.raises(ConfigError, match="revisits times"):
        lean_lerobot(back, fitting)


def test_convolutions_agree_for_every_size():
    generator = torch.Generator().manual_seed(0)
    for stride, padding, taps in ((1, 2, 5), (2, 1, 3), (1, 0, 1)):
        weight, bias = torch.randn(6, 4, taps, generator=generator), torch.randn(6, generator=generator)
        convolve = Convolution(weight, bias, stride, padding)
        for size in ((1, 4, 16), (3, 4, 16), (1, 4, 8), (1, 4, 16)):
            x = torch.randn(size, generator=generator)
            expected = torch.nn.functional.conv1d(x, weight, bias, stride, padding)
            assert torch.allclose(convolve(x), expected, atol=1e-5)


def test_what_does_not_denoise_is_refused_with_a_reason(tmp_path):
    from lerobot.policies.act.configuration_act import ACTConfig

    config = ACTConfig(
        chunk_size=6, n_action_steps=4, dim_model=32, n_heads=2, dim_feedforward=32, n_encoder_layers=1,
        n_vae_encoder_layers=1, latent_dim=4, device="cpu", pretrained_backbone_weights=None, push_to_hub=False,
        **features(True, False),
    )  # fmt: skip
    policy = saved(config, tmp_path / "policy")
    assert "engine=lean does not support LeRobot's 'act'" in why_not_lean(policy)
    with pytest.raises(ConfigError, match="engine=reference"):
        lean_lerobot(policy)
