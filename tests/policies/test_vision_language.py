"""Token policies over vision-language checkpoints: exact scores through the checkpoint's own vision, what is heard.

The checkpoints are tiny, random and of Hugging Face's own classes: SmolVLM, Qwen2.5-VL and PaliGemma.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vision_language_models import FAMILIES, tokenizer, written

from robopolicy.core.errors import CheckpointError, ConfigError, SpecError
from robopolicy.core.examples import example_batch
from robopolicy.core.spec import Field
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.nn import pretrained
from robopolicy.nn.language import Reading
from robopolicy.nn.precision import ROUNDING, training_precision
from robopolicy.nn.vision_language import VisionLanguageProcessor, images_of_rows
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig, load_policy
from robopolicy.policies.token.configuration import TokenDecoding, TokenVision
from robopolicy.policies.token.decoding import MaskedDecoding, ParallelDecoding
from robopolicy.testing.policy import check_policy

pytestmark = pytest.mark.long

STATE, CAMERA, WRIST = "observation.state", "observation.images.front", "observation.images.wrist"
FIELDS = {STATE: Field((3,)), CAMERA: Field((24, 40, 3), "uint8", 0, 255)}
ACTION = Field((2,), low=-1.0, high=1.0)
PARTS = {
    "smolvlm": ("vision_model.embeddings.patch", "vision_model.encoder.", "connector.", "text_model."),
    "qwen": ("visual.patch_embed.", "visual.blocks.", "visual.merger.", "language_model."),
    "paligemma": ("embeddings.patch", "encoder.layers.", "multi_modal_projector.", "language_model."),
}
"""First to last, from pixels."""
TEXTS = ("push the red cube", "push the blue cube to the left", "stop")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hub")
    return {name: make(folder / name) for name, make in FAMILIES.items()}


def build(
    folder: Path, fields: dict[str, Field] = FIELDS, chunk: int = 2, history: int = 1, **token: Any
) -> TokenPolicy:
    config = TokenPolicyConfig(chunk=chunk, history=history, token=TokenConfig(model=str(folder), bins=7, **token))
    values = {key: torch.randn(20, *field.shape, generator=generator(1)) for key, field in fields.items()}
    values["action"] = torch.rand(20, 2, generator=generator(2)) * 2 - 1
    return TokenPolicy(config, fields, ACTION, fps=10, instructions=TEXTS, values=values)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observe(rows: int = 4, history: int = 1, fields: dict[str, Field] = FIELDS) -> dict[str, Any]:
    draws = generator(3)
    observation: dict[str, Any] = {"task": [TEXTS[row % 3] for row in range(rows)]}
    for key, field in fields.items():
        shape = (rows, history, *field.shape)
        image = field.dtype == "uint8"
        observation[key] = (
            torch.randint(0, 256, shape, generator=draws, dtype=torch.uint8)
            if image
            else torch.randn(shape, generator=draws)
        )
    return observation


def disturb(policy: TokenPolicy) -> TokenPolicy:
    """Make the distributions uneven."""
    with torch.no_grad():
        policy.head.weight.mul_(8)
        policy.action_embedding.weight.mul_(20)
    return policy


def processor(policy: TokenPolicy) -> VisionLanguageProcessor:
    assert policy.processor is not None
    return policy.processor


@pytest.mark.parametrize(("name", "decoding"), list(zip(FAMILIES, TokenDecoding, strict=True)))
def test_they_keep_the_promises_of_policies(checkpoints, name: str, decoding: TokenDecoding):
    check_policy(build(checkpoints[name], history=2, decoding=decoding), load_policy)


@pytest.mark.skipif(not bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="this CPU has no bfloat16")
@pytest.mark.parametrize("decoding", TokenDecoding)
@pytest.mark.parametrize("name", FAMILIES)
def test_they_act_score_and_imitate_in_bfloat16(checkpoints, name: str, decoding: TokenDecoding):
    policy, observation = disturb(build(checkpoints[name], decoding=decoding)), observe()
    with training_precision("bf16"):
        decision = policy.act(observation, generator())
        lowered = policy.log_prob(observation, decision.latents).logp
        batch = example_batch(policy.spec, observation, torch.device("cpu"))
        losses = policy.loss(batch, generator())
    assert lowered.dtype == torch.float32
    assert float((lowered.detach() - decision.logp).abs().max()) <= ROUNDING
    exact = policy.log_prob(observation, decision.latents).logp
    assert 0 < float((lowered - exact).detach().abs().max()) < 4 * ROUNDING, "another rounding, not another policy"
    torch.stack([value.mean() for value in losses.values()]).sum().backward()
    grads = [weight.grad for weight in policy.trainable_parameters() if weight.grad is not None]
    assert grads and {grad.dtype for grad in grads} == {torch.float32}


@pytest.mark.parametrize("decoding", TokenDecoding)
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_exact_and_their_gradients_reach_everything(checkpoints, name: str, decoding: TokenDecoding):
    policy, observation = disturb(build(checkpoints[name], decoding=decoding, temperature=0.7)), observe()
    decision = policy.act(observation, generator())
    scores = policy.log_prob(observation, decision.latents)
    assert (scores.logp - decision.logp).abs().max() <= 1e-4
    one = {key: value[1:2] for key, value in observation.items()}
    alone = policy.log_prob(one, {key: value[1:2] for key, value in decision.latents.items()})
    assert (alone.logp - decision.logp[1:2]).abs().max() <= 1e-4, "padding or neighbours change a score"
    scores.logp.sum().backward()
    learned = {key for key, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}
    for part in (
        *PARTS[name],
        "language_model." if name != "smolvlm" else "text_model.",
        "head.",
        "observation_tokens.",
    ):
        assert any(part in key for key in learned), f"nothing of {part} hears of the scores"


@pytest.mark.parametrize("decoding", TokenDecoding)
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_whole_passes_without_a_cache(checkpoints, name: str, decoding: TokenDecoding):
    """Against one pass over the whole sequence a row: no cache, no padding, with who sees whom written out."""
    policy, observation = disturb(build(checkpoints[name], history=2, decoding=decoding)), observe(3, 2)
    decision = policy.act(observation, generator())
    embedded = policy.observation_tokens(observation)
    for row in range(3):
        layer_inputs: dict[str, Tensor] = {}
        decoder = policy.language.decoder
        handle = decoder.register_forward_pre_hook(
            lambda _, given, named, found=layer_inputs: found.update(named), with_kwargs=True
        )
        inputs = processor(policy)([observation["task"][row]], [list(observation[CAMERA][row])])
        policy.language.see(inputs)
        handle.remove()
        tokens = decision.latents["tokens"][row]
        causal = decoding is TokenDecoding.CAUSAL
        states = policy.action_embedding(tokens)
        scored = torch.ones(len(tokens), dtype=torch.bool)
        if isinstance(policy.decoding, ParallelDecoding):
            states = policy.decoding.empty
        if isinstance(policy.decoding, MaskedDecoding):
            scored = decision.latents["order"][row] == 0
            states = policy.decoding.mask + policy.decoding.position.weight
        whole = torch.cat([layer_inputs["inputs_embeds"], embedded[row : row + 1], states[None]], 1)
        prompt, before = inputs["input_ids"].shape[1], inputs["input_ids"].shape[1] + embedded.shape[1]
        allowed = torch.ones(whole.shape[1], whole.shape[1]).tril().bool()
        if name == "paligemma":
            allowed[:prompt, :prompt] = True
        if not causal:
            allowed[before:, before:] = True
        positions = layer_inputs["position_ids"]
        rest = positions.max() + 1 + torch.arange(whole.shape[1] - prompt)
        positions = torch.cat([positions, rest.expand(*positions.shape[:-1], -1)], -1)
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
        hidden = decoder(inputs_embeds=whole, attention_mask=mask, position_ids=positions).last_hidden_state[0]
        hidden = hidden[before - 1 : -1] if causal else hidden[before:]
        expected = policy.head(hidden).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        assert torch.allclose(decision.logp[row][scored], expected[scored], atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_going_on_from_a_prompt_is_reading_it_all_at_once(checkpoints, name: str):
    """Against the checkpoint's own forward pass over prompt and answer: positions of images, padding, directions."""
    policy, observation = build(checkpoints[name]), observe(3)
    images = images_of_rows({CAMERA: observation[CAMERA].flatten(0, 1)}, 3)
    inputs = processor(policy)(observation["task"], images)
    assert not inputs["attention_mask"].all(), "no row is padded"
    answer = torch.randint(10, 20, (3, 4), generator=generator())
    reading = policy.language.see(inputs)
    hidden = policy.language.extend(reading, policy.language.backbone.get_input_embeddings()(answer))
    further = {
        "input_ids": answer,
        "attention_mask": torch.ones_like(answer),
        "token_type_ids": torch.ones_like(answer),
    }
    further["mm_token_type_ids"] = torch.zeros_like(answer)
    whole = {key: torch.cat([value, further[key]], 1) if key in further else value for key, value in inputs.items()}
    expected = policy.language.backbone(**whole).last_hidden_state[:, -4:]
    assert torch.allclose(hidden, expected, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_images_instructions_and_states_are_heard(checkpoints, name: str):
    policy, observation = disturb(build(checkpoints[name])), observe(3)
    latents = policy.act(observation, generator()).latents
    before = policy.log_prob(observation, latents).logp
    image = observation[CAMERA].clone()
    image[0, 0, :12] = 255 - image[0, 0, :12]
    state = observation[STATE].clone()
    state[1] += 1
    for row, changes in enumerate(({CAMERA: image}, {STATE: state}, {"task": [*TEXTS[:2], TEXTS[0]]})):
        moved = (policy.log_prob({**observation, **changes}, latents).logp - before).abs().max(1).values
        assert moved[row] > 1e-3 and moved[[other for other in range(3) if other != row]].max() < 1e-4


def test_prompts_are_written_as_the_checkpoint_learned_them(checkpoints):
    smolvlm, qwen, paligemma = (build(checkpoints[name], prompt="go {instruction} ?") for name in FAMILIES)
    assert processor(smolvlm).written("left", 2) == "user : <image><image>go left ?assistant :"
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert processor(qwen).written("left", 1) == f"user : {image}go left ?assistant :"
    assert processor(paligemma).written("left", 2) == "<image><image>go left ?"
    read = processor(paligemma)(["left"], [[torch.zeros(8, 8, 3, dtype=torch.uint8)]])["input_ids"][0]
    assert processor(paligemma).processor.decode(read) == "<image> " * 16 + "<bos> go left ?"


def test_images_come_camera_by_camera_and_oldest_first():
    front, wrist = torch.arange(6).reshape(6, 1, 1, 1), torch.arange(10, 16).reshape(6, 1, 1, 1)
    rows = images_of_rows({CAMERA: front, WRIST: wrist}, 3)
    assert [[int(image) for image in row] for row in rows] == [[0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15]]


def test_cameras_of_several_sizes_and_none_but_cameras(checkpoints):
    fields = {CAMERA: FIELDS[CAMERA], WRIST: Field((16, 16, 3), "uint8", 0, 255)}
    for name in FAMILIES:
        policy, observation = build(checkpoints[name], fields), observe(2, 1, fields)
        decision = policy.act(observation, generator())
        assert (policy.log_prob(observation, decision.latents).logp - decision.logp).abs().max() <= 1e-4
        assert policy.observation_tokens(observation).shape == (2, 1, 32)
        assert "front 24 x 40, wrist 16 x 16" in policy.described


def test_tiles_are_a_choice(checkpoints):
    whole, split = build(checkpoints["smolvlm"]), build(checkpoints["smolvlm"], split_images=True)
    assert " 4 of them for images" in whole.described and " 20 of them for images" in split.described


def test_adapters_learn_alone(checkpoints):
    policy, observation = build(checkpoints["smolvlm"], lora_rank=2), observe()
    frozen = {
        key: value.clone()
        for key, value in policy.state_dict().items()
        if key.startswith("language.") and "lora_" not in key
    }
    assert any("vision_model" in key for key, weight in policy.named_parameters() if weight.requires_grad)
    latents = policy.act(observation, generator()).latents
    optimiser = torch.optim.Adam(policy.trainable_parameters(), lr=0.01)
    before = policy.log_prob(observation, latents).logp.mean()
    for _ in range(3):
        optimiser.zero_grad()
        (-policy.log_prob(observation, latents).logp.mean()).backward()
        optimiser.step()
    assert policy.log_prob(observation, latents).logp.mean() > before + 0.01
    assert all(torch.equal(policy.state_dict()[key], value) for key, value in frozen.items())


@pytest.mark.parametrize("rank", [0, 2])
def test_fine_tuning_can_leave_the_vision_as_it_is(checkpoints, rank: int, tmp_path: Path):
    policy = build(checkpoints["paligemma"])
    policy.prepare_finetuning(train_encoder=False)
    if rank:
        policy.add_lora(rank)
    learns = {key for key, weight in policy.named_parameters() if weight.requires_grad}
    assert learns and not any("vision_tower" in key or "projector" in key or "observation_" in key for key in learns)
    assert any("language_model" in key for key in learns)
    policy.save(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert isinstance(loaded, TokenPolicy)
    assert {key for key, weight in loaded.named_parameters() if weight.requires_grad} == learns


def test_who_reads_images_is_a_choice(checkpoints):
    folder = checkpoints["smolvlm"]
    own = build(folder, vision=TokenVision.PATCHES, patch=8)
    assert own.processor is None and "LlamaModel" in str(type(own.language.backbone))
    assert build(folder).processor is not None
    blind = build(folder, {STATE: FIELDS[STATE]})
    assert blind.processor is None and blind.described == ""
    check_policy(own, load_policy)


def test_the_folder_is_all_that_is_needed(checkpoints, tmp_path: Path):
    hub = shutil.copytree(checkpoints["qwen"], tmp_path / "hub")
    policy, observation = disturb(build(hub)), observe()
    shutil.rmtree(hub)
    policy.save(tmp_path / "policy")
    names = {path.name for path in (tmp_path / "policy").rglob("*") if path.is_file()}
    assert {"chat_template.jinja", "processor_config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl", ".py")) for name in names)
    loaded = load_policy(tmp_path / "policy")
    first, second = policy.act(observation, generator()), loaded.act(observation, generator())
    assert torch.equal(first.actions, second.actions) and torch.equal(first.logp, second.logp)
    shutil.rmtree(tmp_path / "policy/processor")
    with pytest.raises(CheckpointError, match="image processor is missing"):
        load_policy(tmp_path / "policy")


def test_a_processor_that_brings_code_is_refused(checkpoints, tmp_path: Path):
    build(checkpoints["qwen"]).save(tmp_path / "policy")
    path = tmp_path / "policy/processor/processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoProcessor": "evil.Evil"}}))
    with pytest.raises(CheckpointError, match="contains custom code"):
        load_policy(tmp_path / "policy")


def test_checkpoints_from_before_are_read_as_they_were(checkpoints, tmp_path: Path):
    policy, observation = build(checkpoints["smolvlm"], vision=TokenVision.PATCHES, patch=8), observe()
    policy.save(tmp_path / "policy")
    path = tmp_path / "policy/config.json"
    known = json.loads(path.read_text())
    del known["sees"]
    for name in ("vision", "prompt", "split_images"):
        del known["config"]["token"][name]
    path.write_text(json.dumps(known))
    loaded = load_policy(tmp_path / "policy")
    assert torch.equal(loaded.act(observation, generator()).logp, policy.act(observation, generator()).logp)


def without(folder: Path, place: Path, *names: str) -> Path:
    copy_folder = shutil.copytree(folder, place)
    for name in names:
        (copy_folder / name).unlink()
    return copy_folder


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (("processor_config.json", "chat_template.jinja"), "model, tokenizer and image processor"),
        (("tokenizer.json", "tokenizer_config.json"), "could not be loaded"),
        (("model.safetensors",), "no file named model.safetensors"),
        (("config.json",), "could not be loaded"),
    ],
)
def test_what_a_folder_lacks_is_said(checkpoints, tmp_path: Path, names: Sequence[str], complaint: str):
    folder = without(checkpoints["smolvlm"], tmp_path / "part", *names)
    with pytest.raises(ConfigError, match=complaint) as caught:
        build(folder)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_not_made_up(checkpoints, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(checkpoints["smolvlm"], tmp_path / "part")
    known = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in known.items() if "connector" not in key}, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"lacks 1 weights of a SmolVLMModel, such as connector\..* Download the complete"
    ):
        build(folder)


def test_weights_that_do_not_fit_and_half_a_file_are_named(checkpoints, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(checkpoints["smolvlm"], tmp_path / "other")
    known = load_file(folder / "model.safetensors")
    name = next(key for key in known if "connector" in key)
    save_file({**known, name: torch.zeros(3, 5)}, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"1 weights whose shapes differ .*: connector\..* is \[3, 5\] and should be \["
    ):
        build(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match=r"could not be loaded: Error while deserializing header"):
        build(folder)


def test_a_model_that_sees_nothing_is_not_given_images(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    words = tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=len(words))
    words.save_pretrained(written(transformers.LlamaForCausalLM, config, tmp_path / "blind"))
    with pytest.raises(ConfigError, match=r"llama checkpoint, which reads no images: set token\.vision=patches"):
        build(tmp_path / "blind", vision=TokenVision.CHECKPOINT)
    assert build(tmp_path / "blind", patch=8).processor is None
    with pytest.raises(ConfigError, match=r"token\.vision=checkpoint needs a vision-language checkpoint"):
        TokenConfig(vision=TokenVision.CHECKPOINT)
    with pytest.raises(ConfigError, match=r"write \{instruction\}"):
        TokenConfig(prompt="push it")


def test_versions_memory_and_positions_are_looked_at_first(checkpoints, monkeypatch: pytest.MonkeyPatch):
    folder = checkpoints["smolvlm"]
    with monkeypatch.context() as patched:
        patched.setattr(pretrained, "version", lambda name: "5.23.0")
        with pytest.raises(ConfigError, match=r"5\.23\.0 is installed: pip install 'transformers>=5\.4,<5\.6'"):
            build(folder)
    with monkeypatch.context() as patched:
        patched.setattr(pretrained, "free_memory", lambda device: 1000)
        with pytest.raises(ConfigError, match=r"of memory in fp32, but only 0\.001 MB are free"):
            build(folder)
    with pytest.raises(ConfigError, match=r"of them for its 30 images.*a SmolVLMModel has only 512 positions"):
        build(folder, history=30, split_images=True)


def test_gated_checkpoints_are_explained(monkeypatch: pytest.MonkeyPatch):
    def refused(*names: Any, **options: Any):
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it.")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refused)
    with pytest.raises(ConfigError, match=r"gated repo\. Accept its licence on its page"):
        build(Path("google/paligemma-3b-pt-224"))


def test_the_lean_engine_has_nothing_to_keep(checkpoints):
    with pytest.raises(ConfigError, match="images come before it"):
        with_engine(build(checkpoints["smolvlm"]), InferenceConfig("lean"))


def test_images_are_bytes(checkpoints):
    observation = observe()
    with pytest.raises(SpecError, match="images must be uint8"):
        build(checkpoints["qwen"]).act({**observation, CAMERA: observation[CAMERA].float()}, generator())


def test_a_prompt_is_read_once_a_decision(checkpoints, monkeypatch: pytest.MonkeyPatch):
    policy, reads = build(checkpoints["smolvlm"], chunk=4), []
    see: Callable[..., Reading] = policy.language.see
    monkeypatch.setattr(policy.language, "see", lambda inputs: (reads.append(1), see(inputs))[1])
    policy.act(observe(), generator())
    assert len(reads) == 1
