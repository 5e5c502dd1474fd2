"""A delay in control steps: which action is executed when, how plans are joined, and what cannot be."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.inference.chunking import Delay, with_chunking
from robopolicy.inference.configuration import CHUNKINGS
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind
from sims.registry import make_world
from worldmodels.oracle import wrap_oracle

ACTION = Field((1,), low=-1e6, high=1e6)
SMALL = DenoisingPolicyConfig(kind=PolicyKind.FLOW, width=16, depth=1, sampling_steps=2, chunk=4, prediction_steps=6)


class Numbered:
    """Plans 100 n + 0, 1, ... in the n-th decision of a row, told by the row's observation; chunk 4, predicts 8."""

    def __init__(self, chunk: int = 4, prediction: int = 8):
        self.spec = PolicySpec({STATE: Field((1,))}, ACTION, 1, chunk, prediction, 3, fps=10.0)
        self.forgot: list[object] = []

    def predict(self, observation, generator, *, deterministic=False):
        number = observation[STATE][:, -1]
        return (100 * number + torch.arange(self.spec.prediction)).float()[..., None]

    def act(self, observation, generator, *, deterministic=False):
        return Decision(self.predict(observation, generator)[:, : self.spec.chunk])

    def reset(self, rows=None):
        self.forgot.append(rows)


def chunk_of(policy, *numbers: float) -> list[list[float]]:
    observation = {STATE: torch.tensor(numbers)[:, None, None]}
    return policy.act(observation, torch.Generator().manual_seed(0)).actions[..., 0].tolist()


def test_the_last_plan_goes_on_for_as_long_as_a_decision_takes_and_rows_begin_when_they_are_reset():
    policy = with_chunking(Numbered(), "prefetch", Delay(2))
    policy.reset()
    # An episode begins with holding still for two steps; the first plan begins after them.
    assert chunk_of(policy, 1, 5) == [[0, 0, 100, 101], [0, 0, 500, 501]]
    assert chunk_of(policy, 2, 6) == [[102, 103, 202, 203], [502, 503, 602, 603]]
    policy.reset([1])
    assert chunk_of(policy, 3, 7) == [[204, 205, 302, 303], [0, 0, 700, 701]]
    assert chunk_of(policy, 4, 8) == [[304, 305, 402, 403], [702, 703, 802, 803]]
    assert policy.policy.forgot == [None, [1]]
    with pytest.raises(SpecError, match="reset the policy"):
        chunk_of(policy, 1, 2, 3)
    policy.reset()
    assert chunk_of(policy, 9, 9, 9) == [[0, 0, 900, 901]] * 3


def test_a_delay_as_long_as_a_chunk_is_always_one_chunk_behind():
    policy = with_chunking(Numbered(), "prefetch", Delay(4))
    policy.reset()
    chunks = [chunk_of(policy, number)[0] for number in (1, 2, 3)]
    assert chunks == [[0, 0, 0, 0], [100, 101, 102, 103], [204, 205, 206, 207]]


def test_who_waits_holds_still_and_then_executes_the_whole_chunk():
    policy = with_chunking(Numbered(), "synchronous", Delay(2))
    assert policy.spec.chunk == 6 and policy.spec.scored_steps == 0
    policy.reset()
    assert chunk_of(policy, 1, 5) == [[0, 0, 100, 101, 102, 103], [0, 0, 500, 501, 502, 503]]
    told_positions = with_chunking(Numbered(), "synchronous", Delay(1, "last"))
    told_positions.reset()
    assert chunk_of(told_positions, 1, 5)[0] == [100, 100, 101, 102, 103]  # nothing was told yet: where the plan begins
    told_positions.reset([0])
    assert chunk_of(told_positions, 2, 6) == [[200, 200, 201, 202, 203], [503, 600, 601, 602, 603]]


def test_a_gripper_keeps_its_place_where_the_others_stop():
    plan, last = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[5.0, 6.0]])
    delay = Delay(2, positions=("gripper",))
    assert delay.still(Field((2,), names=("x", "gripper")), plan, last).tolist() == [[[0, 6], [0, 6]]]
    assert delay.still(Field((2,), names=("x", "gripper")), plan).tolist() == [[[0, 2], [0, 2]]]
    assert delay.still(Field((2,)), plan, last).tolist() == [[[0, 0], [0, 0]]]
    assert Delay(1, "last").still(Field((2,)), plan, last).tolist() == [[[5, 6]]]


def test_without_a_delay_nothing_changes():
    policy = Numbered()
    assert with_chunking(policy, "synchronous", Delay()) is policy
    at_once = with_chunking(policy, "prefetch", Delay())
    at_once.reset()
    assert [chunk_of(at_once, number)[0] for number in (1, 2)] == [[100, 101, 102, 103], [200, 201, 202, 203]]


@pytest.mark.parametrize("kind", [PolicyKind.FLOW, PolicyKind.DIFFUSION])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_policy_of_ours_predicts_what_it_would_execute_and_more(kind: PolicyKind, deterministic: bool):
    config = DenoisingPolicyConfig(kind=kind, width=16, depth=1, sampling_steps=3, denoising_steps=9, chunk=2)
    policy = DenoisingPolicy(
        replace(config, prediction_steps=5), {STATE: Field((3,))}, Field((2,), low=-1, high=1), fps=10
    )
    observation = {STATE: torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(1))}
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    predicted = policy.predict(observation, draws[0], deterministic=deterministic)
    assert predicted.shape == (4, 5, 2) and not predicted.requires_grad
    assert torch.equal(predicted[:, :2], policy.act(observation, draws[1], deterministic=deterministic).actions)


def test_ensembling_weighs_all_plans_of_a_step_as_act_does():
    """Against the definition: w_i = exp(-m i), i = 0 the oldest plan that says something of the step."""
    prediction, chunk, delay, decay, draws = 7, 2, 1, 0.3, torch.Generator().manual_seed(0)
    plans = torch.randn(6, 2, prediction, 1, generator=draws)

    class Scripted(Numbered):
        def predict(self, observation, generator, *, deterministic=False):
            return plans[int(observation[STATE][0, 0])]

    policy = with_chunking(Scripted(chunk, prediction), "ensembling", Delay(delay), {"decay": decay})
    policy.reset()
    executed = torch.cat([torch.tensor(chunk_of(policy, number, number)) for number in range(6)], 1)
    for step in range(delay, 12):
        plan_actions = []
        for number in range(6):
            # Plan 0 begins after the hold; the others begin when they are asked for, and are at hand d steps later.
            begins = delay if number == 0 else number * chunk
            if number * chunk + delay <= step < min(begins + prediction, number * chunk + prediction):
                plan_actions.append(plans[number][:, step - begins, 0])
        weights = torch.exp(-decay * torch.arange(len(plan_actions)))
        expected = sum(weight * value for weight, value in zip(weights, plan_actions, strict=True)) / weights.sum()
        assert torch.allclose(executed[:, step], expected, atol=1e-6), step


@pytest.mark.parametrize("kind", ["ensembling", "bidirectional"])
def test_angles_that_go_round_are_joined_the_short_way(kind):
    class Turning(Numbered):
        def __init__(self):
            super().__init__()
            low, high = (-1e6, -math.pi, 0.0), (1e6, math.pi, 1.0)
            action = Field((3,), low=low, high=high, unit="m, rad, ", names=("x", "yaw", "gripper"))
            self.spec = replace(self.spec, action=action)

        def predict(self, observation, generator, *, deterministic=False):
            rows = len(observation[STATE])
            plans = torch.tensor([[3.0, 3.0, 0.0], [0.0, 1.0, 1.0], [2.0, -3.0, 1.0]])  # x, yaw, gripper
            first = bool(observation[STATE][0, 0, 0] == 0)
            chosen = plans[:1].expand(rows, 3) if first else plans[2 if kind == "ensembling" else 1 :][:rows]
            return chosen[:, None].expand(-1, 8, -1).clone()

    policy = with_chunking(Turning(), kind, Delay(0), {"decay": 0.0} if kind == "ensembling" else {"samples": 2})
    policy.reset()
    chunk_of(policy, 0)
    joined = policy.act({STATE: torch.ones(1, 1, 1)}, torch.Generator()).actions[0, 0]
    expected = [2.5, -math.pi] if kind == "ensembling" else [2.0, -3.0]  # the closest of two: -3 rad is 0.28 from 3
    assert abs(joined[0] - expected[0]) < 1e-5
    assert abs(math.remainder(float(joined[1]) - expected[1], 2 * math.pi)) < 1e-5
    assert joined[2] == 1  # as the new plan has it: a gripper is open or closed


@pytest.mark.parametrize(("decay", "newest"), [(-200.0, 1.0), (200.0, 0.0)])
def test_ensembling_trusts_one_plan_alone_where_its_decay_is_large(decay, newest):
    policy = with_chunking(Numbered(), "ensembling", Delay(0), {"decay": decay})
    policy.reset()
    first, second = chunk_of(policy, 0)[0], chunk_of(policy, 9)[0]
    assert first == [0, 1, 2, 3]
    assert second == pytest.approx([900 * newest + place + 4 * (1 - newest) for place in range(4)])


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("ensembling", "decay", "a"),
        ("ensembling", "decay", float("nan")),
        ("bidirectional", "samples", 2.5),
        ("rtc", "mask", 3),
    ],
)
def test_options_of_another_type_are_refused(kind, option, value):
    with pytest.raises(ConfigError, match=f"'{kind}' takes .* as {option}, not"):
        with_chunking(Numbered(), kind, Delay(0), {option: value})


def test_bidirectional_decoding_takes_the_plan_that_is_closest_to_the_last():
    class Sampled(Numbered):
        """Predicts constants 0, 1, 2, ... down its rows, a sample each."""

        def predict(self, observation, generator, *, deterministic=False):
            assert len(observation["task"]) == len(observation[STATE])
            samples = torch.arange(len(observation[STATE])) % 5 + 0.2 * observation[STATE][:, -1, 0]
            return samples[:, None, None].expand(-1, self.spec.prediction, 1)

    policy = with_chunking(Sampled(), "bidirectional", Delay(2), {"samples": 5})
    policy.reset()
    act = lambda *numbers: policy.act(  # noqa: E731
        {STATE: torch.tensor(numbers)[:, None, None], "task": [""] * len(numbers)}, torch.Generator()
    ).actions[..., 0]
    assert act(0.0, 15.0)[:, 2:].tolist() == [[0, 0], [3, 3]]  # the first sample: nothing was planned
    assert act(-14.0, -1.0)[:, 2:].flatten().tolist() == pytest.approx([0.2, 0.2, 2.8, 2.8])  # of -2.8..1.2, -.2..3.8


def test_what_cannot_be_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="exceeds the chunk of 4 steps"):
        with_chunking(Numbered(prediction=20), "prefetch", Delay(5))
    with pytest.raises(ConfigError, match="prediction_steps=7"):
        with_chunking(Numbered(prediction=6), "prefetch", Delay(3))
    with pytest.raises(ConfigError, match="Did you mean 'prefetch'"):
        with_chunking(Numbered(), "prefetsh", Delay(1))
    with pytest.raises(ConfigError, match=r"no option 'decai'.*decay"):
        with_chunking(Numbered(), "ensembling", Delay(1), {"decai": 1.0})
    with pytest.raises(ConfigError, match="latency_steps is -1"):
        Delay(-1)
    with pytest.raises(ConfigError, match="denoising of a diffusion or flow policy"):
        with_chunking(Numbered(), "rtc", Delay(1))

    class Executes(Numbered):
        predict = None

    with pytest.raises(ConfigError, match="nothing is left to execute during inference"):
        with_chunking(Executes(), "prefetch", Delay(1))
    assert with_chunking(Executes(), "synchronous", Delay(1)).spec.chunk == 5


@pytest.mark.parametrize("kind", ["synchronous", "rtc"])
def test_a_delay_is_the_same_in_a_world_and_in_its_imagination(kind: str):
    real, inside = make_world("push_cube", 3, threads=1), make_world("push_cube", 3, threads=1)
    policy = DenoisingPolicy(SMALL, real.spec.observation, real.spec.action, fps=real.spec.fps)
    delayed, seeds = with_chunking(policy, kind, Delay(2)), np.arange(5)
    results = [evaluate_policy(world, delayed, seeds, deterministic=False) for world in (real, wrap_oracle(inside))]
    assert np.array_equal(results[0].returns, results[1].returns) and np.ptp(results[0].returns) > 0
    prompt = evaluate_policy(real, policy, seeds, deterministic=False)
    assert not np.array_equal(prompt.returns, results[0].returns)


def test_every_registered_chunking_is_found():
    assert [callable(CHUNKINGS.load(name)) for name in CHUNKINGS.ours] == [True] * 7


STRANGE = """
from robopolicy.inference.chunking import OverlappingPolicy, fresh_plan

def reluctant(policy, delay, share=0.5):
    def plans(policy, observation, generator, underway, *, deterministic):
        return share * fresh_plan(policy, observation, generator, underway, deterministic=deterministic)

    return OverlappingPolicy(policy, delay, plans)
"""


@pytest.mark.long
def test_the_verb_delays_measures_and_takes_a_strangers_chunking_by_its_dotted_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "strange_chunking.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = make_world("reach_planar", 1).spec
    DenoisingPolicy(SMALL, spec.observation, spec.action, fps=spec.fps).save(tmp_path / "policy")
    common = [
        "evaluate",
        str(tmp_path / "policy"),
        "world=reach_planar",
        "evaluate.episodes=4",
        "evaluate.videos=0",
        f"run.root={tmp_path}",
    ]

    def judged(name: str, *settings: str):
        assert main([*common, f"run.name={name}", *settings]) == 0
        return json.loads((tmp_path / "evaluate" / name / "0" / "result.json").read_text())["policy"]

    prompt = judged("prompt")
    assert "smoothness" not in prompt
    late = judged("late", "evaluate.latency_steps=2", "evaluate.chunking=rtc")
    output = " ".join(capsys.readouterr().out.split())
    assert "policy, deterministic: jump" in output and "chunk borders" in output
    assert set(late["smoothness"]) == {"deterministic", "stochastic"}
    assert late["smoothness"]["stochastic"]["borders"] > 0 and late["smoothness"]["deterministic"]["jerk"] > 0
    strange = "evaluate.chunking=strange_chunking:reluctant"
    still = judged("still", "evaluate.latency_steps=2", strange, "evaluate.chunking_options.share=0.0")
    assert still["smoothness"]["deterministic"]["jerk"] == 0.0  # nothing moves
    whole = judged("whole", strange, "evaluate.chunking_options.share=1.0")
    assert np.array_equal(
        whole["deterministic"]["per_episode"]["returns"], prompt["deterministic"]["per_episode"]["returns"]
    )
    assert main([*common, "evaluate.latency_steps=3", "evaluate.chunking=prefetch"]) == 2
    assert "prediction_steps=7" in " ".join(capsys.readouterr().err.split())
    assert main([*common, "evaluate.latency_steps=3", "evaluate.positions=[griper]"]) == 2
    assert "positions contains 'griper', which is not an element" in " ".join(capsys.readouterr().err.split())
