"""LeRobot's checkpoints as policies: the same chunks as LeRobot's own, for any number of rows, and one-line errors."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_models import tiny_act, word_tokenizer, xvla_config
from safetensors.torch import load_file, save_file

from robopolicy.core.errors import CheckpointError, ConfigError, SpecError
from robopolicy.core.examples import example_observation
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK
from robopolicy.doctor.data import check_rate
from robopolicy.doctor.findings import Health
from robopolicy.policies.lerobot.acting import LeRobotSettings, load_lerobot_policy
from robopolicy.policies.loading import load_policy
from robopolicy.testing.policy import Level, check_policy

pytestmark = pytest.mark.long

FRONT = "observation.images.front"
SIZE = 32
ROWS = 3


def features(state: int = 4, environment: int | None = 3, cameras: tuple[str, ...] = ()) -> tuple[dict, dict]:
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {STATE: PolicyFeature(FeatureType.STATE, (state,))}
    if environment is not None:
        inputs[ENVIRONMENT_STATE] = PolicyFeature(FeatureType.ENV, (environment,))
    inputs |= {camera: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for camera in cameras}
    return inputs, {"action": PolicyFeature(FeatureType.ACTION, (2,))}


def statistics(inputs: dict, outputs: dict) -> dict[str, dict[str, torch.Tensor]]:
    """Return statistics that are not neutral, so that a missing or doubled normalisation shows."""
    generator = torch.Generator().manual_seed(5)
    statistics_of_keys = {}
    for key, feature in {**inputs, **outputs}.items():
        shape = (3, 1, 1) if len(feature.shape) == 3 else feature.shape
        low = -torch.rand(shape, generator=generator) - 0.5
        statistics_of_keys[key] = {"min": low, "max": -2 * low, "mean": -0.4 * low, "std": 0.3 - 0.2 * low}
    return statistics_of_keys


def save(config: Any, folder: Path, discretized: bool = True, processors: tuple[Any, Any] | None = None) -> Path:
    """Build a LeRobot policy and save it with its processors, LeRobot's or other `processors`, as LeRobot does."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    torch.manual_seed(0)
    policy: Any = get_policy_class(config.type)(config)
    with torch.no_grad():
        for parameter in policy.parameters():  # an untrained transformer's zeros would hide what it is conditioned on
            if not parameter.any():
                parameter.normal_(0, 0.1)
    if config.type == "vqbet":
        policy.vqbet.action_head.vqvae_model.discretized.fill_(discretized)
    known = statistics(config.input_features, config.output_features)
    for part in (policy, *(processors or make_pre_post_processors(config, dataset_stats=known))):
        part.save_pretrained(folder)
    return folder


def act_config(**options: Any):
    inputs, outputs = features(**options)
    return tiny_act(inputs, outputs)


def diffusion_config(**options: Any):
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    inputs, outputs = features(**options)
    return DiffusionConfig(
        input_features=inputs, output_features=outputs, horizon=8, n_action_steps=3, down_dims=(16, 32), n_groups=4,
        num_train_timesteps=10, num_inference_steps=4, device="cpu", pretrained_backbone_weights=None,
        spatial_softmax_num_keypoints=4, push_to_hub=False, crop_shape=None, use_group_norm=True,
    )  # fmt: skip


def vqbet_config():
    from lerobot.policies.vqbet.configuration_vqbet import VQBeTConfig

    inputs, outputs = features(environment=None, cameras=(FRONT,))
    return VQBeTConfig(
        input_features=inputs, output_features=outputs, n_obs_steps=3, action_chunk_size=4, crop_shape=None,
        gpt_input_dim=32, gpt_output_dim=32, gpt_n_layer=1, gpt_n_head=2, gpt_hidden_dim=32, vqvae_embedding_dim=16,
        vqvae_enc_hidden_dim=16, spatial_softmax_num_keypoints=4, device="cpu", pretrained_backbone_weights=None,
        push_to_hub=False, use_group_norm=True,
    )  # fmt: skip


def tiny_clip(folder: Path) -> Path:
    """Write a CLIP model and tokenizer of a few thousand weights; LeRobot asks for "clip" in the folder's name."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "vocab_size": len(words), "eos_token_id": len(words) - 1, "bos_token_id": len(words) - 2}
    vision = {**size, "image_size": SIZE, "patch_size": 16}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[]).save_pretrained(folder)
    return folder


def dit_config(clip: Path):
    from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig

    inputs, outputs = features(environment=None, cameras=(FRONT,))
    return MultiTaskDiTConfig(
        input_features=inputs, output_features=outputs, n_obs_steps=2, horizon=8, n_action_steps=4, hidden_dim=32,
        num_layers=1, num_heads=2, objective="flow_matching", num_integration_steps=3, image_crop_shape=None,
        vision_encoder_name=str(clip), text_encoder_name=str(clip), tokenizer_max_length=16, device="cpu",
        push_to_hub=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lerobot")
    words = root / "words"
    word_tokenizer().save_pretrained(words)
    return {
        "act": save(act_config(cameras=(FRONT,)), root / "act"),
        "state": save(act_config(), root / "state"),
        "diffusion": save(diffusion_config(cameras=(FRONT, "observation.images.wrist")), root / "diffusion"),
        "vqbet": save(vqbet_config(), root / "vqbet"),
        "multi_task_dit": save(dit_config(tiny_clip(root / "clip")), root / "dit"),
        "xvla": save(xvla_config(words, *features(environment=None, cameras=(FRONT,))), root / "xvla"),
    }


@pytest.fixture
def copy(folders, tmp_path) -> Path:
    return shutil.copytree(folders["state"], tmp_path / "copy")


def observed(policy, seed: int = 0):
    observation = example_observation(policy.spec, ROWS, torch.Generator().manual_seed(seed))
    observation[TASK] = ["push the cube", "reach", "stack"]
    return observation


def lerobots_chunk(folder: Path, observation: dict, steps: int, noise: torch.Tensor | None, seed: int) -> torch.Tensor:
    """Return what LeRobot's own `select_action` executes until its queue is empty, fed the history frame by frame."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder)
    preprocess, postprocess = make_pre_post_processors(config, str(folder))
    policy.reset()
    arrays = {key: value for key, value in observation.items() if key != TASK}
    history = next(iter(arrays.values())).shape[1]

    def frame(index: int) -> dict:
        values = {key: value[:, index] for key, value in arrays.items()}
        values = {
            key: value.permute(0, 3, 1, 2).contiguous().float() / 255 if value.ndim == 4 else value
            for key, value in values.items()
        }
        return preprocess({**values, TASK: observation[TASK]})

    for index in range(history - 1):  # fills the queues; what it decides meanwhile is thrown away
        policy.select_action(frame(index))
        policy._queues["action"].clear()
    torch.manual_seed(seed)
    options = {} if noise is None else {"noise": noise}
    last = frame(history - 1)
    return torch.stack([postprocess(policy.select_action(dict(last), **options)) for _ in range(steps)], dim=1)


@pytest.mark.parametrize("kind", ["act", "diffusion", "vqbet", "multi_task_dit", "xvla"])
def test_chunks_equal_lerobots_own(folders, kind):
    policy = load_policy(folders[kind])
    observation = observed(policy)
    ours = policy.act(observation, torch.Generator().manual_seed(7)).actions
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(ROWS, 8, 2, generator=generator) if kind == "diffusion" else None
    seed = int(torch.randint(2**62, (1,), generator=generator))
    theirs = lerobots_chunk(folders[kind], observation, policy.spec.chunk, noise, seed)
    assert ours.shape == (ROWS, 3 if kind == "diffusion" else 4, 2)
    assert torch.equal(ours, theirs)
    assert ours.std() > 1e-3


@pytest.mark.parametrize("kind", ["act", "diffusion", "vqbet", "multi_task_dit", "xvla"])
def test_keeps_the_promises_of_a_policy(folders, kind):
    report = check_policy(load_policy(folders[kind]))
    assert report.level is Level.ACTS


def test_what_it_reads_and_writes(folders):
    spec = load_policy(folders["diffusion"]).spec
    assert (spec.history, spec.chunk, spec.scored_steps) == (2, 3, 0)
    assert {key: field.shape for key, field in spec.observation.items()} == {
        STATE: (4,), ENVIRONMENT_STATE: (3,), FRONT: (SIZE, SIZE, 3), "observation.images.wrist": (SIZE, SIZE, 3),
    }  # fmt: skip
    assert spec.observation[FRONT].dtype == "uint8"
    assert spec.action.shape == (2,)


def test_a_rate_that_the_checkpoint_does_not_say_is_no_mistake(folders):
    finding = check_rate(10.0, load_policy(folders["state"]).spec.fps, "policy")
    assert (finding.health, finding.problem) == (Health.UNKNOWN, False)
    assert "rate is unknown" in finding.measured


def test_rows_do_not_touch_each_other(folders):
    policy = load_policy(folders["act"])
    observation, generator = observed(policy), torch.Generator()
    together = policy.act(observation, generator).actions
    for row in range(ROWS):
        alone = {key: value[row : row + 1] for key, value in observation.items()}
        assert torch.allclose(policy.act(alone, generator).actions[0], together[row], atol=1e-5)


def test_texts_reach_a_language_policy(folders):
    policy = load_policy(folders["multi_task_dit"])
    observation = observed(policy)
    first = policy.act(observation, torch.Generator().manual_seed(0)).actions
    other = policy.act({**observation, TASK: ["lift"] * ROWS}, torch.Generator().manual_seed(0)).actions
    assert not torch.allclose(first, other)


def moved(observation, key: str, to: str):
    return {to if name == key else name: value for name, value in observation.items()}


def test_names_are_mapped_where_the_file_says_so(copy):
    plain = load_policy(copy)
    settings = {"features": {ENVIRONMENT_STATE: "observation.goal"}, "fps": 20, "instructions": ["reach"]}
    (copy / "robopolicy.json").write_text(json.dumps(settings))
    policy = load_policy(copy)
    assert (policy.spec.fps, policy.spec.instructions) == (20.0, ("reach",))
    observation, generator = observed(plain), torch.Generator()
    mapped = policy.act(moved(observation, ENVIRONMENT_STATE, "observation.goal"), generator).actions
    assert torch.equal(mapped, plain.act(observation, generator).actions)
    expected = r"no field 'observation.goal': .*reads .*observation.goal.*but the world outputs .*environment_state"
    with pytest.raises(SpecError, match=expected):
        policy.act(observation, generator)
    (copy / "robopolicy.json").write_text(json.dumps({"features": {"observation.stat": "observation.goal"}}))
    with pytest.raises(ConfigError, match=r"features has 'observation.stat', .* Did you mean 'observation.state'"):
        load_policy(copy)
    (copy / "robopolicy.json").write_text(json.dumps({"rate": 20}))
    with pytest.raises(ConfigError, match="rate"):
        load_policy(copy)


def test_a_processor_that_renames_reads_the_old_name(folders, copy):
    path = copy / "policy_preprocessor.json"
    steps = json.loads(path.read_text())
    rename = next(step for step in steps["steps"] if step["registry_name"] == "rename_observations_processor")
    rename["config"]["rename_map"] = {"observation.joints": STATE}
    path.write_text(json.dumps(steps))
    policy, plain = load_policy(copy), load_policy(folders["state"])
    assert set(policy.spec.observation) == {"observation.joints", ENVIRONMENT_STATE}
    observation, generator = observed(plain), torch.Generator()
    renamed = policy.act(moved(observation, STATE, "observation.joints"), generator).actions
    assert torch.equal(renamed, plain.act(observation, generator).actions)


def test_images_are_resized_only_when_asked(folders):
    plain = load_policy(folders["act"])
    observation, generator = observed(plain), torch.Generator()
    plane = torch.tensor([10, 120, 200], dtype=torch.uint8)[:, None, None, None, None]
    observation[FRONT] = plane.expand(ROWS, 1, SIZE, SIZE, 3)
    large = plane.expand(ROWS, 1, 64, 64, 3)
    with pytest.raises(SpecError, match=r"images.front' has shape \(3, 1, 64, 64, 3\)"):
        plain.act({**observation, FRONT: large}, generator)
    policy = load_lerobot_policy(folders["act"], settings=LeRobotSettings(image_sizes={FRONT: (64, 64)}))
    assert policy.spec.observation[FRONT].shape == (64, 64, 3)
    resized = policy.act({**observation, FRONT: large}, generator).actions
    assert torch.allclose(resized, plain.act(observation, generator).actions, atol=1e-5)


def test_a_missing_field_lists_both_sides(folders):
    policy = load_policy(folders["act"])
    observation = observed(policy)
    renamed = moved(observation, STATE, "observation.joints")
    expected = (
        r"no field 'observation.state': .*reads .*observation.state, but .* outputs .*observation.joints.*features"
    )
    with pytest.raises(SpecError, match=expected):
        policy.act(renamed, torch.Generator())


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json", "normalizer"],
)
def test_missing_files_are_named(copy, name):
    path = next(copy.glob("policy_preprocessor_step_*.safetensors")) if name == "normalizer" else copy / name
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name) as caught:
        load_policy(copy)
    assert "\n" not in str(caught.value)


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"type": "tdmpc"},
            r"policy 'tdmpc'.*act, diffusion, multi_task_dit, pi0, .*pi0_fast, smolvla, vqbet, xvla",
        ),
        ({"type": "difusion"}, "Did you mean 'diffusion'"),
        ({"temporal_ensemble_coeff": 0.01}, "averages overlapping chunks"),
        ({"use_peft": True}, "adapter"),
        ({"dim_model": 64}, r"cannot be loaded as LeRobot's 'act': .* size mismatch for model\.\w+"),
        ({"n_action_steps": 99}, "chunk size is the upper bound"),
        ({"chunk_size": 10**9}, "chunk_size=1000000000, but at most 10000"),
        ({"n_encoder_layers": 10**5}, "n_encoder_layers=100000, but at most"),
        ({"n_encoder_layers": 900}, "far more memory than its weights occupy"),
        ({"dim_feedforward": 10**30}, "dim_feedforward=1"),
        ({"dim_feedforward": 10**6}, "far more memory than its weights occupy"),
    ],
)
def test_checkpoints_that_cannot_be_used_say_why(copy, changes, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        load_policy(edited(copy, **changes))
    assert "\n" not in str(caught.value)


def test_images_are_processed_in_sizes_that_there_are(folders, tmp_path):
    copy = shutil.copytree(folders["act"], tmp_path / "copy")
    path = copy / "policy_preprocessor.json"
    described = json.loads(path.read_text())
    step = {"registry_name": "image_crop_resize_processor", "config": {"resize_size": [40_000, 40_000]}}
    path.write_text(json.dumps({**described, "steps": [*described["steps"], step]}))
    with pytest.raises(CheckpointError, match=r"policy_preprocessor\.json has resize_size=40000, but at most 4096"):
        load_policy(copy)
    shutil.copytree(folders["act"], copy, dirs_exist_ok=True)
    (copy / "robopolicy.json").write_text(json.dumps({"image_sizes": {FRONT: [10**6, 32]}}))
    with pytest.raises(ConfigError, match=r"image_sizes.* is 1000000: it must lie between 1 and 4096"):
        load_policy(copy)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_weights_of_another_kind_are_not_rounded_in_silence(copy, dtype):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, value in tensors.items() if value.is_floating_point())
    save_file({**tensors, name: tensors[name].to(dtype)}, path)
    with pytest.raises(CheckpointError, match=rf"contains '{name}' as {str(dtype)[6:]}, but it is used as float32"):
        load_policy(copy)
    save_file({**tensors, name: tensors[name].bfloat16()}, path)
    load_policy(copy)


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        ({"class": "antigravity.Step"}, r"uses the class antigravity\.Step.*run\.plugins=\[antigravity\]"),
        ({"class": "lerobot.processor.pipeline.hf_hub_download"}, r"uses the class lerobot\.processor"),
        ({"class": "lerobot.scripts.lerobot_train.subprocess"}, r"uses the class lerobot\.scripts"),
        ({"class": ["a"]}, "uses the class"),
        ({}, "uses the class None"),
        ({"registry_name": "reward_classifier_processor"}, "uses the processor step 'reward_classifier_processor'"),
        ({"registry_name": "nowhere"}, "uses the processor step 'nowhere'"),
        ({"registry_name": ["a"]}, "uses the processor step"),
        ({"registry_name": "normalizer_processor", "state_file": "../../x.safetensors"}, "which is not next to it"),
        ({"registry_name": "normalizer_processor", "state_file": 3}, "which is not next to it"),
    ],
)
@pytest.mark.parametrize("processor", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_a_checkpoint_does_not_choose_what_is_imported(copy, processor, step, complaint):
    path = copy / processor
    steps = json.loads(path.read_text())
    steps["steps"].append({"config": {}, **step})
    path.write_text(json.dumps(steps))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_policy(copy)
    assert "\n" not in str(caught.value)
    assert "antigravity" not in sys.modules


CODE = """from pathlib import Path
Path(__file__).parent.joinpath("ran").touch()
class Evil: pass
"""


@pytest.fixture
def evil(tmp_path, monkeypatch) -> Path:
    """A tokenizer's folder that asks transformers to run the code beside it; whoever is asked says yes."""
    folder = tiny_clip(tmp_path / "evil_clip")
    path = folder / "tokenizer_config.json"
    known = {
        **json.loads(path.read_text()),
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil"] * 2},
    }
    path.write_text(json.dumps({**known, "processor_class": "Evil"}))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "evil.Evil"}}))
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    (folder / "evil.py").write_text(CODE.replace("Path(__file__).parent", f"Path({str(folder)!r})"))
    monkeypatch.setattr("builtins.input", lambda *asked: (folder / "asked").touch() or "y")
    return folder


def test_a_tokenizer_that_brings_code_is_refused_without_asking(copy, evil):
    steps = json.loads((copy / "policy_preprocessor.json").read_text())
    tokenizer = {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": str(evil)}}
    (copy / "policy_preprocessor.json").write_text(json.dumps({**steps, "steps": [*steps["steps"], tokenizer]}))
    with pytest.raises(CheckpointError, match="custom code"):
        load_policy(copy)
    assert not {"ran", "asked"} & {path.name for path in evil.iterdir()}


def test_an_action_tokenizer_is_no_step_that_a_checkpoint_may_choose(copy, evil):
    steps = json.loads((copy / "policy_preprocessor.json").read_text())
    config = {"action_tokenizer_name": str(evil), "trust_remote_code": True, "paligemma_tokenizer_name": str(evil)}
    tokenizer = {"registry_name": "action_tokenizer_processor", "config": config}
    (copy / "policy_preprocessor.json").write_text(json.dumps({**steps, "steps": [*steps["steps"], tokenizer]}))
    with pytest.raises(CheckpointError, match="action_tokenizer_processor"):
        load_policy(copy)
    assert not {"ran", "asked"} & {path.name for path in evil.iterdir()}


def test_a_vqbet_without_codes_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="action codes are not trained yet"):
        load_policy(save(vqbet_config(), tmp_path / "vqbet", discretized=False))


def test_nothing_is_downloaded(folders, tmp_path, monkeypatch):
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    asked = []
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: asked.append(arguments))
    resnet = edited(
        shutil.copytree(folders["act"], tmp_path / "act"), pretrained_backbone_weights="ResNet18_Weights.IMAGENET1K_V1"
    )
    load_policy(resnet)
    clip = edited(
        shutil.copytree(folders["multi_task_dit"], tmp_path / "dit"), vision_encoder_name="openai/clip-absent"
    )
    with pytest.raises(CheckpointError, match="needs vision_encoder_name=openai/clip-absent on this") as caught:
        load_policy(clip)
    assert "\n" not in str(caught.value)
    assert not asked
    assert hub.HF_HUB_OFFLINE is False
