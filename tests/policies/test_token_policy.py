"""The token policy: exact scores, shared texts, adapters, Hugging Face checkpoints, and that it listens."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.errors import CheckpointError, ConfigError, SpecError
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.evaluation.instructions import with_instruction
from robopolicy.nn.configuration import ActionTokens
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig, load_policy
from robopolicy.policies.token.configuration import DecodeSchedule, TokenDecoding
from robopolicy.testing.policy import check_policy

pytestmark = pytest.mark.long

STATE, CAMERA = "observation.state", "observation.images.front"
FIELDS = {STATE: Field((3,)), "observation.environment_state": Field((4,))}
IMAGES_DIR = {STATE: Field((3,)), CAMERA: Field((16, 32, 3), "uint8", 0, 255)}
ACTION = Field((2,), low=(-0.5, -2.0), high=(0.5, 2.0))
TEXTS = ("push the red cube", "push the blue cube to the left", "stop")
TOKEN = TokenConfig(width=32, depth=2, heads=2, feed_forward=64, bins=9, patch=8)
CONFIG = TokenPolicyConfig(chunk=3, token=TOKEN)


def make(config: TokenPolicyConfig = CONFIG, fields: dict[str, Field] = FIELDS, seed: int = 0) -> TokenPolicy:
    draws = torch.Generator().manual_seed(0)
    values = {key: torch.randn(50, *field.shape, generator=draws) for key, field in fields.items()}
    values["action"] = torch.rand(50, 2, generator=draws) - 0.5
    return TokenPolicy(config, fields, ACTION, fps=10, instructions=TEXTS, values=values, seed=seed)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observe(rows: int = 7, texts: Any = None) -> dict[str, Any]:
    draws = generator(3)
    vectors = {key: torch.randn(rows, 1, *field.shape, generator=draws) for key, field in FIELDS.items()}
    return {**vectors, "task": texts or [TEXTS[row % 3] for row in range(rows)]}


def disturb(policy: TokenPolicy) -> None:
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator(5)))


def token(**changes: Any) -> TokenPolicyConfig:
    return replace(CONFIG, token=replace(TOKEN, **changes))


CONFIGS = {
    "bins": CONFIG,
    "frequencies": token(actions=ActionTokens.FREQUENCIES, resolution=5.0),
    "two frequencies": token(actions=ActionTokens.FREQUENCIES, frequencies=2),
    "warm": token(temperature=1.7),
    "history": replace(CONFIG, history=3),
    "one step": replace(CONFIG, chunk=1),
    "masked": token(decoding=TokenDecoding.MASKED),
    "masked frequencies": token(decoding=TokenDecoding.MASKED, actions=ActionTokens.FREQUENCIES, decode_steps=6),
    "ascending": token(decoding=TokenDecoding.MASKED, decode_schedule=DecodeSchedule.ASCENDING),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_token_policies_conform(name: str):
    check_policy(make(CONFIGS[name]), load_policy)


@pytest.mark.parametrize("name", ["history", "masked"])
def test_policies_with_images_and_adapters_conform(name: str):
    policy = make(replace(CONFIGS[name], history=2), IMAGES_DIR)
    check_policy(policy, load_policy)
    policy.prepare_finetuning(train_encoder=False)
    policy.add_lora(2)
    check_policy(policy, load_policy)


def test_what_was_frozen_stays_frozen_and_says_so(tmp_path: Path):
    policy = make(CONFIGS["history"], IMAGES_DIR)
    policy.prepare_finetuning(train_encoder=False)
    for _ in range(2):
        policy.save(tmp_path)
        policy = cast(TokenPolicy, load_policy(tmp_path))
        policy.prepare_finetuning()
        assert policy.finetuning == {"train_encoder": False}
        assert not any(weight.requires_grad for weight in policy.observation_tokens.parameters())


def test_the_spec_says_what_units_are():
    assert (make().spec.scored_steps, make().spec.steps_per_action, make().spec.categorical) == (6, 2, True)
    slow = make(CONFIGS["two frequencies"]).spec
    assert (slow.scored_steps, slow.steps_per_action) == (4, 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_scores_are_those_of_the_whole_sequence_without_a_cache(temperature: float):
    """Against one plain forward pass per row: no cache, no padding, no sharing, one logit at a time."""
    policy, observation = make(token(temperature=temperature)), observe()
    disturb(policy)
    decision = policy.act(observation, generator())
    scores = policy.log_prob(observation, decision.latents)
    assert (scores.logp - decision.logp).abs().max() <= 1e-4
    embedded = policy.observation_tokens(observation)
    for row in range(7):
        words, _ = policy.text_tokens([observation["task"][row]])
        text = policy.language.backbone.get_input_embeddings()(words)
        action_embedding = policy.action_embedding(decision.latents["tokens"][row : row + 1])
        whole = torch.cat([text, embedded[row : row + 1], action_embedding], 1)
        hidden = policy.language.backbone(inputs_embeds=whole).last_hidden_state[0]
        start = text.shape[1] + embedded.shape[1] - 1
        logits = policy.head(hidden[start : start + 6])
        expected = torch.distributions.Categorical(logits=logits / temperature)
        assert torch.allclose(decision.logp[row], expected.log_prob(decision.latents["tokens"][row]), atol=1e-4)
        assert torch.allclose(scores.entropy[row], expected.entropy(), atol=1e-4)


def test_tokens_are_drawn_from_the_stated_distribution():
    policy = make(replace(CONFIG, chunk=1))
    observation = {key: value[:1].expand(4000, -1, -1) for key, value in observe().items() if key != "task"}
    observation["task"] = ["stop"] * 4000
    decision = policy.act(observation, generator())
    counts = torch.bincount(decision.latents["tokens"][:, 0], minlength=9) / 4000
    likely = policy.log_prob(observation, decision.latents).extras["log_probabilities"][0, 0].exp()
    assert (counts - likely).abs().max() < 0.04


def test_deterministic_is_the_likeliest_token_and_no_choice():
    policy, observation = make(), observe()
    decision = policy.act(observation, generator(), deterministic=True)
    assert not decision.mask.any() and not decision.logp.any()
    every = policy.log_prob(observation, decision.latents).extras["log_probabilities"]
    assert torch.equal(every.argmax(-1), decision.latents["tokens"])


def test_gradients_add_up_through_shared_texts():
    policy, observation = make(), observe()
    latents = policy.act(observation, generator()).latents

    def gradients(rows: list[int]) -> list[Tensor]:
        part = {key: [value[i] for i in rows] if key == "task" else value[rows] for key, value in observation.items()}
        policy.zero_grad()
        policy.log_prob(part, {"tokens": latents["tokens"][rows]}).logp.sum().backward()
        return [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in policy.parameters()]

    together = gradients(list(range(7)))
    apart = [sum(parts) for parts in zip(*(gradients([row]) for row in range(7)), strict=True)]
    for one, other in zip(together, apart, strict=True):
        assert torch.allclose(one, torch.as_tensor(other), atol=2e-4)


def test_chosen_units_and_executed_steps_are_scored_alone():
    policy, observation = make(), observe(2)
    latents = policy.act(observation, generator()).latents
    whole = policy.log_prob(observation, latents)
    chosen = torch.tensor([[5, 0], [2, 2]])
    part = policy.log_prob(observation, {**latents, "chosen": chosen})
    assert torch.equal(part.logp, whole.logp.gather(1, chosen))
    executed = torch.tensor([[True, True, False], [True, True, True]])
    cut = policy.log_prob(observation, {**latents, "executed": executed})
    assert torch.equal(cut.logp[0, :4], whole.logp[0, :4]) and not cut.logp[0, 4:].any()
    assert torch.equal(cut.logp[1], whole.logp[1])
    slow = make(CONFIGS["frequencies"])
    latents = slow.act(observation, generator()).latents
    assert torch.equal(
        slow.log_prob(observation, {**latents, "executed": executed}).logp, slow.log_prob(observation, latents).logp
    )


def test_loss_is_the_cross_entropy_of_demonstrated_tokens_without_padding():
    policy, observation = make(), observe(4)
    actions = 0.5 * torch.rand(4, 3, 2, generator=generator()) - 0.25
    valid = torch.tensor([[True] * 3, [True] * 3, [True, True, False], [True, False, False]])
    batch = {"observation": observation, "actions": actions, "action_valid": valid}
    tokens = policy.action_tokens.encode(policy.action_normalizer(actions))
    logp = policy.log_prob(observation, {"tokens": tokens}).logp
    counts = torch.tensor([6, 6, 4, 2])
    expected = torch.stack([-logp[row, :count].mean() for row, count in enumerate(counts.tolist())])
    assert torch.allclose(policy.loss(batch, generator())["tokens"], expected, atol=1e-5)
    with pytest.raises(SpecError, match="chunks"):
        policy.loss({**batch, "actions": actions[:, :2]}, generator())


def test_instructions_it_was_not_taught_are_refused():
    with pytest.raises(SpecError, match=r"'green'.*Did you mean"):
        make().act(observe(1, ["push the green cube"]), generator())
    with pytest.raises(SpecError, match="no 'task'"):
        make().act({key: value for key, value in observe().items() if key != "task"}, generator())
    with pytest.raises(SpecError, match="2 texts, but there are 7 rows"):
        make().act(observe(7, ["stop", "stop"]), generator())


def test_adapters_learn_alone_and_merge_into_the_weights():
    policy, observation = make(), observe()
    before = policy.act(observation, generator())
    policy.add_lora(3)
    same = policy.act(observation, generator())
    assert torch.equal(same.latents["tokens"], before.latents["tokens"])
    frozen = {name: value.clone() for name, value in policy.state_dict().items() if "lora_" not in name}
    trainable = policy.trainable_parameters()
    assert sum(weight.numel() for weight in trainable) < 0.5 * sum(value.numel() for value in frozen.values())
    optimiser = torch.optim.Adam(trainable, lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        (-policy.log_prob(observation, before.latents).logp.mean()).backward()
        optimiser.step()
    state = policy.state_dict()
    assert all(torch.equal(state[name], value) for name, value in frozen.items())
    tuned = policy.log_prob(observation, before.latents).logp
    assert (tuned - before.logp).mean() > 0.01
    with pytest.raises(ConfigError, match="already has adapters"):
        policy.add_lora(3)
    policy.merge_lora()
    assert not any("lora_" in name for name in policy.state_dict())
    assert torch.allclose(policy.log_prob(observation, before.latents).logp, tuned, atol=1e-5)
    assert set(policy.state_dict()) == set(make().state_dict())


def test_adapters_survive_a_checkpoint(tmp_path: Path):
    policy, observation = make(), observe()
    policy.prepare_finetuning()
    policy.add_lora(2)
    disturb(policy)
    policy.save(tmp_path / "tuned")
    loaded = load_policy(tmp_path / "tuned")
    assert isinstance(loaded, TokenPolicy)
    assert loaded.adapters == {"rank": 2, "alpha": 4.0}
    first, second = policy.act(observation, generator()), loaded.act(observation, generator())
    assert torch.equal(first.logp, second.logp)
    assert len(loaded.trainable_parameters()) == len(policy.trainable_parameters())
    (tmp_path / "tuned" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_policy(tmp_path / "tuned")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A causal and a vision-language checkpoint as their own save_pretrained writes them."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["<pad>", *sorted({w for text in TEXTS for w in text.split()})])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    text = transformers.LlamaConfig(**sizes)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    seeing = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=0)
    folders = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, model in {
            "causal": transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes)),
            "vision-language": transformers.LlavaForConditionalGeneration(seeing),
        }.items():
            folders[name] = tmp_path_factory.mktemp("hub") / name
            model.save_pretrained(folders[name])
            tokenizer.save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("name", ["causal", "vision-language"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("decoding", TokenDecoding)
def test_checkpoints_of_the_hub_load_by_name_and_are_not_needed_again(
    checkpoints, name: str, rank: int, decoding: TokenDecoding, tmp_path: Path
):
    from safetensors.torch import load_file

    policy = make(token(model=str(checkpoints[name]), lora_rank=rank, decoding=decoding))
    saved = load_file(checkpoints[name] / "model.safetensors")
    embedding = next(value for key, value in saved.items() if key.endswith("embed_tokens.weight"))
    assert torch.equal(policy.language.backbone.get_input_embeddings().weight, embedding)
    learns = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert all(("lora_" in item) == (rank > 0) for item in learns if item.startswith("language."))
    assert any(item.startswith("head.") for item in learns)
    check_policy(policy, load_policy)
    policy.save(tmp_path / "policy")
    moved = checkpoints[name].rename(tmp_path / "away")
    try:
        assert load_policy(tmp_path / "policy").spec == policy.spec
    finally:
        moved.rename(checkpoints[name])


@pytest.fixture
def saved(checkpoints, tmp_path: Path, monkeypatch) -> Path:
    """A policy of a Hugging Face checkpoint, with code beside its tokenizer; whoever is asked says yes."""
    make(token(model=str(checkpoints["causal"]))).save(tmp_path / "policy")
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Evil: pass\n"
    (tmp_path / "policy/tokenizer/evil.py").write_text(code)
    monkeypatch.setattr("builtins.input", lambda *asked: (tmp_path / "asked").touch() or "y")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", lambda *to: (tmp_path / "connected").touch())
    return tmp_path / "policy"


def change(path: Path, **entries: Any) -> None:
    """Change entries of a JSON file."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **entries}))


AUTO_MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json", "processor_config.json"])
def test_a_tokenizer_that_brings_code_is_refused_without_asking(saved: Path, file: str):
    change(saved / "tokenizer" / file, auto_map=AUTO_MAP, tokenizer_class="Evil", model_type="evil")
    with pytest.raises(CheckpointError, match=r"config\.json contains custom code") as caught:
        load_policy(saved)
    assert "\n" not in str(caught.value)
    assert {path.name for path in saved.parent.iterdir()} == {"policy"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"auto_map": AUTO_MAP}, "contains custom code"),
        ({"attn_implementation": "evil/kernel"}, "could be code from a hub"),
        ({"_attn_implementation": "evil/kernel:forward"}, "could be code from a hub"),
        ({"attn_implementation": {"text_config": "evil/kernel"}}, "could be code from a hub"),
        ({"attn_implementation": "flash_attention_2"}, "could be code from a hub"),
        ({"experts_implementation": "evil/kernel"}, "could be code from a hub"),
        ({"num_hidden_layers": 10**9}, "not a valid size of a language model"),
        ({"vocab_size": 10**15}, "not a valid size of a language model"),
        ({"vocab_size": 10**7}, "far more memory"),
        ({"model_type": "evil"}, "evil"),
        ({"model_type": "timm_backbone", "backbone": "resnet18", "use_pretrained_backbone": True}, "policy"),
    ],
)
def test_a_backbone_that_is_not_of_transformers_is_refused(saved: Path, changes: dict, complaint: str):
    described = json.loads((saved / "config.json").read_text())["backbone"]
    change(saved / "config.json", backbone={**described, **changes})
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_policy(saved)
    assert "\n" not in str(caught.value)
    assert {path.name for path in saved.parent.iterdir()} == {"policy"}


def test_a_missing_tokenizer_is_not_looked_for_elsewhere(saved: Path):
    shutil.rmtree(saved / "tokenizer")
    with pytest.raises(CheckpointError, match="tokenizer is missing"):
        load_policy(saved)
    assert {path.name for path in saved.parent.iterdir()} == {"policy"}


def test_a_named_checkpoint_does_not_run_its_code_either(checkpoints, tmp_path: Path, monkeypatch):
    folder = shutil.copytree(checkpoints["causal"], tmp_path / "hub")
    monkeypatch.setattr("builtins.input", lambda *asked: (tmp_path / "asked").touch() or "y")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    change(folder / "config.json", auto_map=AUTO_MAP, model_type="evil")
    with pytest.raises(ConfigError, match="could not be loaded") as caught:
        make(token(model=str(folder)))
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"token\.model=.*nothing: this folder does not exist"):
        make(token(model=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="could not be loaded"):
        make(token(model="nobody/nothing"))
    with pytest.raises(ConfigError, match="lora_rank of fine-tuning"):
        token(lora_rank=4)


def test_it_learns_to_listen():
    """Two instructions, one state: the text alone decides the action, and the wrong one gives the wrong action."""
    policy = TokenPolicy(
        replace(CONFIG, chunk=1), {STATE: Field((3,))}, ACTION, fps=10, instructions=("go left", "go right")
    )
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    state = torch.zeros(16, 1, 3)
    texts = ["go left", "go right"] * 8
    actions = torch.tensor([-0.5, 0.5]).repeat(8)[:, None, None].expand(-1, -1, 2)
    batch = {
        "observation": {STATE: state, "task": texts},
        "actions": actions,
        "action_valid": torch.ones(16, 1, dtype=torch.bool),
    }
    for _ in range(60):
        optimiser.zero_grad()
        policy.loss(batch, generator())["tokens"].mean().backward()
        optimiser.step()
    right = policy.act(batch["observation"], generator(), deterministic=True).actions
    assert functional.mse_loss(right, actions) < 0.01
    world = WorldSpec("ways", {}, ACTION, 10, 10, instructions=policy.instructions)
    wrong = with_instruction(policy, "wrong", world)
    assert (wrong.act(batch["observation"], generator(), deterministic=True).actions * actions).max() < 0
    always = with_instruction(policy, "go left", world)
    assert (always.act(batch["observation"], generator(), deterministic=True).actions < 0).all()
    with pytest.raises(ConfigError, match="several instructions"):
        with_instruction(policy, "wrong", replace(world, instructions=("go left",)))
