"""`optimize` keeps a way of deciding beside a checkpoint; what acts later uses it, and refuses it for other weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from robopolicy.building.policies import load_acting
from robopolicy.cli import main
from robopolicy.configuration.sections.act import InferenceSection, OptimizeSection
from robopolicy.core.errors import CheckpointError, RobopolicyWarning
from robopolicy.core.origin import WorldOrigin, remember_origin
from robopolicy.data.record import record
from robopolicy.doctor.findings import Health
from robopolicy.doctor.policy import check_plan
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.chunking import Delay, with_chunking
from robopolicy.inference.comparison import Timing, time_decisions
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.lean import LeanDenoising
from robopolicy.inference.plan import FILE, InferencePlan, load_plan, save_plan, weights_hash
from robopolicy.nn.configuration import DenoiserKind
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.rl.offline.configuration import RlpdConfig
from robopolicy.training.critics import SteeredPolicy, steer
from robopolicy.verbs import optimize
from sims.registry import make_world


def _checkpoint(folder: Path, seed: int = 0, **changes: Any) -> DenoisingPolicy:
    """Save a small untrained policy for reach_planar."""
    world = make_world("reach_planar", 1)
    config = DenoisingPolicyConfig(width=16, depth=2, sampling_steps=6, denoising_steps=20, **changes)
    policy = DenoisingPolicy(config, world.spec.observation, world.spec.action, fps=world.spec.fps, seed=seed)
    world.close()
    remember_origin(policy, WorldOrigin("reach_planar"))
    policy.save(folder)
    return policy


def _seen(policy: DenoisingPolicy) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {key: torch.randn(3, 1, *field.shape, generator=draws) for key, field in policy.fields.items()}


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path):
    _checkpoint(tmp_path / "checkpoint")
    cache = CachePlan.of(("0.hidden",), torch.tensor([[True, False, True]]), "bac", 2)
    config = InferenceConfig("lean", sampler="ddim", steps=3)
    plan = InferencePlan(config, weights_hash(tmp_path / "checkpoint"), cache, measured={"error": 0.1})
    save_plan(tmp_path / "checkpoint", plan)
    assert load_plan(tmp_path / "checkpoint") == plan
    assert plan.refusal(tmp_path / "checkpoint") == ""


def _clocked(policies: Any, seen: Any, rounds: int) -> dict[str, Timing]:
    """Time every way for real and report other seconds, which no load on the machine changes."""
    known = {"reference": 4.0, "lean": 2.0, "ddim 1": 1.0}
    return {name: Timing(np.full(rounds, known.get(name, 3.0))) for name in time_decisions(policies, seen, rounds)}


@pytest.mark.long
def test_optimize_keeps_the_fastest_that_is_allowed_and_acting_reads_it(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(optimize, "time_decisions", _clocked)
    policy = _checkpoint(tmp_path / "checkpoint", denoiser=DenoiserKind.TRANSFORMER, heads=2)
    given = ["optimize", str(tmp_path / "checkpoint"), "optimize.engines=[lean]", "optimize.episodes=2"]
    small = ["optimize.rounds=2", "optimize.budgets=[3]", "optimize.steps=[1,2]", f"run.root={tmp_path / 'runs'}"]
    assert main([*given, *small, "run.threads=1"]) == 0
    exact = load_plan(tmp_path / "checkpoint")
    assert exact is not None and exact.config == InferenceConfig("lean") and exact.cache is None
    assert main([*given, *small, "optimize.max_action_error=1e9", "run.threads=1", "optimize.evaluate_episodes=4"]) == 0
    output = capsys.readouterr().out
    assert "Chosen: lean, 2.0x faster than the reference" in output and "Chosen: ddim 1, 4.0x" in output
    assert "bac cache 3" in output and "shared cache 3, order 1" in output
    chosen = load_plan(tmp_path / "checkpoint")
    assert chosen is not None and chosen.measured["error"] > 1e-3
    result = json.loads((tmp_path / "runs" / "optimize" / "reach_planar" / "0" / "result.json").read_text())
    assert {"reference", "lean", "ddim 1", "bf16"} <= set(result["ways"]) and "difference" in result
    page = (tmp_path / "runs" / "optimize" / "reach_planar" / "0" / "report.html").read_text()
    for text in ("Time and error", "ddim 1 *", ">bf16<", "4.0x faster than the reference", "reference, determin"):
        assert text in page, text
    save_plan(tmp_path / "checkpoint", exact)
    acting = load_acting(InferenceSection(), tmp_path / "checkpoint")
    assert isinstance(acting, LeanDenoising)
    own, fast = (
        each.act(_seen(policy), torch.Generator().manual_seed(0), deterministic=True).actions
        for each in (policy, acting)
    )
    assert torch.allclose(own, fast, atol=1e-5)
    assert isinstance(load_acting(InferenceSection("reference"), tmp_path / "checkpoint"), DenoisingPolicy)


def test_what_decides_by_means_of_another_policy_is_tried_with_fewer_steps_too(tmp_path: Path, capsys, monkeypatch):
    base = _checkpoint(tmp_path / "base")
    policy = steer(base, RlpdConfig(width=8, depth=1, critics=3), base.fields, ("",), bound=1.5, seed=0, kind="rlpd")
    remember_origin(policy, WorldOrigin("reach_planar"))
    policy.save(tmp_path / "checkpoint")
    given = ["optimize", str(tmp_path / "checkpoint"), "optimize.engines=[lean]", "optimize.episodes=2"]
    small = ["optimize.rounds=2", "optimize.steps=[1]", f"run.root={tmp_path / 'runs'}", "run.threads=1"]
    monkeypatch.setattr(optimize, "time_decisions", _clocked)
    assert main([*given, *small, "optimize.max_action_error=1e9"]) == 0
    output = capsys.readouterr().out
    assert "Chosen: ddim 1, 4.0x" in output and "bf16" in output and "No block caches: SteeredPolicy wraps" in output
    acting = load_acting(InferenceSection(), tmp_path / "checkpoint")
    assert isinstance(acting, SteeredPolicy) and isinstance(acting.inner, LeanDenoising)
    assert len(acting.inner.samplers[True].steps) == 1


def test_what_is_asked_for_and_cannot_be_done_is_said(tmp_path: Path, capsys, monkeypatch):
    ways = optimize.methods_to_test(OptimizeSection(max_action_error=0.1, engines=("lean",)), cast(Any, object()), {})
    assert set(ways) == {"reference", "lean"} and "Only exact engines" in capsys.readouterr().out
    monkeypatch.setattr(
        optimize, "time_decisions", lambda *given: {name: Timing(np.ones(1)) for name in _clocked(*given)}
    )
    _checkpoint(tmp_path / "checkpoint")
    given = ["optimize", str(tmp_path / "checkpoint"), "optimize.engines=[lean]", "optimize.episodes=2"]
    small = ["optimize.rounds=1", "optimize.evaluate_episodes=4", f"run.root={tmp_path / 'runs'}", "run.threads=1"]
    assert main([*given, *small]) == 0
    assert "No evaluation: the reference was chosen" in capsys.readouterr().out


def test_what_is_cheaper_is_computed_by_an_engine_that_is_not_the_reference(tmp_path: Path, capsys):
    policy = _checkpoint(tmp_path / "checkpoint")
    given = OptimizeSection(max_action_error=0.3, engines=("reference", "lean"), steps=(1,), schedulers=())
    ways = optimize.methods_to_test(given, policy, _seen(policy))
    assert set(ways) == {"reference", "lean", "bf16", "ddim 1"} and ways["ddim 1"].config.engine == "lean"
    assert set(optimize.methods_to_test(replace(given, engines=("reference",)), policy, _seen(policy))) == {"reference"}
    assert "Only the reference engine" in capsys.readouterr().out


def test_a_plan_for_other_weights_is_refused_with_a_reason(tmp_path: Path):
    _checkpoint(tmp_path / "checkpoint")
    plan = InferencePlan(InferenceConfig("lean", sampler="ddim", steps=1), weights_hash(tmp_path / "checkpoint"))
    _checkpoint(tmp_path / "checkpoint", seed=1)
    save_plan(tmp_path / "checkpoint", plan)
    with pytest.warns(RobopolicyWarning, match="created for other weights.*robopolicy optimize"):
        acting = load_acting(InferenceSection(), tmp_path / "checkpoint")
    assert isinstance(acting, DenoisingPolicy)


def test_a_plan_that_the_policy_no_longer_fits_is_refused_when_it_is_loaded(tmp_path: Path):
    """The weights are the same, and config.json asks for a chain of other steps."""
    policy = _checkpoint(tmp_path / "checkpoint")
    blocks = policy.network.denoiser.block_names
    cache = CachePlan.of(blocks, torch.ones(len(blocks), policy.schedule.steps + 1, dtype=torch.bool))
    save_plan(
        tmp_path / "checkpoint", InferencePlan(InferenceConfig("lean"), weights_hash(tmp_path / "checkpoint"), cache)
    )
    with pytest.warns(
        RobopolicyWarning, match=r"inference.json is not used: .* has 6\. Create it again with robopolicy"
    ):
        assert isinstance(load_acting(InferenceSection(), tmp_path / "checkpoint"), DenoisingPolicy)


def test_a_plan_measured_elsewhere_is_used_and_said(tmp_path: Path):
    _checkpoint(tmp_path / "checkpoint")
    save_plan(
        tmp_path / "checkpoint",
        InferencePlan(InferenceConfig("lean"), weights_hash(tmp_path / "checkpoint"), version="1.0"),
    )
    with pytest.warns(RobopolicyWarning, match=r"measured with torch 1\.0, here"):
        assert isinstance(load_acting(InferenceSection(), tmp_path / "checkpoint"), LeanDenoising)


def test_a_plan_that_a_chunking_leaves_aside_is_named(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    policy = _checkpoint(tmp_path / "checkpoint", chunk=4, prediction_steps=8)
    for engine, warning_count in (("reference", 0), ("lean", 1)):
        plan = InferencePlan(InferenceConfig(engine), weights_hash(tmp_path / "checkpoint"))
        save_plan(tmp_path / "checkpoint", plan)
        assert isinstance(load_acting(InferenceSection(), tmp_path / "checkpoint", chunking="rtc"), DenoisingPolicy)
        assert len(recwarn) == warning_count
    assert "is not used with chunking=rtc" in str(recwarn.pop(RobopolicyWarning).message)
    for chunking in ("prefetch", "ensembling", "bidirectional"):  # the way out that it names
        lean = load_acting(InferenceSection("lean"), tmp_path / "checkpoint", chunking=chunking)
        assert isinstance(lean, LeanDenoising)
        acting = with_chunking(lean, chunking, Delay(2))
        acting.act(_seen(policy), torch.Generator().manual_seed(0), deterministic=True)
    assert not len(recwarn)


@pytest.mark.parametrize(
    "change", [{"format": 7}, {"config": {"engine": 3}}, {"weights": 1}, {"batch": "many"}, {"cache": {"blocks": 1}}]
)
def test_a_broken_plan_is_named(tmp_path: Path, change: dict[str, Any]):
    _checkpoint(tmp_path / "checkpoint")
    save_plan(tmp_path / "checkpoint", InferencePlan(InferenceConfig("lean"), weights_hash(tmp_path / "checkpoint")))
    path = tmp_path / "checkpoint" / FILE
    for text in (json.dumps(json.loads(path.read_text()) | change), ""):
        path.write_text(text)
        with pytest.raises(
            CheckpointError, match=rf"{FILE} is not a plan .* remove it, or create it again with robopolicy"
        ):
            load_acting(InferenceSection(), tmp_path / "checkpoint")


def test_doctor_compares_the_stored_way_with_the_policy(tmp_path: Path):
    policy = _checkpoint(tmp_path / "checkpoint")
    world = make_world("reach_planar", 4)
    episodes = record(world, policy, np.arange(4), generator=torch.Generator().manual_seed(0))
    world.close()
    assert check_plan(tmp_path / "checkpoint", policy, episodes) == []
    good = InferencePlan(InferenceConfig("lean"), weights_hash(tmp_path / "checkpoint"))
    rough = replace(good, config=InferenceConfig("lean", sampler="ddim", steps=1), measured={"error": 1e-3})
    for plan, health in ((good, Health.GOOD), (rough, Health.BAD), (replace(good, weights="x"), Health.WARNING)):
        save_plan(tmp_path / "checkpoint", plan)
        (finding,) = check_plan(tmp_path / "checkpoint", policy, episodes)
        assert finding.health is health and finding.check == "engine"
