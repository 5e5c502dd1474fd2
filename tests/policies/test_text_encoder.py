"""Denoising policies that read instructions: opposite tasks in one state, scores, errors, checkpoints, fine-tuning."""

import asyncio
import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.spec import STATE, TASK, Field, WorldSpec
from robopolicy.evaluation.instructions import with_instruction
from robopolicy.nn.configuration import DenoiserKind, FlowNoise, ImageEncoderConfig
from robopolicy.nn.encoders import Modulation, WordEncoder
from robopolicy.nn.language import WordTokenizer
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy
from robopolicy.policies.configuration import Likelihood, PolicyKind, TextEncoder
from robopolicy.rl.critic import state_critic
from robopolicy.serving.batching import InferenceQueue
from robopolicy.serving.inputs import Session
from robopolicy.testing.policy import check_policy
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from bandit_toys import ACTION, FIELDS, BanditWorld

pytestmark = pytest.mark.long

CAMERA = {"observation.images.front": Field((8, 8, 3), "uint8", 0, 255)}
TEXTS = ("put red left of blue", "put blue left of red")
"""The same words: only their order tells the two apart."""
CONFIG = DenoisingPolicyConfig(
    chunk=1,
    prediction_steps=1,
    width=32,
    depth=1,
    sampling_steps=4,
    denoising_steps=20,
    text_encoder=TextEncoder.WORDS,
    text_features=16,
)


def make(config: DenoisingPolicyConfig = CONFIG, texts: tuple[str, ...] = TEXTS, **options: Any) -> DenoisingPolicy:
    fields = options.pop("fields", FIELDS)
    return DenoisingPolicy(config, fields, ACTION, fps=10.0, instructions=texts, **options)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observe(texts: list[str] | None, rows: int = 8) -> dict[str, Any]:
    told = {} if texts is None else {TASK: [texts[row % len(texts)] for row in range(rows)]}
    return {STATE: torch.zeros(rows, 1, 2), **told}


def taught(config: DenoisingPolicyConfig = CONFIG, size: float = 0.6, steps: int = 400) -> DenoisingPolicy:
    """Return a policy that saw `size` done under the first text and its opposite under the second, in one state."""
    policy, draws = make(config), generator()
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    observation = observe([*TEXTS], 64)
    sign = torch.tensor([1.0, -1.0]).repeat(32)[:, None, None]
    batch = {
        "observation": observation,
        "actions": (size * sign).expand(-1, 1, 2),
        "action_valid": torch.ones(64, 1, dtype=torch.bool),
    }
    for _ in range(steps):
        optimiser.zero_grad()
        policy.loss(batch, draws)["denoising"].mean().backward()
        optimiser.step()
    return policy


def done(policy: Any, text: str) -> Tensor:
    """Return the actions [64, 2] that a policy takes when told `text`."""
    return policy.act(observe([text], 64), generator(1), deterministic=True).actions[:, 0]


@pytest.mark.parametrize("kind", [PolicyKind.FLOW, pytest.param(PolicyKind.DIFFUSION, marks=pytest.mark.slow)])
def test_opposite_instructions_in_one_state_are_told_apart_only_by_a_text_encoder(kind: PolicyKind):
    listens = taught(replace(CONFIG, kind=kind))
    assert listens.reads_instructions
    for text, meant in zip(TEXTS, (0.6, -0.6), strict=True):
        assert (done(listens, text) - meant).abs().max() < 0.2
    wrong = with_instruction(listens, "wrong", WorldSpec("ways", {}, listens.action, 10, 10, instructions=TEXTS))
    assert (done(wrong, TEXTS[0]) + 0.6).abs().max() < 0.2
    deaf = taught(replace(CONFIG, kind=kind, text_encoder=TextEncoder.NONE))
    assert not deaf.reads_instructions
    assert torch.equal(done(deaf, TEXTS[0]), done(deaf, TEXTS[1]))
    assert max((done(deaf, text) - meant).abs().max() for text, meant in zip(TEXTS, (0.6, -0.6), strict=True)) > 0.5


def test_what_is_seen_is_weighed_by_what_was_read():
    """By hand: scale(text) x layer(seen) + shift(text), and a policy with it is told by its weights."""
    mixed = Modulation(2, 1)
    with torch.no_grad():
        mixed.layer.weight.copy_(torch.tensor([[2.0, -1.0]]))
        mixed.layer.bias.fill_(0.5)
        mixed.weights.weight.copy_(torch.tensor([[3.0], [10.0]]))
        mixed.weights.bias.zero_()
    image_features, told = torch.tensor([[1.0, 4.0], [2.0, 1.0]]), torch.tensor([[0.0], [1.0]])
    assert mixed(image_features, told).tolist() == [[2 - 4 + 0.5], [4 * (4 - 1 + 0.5) + 10]]
    policy = make(replace(CONFIG, text_encoder=TextEncoder.FILM))
    assert policy.reads_instructions and any("modulation" in name for name in policy.state_dict())


CONFIGS = {
    "diffusion": CONFIG,
    "film": replace(CONFIG, text_encoder=TextEncoder.FILM),
    "flow": replace(CONFIG, kind=PolicyKind.FLOW),
    "learned noise": replace(CONFIG, kind=PolicyKind.FLOW, flow_noise=FlowNoise.LEARNED),
    "matching": replace(CONFIG, kind=PolicyKind.FLOW, likelihood=Likelihood.MATCHING),
    "transformer": replace(CONFIG, denoiser=DenoiserKind.TRANSFORMER, prediction_steps=3),
    "unet": replace(CONFIG, denoiser=DenoiserKind.UNET, prediction_steps=4, depth=2, history=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_keeps_every_promise_of_what_can_be_fine_tuned(name: str):
    """Scores equal those of `act`, rows stay apart, and a checkpoint decides what was saved, base copy included."""
    fields = {**FIELDS, **CAMERA} if name in ("flow", "transformer") else FIELDS
    check_policy(make(CONFIGS[name], fields=fields), load_policy)
    prepared = make(CONFIGS[name], fields=fields)
    prepared.prepare_finetuning(2, train_encoder=False)
    assert not any(weight.requires_grad for weight in prepared.network.encoder_parameters())
    check_policy(prepared, load_policy)


def test_scores_are_those_of_the_instruction_that_was_given():
    policy = make()
    policy.prepare_finetuning(3)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator(5)))
    observation = observe([*TEXTS])
    decision = policy.act(observation, generator())
    scores = policy.log_prob(observation, decision.latents)
    assert (scores.logp - decision.logp).abs().max() <= 1e-5
    alone = policy.log_prob(observe([TEXTS[0]], 1), {"chain": decision.latents["chain"][:1]})
    assert (alone.logp - decision.logp[:1]).abs().max() <= 1e-5
    other = policy.log_prob(observe([*TEXTS[::-1]]), decision.latents)
    assert (other.logp - decision.logp).abs().max() > 1e-2
    scores.logp.sum().backward()
    read = dict(policy.named_parameters())["network.text_encoder.embedding.weight"]
    assert read.grad is not None and bool(read.grad.any())


def test_a_text_means_the_same_beside_longer_ones():
    torch.manual_seed(0)
    encoder = WordEncoder((*TEXTS, "stop"), 8)
    alone, beside = encoder(["stop"]), encoder([TEXTS[0], "stop", TEXTS[1], "Stop "])
    assert torch.allclose(alone[0], beside[1], atol=1e-6) and torch.allclose(beside[1], beside[3], atol=1e-6)
    assert (beside[0] - beside[2]).abs().max() > 1e-3  # the same words in another order


def test_other_phrasings_of_known_words_are_read_and_new_words_refused():
    policy = make()
    assert policy.act(observe(["blue left of red"]), generator()).actions.isfinite().all()
    with pytest.raises(
        SpecError, match=r"not trained with the word 'lefft' of 'put red lefft'.*left.*Known words: blue, left"
    ):
        policy.act(observe(["put red lefft"]), generator())
    with pytest.raises(SpecError, match=r"'zebra' of 'zebra'\. Known words: blue, left"):
        policy.act(observe(["zebra"]), generator())


def test_punctuation_around_a_word_says_nothing():
    words = WordTokenizer(["put red left of blue", "turn by -3 to the left.", "3 times"])
    same = "put red left of blue", "Put 'red' left of blue.", "put red, left of (blue)!", "put red left of blue ..."
    tokens = words(same)[0]
    assert all(torch.equal(row, tokens[0]) for row in tokens)
    two = words(["turn by -3 to the left.", "turn by 3 to the left."])[0]
    assert not torch.equal(two[0], two[1]), "a minus is no punctuation"
    assert torch.equal(WordTokenizer(["go left."])(["go left"])[0], WordTokenizer(["go left."])(["go left."])[0])
    with pytest.raises(SpecError, match=r"not trained with the word 'lefft\.'"):
        words(["put red lefft."])


def test_where_words_were_hidden_in_training_unknown_ones_are_read():
    """Only losses hide words: what is decided and scored does not; whatever is unknown is one and the same word."""
    policy = make(replace(CONFIG, word_dropout=0.5))
    told = [policy.act(observe([f"put {word} left of blue"]), generator()).actions for word in ("red", "mauve", "teal")]
    assert torch.equal(told[1], told[2]) and not torch.equal(told[0], told[1])
    encoder = policy.network.text_encoder
    assert isinstance(encoder, WordEncoder)
    draw = lambda seed: encoder([TEXTS[0]] * 64, generator(seed))  # noqa: E731
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert len(draw(1).unique(dim=0)) > 8  # every row hides words of its own
    assert torch.allclose(encoder([TEXTS[0]] * 2), encoder([TEXTS[0], "stop"])[:1].expand(2, -1), atol=1e-6)
    assert bool((draw(1) == encoder([TEXTS[0]])).all(1).sum() < 16)
    with pytest.raises(ConfigError, match=r"word_dropout=1\.0 is a fraction"):
        replace(CONFIG, word_dropout=1.0)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (None, r"no 'task'.*2 instructions: 'put red left of blue', 'put blue left of red'"),
        ([TEXTS[0], ""], r"empty 'task' in row 1.*2 instructions"),
    ],
)
def test_a_missing_instruction_is_refused_where_several_are_known(texts: Any, said: str):
    with pytest.raises(SpecError, match=said):
        make().act(observe(texts), generator())
    one = make(texts=TEXTS[:1])
    told, untold = one.act(observe([TEXTS[0]]), generator()), one.act(observe(texts and ["", TEXTS[0]]), generator())
    assert torch.equal(told.actions, untold.actions)


def test_another_number_of_texts_than_rows_is_refused():
    with pytest.raises(SpecError, match="3 texts, but there are 8 rows"):
        make().act({**observe(None), TASK: [TEXTS[0]] * 3}, generator())


def test_a_frozen_encoder_keeps_what_it_read_in_the_latents():
    config = replace(CONFIG, image=ImageEncoderConfig(features=8, channels=(8, 8, 8)))
    policy = make(config, fields={**FIELDS, **CAMERA})
    policy.prepare_finetuning(2, train_encoder=False)
    assert policy.caches_condition
    image = torch.randint(0, 256, (8, 1, 8, 8, 3), generator=generator(2), dtype=torch.uint8)
    decision = policy.act({**observe([*TEXTS]), "observation.images.front": image}, generator())
    assert decision.latents["condition"].shape == (8, 2 + 8 + 16)
    assert (policy.log_prob({}, decision.latents).logp - decision.logp).abs().max() <= 1e-5


def test_the_default_reads_nothing_and_has_no_weights_for_it():
    policy = make(DenoisingPolicyConfig())
    assert not policy.reads_instructions and not any("text" in name for name in policy.state_dict())
    assert policy.act(observe(None), generator()).actions.shape == (8, 4, 2)


class Own(nn.Module):
    """Somebody else's network, which reads the text's length."""

    reads_instructions = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def encode(self, observation: dict[str, Any], generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {"condition": torch.tensor([[float(len(text))] for text in observation[TASK]])}

    def denoise(self, x: Tensor, time: Tensor, condition: Any) -> Tensor:
        return x + self.layer(condition["condition"])[:, None]

    def encoder_parameters(self) -> list[nn.Parameter]:
        return []


def test_a_network_of_ones_own_reads_texts_by_itself():
    config = replace(CONFIG, text_encoder=TextEncoder.NONE)
    assert make(config, network=Own()).reads_instructions
    with pytest.raises(ConfigError, match="text_encoder=words is supported by ChunkNetwork only, and Own reads"):
        make(CONFIG, network=Own())
    with pytest.raises(ConfigError, match="text_features=0"):
        replace(CONFIG, text_features=0)


class ToldWorld(BanditWorld):
    """Reward -|a - g|^2, g = +-(0.8, 0.8) by the instruction, which the state does not show."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size, horizon=2, with_task=True)
        self.spec = replace(self.spec, instructions=TEXTS)

    def observe(self) -> dict:
        texts = np.array(TEXTS)[(self.context[:, 0] > 0).astype(int)]
        return {STATE: np.zeros((self.batch_size, 1, 2), dtype=np.float32), TASK: texts}

    def step(self, actions: np.ndarray) -> Any:
        step = super().step(actions)
        goal = np.where(self.context[:, 0] > 0, -0.8, 0.8)[:, None, None]
        error = ((actions - goal) ** 2).sum(-1)
        return replace(step, rewards={"reward": np.where(step.valid, -error, 0.0)})


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "dppo"])
def test_fine_tuning_moves_opposite_tasks_in_opposite_directions(algorithm: str):
    """Imitation did +-0.4, the reward is for +-0.8; the trainer itself checks that scores equal those of `act`."""
    policy = taught(size=0.4)
    before = copy.deepcopy(policy.state_dict())
    policy.prepare_finetuning(4)
    world = ToldWorld(64)
    config = FinetuneConfig(
        algorithm=algorithm,
        iterations=12,
        groups=8,
        group_size=8,
        epochs=4,
        minibatch=256,
        learning_rate=3e-3,
        target_kl=None,
        evaluate_every=0,
    )
    critic = state_critic(FIELDS, 1, width=16, instructions=TEXTS) if algorithm == "dppo" else None
    finetune(policy, critic, world, config, seed=0)
    for text, sign in zip(TEXTS, (1, -1), strict=True):
        assert 0.55 < float(sign * done(policy, text).mean()) < 1.0
    moved = {
        name for name, value in policy.state_dict().items() if name in before and not torch.equal(value, before[name])
    }
    assert any(name.startswith("network.text_encoder") for name in moved)


def test_a_policy_that_knows_several_tasks_is_tuned_in_a_world_with_one():
    world = ToldWorld(16)
    world.spec = replace(world.spec, instructions=TEXTS[1:])
    world.observe = lambda: {STATE: np.zeros((16, 1, 2), dtype=np.float32), TASK: np.array(TEXTS[1:] * 16)}
    policy = make()
    policy.prepare_finetuning(2)
    config = FinetuneConfig(algorithm="grpo", iterations=1, groups=4, group_size=4, epochs=1, evaluate_every=0)
    assert finetune(policy, None, world, config, seed=0).iterations == 1


def test_requests_served_together_follow_their_own_instructions():
    """One pass answers both; a request without a text, or with a strange word, is that client's error alone."""
    policy = taught()
    session = Session(policy.spec)
    told = [*TEXTS, "", "juggle"]
    messages = [{STATE: np.zeros(2), **({"prompt": text} if text else {})} for text in told]
    sizes: list[int] = []

    async def answers() -> list[Any]:
        queue = InferenceQueue(policy, generator(), on_batch=sizes.append)
        queue.start()
        asked = [asyncio.ensure_future(queue.infer(session.observe(message))) for message in messages]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        await queue.stop()
        return replies

    left, right, untold, strange = asyncio.run(answers())
    assert sizes == [4]
    assert left.actions.min() > 0.3 and right.actions.max() < -0.3
    assert isinstance(untold, SpecError) and "2 instructions" in str(untold)
    assert isinstance(strange, SpecError) and "'juggle'" in str(strange)
