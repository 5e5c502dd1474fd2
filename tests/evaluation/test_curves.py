"""Pooled learning curves: means over seeds at common environment steps."""

import numpy as np

from robopolicy.evaluation.plots import imagination_curves, method_curves, pooled_curve, ranking_panels


def test_seeds_are_averaged_at_common_steps_and_a_finished_seed_keeps_its_last_value():
    steps, mean, low, high = pooled_curve([[(0, 0.0), (100, 1.0)], [(0, 0.2), (50, 0.6)]], points=3)
    np.testing.assert_allclose(steps, [0, 50, 100])
    np.testing.assert_allclose(mean, [0.1, 0.55, 0.8])
    np.testing.assert_allclose(low, [0.0, 0.5, 0.6])
    np.testing.assert_allclose(high, [0.2, 0.6, 1.0])


def test_every_method_is_drawn_and_named():
    methods = {"PPO": [[(0, 0.1), (10, 0.9)]], "GRPO": [[(0, 0.1), (20, 0.8)]]}
    svg = method_curves({"push": methods, "pick": methods}, {"push": 0.1, "pick": 0.2})
    assert svg.startswith("<svg")
    for name in ("PPO", "GRPO", "BC", "push", "pick"):
        assert f">{name}<" in svg


def test_every_arm_has_a_panel_with_a_line_a_seed_for_imagination_and_reality():
    seed = [
        {"env_steps": steps, "deterministic_success": 0.9, "deterministic_real_success": 0.3} for steps in (0, 1000)
    ]
    svg = imagination_curves({"one": [seed], "two": [seed, seed], "three": [seed]}, columns=2)
    for name in ("one", "two", "three", "imagined", "real"):
        assert svg.count(f">{name}<") == 1
    imagined, real = (svg.count(f"stroke: {colour}; stroke-opacity") for colour in ("#d55e00", "#0072b2"))
    assert imagined == real and imagined >= 4, "four seeds in all"


def test_every_model_has_a_panel_with_a_point_a_policy_and_a_colour_a_seed():
    first, second = [(0.1, 0.2), (0.8, 0.7)], [(0.3, 0.3), (0.5, 0.6), (0.9, 0.9)]
    svg = ranking_panels({"one": [first, second], "two": [first]}, columns=1)
    assert svg.count(">one<") == svg.count(">two<") == 1
    points = {colour: svg.count(f'style="fill: {colour}; fill-opacity: 0.7"') for colour in ("#0072b2", "#d55e00")}
    assert points == {"#0072b2": 4, "#d55e00": 3}
