"""LeRobot's SmolVLA, pi0 and pi05 learn here: chains and scores are LeRobot's own networks', checkpoints LeRobot's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_models import FRONT, pi_config, pi_processors, smolvla_config, tiny_pi, tiny_smolvlm, word_tokenizer
from test_lerobot_policies import features, save, statistics

from robopolicy.core.policy import require_trainable
from robopolicy.core.policy_conformance import Level, check_policy, example_batch, example_observation
from robopolicy.core.spec import TASK
from robopolicy.policies.checkpoint import load_policy

KINDS = ("smolvla", "pi0", "pi05")
ROWS = 3


def save_pi(kind: str, folder: Path, tokenizer: Path) -> Path:
    inputs, outputs = features(environment=None, cameras=(FRONT,))
    known = statistics(inputs, outputs)
    for value in known.values():
        value |= {"q01": value["min"], "q99": value["max"]}
    config = pi_config(kind, inputs, outputs)
    save(config, folder, processors=pi_processors(config, known, tokenizer))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("language")
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(root / "words")
    inputs, outputs = features(environment=None, cameras=(FRONT,))
    with tiny_pi(len(tokenizer)):
        yield {
            "smolvla": save(smolvla_config(tiny_smolvlm(root / "vlm"), inputs, outputs), root / "smolvla"),
            "pi0": save_pi("pi0", root / "pi0", root / "words"),
            "pi05": save_pi("pi05", root / "pi05", root / "words"),
        }


def observed(policy: Any) -> dict:
    observation = example_observation(policy.spec, ROWS, torch.Generator().manual_seed(0))
    observation[TASK] = ["push the cube", "reach", "stack left"]
    return observation


def trained(folder: Path) -> Any:
    return require_trainable(load_policy(folder))


def lerobots_chunk(folder: Path, observation: dict, noise: torch.Tensor) -> torch.Tensor:
    """Return what LeRobot's own `predict_action_chunk` and postprocessor make of `noise`, all predicted steps."""
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
    actions = policy.predict_action_chunk(preprocess({**frame, TASK: observation[TASK]}), noise=noise)
    return postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])


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
def test_keeps_the_promises_of_a_policy_that_learns(folders, kind):
    def load(folder: Path) -> Any:
        return trained(folder)

    assert check_policy(trained(folders[kind]), load=load).level is Level.TRAINS
