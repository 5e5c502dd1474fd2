"""LeRobot's SmolVLA, pi0 and pi05 learn here: chains and scores are LeRobot's own networks', checkpoints LeRobot's."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_models import FRONT, pi_config, smolvla_config, tiny_pi, tiny_smolvlm, word_tokenizer
from safetensors.torch import load_file, save_file
from test_lerobot_policies import act_config, diffusion_config, features, save, statistics
from torch.utils._python_dispatch import TorchDispatchMode

from robopolicy.benchmarks.tiny_vla import pi_processors
from robopolicy.building.policies import load_trainable
from robopolicy.cli import main
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning, SpecError
from robopolicy.core.examples import example_batch, example_observation
from robopolicy.core.machine import in_bytes
from robopolicy.core.policy import require_trainable
from robopolicy.core.randomness import use_generator
from robopolicy.core.spec import STATE, TASK, Field, WorldSpec, require_fit
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.nn.configuration import FlowNoise
from robopolicy.policies.lerobot import reading as lerobot_reading
from robopolicy.policies.lerobot.acting import LeRobotPolicy, load_lerobot_policy
from robopolicy.policies.lerobot.configuration import LeRobotStart, LeRobotTuning, TrainableWeights
from robopolicy.policies.loading import build_policy, load_policy
from robopolicy.policies.network import steps_of
from robopolicy.rl.critic import state_critic
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.configuration import FinetuneConfig, PretrainConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.memory import plan_memory
from robopolicy.verbs.job import print_model
from sims.registry import make_world

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
KINDS = ("smolvla", "pi0", "pi05")
ROWS = 3


def save_pi(kind: str, folder: Path, tokenizer: Path, action: int = 2, **changes: Any) -> Path:
    inputs, outputs = features(environment=None, cameras=(FRONT,))
    outputs = {name: replace(each, shape=(action,)) for name, each in outputs.items()}
    known = statistics(inputs, outputs)
    for value in known.values():
        value |= {"q01": value["min"], "q99": value["max"]}
    config = pi_config(kind, inputs, outputs, **changes)
    save(config, folder, processors=pi_processors(config, known, tokenizer))
    return folder


@contextmanager
def language_folders(root: Path) -> Iterator[dict[str, Path]]:
    """Write a checkpoint of each of `KINDS` under `root`, and the tokenizer `words`; they can be loaded inside."""
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(root / "words")
    inputs, outputs = features(environment=None, cameras=(FRONT,))
    with tiny_pi(len(tokenizer)):
        yield {
            "smolvla": save(smolvla_config(tiny_smolvlm(root / "vlm"), inputs, outputs), root / "smolvla"),
            "pi0": save_pi("pi0", root / "pi0", root / "words"),
            "pi05": save_pi("pi05", root / "pi05", root / "words"),
        }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with language_folders(tmp_path_factory.mktemp("language")) as made:
        yield made


def observed(policy: Any) -> dict:
    observation = example_observation(policy.spec, ROWS, torch.Generator().manual_seed(0))
    observation[TASK] = ["push the cube", "reach", "stack left"]
    return observation


def trained(folder: Path) -> Any:
    return require_trainable(load_policy(folder))


def lerobots_own(folder: Path, observation: dict, **more: Any) -> tuple[Any, dict, Any]:
    """Return LeRobot's own policy, the batch that its preprocessor makes of an observation, and its postprocessor."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder)
    preprocess, postprocess = make_pre_post_processors(config, str(folder))
    frame = {key: value[:, -1] for key, value in observation.items() if key != TASK}
    frame = {
        key: value.permute(0, 3, 1, 2).contiguous().float() / 255 if value.ndim == 4 else value
        for key, value in frame.items()
    }
    return policy, preprocess({**frame, TASK: observation[TASK], **more}), postprocess


def lerobots_chunk(folder: Path, observation: dict, noise: torch.Tensor) -> torch.Tensor:
    """Return what LeRobot's own `predict_action_chunk` and postprocessor make of `noise`, all predicted steps."""
    policy, batch, postprocess = lerobots_own(folder, observation)
    actions = policy.predict_action_chunk(batch, noise=noise)
    return postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])


def learn_a_little(policy: Any, observation: dict) -> None:
    """Move what is tuned up the gradient of its scores, far enough to be seen in its decisions."""
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    weights = list(policy.trainable_parameters())
    score = policy.log_prob(observation, decision.latents).logp.sum()
    with torch.no_grad():
        for weight, gradient in zip(weights, torch.autograd.grad(score, weights, allow_unused=True), strict=True):
            if gradient is not None:
                weight.add_(0.02 * gradient / gradient.norm().clamp(min=1e-8))


def noise_free(policy: Any, observation: dict) -> torch.Tensor:
    return policy.act(observation, torch.Generator().manual_seed(7), deterministic=True).actions


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_without_noise_is_lerobots_own(folders, kind):
    policy = trained(folders[kind])
    observation = observed(policy)
    ours = policy.act(observation, torch.Generator().manual_seed(7), deterministic=True)
    noise = torch.randn((ROWS, 6, 5), generator=torch.Generator().manual_seed(7))
    assert torch.equal(ours.latents["chain"][:, 0], noise)
    theirs = lerobots_chunk(folders[kind], observation, noise)
    assert theirs.std() > 1e-2
    assert ours.actions.shape == (ROWS, 4, 2)
    torch.testing.assert_close(ours.actions, theirs[:, :4], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        policy.predict(observation, torch.Generator().manual_seed(7), deterministic=True), theirs, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scores_again_are_those_collected_without_the_images(folders, kind):
    policy = trained(folders[kind])
    policy.prepare_finetuning()
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    assert decision.mask.all() and decision.logp.shape == (ROWS, 4)
    blind = {key: value for key, value in observation.items() if key != FRONT}
    scores = policy.log_prob(blind, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-4, rtol=0)
    scores.logp.mean().backward()
    graded = {name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert any("action_in_proj" in name for name in graded) and any("expert" in name for name in graded)
    frozen = ("vlm_with_expert.vlm", "paligemma.model", "paligemma.lm_head")
    assert not [name for name in graded if any(part in name for part in frozen)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_only_instruction_is_learned_under_and_not_an_empty_one(folders, kind, tmp_path):
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    (folder / "robopolicy.json").write_text(json.dumps({"instructions": ["push the cube"]}))
    policy = trained(folder)
    assert TASK not in policy.spec.columns  # what batches of imitation hold
    observation = {key: value for key, value in observed(policy).items() if key != TASK}
    unsaid, losses_with_text, other = (
        policy.encode({**observation, **text}) for text in ({}, {TASK: ["push the cube"] * ROWS}, {TASK: [""] * ROWS})
    )
    assert all(torch.equal(unsaid[name], losses_with_text[name]) for name in losses_with_text)
    assert any(not torch.equal(unsaid[name], other[name]) for name in losses_with_text)


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_the_promises_of_a_policy_that_learns(folders, kind):
    def load(folder: Path) -> Any:
        return trained(folder)

    assert check_policy(trained(folders[kind]), load=load).level is Level.TRAINS


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen_and_said_decides(folders, kind):
    policy = trained(folders[kind])
    observation = observed(policy)
    before = noise_free(policy, observation)
    dark = {**observation, FRONT: torch.zeros_like(observation[FRONT])}
    for other in (dark, {**observation, TASK: ["stack"] * ROWS}):
        assert (noise_free(policy, other) - before).abs().amax((1, 2)).min() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_lerobots_own(folders, kind):
    policy = trained(folders[kind])
    observation = observed(policy)
    batch = example_batch(policy.spec, observation)
    if kind != "smolvla":  # which alone leaves padding out of its loss, as we do
        batch["action_valid"][:] = True
    ours = policy.loss(batch, torch.Generator().manual_seed(3))["denoising"]
    draws = torch.Generator().manual_seed(3)
    time = policy.network.levels(ROWS, draws)
    noise = torch.randn((ROWS, 6, 5), generator=draws)
    theirs, known, _ = lerobots_own(folders[kind], observation, action=batch["actions"])
    theirs.model.sample_noise, theirs.model.sample_time = lambda *asked: noise, lambda *asked: time
    if kind == "smolvla":
        known["action_is_pad"] = ~batch["action_valid"]
    expected, _ = theirs.forward(known, reduction="none")
    assert time.min() >= 0.001 and time.max() < 1.0
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_lerobots_again(folders, kind, tmp_path):
    policy = trained(folders[kind])
    policy.prepare_finetuning()
    observation = observed(policy)
    before = noise_free(policy, observation)
    learn_a_little(policy, observation)
    learned = noise_free(policy, observation)
    assert (learned - before).abs().max() > 1e-3
    policy.save(tmp_path / "tuned")
    noise = torch.randn((ROWS, 6, 5), generator=torch.Generator().manual_seed(7))
    theirs = lerobots_chunk(tmp_path / "tuned", observation, noise)[:, :4]
    torch.testing.assert_close(theirs, learned, atol=1e-5, rtol=0)
    assert torch.equal(noise_free(trained(tmp_path / "tuned"), observation), learned)


def test_adapters_alone_learn_and_are_saved_in_the_weights(folders, tmp_path):
    policy = trained(folders["smolvla"])
    policy.prepare_finetuning()
    observation = observed(policy)
    before = noise_free(policy, observation)
    policy.add_lora(2)
    assert torch.equal(noise_free(policy, observation), before)
    learning = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert learning and all("lora_" in name and ("expert" in name or "action_" in name) for name in learning)
    assert policy.caches_condition, "what reads rests, with adapters too"
    for _ in range(2):  # the second factor begins at zero
        learn_a_little(policy, observation)
    learned = noise_free(policy, observation)
    assert (learned - before).abs().max() > 1e-4
    policy.save(tmp_path / "tuned")
    noise = torch.randn((ROWS, 6, 5), generator=torch.Generator().manual_seed(7))
    theirs = lerobots_chunk(tmp_path / "tuned", observation, noise)[:, :4]
    torch.testing.assert_close(theirs, learned, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="already has adapters"):
        policy.add_lora(2)


def test_a_base_takes_the_first_steps_and_stays(folders, tmp_path):
    policy, alone = trained(folders["smolvla"]), trained(folders["smolvla"])
    with pytest.warns(
        RobopolicyWarning, match="a frozen base runs the first denoising steps, which LeRobot does not support"
    ):
        policy.prepare_finetuning(2)
    with pytest.raises(ConfigError, match="Adapters train all denoising steps"):
        policy.add_lora(2)
    observation = observed(policy)
    noise = torch.randn((ROWS, 6, 5), generator=torch.Generator().manual_seed(2))
    before = policy.trajectory(observation, noise)
    learn_a_little(policy, observation)
    after = policy.trajectory(observation, noise)
    torch.testing.assert_close(before[:, :3], alone.trajectory(observation, noise)[:, :3], atol=1e-5, rtol=0)
    torch.testing.assert_close(after[:, :3], before[:, :3], atol=1e-6, rtol=0)
    assert (after[:, 3:] - before[:, 3:]).abs().max() > 1e-4
    shared = {id(weight) for weight in policy.network.parameters()}
    copied = sum(value.numel() for value in policy.base.buffers())
    assert copied == sum(weight.numel() for weight in policy.trainable_parameters())
    assert not shared & {id(value) for value in policy.base.buffers()}
    with pytest.warns(RobopolicyWarning, match="a frozen base runs the first denoising steps"):
        alone.prepare_finetuning(2)
    alone.load_state_dict(policy.state_dict())  # as a run does that goes on
    assert torch.equal(alone.trajectory(observation, noise), after)
    policy.save(tmp_path / "tuned")
    restored = trained(tmp_path / "tuned")
    assert restored.spec.scored_steps == 2
    assert torch.equal(restored.trajectory(observation, noise), after)
    acting = load_policy(tmp_path / "tuned")
    for name in ("act", "predict"):
        own, kept = (
            getattr(each, name)(observation, torch.Generator().manual_seed(3), deterministic=True)
            for each in (acting, restored)
        )
        assert torch.equal(*(each if name == "predict" else each.actions for each in (own, kept)))
    for tuned in (
        TrainableWeights.ALL,
        TrainableWeights.LEROBOT,
    ):  # other weights learn now, and the base is what it was
        other: Any = load_trainable(tmp_path / "tuned", LeRobotTuning(trainable=tuned))
        assert torch.equal(other.trajectory(observation, noise), after)
    with pytest.warns(RobopolicyWarning, match="frozen base .* the base is removed"):
        whole = build_policy("lerobot", LeRobotStart(tmp_path / "tuned"), data_spec(), None, 0)
    assert whole.base is None and whole.finetuning is None
    path = tmp_path / "tuned" / "robopolicy_base.safetensors"
    named = load_file(path)
    save_file({f"weight_{index}": named[name] for index, name in enumerate(policy.base.names)}, path)  # as once written
    assert torch.equal(trained(tmp_path / "tuned").trajectory(observation, noise), after)
    path.unlink()
    with pytest.raises(CheckpointError, match="first denoising steps"):
        trained(tmp_path / "tuned")


def test_activations_computed_again_give_the_same_gradients(folders):
    gradients = []
    for checkpointing in (False, True):
        policy = load_trainable(
            folders["smolvla"], LeRobotTuning(trainable=TrainableWeights.ALL, gradient_checkpointing=checkpointing)
        )
        observation = observed(policy)
        decision = policy.act(observation, torch.Generator().manual_seed(1))
        chosen = torch.tensor([[0, 2]]).expand(ROWS, 2)
        scores = policy.log_prob(observation, {**decision.latents, "chosen": chosen})
        torch.testing.assert_close(scores.logp, decision.logp[:, [0, 2]], atol=1e-4, rtol=0)
        scores.logp.sum().backward()
        gradients.append({name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and any("vision_model" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-4)


def test_a_prefix_that_is_not_kept_is_read_again(folders):
    policy = load_trainable(folders["pi05"], LeRobotTuning(cache_encoder_outputs=False))
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    assert set(decision.latents) == {"chain"}
    scores = policy.log_prob(observation, decision.latents)
    torch.testing.assert_close(scores.logp, decision.logp, atol=1e-4, rtol=0)
    dark = {**observation, FRONT: torch.zeros_like(observation[FRONT])}
    assert (policy.log_prob(dark, decision.latents).logp - decision.logp).abs().max() > 1e-6


def test_noise_is_where_it_is_scored(folders):
    policy = load_trainable(folders["pi0"], LeRobotTuning(flow_noise_level=0.2, flow_noise=FlowNoise.CONSTANT))
    decision = policy.act(observed(policy), torch.Generator().manual_seed(1))
    assert policy.schedule.table[:, 4].unique().tolist() == pytest.approx([0.2])
    policy.record_means = True
    decision = policy.act(observed(policy), torch.Generator().manual_seed(1))
    drawn = (decision.latents["chain"][:, 1:] - decision.latents["mean"]) / 0.2
    assert drawn[..., 2:].abs().max() == 0 and 0.8 < drawn[..., :2].std() < 1.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tuning", [{}, {"noisy_steps": 2}])
def test_what_pads_an_action_follows_the_ode_under_an_sde(folders, kind, tuning):
    """Against Euler's own formula, in sampling, scoring, chains gone on from, and the lean engine."""
    sde = LeRobotTuning(flow_noise=FlowNoise.SDE, flow_noise_level=0.7, **tuning)
    policy, generator = load_trainable(folders[kind], sde), torch.Generator().manual_seed(1)
    policy.prepare_finetuning()
    policy.record_means = True
    observation = observed(policy)
    decision = policy.act(observation, generator)
    again = policy.resume(observation, decision.latents, torch.tensor([-1, 0, 2]), generator)
    condition = policy.encode(observation)
    for chain in (decision.latents["chain"], again.latents["chain"]):
        steps, count = steps_of(policy.network, policy.schedule.times, condition), policy.schedule.steps
        for index in range(count):
            velocity = steps.one(chain[:, index], index)
            expected = chain[:, index] - velocity / count
            torch.testing.assert_close(chain[:, index + 1, :, 2:], expected[..., 2:], atol=1e-5, rtol=0)
    assert (decision.latents["chain"][:, -1] - again.latents["chain"][:, -1])[..., :2].abs().max() > 1e-2
    scores = policy.log_prob(observation, decision.latents)
    torch.testing.assert_close(scores.logp * decision.mask, decision.logp * decision.mask, atol=1e-4, rtol=0)
    torch.testing.assert_close(scores.extras["mean"], decision.latents["mean"], atol=1e-5, rtol=0)
    lean = with_engine(policy, InferenceConfig(engine="lean"))
    ours, theirs = (each.act(observation, torch.Generator().manual_seed(3)).actions for each in (lean, policy))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_an_iteration_of_the_trainer_moves_the_expert_alone(folders, tmp_path):
    inputs, outputs = features(state=6, environment=None, cameras=(FRONT,))
    vlm = json.loads((folders["smolvla"] / "config.json").read_text())["vlm_model_name"]
    policy = trained(save(smolvla_config(Path(vlm), inputs, outputs), tmp_path / "smolvla"))
    policy.prepare_finetuning()
    world = make_world("push_cube", 2, cameras=("front",), image_size=32)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    config = FinetuneConfig(iterations=1, rollout_length=3, minibatch=4, epochs=1, critic_warmup=0)
    critic = state_critic(world.spec.observation, 1, 8, 1, world.spec.instructions)
    result = finetune(policy, critic, world, config)
    world.close()
    assert result.iterations == 1
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert any("lm_expert" in name for name in moved)
    assert all("lm_expert" in name or "model.action_" in name for name in moved)
    assert all(value.isfinite().all() for value in policy.state_dict().values())


def edited(folder: Path, copy: Path, **changes: Any) -> Path:
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


def test_a_version_that_breaks_them_is_refused_before_anything_is_read(folders, monkeypatch):
    monkeypatch.setattr("robopolicy.policies.lerobot.acting.version", lambda name: "5.23.0")
    for kind in KINDS:
        with pytest.raises(ConfigError, match=rf"'{kind}' does not work with transformers 5.23.0.*<5.6"):
            load_policy(folders[kind])


def test_every_policy_that_reads_by_transformers_is_checked(tmp_path, monkeypatch):
    """Also those whose only part of it is a text encoder (multi_task_dit) or Florence's vision (xvla)."""
    monkeypatch.setattr("robopolicy.policies.lerobot.acting.version", lambda name: "5.23.0")
    for kind in ("multi_task_dit", "xvla"):
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json"):
            (folder / name).write_text("{}")
        (folder / "config.json").write_text(json.dumps({"type": kind, "n_action_steps": 2}))
        with pytest.raises(ConfigError, match=rf"'{kind}' does not work with transformers 5.23.0"):
            load_policy(folder)


@pytest.mark.parametrize("installed", ["5.3.0", "4.57.1"])
def test_a_version_that_was_never_tried_is_refused_before_anything_is_read(folders, monkeypatch, installed):
    monkeypatch.setattr("robopolicy.policies.lerobot.acting.version", lambda name: installed)
    for kind in KINDS:
        with pytest.raises(ConfigError, match=rf"'{kind}' was not tested with transformers {installed}.*>=5.4,<5.6"):
            load_policy(folders[kind])


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(folders, tmp_path, monkeypatch, dtype, size):
    folder = edited(folders["pi0"], tmp_path / "copy", dtype=dtype)
    needed = size * sum(value.numel() for value in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(lerobot_reading, "free_memory", lambda device: needed - 1)
    monkeypatch.setattr("lerobot.policies.factory.get_policy_class", lambda kind: pytest.fail("it is built"))
    free = in_bytes(needed - 1)
    with pytest.raises(ConfigError, match=rf"copy needs {in_bytes(needed)} of memory on cpu.*only {free} are free"):
        load_policy(folder)
    monkeypatch.setattr(lerobot_reading, "free_memory", lambda device: needed)
    lerobot_reading.require_memory(folder, CPU)
    path = tmp_path / "copy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is corrupt"):
        lerobot_reading.require_memory(folder, CPU)


class Drawing(TorchDispatchMode):
    """Counts the random numbers that are drawn within."""

    drawn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            self.drawn += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_loading_draws_no_weights_that_the_file_replaces(folders, kind):
    with Drawing() as drawing:
        policy = load_policy(folders[kind])
    assert drawing.drawn == 0
    kept = load_file(folders[kind] / "model.safetensors")
    assert isinstance(policy, LeRobotPolicy)
    assert all(torch.equal(policy.policy.state_dict()[name], value) for name, value in kept.items())


def test_fine_tuning_asks_for_the_memory_of_both_copies_before_it_reads_one(folders, tmp_path, monkeypatch, capsys):
    folder = folders["pi0"]
    needed = 4 * sum(value.numel() for value in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(lerobot_reading, "free_memory", lambda device: 2 * needed - 1)
    monkeypatch.setattr("robopolicy.verbs.finetune.load_policy", lambda *given: pytest.fail("it is read"))
    command = ["finetune", f"finetune.policy={folder}", "world=push_cube", f"run.root={tmp_path / 'runs'}"]
    assert main(command) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert f"2 times {in_bytes(needed)} of memory" in output and f"{in_bytes(2 * needed - 1)} are free" in output


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("smolvla", {"use_cache": False}, "use_cache=false"),
        ("smolvla", {"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha"),
        ("pi0", {"use_relative_actions": True}, "use_relative_actions"),
    ],
)
def test_what_cannot_learn_here_says_why(folders, tmp_path, kind, changes, complaint):
    policy = load_policy(edited(folders[kind], tmp_path / "copy", **changes))
    with pytest.raises(ConfigError, match=complaint):
        require_trainable(policy)


def test_a_missing_tokenizer_or_model_is_named(folders, tmp_path):
    folder = edited(folders["smolvla"], tmp_path / "smolvla", vlm_model_name="somebody/absent")
    with pytest.raises(CheckpointError, match=r"needs vlm_model_name=somebody/absent on this machine.*hf download"):
        load_policy(folder)
    folder = edited(folders["smolvla"], tmp_path / "moved", vlm_model_name="/nowhere/vlm")
    with pytest.raises(
        CheckpointError, match=r"needs vlm_model_name=/nowhere/vlm on.*: copy the folder there"
    ) as moved:
        load_policy(folder)
    assert "hf download" not in str(moved.value)  # which nobody can follow with a path
    folder = edited(folders["pi0"], tmp_path / "pi0")
    path = folder / "policy_preprocessor.json"
    words = json.loads(path.read_text())["steps"][3]["config"]["tokenizer_name"]
    path.write_text(path.read_text().replace(words, "google/paligemma-3b-pt-224"))
    with pytest.raises(CheckpointError, match=r"tokenizer_name=google/paligemma-3b-pt-224.*gated") as caught:
        load_policy(folder)
    assert "\n" not in str(caught.value)


def test_memory_is_told_apart_by_what_is_kept_and_computed_again(folders):
    budgets = []
    for changes in ({}, {"cache_encoder_outputs": False}, {"gradient_checkpointing": True}):
        policy = load_trainable(folders["smolvla"], LeRobotTuning(**changes))
        policy.prepare_finetuning()
        budgets.append(plan_memory(policy, 8, 8))
    plain, again, checkpointed = budgets
    prefix = 2 * 4 * (4 + 8 + 1) * 16 * 4  # keys and values, layers, tokens of image, text and state, size, bytes
    assert plain.kept - again.kept == 2 * 8 * (prefix + 13)  # and which of the tokens are there
    assert checkpointed.activations < 0.2 * plain.activations
    assert plain.learning == 4 * 4 * sum(weight.numel() for weight in policy.trainable_parameters())


def test_training_says_what_it_takes_and_what_fits(folders, capsys, monkeypatch):
    policy = trained(folders["smolvla"])
    print_model(policy, PretrainConfig(batch_size=8))
    output = capsys.readouterr().out
    assert "activations of 8 chunks" in output and "gradients, optimiser and moving average" in output
    learns = 4 * 4 * sum(weight.numel() for weight in policy.trainable_parameters())
    monkeypatch.setattr("robopolicy.verbs.job.free_memory", lambda device: learns)
    with pytest.raises(ConfigError, match=r"Training needs about .* more memory"):
        print_model(policy, PretrainConfig(batch_size=8))


def test_training_of_what_does_not_denoise_says_what_it_takes_too(tmp_path, monkeypatch, capsys):
    policy = load_trainable(save(act_config(), tmp_path / "act"), LeRobotTuning())
    print_model(policy, PretrainConfig())
    assert "gradients, optimiser and moving average" in capsys.readouterr().out
    monkeypatch.setattr("robopolicy.verbs.job.free_memory", lambda device: 0)
    with pytest.raises(ConfigError, match=r"Training needs about .* more memory"):
        print_model(policy, PretrainConfig())


def test_images_of_another_size_are_refused(folders):
    policy = trained(folders["smolvla"])
    observation = observed(policy)
    large = torch.zeros((ROWS, 1, 64, 64, 3), dtype=torch.uint8)
    with pytest.raises(SpecError, match=r"images.front' has shape \(3, 1, 64, 64, 3\)"):
        policy.act({**observation, FRONT: large}, torch.Generator())


def data_spec() -> WorldSpec:
    """What data shows that these policies learn from."""
    spec = make_world("push_cube", 1, cameras=("front",), image_size=32).spec
    state = replace(spec.observation[STATE], shape=(4,), names=("x", "y", "velocity_x", "velocity_y"))
    more = {"observation.environment_state": Field((3,))}
    return replace(spec, observation={**spec.observation, **more, STATE: state})


def test_training_begins_with_lerobots_weights_and_frees_what_its_config_does(folders):
    spec = data_spec()
    config = LeRobotStart(folders["smolvla"])
    policy = build_policy("lerobot", config, spec, None, 0)
    learning = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert any("state_proj" in name for name in learning) and not any("vision_model" in name for name in learning)
    assert (policy.spec.fps, policy.spec.instructions) == (spec.fps, spec.instructions)
    observation = observed(policy)
    assert torch.equal(noise_free(policy, observation), noise_free(trained(folders["smolvla"]), observation))
    with pytest.raises(ConfigError, match=r"policy.path=FOLDER"):
        build_policy("lerobot", LeRobotStart(), spec, None, 0)


def test_what_it_learned_from_names_its_elements(folders, tmp_path):
    """So that other orders are refused, and a robot knows what is meant; what a user wrote down stays."""
    spec = data_spec()
    policy = build_policy("lerobot", LeRobotStart(folders["smolvla"]), spec, None, 0)
    assert policy.spec.action.names == spec.action.names != ()
    policy.save(tmp_path / "learned")
    learned = load_policy(tmp_path / "learned")
    assert all(learned.spec.observation[key].names == spec.observation[key].names for key in learned.spec.observation)
    require_fit(learned.spec, spec)
    swapped = replace(spec, action=replace(spec.action, names=tuple(reversed(spec.action.names))))
    with pytest.raises(SpecError, match="Element 0 of the action"):
        require_fit(learned.spec, swapped)
    own = copied(folders["smolvla"], tmp_path / "own", {"names": {"action": ["across", "along"]}})
    with pytest.raises(SpecError, match="Element 0 of the action is 'across' for the policy"):
        build_policy("lerobot", LeRobotStart(own), spec, None, 0)
    wrong = copied(folders["smolvla"], tmp_path / "wrong", {"names": {"action": ["across"]}})
    with pytest.raises(ConfigError, match="has 1 names for the elements of 'action', which has 2"):
        load_policy(wrong)


def test_data_of_other_sizes_is_refused_with_the_line_to_write(folders):
    wide = data_spec()
    fields = {**wide.observation, FRONT: replace(wide.observation[FRONT], shape=(24, 40, 3))}
    with pytest.raises(
        SpecError, match=r'write {"image_sizes": {"observation.images.front": \[24, 40\]}} into robopolicy'
    ):
        build_policy("lerobot", LeRobotStart(folders["smolvla"]), replace(wide, observation=fields), None, 0)
    without = {key: field for key, field in wide.observation.items() if key != FRONT}
    with pytest.raises(SpecError, match=r"camera 'front'.*write .*camera of the world.* into robopolicy.json"):
        build_policy("lerobot", LeRobotStart(folders["smolvla"]), replace(wide, observation=without), None, 0)


def copied(folder: Path, copy: Path, settings: dict[str, Any]) -> Path:
    shutil.copytree(folder, copy)
    (copy / "robopolicy.json").write_text(json.dumps(settings))
    return copy


def test_weights_with_openpis_names_are_read_and_none_may_lack(folders, tmp_path):
    folder = edited(folders["pi0"], tmp_path / "pi0")
    path = folder / "model.safetensors"
    known = {name.removeprefix("model."): value for name, value in load_file(path).items()}
    save_file(known, path)
    observation = observed(load_policy(folder))
    assert torch.equal(noise_free(trained(folder), observation), noise_free(trained(folders["pi0"]), observation))
    del known["action_out_proj.bias"]
    save_file(known, path)
    with pytest.raises(CheckpointError, match=r"lacks \['model.action_out_proj.bias'\]"):
        load_policy(folder)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_relative_actions_are_added_to_each_rows_own_state(folders, tmp_path, kind, rows):
    """Against LeRobot itself, which is shown one row after the other; 4 rows are as many as a chunk has steps."""
    folder = save_pi(kind, tmp_path / kind, folders["pi0"].parent / "words", use_relative_actions=True, action=4)
    policy = load_policy(folder)
    observation = example_observation(policy.spec, rows, torch.Generator().manual_seed(0))
    observation[TASK] = ["push the cube", "reach", "stack left", "push"][:rows]
    with use_generator(torch.Generator().manual_seed(3), CPU):
        noise = torch.randn(rows, 6, 5)
    ours = policy.act(observation, torch.Generator().manual_seed(3)).actions
    for row in range(rows):
        theirs, batch, postprocess = lerobots_own(
            folder, {key: each[row : row + 1] for key, each in observation.items()}
        )
        expected = postprocess(theirs.predict_action_chunk(batch, noise=noise[row : row + 1]))
        torch.testing.assert_close(ours[row], expected[0, :4], atol=1e-5, rtol=0)
    state = observation["observation.state"][:, -1]
    assert rows == 1 or (state[1:] - state[0]).abs().amax(1).min() > 1e-2


def test_steps_without_noise_name_the_settings_of_lerobots_policies(folders):
    policy = load_trainable(folders["pi0"], LeRobotTuning(flow_noise_level=0.0))
    with pytest.raises(ConfigError, match=r"fine-tune more steps, or raise flow_noise_level\.$"):
        policy.prepare_finetuning(2)
    without = load_trainable(folders["pi0"], LeRobotTuning(flow_noise=FlowNoise.ODE))
    with pytest.raises(ConfigError, match=r"no log-probability is defined: choose a flow_noise other than ode\.$"):
        without.prepare_finetuning(without.schedule.steps)


@pytest.mark.parametrize(
    ("kind", "chosen", "said"),
    [
        (
            "pi0",
            {"eta": 0.5},
            "'pi0' does not read lerobot.eta, which applies to diffusion policies; its exploration settings are",
        ),
        (
            "smolvla",
            {"exploration_std": 0.2},
            "which applies to act policies; its exploration settings are flow_noise, flow_noise_level, min_std",
        ),
        ("pi05", {"temperature": 0.7}, "which applies to pi0_fast policies"),
        (
            "act",
            {"min_std": 0.2},
            "to flow and diffusion policies; its exploration settings are exploration_std, learn_std.",
        ),
        (
            "diffusion",
            {"flow_noise_level": 0.2},
            "to flow policies; its exploration settings are eta, min_std, noisy_steps.",
        ),
    ],
)
def test_a_choice_that_would_do_nothing_is_refused(folders, tmp_path, kind, chosen, said):
    others = {"act": act_config, "diffusion": diffusion_config}
    folder = save(others[kind](), tmp_path) if kind in others else folders[kind]
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_trainable(folder, LeRobotTuning(**chosen))


def test_a_tokenizer_with_words_that_the_model_lacks_is_anothers(folders, tmp_path):
    word_tokenizer(*(f"word{index}" for index in range(300))).save_pretrained(tmp_path / "words")
    folder = save_pi("pi05", tmp_path / "pi05", tmp_path / "words")
    with pytest.raises(CheckpointError, match=r"has a tokenizer of 3\d\d words .*, but its language model has \d+: it"):
        load_policy(folder)


def test_an_instruction_is_read_as_far_as_the_processor_says(folders, tmp_path):
    folder = edited(folders["smolvla"], tmp_path / "short", tokenizer_max_length=2)
    observation = observed(trained(folder))
    observation[TASK] = ["push the cube left"] * ROWS
    noise = torch.randn((ROWS, 6, 5), generator=torch.Generator().manual_seed(7))
    ours = noise_free(trained(folder), observation)
    torch.testing.assert_close(ours, lerobots_chunk(folder, observation, noise)[:, :4], atol=1e-5, rtol=0)


@pytest.mark.parametrize("setting", ["max_action_dim", "max_state_dim"])
def test_more_elements_than_there_is_room_for_are_refused(folders, tmp_path, setting):
    folder = edited(folders["pi0"], tmp_path / "narrow", **{setting: 1})
    with pytest.raises(CheckpointError, match=f"has {setting}=1, but it has"):
        load_lerobot_policy(folder, weights=False)


@pytest.mark.parametrize("level", [0.2, 0.02])
def test_little_noise_is_what_was_asked_for_and_has_gradients(folders, level):
    policy = load_trainable(folders["pi0"], LeRobotTuning(flow_noise_level=level, flow_noise=FlowNoise.CONSTANT))
    assert policy.schedule.table[:, 4].unique().tolist() == pytest.approx([level])
    observation = observed(policy)
    decision = policy.act(observation, torch.Generator().manual_seed(1))
    scores = policy.log_prob(observation, decision.latents)
    assert float(scores.extras["logp_clamped"].float().mean()) < 0.01
