"""Stored pairs hold images, not what an encoder made of them: who learns from them reads them by its own weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing_toys import CAMERA, INSTRUCTIONS, SeeingWorld, denoising_policy
from torch import Tensor

from robopolicy.core.errors import DataError
from robopolicy.core.policy import is_condition
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import write_folder_atomic
from robopolicy.core.tensors import save_tree
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.preferences import Pairs, Preferences, read_pairs, write_pairs
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import recompute_log_probs
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance

CONFIG = FinetuneConfig(
    algorithm="grape",
    iterations=2,
    groups=4,
    group_size=4,
    epochs=1,
    minibatch_episodes=8,
    actor_warmup=1,
    target_kl=None,
    evaluate_every=0,
    options={"gcpg": {"own": 1.0, "external": 0.0, "success": 0.0}},
)


def policy_of(seed: int = 0, *, frozen: bool = True) -> Any:
    """A policy that reads the camera; seed: of its weights."""
    policy = denoising_policy(SeeingWorld(4), seed, cameras=True)
    policy.prepare_finetuning(train_encoder=not frozen)
    assert policy.caches_condition == frozen
    return policy


@pytest.fixture(scope="module", params=[True, False], ids=["stored frozen", "stored learning"])
def stored(request, tmp_path_factory) -> Path:
    """Pairs of a run whose decisions kept what the encoder made of images, or did not."""
    folder = tmp_path_factory.mktemp("pairs")
    finetune(policy_of(frozen=request.param), None, SeeingWorld(16), CONFIG, RunFolder(folder))
    return folder / "preferences"


def conditions(latents) -> list[str]:
    return [name for name in latents if is_condition(name)]


def by_hand(policy: Any, rollouts: Any) -> Tensor:
    """Score decisions one by one from what the world showed, with nothing that anybody kept: [B, T, K]."""
    logp = torch.zeros(rollouts.mask.shape)
    for row, column in rollouts.alive.nonzero().tolist():
        observation = {key: value[row, column][None] for key, value in rollouts.observation.items()}
        observation[CAMERA] = rollouts.images.read(rollouts.images.seen[row, column][None])[CAMERA]
        observation["task"] = [INSTRUCTIONS[int(rollouts.task[row, column])]]
        latents = {"chain": rollouts.latents["chain"][row, column][None]}
        logp[row, column] = policy.log_prob(observation, latents).logp.detach()
    return logp


def test_images_are_stored_and_no_conditions(stored):
    rollouts = read_pairs(stored).rollouts
    assert not conditions(rollouts.latents)
    assert rollouts.images is not None and rollouts.shown[CAMERA] == (1, 20, 20, 3)


@pytest.mark.parametrize("frozen", [True, False])
def test_pairs_alone_are_scored_by_the_encoder_of_who_learns(stored, frozen):
    policy, world = policy_of(seed=5, frozen=frozen), SeeingWorld(4)
    kept = read_pairs(stored)
    collector = make_collector(world, policy, build_algorithm(CONFIG), CONFIG, 0, torch.Generator(), pairs=kept)
    rollouts = collector.collect(0)
    assert bool(conditions(rollouts.latents)) == frozen  # read once an iteration, as when it acts
    scores, _ = recompute_log_probs(rollouts, policy, INSTRUCTIONS)
    wanted = by_hand(policy, rollouts)
    assert (wanted - rollouts.logp_behaviour)[rollouts.mask].abs().max() > 1e-3  # another encoder sees something else
    torch.testing.assert_close(scores[rollouts.mask], wanted[rollouts.mask], atol=1e-4, rtol=1e-4)
    assert finetune(policy, None, world, CONFIG, guidance=Guidance(pairs=kept)).iterations == 2


@pytest.mark.parametrize("frozen", [True, False])
def test_older_pairs_beside_todays_are_scored_by_the_encoder_of_who_learns(stored, frozen, monkeypatch):
    policy = policy_of(seed=5, frozen=frozen)
    mixed = []
    plain = Preferences.mix

    def spy(self, rollouts, context):
        scored_rollouts = plain(self, rollouts, context)
        scores, wanted = recompute_log_probs(scored_rollouts, policy, INSTRUCTIONS)[0], by_hand(policy, scored_rollouts)
        torch.testing.assert_close(scores[scored_rollouts.mask], wanted[scored_rollouts.mask], atol=1e-4, rtol=1e-4)
        mixed.append((len(scored_rollouts.group) - len(rollouts.group), bool(conditions(scored_rollouts.latents))))
        assert not any(conditions(part.latents) for _, part in self.kept)
        return scored_rollouts

    monkeypatch.setattr(Preferences, "mix", spy)
    options = {**CONFIG.options, "preferences": {"share": 1.0, "folder": str(stored)}}
    assert finetune(policy, None, SeeingWorld(16), replace(CONFIG, options=options)).iterations == 2
    assert [older > 0 for older, _ in mixed] == [True, True]
    assert [kept for _, kept in mixed] == [frozen] * 2


def test_pairs_whose_latents_are_other_actions_are_refused(stored):
    policy = policy_of(seed=5)
    policy.action_normalizer.scale.mul_(0.5)
    for given in ({"guidance": Guidance(pairs=read_pairs(stored))}, {}):
        folder = {} if given else {"preferences": {"share": 1.0, "folder": str(stored)}}
        config = replace(CONFIG, options={**CONFIG.options, **folder})
        with pytest.raises(DataError, match="by a policy with another action normaliser"):
            finetune(policy, None, SeeingWorld(16), config, **given)


def test_pairs_that_were_stored_with_stale_conditions_are_read_without(tmp_path):
    """As earlier versions wrote them: the latents hold what weights of another time made of the images."""
    finetune(policy_of(), None, SeeingWorld(16), CONFIG, RunFolder(tmp_path / "run"))
    rollouts = read_pairs(tmp_path / "run" / "preferences").rollouts
    stale = torch.randn((*rollouts.shape, 10))
    old = replace(rollouts, latents={**rollouts.latents, "condition": stale})
    tree = {"instructions": list(INSTRUCTIONS), "rollouts": old.tree()}
    write_folder_atomic(tmp_path / "old", lambda inside: save_tree(inside, "preferences", tree))
    policy = policy_of(seed=5)
    collected = []
    for pairs in (read_pairs(tmp_path / "old"), Pairs(rollouts, INSTRUCTIONS)):
        collector = make_collector(
            SeeingWorld(4), policy, build_algorithm(CONFIG), CONFIG, 0, torch.Generator(), pairs=pairs
        )
        collected.append(collector.collect(0))
    assert torch.equal(collected[0].latents["condition"], collected[1].latents["condition"])
    write_pairs(tmp_path / "anew", old, INSTRUCTIONS)
    assert not conditions(read_pairs(tmp_path / "anew").rollouts.latents)


def test_what_was_collected_without_images_is_no_pair_for_anybody(tmp_path):
    finetune(policy_of(), None, SeeingWorld(16), CONFIG, RunFolder(tmp_path / "run"))
    rollouts = replace(read_pairs(tmp_path / "run" / "preferences").rollouts, images=None)
    kept = replace(rollouts, latents={**rollouts.latents, "condition": torch.zeros((*rollouts.shape, 10))})
    with pytest.raises(DataError, match="collect them again with images"):
        write_pairs(tmp_path / "blind", kept, INSTRUCTIONS)
    for pairs in (Pairs(kept, INSTRUCTIONS), Pairs(rollouts, INSTRUCTIONS)):
        with pytest.raises(DataError, match=rf"'{CAMERA}' in the stored pairs: nothing"):
            finetune(policy_of(), None, SeeingWorld(4), CONFIG, guidance=Guidance(pairs=pairs))


def test_a_policy_that_cannot_be_asked_for_conditions_reads_all_rows_anew(stored, monkeypatch):
    """One of your own may keep features without `encode`: then nobody's are used beside older pairs."""
    from robopolicy.rl.context import Context
    from robopolicy.training import finetune as trainer

    assert Context(torch.Generator()).conditions(read_pairs(stored).rollouts) == {}
    monkeypatch.setattr(trainer, "conditions_of", lambda rollouts, policy, instructions: {})
    options = {**CONFIG.options, "preferences": {"share": 1.0, "folder": str(stored)}}
    assert finetune(policy_of(), None, SeeingWorld(16), replace(CONFIG, options=options)).iterations == 2
