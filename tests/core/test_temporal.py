"""Signal temporal logic: robustness by hand, by a slow recursive definition, and in the verb."""

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from robopolicy.core.temporal import Specification, with_specification
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.evaluation.tables import specification_table
from sims.registry import make_expert, make_world

FIELDS = {STATE: Field((2,), names=("x", "y")), ENVIRONMENT_STATE: Field((2,), names=("x", "z"))}


def robustness(text, *episodes, fields=None, fps=1.0):
    """Robustness of episodes, each a list of x, or of pairs."""
    fields = {STATE: Field((2,), names=("x", "y"))} if fields is None else fields
    lengths = np.array([len(each) for each in episodes])
    frames = np.full((len(episodes), lengths.max() + 3, 2), 77.0)  # what follows an episode must not count
    for row, each in enumerate(episodes):
        frames[row, : len(each)] = np.broadcast_to(np.reshape(each, (len(each), -1)), (len(each), 2))
    return Specification(text, fields, fps).robustness({STATE: frames}, lengths)


@pytest.mark.checks("TGPO-STL")
def test_operators_by_hand():
    x = [0.0, 0.5, 1.2, 0.9]
    for text, expected in {
        "F[0,3](x > 1)": 0.2,
        "G[0,2](x < 1)": -0.2,
        "F[0,3](x > 1) & G[0,2](x < 1)": -0.2,
        "F[0,3](x > 1) | G[0,2](x < 1)": 0.2,
        "(x < 1) U[0,2] (x > 1)": 0.2,  # at t' = 2: min(.2, min(1, .5))
        "(x < 0.4) U[0,2] (x > 1)": -0.1,  # at t' = 2: min(.2, min(.4, -.1))
        "(x < 0.4) U[0,0] (x > 1)": -1.0,
        "!F(x > 1)": -0.2,
        "F[3,9](x > 0.5)": 0.4,  # the last frame holds
        "G[0,1](F[1,2](x > 1))": 0.2,
        "x > 1": -1.0,
        "0 < x < 0.4": 0.0,
        "F(min(x, 2 * y - 1) >= hypot(x, -0.0) / 2)": 0.6,
        "G(abs(x - 0.5) < 1)": 0.3,
        "F[1,1](state[0] < state[1] + 0.25)": 0.25,
    }.items():
        assert robustness(text, x) == pytest.approx([expected]), text
    assert robustness("F[0,0.3](x > 1)", x, fps=10) == pytest.approx([0.2])  # seconds
    assert robustness("G(x < 1)", x, [0.0], [0.25, 0.75]) == pytest.approx([-0.2, 1.0, 0.25])


def slow(node, x, t):
    """Definition by recursion over an endless signal."""
    kind, *parts = node
    if kind == "p":
        sign, bound = parts
        return sign * (x[min(t, len(x) - 1)] - bound)
    if kind in "&|":
        return {"&": min, "|": max}[kind](slow(parts[0], x, t), slow(parts[1], x, t))
    if kind == "!":
        return -slow(parts[0], x, t)
    times = range(t + parts[-2], t + parts[-1] + 1)
    if kind in "FG":
        return {"F": max, "G": min}[kind](slow(parts[0], x, each) for each in times)
    first, second = parts[:2]
    return max(min([slow(second, x, at), *(slow(first, x, each) for each in range(t, at))]) for at in times)


def text_of(node):
    kind, *parts = node
    if kind == "p":
        return f"(x {'>' if parts[0] > 0 else '<'} {parts[1]})"
    if kind in "&|":
        return f"({text_of(parts[0])} {kind} {text_of(parts[1])})"
    if kind == "!":
        return f"!({text_of(parts[0])})"
    interval = f"{kind}[{parts[-2]},{parts[-1]}]"
    return (
        f"{interval}({text_of(parts[0])})"
        if kind in "FG"
        else f"(({text_of(parts[0])}) {interval} ({text_of(parts[1])}))"
    )


def drawn(draws, depth):
    kind = draws.choice(["p"] if depth == 0 else ["p", "&", "|", "!", "F", "G", "U"])
    if kind == "p":
        return ("p", int(draws.choice([-1, 1])), float(np.round(draws.uniform(-1, 1), 2)))
    low = int(draws.integers(0, 3))
    times = (low, low + int(draws.integers(0, 3)))
    count = 2 if kind in "&|U" else 1
    return (str(kind), *(drawn(draws, depth - 1) for _ in range(count)), *(times if kind in "FGU" else ()))


@pytest.mark.checks("TGPO-STL")
def test_random_formulas_agree_with_the_recursive_definition():
    draws = np.random.default_rng(0)
    for _ in range(200):
        node = drawn(draws, 3)
        episodes = [draws.uniform(-1, 1, int(draws.integers(1, 8))).tolist() for _ in range(3)]
        expected = [slow(node, each, 0) for each in episodes]
        assert robustness(text_of(node), *episodes) == pytest.approx(expected), text_of(node)


def test_mistakes_are_explained():
    for text, part in {
        "F[0,3](w > 1)": "no element 'w'",
        "F[0,3](x > 1": "cannot be read",
        "x + 1": "compares nothing",
        "F[3,0](x > 1)": "end after its begin",
        "F[-1,0](x > 1)": "begin at 0",
        "F[a,b](x > 1)": "two numbers in seconds",
        "x > 1 & y < 2": "parentheses",
        "F(x)(y) > 1": "is not a number",
        "__import__('os').system('true') > 0": "is not a number",
        "x == 1": "<, <=, > and >=",
    }.items():
        with pytest.raises(ConfigError, match="Elements: ") as error:
            Specification(text, {STATE: Field((2,), names=("x", "y"))}, 1.0)
        assert part in str(error.value), text
    with pytest.raises(ConfigError, match="no element 'x'"):  # which x?
        Specification("x > 1", FIELDS, 1.0)
    assert Specification("environment_state[0] + z > state[0]", FIELDS, 1.0)


def test_episodes_of_a_world_are_measured_whatever_their_batch():
    text = "F(hypot(cube_to_goal_x, cube_to_goal_y) < 0.03) & G(abs(y) < 0.2)"
    results = []
    for rows in (30, 7):
        world = make_world("push_cube", rows)
        expert = make_expert("push_cube", world.spec)
        assert expert is not None
        results.append(evaluate_policy(with_specification(world, text), expert, np.arange(30)))
    first, second = results
    np.testing.assert_allclose(first.robustness, second.robustness, atol=1e-6)
    assert first.specification == text and first.robustness is not None
    assert 0.0 < first.robustness.max() <= 0.03 and first.success.all()  # at best the cube is on the goal
    figures = first.summary()["specification"]
    assert figures["fulfilled"]["count"] == (first.robustness >= 0).sum() < 30
    restored = EvaluationResult.from_json(first.to_json())
    assert restored.summary() == first.summary()
    table = specification_table([("policy", first.to_json())])
    assert table is not None and table[0] == [text, "policy"] and len(table[1]) == 2
    plain = evaluate_policy(world, expert, np.arange(30))
    assert plain.robustness is None and "specification" not in plain.summary()
    assert specification_table([("policy", plain.to_json())]) is None
