"""Thresholds keep the false-accept rate that they promise; labels and error rates are those of a hand table."""

import numpy as np
import pytest
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.spec import Field
from robopolicy.success.calibration import (
    choose_threshold,
    clopper_pearson,
    failures_needed,
    fit_calibration,
    probabilities,
    upper_bound,
)
from robopolicy.success.labels import (
    Labels,
    from_episodes,
    from_file,
    from_steps,
    labels_of,
    require_both,
    require_held,
    split_by_episode,
)
from robopolicy.success.measures import EpisodeScores, held_scores, measure, measure_frames


def episodes(*lengths: int, final_known: bool = True, **more) -> Episodes:
    """Episodes of these lengths with one number per frame."""
    steps, count = sum(lengths), len(lengths)
    return Episodes(
        {"observation.state": Field((1,))},
        Field((1,)),
        10.0,
        {"observation.state": torch.arange(steps + count, dtype=torch.float32)[:, None]},
        torch.zeros(steps, 1),
        torch.tensor(lengths),
        ("",) * count,
        final_known=torch.full((count,), final_known),
        **more,
    )


def test_exact_intervals_are_those_of_the_table():
    # Clopper and Pearson's interval of 3 of 20 and 0 of 59, as in R's binom.test
    assert clopper_pearson(3, 20) == pytest.approx((0.03207094, 0.37892683), abs=1e-7)
    assert upper_bound(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59)) and upper_bound(0, 59) < 0.05 < upper_bound(0, 58)
    assert clopper_pearson(0, 0) == (0.0, 1.0) and clopper_pearson(20, 20)[1] == 1.0
    assert failures_needed(0.05) == 59


def test_a_threshold_exceeds_its_rate_in_at_most_one_of_twenty_draws():
    """Scores of failed episodes are normal: the true false-accept rate of a threshold is known."""
    from scipy.stats import norm

    draws, over = np.random.default_rng(0), 0
    for _ in range(1000):
        threshold = choose_threshold(draws.normal(size=120), np.empty(0), rate=0.1)
        assert threshold.met and threshold.bound <= 0.1
        over += norm.sf(threshold.value) > 0.1
    assert 10 < over < 65  # 5 % of 1000, and not far below: the threshold is not wasteful


def test_with_too_few_failures_none_is_accepted_and_the_bound_says_so():
    threshold = choose_threshold(np.array([1.0, 3.0, 2.0]), np.array([0.0, 4.0]), rate=0.05)
    assert threshold.value == 4.0 and threshold.accepted == 0 and not threshold.met
    assert threshold.bound == pytest.approx(1 - 0.05 ** (1 / 3))
    with pytest.raises(DataError, match="failed episodes"):
        choose_threshold(np.empty(0), np.zeros(3), rate=0.05)


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_probabilities_match_frequencies(method):
    draws = np.random.default_rng(1)
    logits = 3 * draws.normal(size=4000)
    truth = draws.random(4000) < 1 / (1 + np.exp(-(0.5 * logits - 1)))
    calibration = fit_calibration(method, logits, truth)
    grid = np.linspace(-4, 6, 21)
    expected = 1 / (1 + np.exp(-(0.5 * grid - 1)))
    chances = probabilities(calibration, grid)
    assert np.abs(chances - expected).mean() < (0.02 if method == "temperature" else 0.06)
    assert (np.diff(chances) >= 0).all()


def test_labels_describe_the_frame_after_the_step_or_the_row_itself():
    data = episodes(3, 2)
    labels = from_steps(data, torch.tensor([0, 0, 1, 0, float("nan")]))
    assert labels.frames.tolist() == [0, 0, 0, 1, 0, 0, -1] and labels.episodes.tolist() == [True, False]
    rows = from_steps(episodes(3, 2, final_known=False), torch.tensor([0, 0, 1, 0, 0]))  # as LeRobot stores them
    assert rows.frames.tolist() == [0, 0, 1, -1, 0, 0, -1]
    with pytest.raises(DataError, match="label is 2"):
        from_steps(data, torch.tensor([0, 0, 2, 0, 0]))


def test_success_of_episodes_labels_their_ends():
    data = episodes(7, 3)
    labels = from_episodes(data, torch.tensor([True, False]), last_frames=2)
    assert labels.frames.tolist() == [0, 0, 0, 0, -1, -1, 1, 1, 0, 0, 0, 0]


def test_only_the_first_frames_of_a_lasting_success_are_used():
    data = episodes(6, 2)
    lasting = torch.tensor([0, 1, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
    labels = labels_of(episodes(6, 2, step_success=lasting), "frames", 2, None, "DATA")
    assert labels.frames.tolist() == [0, 0, 1, 1, -1, -1, -1, 0, 0, 0]
    lost = torch.tensor([0, 1, 1, 1, 1, 0, 0, 0], dtype=torch.bool)  # describes the present frame
    assert labels_of(episodes(6, 2, step_success=lost), "frames", 2, None, "DATA").frames.tolist() == [
        0, 0, 1, 1, 1, 1, 0, 0, 0, 0]  # fmt: skip
    require_held(data, labels, 2)
    with pytest.raises(DataError, match=r"2 frames.*success\.hold=1"):
        require_held(data, labels, 3)


def test_a_file_labels_episodes_or_frames(tmp_path):
    path, data = tmp_path / "labels.csv", episodes(7, 3, 3)
    path.write_text("episode,success,first_frame,last_frame\n0,yes,,\n1,0,1,2\n1,1,3,3\n")
    labels = from_file(data, path, last_frames=2)
    assert labels.frames.tolist() == [0, 0, 0, 0, -1, -1, 1, 1, -1, 0, 0, 1, -1, -1, -1, -1]
    assert labels.episodes.tolist() == [True, True, False]
    for text, match in (
        ("episode,success\n9,1\n", "line 2: episode is '9'"),
        ("episode,success\n0,maybe\n", "success is 'maybe'"),
        ("number,good\n0,1\n", "columns episode and success"),
        ("episode,success,first_frame,last_frame\n0,1,0,99\n", "last_frame is '99'"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=match):
            from_file(data, path, 2)


def test_data_without_labels_failures_or_successes_name_the_way_out():
    data = episodes(3, 3)
    with pytest.raises(DataError, match=r"success\.labels=next\.reward"):
        labels_of(data, "frames", 3, None, "DATA")
    with pytest.raises(DataError, match=r"no failed one.*success\.negatives=\[DATASET\]"):
        require_both(from_episodes(data, torch.tensor([True, True]), 1), "DATA")
    with pytest.raises(DataError, match="no success among its labels"):
        require_both(from_episodes(data, torch.tensor([False, False]), 1), "DATA")


def test_episodes_are_divided_with_both_kinds_in_every_part():
    kinds = torch.tensor([True] * 4 + [False] * 40)
    labels = Labels(torch.zeros(0), kinds)
    parts = split_by_episode(labels, (0.6, 0.2, 0.2), np.random.default_rng(0))
    assert sorted(torch.cat(parts).tolist()) == list(range(44))
    assert all(0 < kinds[part].sum() < len(part) for part in parts)
    with pytest.raises(DataError, match="2 failed episodes cannot be divided into 3"):
        split_by_episode(Labels(torch.zeros(0), torch.tensor([True] * 9 + [False] * 2)), (1, 1, 1),
                         np.random.default_rng(0))  # fmt: skip


def test_error_rates_are_counted_by_episode():
    assert held_scores(np.array([1.0, 3.0, 2.0, 5.0]), 2).tolist() == [-np.inf, 1.0, 2.0, 2.0]
    assert held_scores(np.array([1.0]), 2).tolist() == [-np.inf]
    late = EpisodeScores(np.array([0, 0, 0, 0, 0, 0, 9.0]), np.array([0, 0, 0, 0, 0, 1, 1]), True)
    early = EpisodeScores(np.array([9.0, 0, 0, 0, 0, 9, 9]), np.array([0, 0, 0, 0, 0, 1, 1]), True)
    never = EpisodeScores(np.zeros(7), np.array([0, 0, 0, 0, 0, 1, 1]), True)
    lies = EpisodeScores(np.array([0, 9.0, 0]), np.zeros(3), False)
    fails = EpisodeScores(np.zeros(3), np.zeros(3), False)
    figures = measure([late, early, never, lies, fails], threshold=1.0)
    counts = {name: (each["count"], each["total"]) for name, each in figures.items() if name != "delay"}
    assert counts == {"false_accepts": (1, 2), "false_rejects": (1, 3), "early_accepts": (1, 3), "precision": (2, 3)}
    assert figures["delay"] == 1.0 and early.highest_failure == 9.0 and late.highest_failure == 0.0


def test_reliability_weighs_bins_by_their_frames():
    labels = Labels(torch.tensor([1, 0, 0, 1, -1], dtype=torch.int8), torch.tensor([True]))
    chances = np.array([0.9, 0.9, 0.1, 0.9, 0.5])
    figures = measure_frames(labels, chances - 0.5, chances, 0.0)
    assert figures["false_accepts"]["count"] == 1 and figures["false_rejects"]["count"] == 0
    assert figures["calibration_error"] == pytest.approx((3 * (0.9 - 2 / 3) + 0.1) / 4)
    assert [each["frames"] for each in figures["reliability"]] == [1, 3]
