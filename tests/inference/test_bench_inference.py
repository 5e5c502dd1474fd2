"""The benchmark of ways of deciding: its peer decides as the policy does, its plans cost what they say."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.benchmarks import inference
from robopolicy.benchmarks.inference import CHANGES, HUNDRED, LEAN, POLICIES, DiffusersLoop, picture, tables
from robopolicy.configuration import compose
from robopolicy.core.spec import Field
from robopolicy.inference.caching import CachePlan, FirstBlockCaching
from robopolicy.inference.calibration import Calibration, calibrate
from robopolicy.inference.comparison import EXACT, Timing, action_error, noise_free_actions
from robopolicy.inference.engine import with_engine
from robopolicy.nn.configuration import DenoiserKind, Prediction
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind

pytestmark = pytest.mark.long

FIELDS, ACTION = {"observation.state": Field((3,))}, Field((2,), low=-1.0, high=1.0)


def _policy(**changes: Any) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(width=16, depth=2, heads=2, denoising_steps=40, **changes)
    return DenoisingPolicy(config, FIELDS, ACTION, fps=10)


@pytest.mark.parametrize("prediction", list(Prediction))
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_peer_s_loop_decides_as_the_policy_does(prediction: Prediction, clip: float | None):
    policy = _policy(sampling_steps=8, prediction=prediction, clip=clip)
    observation: Any = {"observation.state": torch.randn(4, 1, 3)}
    own, theirs = (
        each.act(observation, torch.Generator().manual_seed(1), deterministic=True).actions
        for each in (policy, DiffusersLoop(policy))
    )
    assert torch.allclose(own, theirs, atol=1e-4)


def _plan(arm: str, found: Calibration) -> CachePlan:
    made = HUNDRED[arm].cache
    plan = made and made(found)
    assert isinstance(plan, CachePlan)
    return plan


def test_the_peer_is_for_diffusions():
    with pytest.raises(Exception, match="supports diffusion policies only"):
        DiffusersLoop(_policy(kind=PolicyKind.FLOW, sampling_steps=4))


def test_uniform_plans_cost_what_bac_costs():
    policy = _policy(denoiser=DenoiserKind.TRANSFORMER, sampling_steps=40)
    calibration = calibrate(policy, {"observation.state": torch.randn(4, 1, 3)}, torch.Generator().manual_seed(0))
    for budget in (5, 10, 20):
        names = f"BAC {budget}", f"uniform at the cost of BAC {budget}"
        own, beside = (_plan(name, calibration).share for name in names)
        assert abs(own - beside) < 1 / 40


def test_first_block_caching_computes_less_the_more_it_lets_pass():
    """Where nothing may change all is computed, so it decides as the reference does."""
    policy = _policy(denoiser=DenoiserKind.TRANSFORMER, sampling_steps=40)
    observation: Any = {"observation.state": torch.randn(1, 1, 3)}
    own = noise_free_actions(policy, observation)
    ways = [with_engine(policy, LEAN, FirstBlockCaching(each)) for each in (0.0, *CHANGES)]
    errors = [action_error(noise_free_actions(way, observation), own) for way in ways]
    assert errors[0] < EXACT < errors[1] < errors[2]


def test_tables_and_plot_show_every_way():
    arms = POLICIES["ten_steps"]
    row = {"median_ms": 2.0, "least_ms": 1.0, "spread_ms": 0.1, "error": 0.0, "flops": 3e6}
    rate = {"success_rate": 0.5, "low": 0.4, "high": 0.6, "episodes": 200}
    rows = {name: {**row, "least_ms": 1.0 + place} for place, name in enumerate(arms)}
    rows["reference"] |= {"success": rate}
    rows["DDIM 5"] |= {"error": 0.25, "success": rate, "share": 0.5}
    figures = {"tasks": {"push_t": {"ten_steps": {"0": rows, "1": rows}}}}
    (table,) = tables(figures)
    lines = {line[0]: line for line in table.lines}
    assert list(lines) == list(arms)
    assert lines["lean"][-1] == "as the reference" and lines["reference"][-1].startswith("50.0 % [45.1, 54.9]")
    assert lines["DDIM 5"][5:7] == ["50 (50, 50) %", "0.250"]
    assert lines["diffusers loop"][2:4] == ["0.5 (0.5, 0.5)", "1.0 (1.0, 1.0)"]
    assert picture(figures).svg.count("push_t, ten steps") >= 1


def test_times_are_taken_anew_and_success_is_not(tmp_path, monkeypatch):
    policy, judged, clock = _policy(), list[int](), itertools.count(1)
    observation: Any = {"observation.state": torch.randn(4, 1, 3)}
    ways = {"reference": inference.Way(policy, policy), "lean": inference.Way(with_engine(policy, LEAN), policy)}
    monkeypatch.setattr(inference, "POLICIES", {"tiny": {"reference": inference.Arm(), "lean": inference.Arm(LEAN)}})
    monkeypatch.setattr(inference, "made", lambda *case: ways)
    monkeypatch.setattr(inference, "recorded", lambda *case: observation)
    monkeypatch.setattr(inference, "judged", lambda *case: judged.append(1) or {"success_rate": 0.5})
    monkeypatch.setattr(
        inference,
        "time_decisions",
        lambda made, first, rounds: dict.fromkeys(made, Timing(np.full(rounds, next(clock)))),
    )

    def found(*settings: str) -> dict[str, Any]:
        return inference.measure(compose(list(settings)), tmp_path, "push_cube", "tiny", 0)

    first = found()
    assert len(judged) == 1 and first["lean"]["error"] < EXACT and first["lean"]["least_ms"] == 1e3
    again = found("bench.rounds=3")
    assert len(judged) == 1 and again["lean"] == {**first["lean"], "median_ms": 2e3, "least_ms": 2e3}
    assert found("bench.rounds=0") == again and next(clock) == 3
