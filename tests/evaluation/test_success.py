import json

import numpy as np
import pytest
from evaluation_toys import LineController, LinePolicy, LineWorld

from robopolicy.core.errors import ConfigError, DataError, SpecError
from robopolicy.core.policy import is_memoryless
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import Field
from robopolicy.evaluation import episode_batches
from robopolicy.evaluation.episode_batches import SavedBatches
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.success import EvaluationResult, compare, evaluate_policy
from robopolicy.policies.memory import MemoryPolicy

SEEDS = np.arange(100, 123)


def outcomes(result):
    return result.success.tolist(), result.returns.tolist(), result.lengths.tolist()


def test_outcomes_by_hand():
    result = evaluate_policy(LineWorld(4), LinePolicy(speed=0.05), SEEDS)
    distance = np.abs(uniforms(SEEDS, 1)[:, 0] * 2 - 1)
    reachable = distance - 12 * 0.05 < 0.1
    assert result.success.tolist() == reachable.tolist()
    assert 0 < result.successes < result.episodes == 23
    steps = np.where(reachable, np.ceil(np.maximum((distance - 0.1) / 0.05, 1e-9)), 12).astype(int)
    assert result.lengths.tolist() == steps.tolist()
    assert result.returns == pytest.approx(np.minimum(steps * 0.05, distance), abs=1e-6)
    assert result.steps == steps.sum()
    assert result.interval == wilson(result.successes, 23)
    assert not result.cut.any()


@pytest.mark.parametrize("actor", [LinePolicy(speed=0.05), LineController(speed=0.05)])
def test_batch_size_and_order_change_nothing_without_noise(actor):
    reference = evaluate_policy(LineWorld(1), actor, SEEDS)
    for batch_size in (3, 23, 40):
        assert outcomes(evaluate_policy(LineWorld(batch_size), actor, SEEDS)) == outcomes(reference)
    shuffled = np.random.default_rng(0).permutation(SEEDS)
    result = evaluate_policy(LineWorld(4), actor, shuffled)
    back = np.argsort(shuffled)
    assert result.lengths[back].tolist() == reference.lengths.tolist()
    assert result.seeds.tolist() == shuffled.tolist()


def test_noise_repeats_bit_for_bit_and_follows_the_mode():
    policy = LinePolicy(speed=0.05, noise=0.1)

    def run(seeds=SEEDS, **options):
        return evaluate_policy(LineWorld(5), policy, seeds, **options)

    assert outcomes(run(deterministic=False)) == outcomes(run(deterministic=False))
    assert outcomes(run(deterministic=False)) != outcomes(run(deterministic=False, generator_seed=1))
    assert outcomes(run(deterministic=True)) != outcomes(run(deterministic=False))
    backwards = run(SEEDS[::-1], deterministic=False)
    assert backwards.lengths[::-1].tolist() == run(deterministic=False).lengths.tolist()
    world = LineWorld(5)
    evaluate_policy(world, policy, SEEDS[:5], deterministic=False)
    used = evaluate_policy(world, policy, SEEDS, deterministic=False)
    assert outcomes(used) == outcomes(run(deterministic=False)), "an earlier evaluation must leave no trace"


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_batch_size_changes_nothing_though_the_policy_draws_by_torch_for_all_rows(deterministic: bool):
    policy = LinePolicy(speed=0.05, noise=0.1)
    results = [evaluate_policy(LineWorld(size), policy, SEEDS, deterministic=deterministic) for size in (3, 8, 25)]
    assert 0 < results[0].success_rate < 1
    for other in results[1:]:
        assert outcomes(other) == outcomes(results[0])


def test_waves_of_another_noise_are_played_again(tmp_path, monkeypatch):
    def play() -> int:
        world, kept = LineWorld(5), SavedBatches(tmp_path / "waves.jsonl", {"policy": "line"})
        evaluate_policy(world, LinePolicy(noise=0.1), SEEDS, kept=kept)
        return len(world.chunk_lengths)

    assert play() and not play()
    monkeypatch.setattr(episode_batches, "NOISE_VERSION", "another")
    assert play()


def test_a_policy_decides_once_per_chunk_and_a_controller_at_every_step():
    world = LineWorld(8)
    evaluate_policy(world, LinePolicy(chunk=5), SEEDS)
    assert set(world.chunk_lengths) == {5}
    world = LineWorld(8)
    evaluate_policy(world, LineController(), SEEDS)
    assert set(world.chunk_lengths) == {1}


def test_actor_is_reset_before_every_wave():
    policy = LinePolicy()
    evaluate_policy(LineWorld(10), policy, SEEDS)
    assert policy.resets == 3


def test_imagination_cut_is_kept_apart_from_failure():
    result = evaluate_policy(LineWorld(6, cut_after=5), LinePolicy(speed=0.05), SEEDS)
    distance = np.abs(uniforms(SEEDS, 1)[:, 0] * 2 - 1)
    assert result.cut.tolist() == (distance - 5 * 0.05 >= 0.1).tolist()
    assert not (result.cut & result.success).any()
    assert result.summary()["cut"] == result.cut.sum() > 0


def test_a_world_that_never_ends_is_an_error():
    with pytest.raises(SpecError, match="horizon of 12"):
        evaluate_policy(LineWorld(4, endless=True), LinePolicy(speed=0.0), SEEDS)


def test_json_round_trip():
    result = evaluate_policy(LineWorld(4), LinePolicy(speed=0.05), SEEDS)
    again = EvaluationResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False)))
    assert outcomes(again) == outcomes(result)
    assert again.summary() == result.summary()


def test_comparison_pairs_by_seed():
    base = evaluate_policy(LineWorld(4), LinePolicy(speed=0.03), SEEDS)
    tuned = evaluate_policy(LineWorld(4), LinePolicy(speed=0.06), SEEDS[::-1])
    comparison = compare(base, tuned)
    assert comparison.worsened == 0
    assert comparison.improved == tuned.successes - base.successes > 0
    with pytest.raises(DataError, match="different seeds"):
        compare(base, evaluate_policy(LineWorld(4), LinePolicy(), SEEDS + 1))


def test_bad_requests_are_clear():
    with pytest.raises(ConfigError, match="at least one seed"):
        evaluate_policy(LineWorld(2), LinePolicy(), [])
    with pytest.raises(ConfigError, match="repeat"):
        evaluate_policy(LineWorld(2), LinePolicy(), [1, 1])
    blind = LinePolicy()
    object.__setattr__(blind.spec, "observation", {"observation.images.front": Field((8, 8, 3), "uint8")})
    with pytest.raises(SpecError, match="reads the camera 'front'"):
        evaluate_policy(LineWorld(2), blind, [1, 2])
    wide = LinePolicy()
    object.__setattr__(wide.spec, "action", Field((7,)))
    with pytest.raises(SpecError, match=r"actions are .* Is this the world it was trained for"):
        evaluate_policy(LineWorld(2), wide, [1, 2])


class Forgetful(LinePolicy):
    """A `LinePolicy` that says it has no memory, and counts the rows that it is asked for."""

    memoryless = True
    asked = ()

    def reset(self, rows=None):
        pass

    def act(self, observation, generator, *, deterministic=False):
        self.asked = (*self.asked, len(observation["task"]))
        return super().act(observation, generator, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_policy_without_memory_is_not_asked_for_rows_that_have_ended(deterministic):
    settings, batch = {"speed": 0.05, "noise": 0.05, "chunk": 1}, 23
    policy = Forgetful(**settings)
    result = evaluate_policy(LineWorld(batch), policy, SEEDS, deterministic=deterministic)
    expected = evaluate_policy(LineWorld(batch), LinePolicy(**settings), SEEDS, deterministic=deterministic)
    assert outcomes(result) == outcomes(expected)
    running = [int((result.lengths > step).sum()) for step in range(result.lengths.max())]
    smallest = [min(size for size in (23, 11, 5, 2, 1) if size >= count) for count in running]
    assert list(policy.asked) == smallest
    assert sum(policy.asked) < 0.8 * batch * len(running)


def test_memory_is_assumed_where_a_policy_says_nothing_or_a_subclass_resets():
    class Remembering(Forgetful):
        def reset(self, rows=None):
            self.asked = ()

    assert is_memoryless(Forgetful())
    assert not is_memoryless(LinePolicy())
    assert not is_memoryless(Remembering())
    assert not is_memoryless(MemoryPolicy.__new__(MemoryPolicy))
