"""LeRobot's SmolVLA and pi0 with random weights in laptop sizes, to test code that fine-tunes the full-size ones.

They have LeRobot's own classes, written as LeRobot writes them, with processors; only the sizes differ. The language
models of the large ones are pre-trained, and frozen while an action expert is trained; here `taught_to_see` takes the
place of that pre-training. The sizes of pi0, pi05 and pi0_fast are literals in LeRobot's code, so every construction or
loading of one must be inside `pi_of`.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import require_extra
from robopolicy.core.examples import example_observation
from robopolicy.core.policy import TensorObservation
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.core.storage import read_json
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.nn.normalizer import Normalizer
from robopolicy.nn.pretrained import quiet_logger
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.lerobot.acting import load_lerobot_policy
from robopolicy.policies.lerobot.configuration import LeRobotSettings, LeRobotTuning, TrainableWeights
from robopolicy.policies.lerobot.families import VALUES
from robopolicy.policies.lerobot.training import LeRobotNetwork, trainable_lerobot
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit

EXTRA = "vla"
SPECIAL = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
SPECIAL["global_image_token"] = "<global-img>"
PI_HEADS = 8
"""Attention heads of pi0's language model, another literal in LeRobot's code."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tiny VLA.

    image, patch: px of a side; seen: width and layers of the vision transformer; read: of the language model; head:
    width of an attention head; shared: number of the language model's heads that share their keys; acts: width of the
    expert, which has as many layers; chunk: steps predicted and executed; steps: of the flow.
    """

    image: int = 64
    patch: int = 8
    seen: tuple[int, int] = (96, 2)
    read: tuple[int, int] = (96, 2)
    head: int = 32
    shared: int = 1
    acts: int = 64
    chunk: int = 4
    steps: int = 5

    @property
    def heads(self) -> dict[str, int]:
        """Number of attention heads of the language model, for transformers' configs."""
        count = max(1, self.read[0] // self.head)
        return {
            "num_attention_heads": count,
            "num_key_value_heads": max(1, count // self.shared),
            "head_dim": self.head,
        }

    @property
    def vision(self) -> dict[str, int]:
        """Config of the vision transformer, for transformers."""
        width, layers = self.seen
        return {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, width // self.head),
            "image_size": self.image,
            "patch_size": self.patch,
        }


def tokenizer_of(words: Iterable[str], special: Mapping[str, str] = SPECIAL, **known: str) -> Any:
    """Return a fast tokenizer of words, built in memory.

    special: further tokens by attribute, SmolVLM's by default; known: tokens that transformers names
    (bos_token="<bos>").
    """
    tokenizers = require_extra("tokenizers", EXTRA)
    transformers = require_extra("transformers", EXTRA)
    known = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>", **known}
    vocabulary = dict.fromkeys((*known.values(), *special.values(), "\n", *words))
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known, extra_special_tokens=dict(special))


def write_tiny(kind: str, folder: Path, dataset: Path, camera: str, sizes: Sizes, seed: int) -> Path:
    """Write an untrained policy that reads the robot's state and one camera, and return its folder.

    kind: smolvla or pi0; dataset: its training data, a LeRobotDataset, for shapes, statistics and instructions; camera:
    key of its images, [height, width, 3].
    """
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class

    features = read_json(dataset / "meta" / "info.json")["features"]
    action = (features["action"]["shape"][0],)
    inputs = {
        STATE: PolicyFeature(FeatureType.STATE, (features[STATE]["shape"][0],)),
        camera: PolicyFeature(FeatureType.VISUAL, (3, sizes.image, sizes.image)),
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, action)}
    file_statistics = read_json(dataset / "meta" / "stats.json")
    statistics = {
        key: {name: torch.tensor(value) for name, value in file_statistics[key].items()} for key in (*inputs, "action")
    }
    shared_config = {
        "input_features": inputs,
        "output_features": outputs,
        "chunk_size": sizes.chunk,
        "n_action_steps": sizes.chunk,
        "max_state_dim": inputs[STATE].shape[0],
        "max_action_dim": action[0],
        "tokenizer_max_length": 16,
        "device": "cpu",
        "push_to_hub": False,
    }
    words = tokenizer_of(word for task in read_dataset(dataset, cameras=()).tasks for word in task.split())
    with (
        quiet_logger(),
        redirect_stdout(io.StringIO()),
        torch.random.fork_rng(devices=[]),
        pi_of(sizes) if kind == "pi0" else nullcontext(),
    ):
        torch.manual_seed(seed)
        make = _smolvla if kind == "smolvla" else _pi0
        config, processors = make(folder, words, sizes, shared_config, statistics)
        policy = get_policy_class(kind)(config)
        spread(policy)
        for part in (policy, *processors):
            part.save_pretrained(folder / kind)
    return folder / kind


def taught_to_see(folder: Path, dataset: Path, target: Path, steps: int, seed: int) -> Path:
    """Pre-train the vision-language model of the policy in `folder` to encode object positions, write it to `target`,
    and return `target`.

    A linear head, discarded afterwards, predicts the environment's state in `dataset` from the last layer of the
    language model, in standard deviations. The action expert is unchanged.
    """
    settings = LeRobotSettings(tuning=LeRobotTuning(trainable=TrainableWeights.ALL))
    policy = trainable_lerobot(load_lerobot_policy(folder, settings=settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pupil = _Pupil(cast(DenoisingPolicy, policy), read_dataset(dataset))
    generators = Generators(seed)
    draws = pupil.episodes.sampler(policy.spec.history, 1, 64, generators["batches"])
    fit(pupil, draws, FitConfig(steps=steps, learning_rate=1e-3), generators, label="Training the vision encoder")
    policy.save(target)
    return target


class _Pupil(nn.Module):
    """The vision-language model of a policy, and a head that predicts the environment's state from it."""

    def __init__(self, policy: DenoisingPolicy, episodes: Episodes):
        super().__init__()
        self.policy, self.episodes = policy, episodes
        for module in cast(LeRobotNetwork, policy.network).acting:
            module.requires_grad_(False)
        states = episodes.observation[ENVIRONMENT_STATE]
        self.normalizer = Normalizer(tuple(states.shape[1:]), NormalizationMode.MEAN_STD).fit(states)
        features = self._read(example_observation(policy.spec, 1, torch.Generator()))
        self.head = nn.Linear(features.shape[1], states.shape[1])

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the squared error {"seen": [N]} of the state, a mean over its elements."""
        target = self.normalizer(batch["observation"][ENVIRONMENT_STATE][:, -1])
        return {"seen": (self.head(self._read(batch["observation"])) - target).square().mean(-1)}

    def _read(self, observation: TensorObservation) -> Tensor:
        return self.policy.encode(observation)[VALUES][:, -1].flatten(1)


def spread(network: nn.Module) -> None:
    """Initialise the weights of linear layers again, with variance 1 / inputs.

    transformers initialises all of them with standard deviation .02, meant for widths of thousands: at a width of 96 a
    layer's output is a fifth of its input, and attention is uniform.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)


def _smolvla(folder: Path, words: Any, sizes: Sizes, shared: Mapping[str, Any], known: Any) -> tuple[Any, Any]:
    """Return config and processors of a SmolVLA over a SmolVLM whose config and tokenizer are written into `folder`."""
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    backbone = write_smolvlm(folder / "smolvlm", words, sizes)
    width, layers = sizes.read
    config = SmolVLAConfig(
        **shared,
        num_steps=sizes.steps,
        num_vlm_layers=layers,
        expert_width_multiplier=sizes.acts / width,
        resize_imgs_with_padding=(sizes.image, sizes.image),
        vlm_model_name=str(backbone),
        train_expert_only=False,
        freeze_vision_encoder=False,
    )
    return config, make_pre_post_processors(config, dataset_stats=known)


def write_smolvlm(folder: Path, words: Any, sizes: Sizes) -> Path:
    """Write config, processor and tokenizer of the SmolVLM that a SmolVLA names, and return `folder`."""
    transformers = require_extra("transformers", EXTRA)
    width, layers = sizes.read
    text = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "vocab_size": len(words),
        "max_position_embeddings": 512,
        **sizes.heads,
    }
    transformers.SmolVLMConfig(
        text_config=text,
        vision_config=sizes.vision,
        scale_factor=2,
        image_token_id=words.image_token_id,
        pad_token_id=0,
    ).save_pretrained(folder)
    parts = transformers.SmolVLMImageProcessor(), words, transformers.SmolVLMVideoProcessor()
    tokens = (sizes.image // sizes.patch // 2) ** 2
    transformers.SmolVLMProcessor(*parts, image_seq_len=tokens).save_pretrained(folder)
    return folder


def _pi0(folder: Path, words: Any, sizes: Sizes, shared: Mapping[str, Any], known: Any) -> tuple[Any, Any]:
    """Return config and processors of a pi0 whose tokenizer is written into `folder`: LeRobot's own is gated."""
    from lerobot.policies.pi0.configuration_pi0 import PI0Config

    words.save_pretrained(folder / "tokenizer")
    side = (sizes.image, sizes.image)
    config = PI0Config(**shared, num_inference_steps=sizes.steps, image_resolution=side, dtype="float32")
    return config, pi_processors(config, known, folder / "tokenizer")


def pi_processors(config: Any, statistics: Mapping[str, Any], tokenizer: Path) -> Any:
    """Return the processors of a pi0 or pi05 with the tokenizer in a folder: the one that LeRobot names is gated."""
    from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
    from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
    from lerobot.processor import TokenizerProcessorStep

    def step(**options: Any) -> Any:
        return TokenizerProcessorStep(**(options | {"tokenizer_name": str(tokenizer)}))

    make: Any = make_pi0_pre_post_processors if config.type == "pi0" else make_pi05_pre_post_processors
    with patch(f"lerobot.policies.{config.type}.processor_{config.type}.TokenizerProcessorStep", step):
        return make(config, statistics)


@contextmanager
def pi_of(sizes: Sizes, vocabulary: int = 256) -> Iterator[None]:
    """Give LeRobot's pi0, pi05 and pi0_fast these sizes and this vocabulary size inside the context."""
    from lerobot.policies.pi0 import modeling_pi0
    from lerobot.policies.pi0_fast import modeling_pi0_fast
    from lerobot.policies.pi05 import modeling_pi05

    width, layers = sizes.read
    inner = {"num_heads": PI_HEADS, "num_kv_heads": PI_HEADS // sizes.shared, "head_dim": width // PI_HEADS}
    with ExitStack() as stack:
        for module in (modeling_pi0, modeling_pi05, modeling_pi0_fast):
            gemma, mapping = module.GemmaConfig, module.CONFIG_MAPPING
            build = module.PaliGemmaForConditionalGenerationWithPiGemma

            def gemma_of(variant: str, gemma: Any = gemma) -> Any:
                wide = sizes.acts if "300m" in variant else width
                return gemma(width=wide, depth=layers, mlp_dim=2 * wide, **inner)

            def expert(make: Any = mapping["gemma"], **settings: Any) -> Any:
                return make(**(settings | {"vocab_size": vocabulary}))

            def vision_language(config: Any, make: Any = build) -> Any:
                config.text_config.vocab_size = vocabulary
                config.image_token_id = vocabulary - 1
                for name, value in {**sizes.vision, "projection_dim": width}.items():
                    setattr(config.vision_config, name, value)
                return make(config)

            small = {"paligemma": mapping["paligemma"], "gemma": expert}
            stack.enter_context(patch.object(module, "get_gemma_config", gemma_of))
            stack.enter_context(patch.object(module, "CONFIG_MAPPING", small))
            stack.enter_context(patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", vision_language))
        yield
