"""Planning by optimised action sequences: formulas by hand, known optima, rows that do not disturb each other."""

import sys

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import EpisodeGenerator
from robopolicy.core.spec import STATE, Field, PolicySpec, WorldSpec
from worldmodels.configuration import PlanConfig
from worldmodels.mpc import (
    ModelPredictivePolicy,
    Problem,
    best_sequences,
    imagined_returns,
    make_planner,
    path_weights,
    shifted,
    spectrum,
)
from worldmodels.protocol import Imagined

FIELDS = {STATE: Field((2,))}
GOAL = torch.tensor([0.6, -0.3])


class Plane:
    """A point that an action moves by a tenth; paid by how much nearer to the goal it comes, until it is there."""

    spec = WorldSpec("plane", FIELDS, Field((2,), low=-1.0, high=1.0), 10.0, 100, rewards=("progress",))

    def initial(self, context, seeds):
        return {"x": torch.from_numpy(context.last(STATE).astype(np.float32)), "seed": torch.from_numpy(seeds)}

    def imagine(self, latent, actions):
        x = latent["x"] + 0.1 * actions.float()
        before, after = ((each - GOAL).norm(dim=1) for each in (latent["x"], x))
        near = after < 0.02
        uncertainty = x[:, 0].clamp_min(0)
        return {**latent, "x": x}, Imagined({STATE: x}, {"progress": before - after}, near, near, uncertainty)


def generator(rows):
    made = EpisodeGenerator(0)
    made.begin(np.arange(rows))
    return made


def run(kind, rows=3, steps=12, policy=None, seeds=None, **options):
    """Return the paths [steps + 1, rows, 2] of rows that execute their plans in the true plane."""
    planner = ModelPredictivePolicy(Plane(), PlanConfig(kind=kind, horizon=8, options=options, replan=2), policy)
    drawn = EpisodeGenerator(0)
    drawn.begin(np.arange(rows) if seeds is None else seeds)
    x, path = torch.zeros(rows, 2), [torch.zeros(rows, 2)]
    planner.reset()
    for _ in range(steps // 2):
        with drawn.decision():
            actions = planner.act({STATE: x[:, None]}, drawn).actions
        assert actions.shape == (rows, 2, 2) and actions.abs().max() <= 1
        for number in range(2):
            x = x + 0.1 * actions[:, number]
            path.append(x)
    return torch.stack(path)


@pytest.mark.parametrize("kind", ["cem", "icem", "mppi"])
def test_planners_reach_a_goal_nearly_as_fast_as_can_be(kind):
    path = run(kind)
    distance = (path - GOAL).norm(dim=-1)
    assert (distance[0] > 0.6).all() and (distance[6] < 0.3).all()  # six full steps is the least
    assert (distance.amin(0) < 0.05).all()
    assert not torch.equal(path[:, 0], path[:, 1])  # rows draw their own samples


@pytest.mark.parametrize("kind", ["cem", "icem", "mppi"])
def test_rows_plan_alike_in_any_company(kind):
    together, alone = run(kind, rows=3), run(kind, rows=1, seeds=np.array([2]))
    assert torch.allclose(together[:, 2], alone[:, 0], atol=1e-5)


def test_a_reset_row_forgets_its_plan_and_others_keep_theirs():
    planner = ModelPredictivePolicy(Plane(), PlanConfig(kind="cem", horizon=8, options={"std": 1e-6}, replan=2))
    still = {STATE: torch.zeros(2, 1, 2)}
    drawn = generator(2)
    planner._plan, planner._fresh = torch.full((2, 8, 2), 0.5), torch.tensor([False, False])
    planner.reset([1])
    with drawn.decision():
        actions = planner.act(still, drawn).actions
    assert actions[0] == pytest.approx(torch.full((2, 2), 0.5), abs=1e-4) and actions[1].abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["cem", "icem", "mppi"])
def test_a_planner_of_a_server_starts_from_no_other_robots_plan(kind):
    config = PlanConfig(kind=kind, horizon=8, options={"samples": 8, "rounds": 2}, replan=2)
    kept, forgets = ModelPredictivePolicy(Plane(), config), ModelPredictivePolicy(Plane(), config, remembers=False)
    found = []
    for planner in (kept, forgets):
        planner.reset([0])  # before anything was planned
        for robot in (0.5, -0.5, 0.5):
            found.append(planner.act({STATE: torch.full((1, 1, 2), robot)}, torch.Generator().manual_seed(1)).actions)
    assert not torch.equal(found[0], found[2]) and torch.equal(found[3], found[5])


def test_returns_by_hand():
    model, start = Plane(), {"x": torch.tensor([[0.0, -0.3]] * 2), "seed": torch.zeros(2, dtype=torch.int64)}
    sequences = torch.zeros(2, 8, 2)
    sequences[0, :, 0] = 1.0  # there after six steps, and paid for nothing after that
    plain = PlanConfig(kind="cem", discount=0.9)
    returns = imagined_returns(model, start, sequences, plain)
    assert returns[0] == pytest.approx(0.1 * (1 - 0.9**6) / 0.1, abs=1e-5) and returns[1] == 0
    careful = PlanConfig(kind="cem", discount=0.9, uncertainty=-2.0)
    cost = sum(0.9**step * 2 * 0.1 * (step + 1) for step in range(6))
    assert imagined_returns(model, start, sequences, careful)[0] == pytest.approx(float(returns[0]) - cost, abs=1e-4)
    height = lambda frames: frames[STATE][:, 0].double() ** 2  # noqa: E731
    found = imagined_returns(model, start, sequences, plain, height, torch.full((2,), 0.5))[0]
    squares = [0.5, *((0.1 * step) ** 2 for step in range(1, 7))]
    expected = sum(0.9**step * (squares[step + 1] - squares[step]) for step in range(6))
    assert found == pytest.approx(expected, abs=1e-5)


def nearness(frames):
    """Minus the distance to the goal, whose increases are the rewards of Plane."""
    return -(frames[STATE] - GOAL).norm(dim=1)


def column(frames):
    return frames[STATE]


def elsewhere(frames):
    return frames["observation.other"]


@pytest.mark.parametrize("kind", ["cem", "icem", "mppi"])
def test_increases_of_an_objective_plan_as_equal_rewards_do(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "objectives", sys.modules[__name__])
    found = []
    for objective in ("", "objectives:nearness"):
        config = PlanConfig(kind=kind, horizon=4, replan=1, objective=objective)
        planner, drawn = ModelPredictivePolicy(Plane(), config), generator(2)
        planner.reset()
        with drawn.decision():
            found.append(planner.act({STATE: torch.zeros(2, 1, 2)}, drawn).actions)
    assert torch.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [("column", r"returned shape \[2, 2\] for 2 frames"), ("elsewhere", r"imagines observation\.state: use one")],
)
def test_an_objective_that_does_not_fit_is_refused_with_a_reason(name, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "objectives", sys.modules[__name__])
    planner = ModelPredictivePolicy(Plane(), PlanConfig(kind="cem", horizon=4, objective=f"objectives:{name}"))
    drawn = generator(2)
    with pytest.raises(ConfigError, match=message), drawn.decision():
        planner.act({STATE: torch.zeros(2, 1, 2)}, drawn)


def test_weights_of_mppi_and_elites_by_hand():
    scores = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]], dtype=torch.float64)
    deviation = (2 / 3) ** 0.5
    parts = np.exp(np.array([-2.0, -1.0, 0.0]) / (0.5 * deviation))
    assert path_weights(scores, 0.5)[0].numpy() == pytest.approx(parts / parts.sum())
    assert path_weights(scores, 0.5)[1].numpy() == pytest.approx([1 / 3] * 3)
    sequences = torch.arange(6.0).reshape(2, 3, 1, 1)
    best, values = best_sequences(sequences, scores, 2)
    assert best[0].flatten().tolist() == [2.0, 1.0] and values[0].tolist() == [2.0, 1.0]
    assert shifted(torch.arange(4.0).reshape(1, 4, 1), 3, 1).flatten().tolist() == [3.0, 3.0, 3.0, 3.0]
    assert shifted(torch.arange(4.0).reshape(1, 4, 1), 1, 1).flatten().tolist() == [1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("steps", [15, 16])
@pytest.mark.parametrize("exponent", [0.0, 2.0])
def test_coloured_noise_has_unit_variance_and_its_spectrum(steps, exponent):
    none = torch.zeros(4, steps, 2)
    problem = Problem(
        lambda each: each[..., 0, 0],
        -torch.ones(2),
        torch.ones(2),
        none,
        none.bool(),
        none[:, None][:, :0],
        2,
        torch.Generator().manual_seed(0),
    )
    noise = problem.coloured_noise(4000, exponent)
    assert noise.shape == (4, 4000, steps, 2)
    assert float(noise.var(correction=0)) == pytest.approx(1.0, abs=0.02)
    power = torch.fft.rfft(noise, dim=2).abs().square().mean((0, 1, 3))[1:]
    if steps % 2 == 0:
        assert float(power[-1] / power[0]) == pytest.approx((steps / 2) ** -exponent, rel=0.08)
    scale, _ = spectrum(steps, exponent)
    assert (power / power[0]).numpy() == pytest.approx((scale[1:] / scale[1]) ** 2, rel=0.08)
    held = problem.held_noise(3, 2)
    assert torch.equal(held[:, :, 0], held[:, :, 1]) and not torch.equal(held[:, :, 1], held[:, :, 2])


class Knows:
    """A policy that goes straight to the goal."""

    spec = PolicySpec(FIELDS, Plane.spec.action, 1, 4, 4, 0, 10.0)

    def act(self, observation, generator, *, deterministic=False):
        way = GOAL - observation[STATE][:, -1]
        return Decision((way / way.norm(dim=1, keepdim=True))[:, None].expand(-1, 4, -1))

    def reset(self, rows=None): ...


def test_a_policy_proposes_a_sequence():
    known = run("cem", policy=Knows(), samples=8, elites=1, rounds=1, std=1e-3)
    unknown = run("cem", samples=8, elites=1, rounds=1, std=1e-3)
    assert (known[-1] - GOAL).norm(dim=-1).max() < 0.1 < (unknown[-1] - GOAL).norm(dim=-1).min()


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match=r"has no option 'sample'\. Did you mean 'samples'"):
        make_planner(PlanConfig(kind="cem", options={"sample": 3}))
    with pytest.raises(ConfigError, match="elites at most samples"):
        make_planner(PlanConfig(kind="cem", options={"samples": 3}))
    with pytest.raises(ConfigError, match="nothing"):
        make_planner(PlanConfig(kind="nothing"))
    unbounded = Plane()
    unbounded.spec = WorldSpec("plane", FIELDS, Field((2,)), 10.0, 100, rewards=("progress",))
    with pytest.raises(ConfigError, match="unbounded"):
        ModelPredictivePolicy(unbounded, PlanConfig(kind="cem"))


def test_a_policy_of_another_task_is_refused():
    other = Knows()
    other.spec = PolicySpec(FIELDS, Field((3,), low=-1.0, high=1.0), 1, 4, 4, 0, 10.0)
    with pytest.raises(ConfigError, match="belongs to another task than the policy: its actions"):
        ModelPredictivePolicy(Plane(), PlanConfig(kind="cem"), other)
