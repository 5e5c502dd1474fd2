"""Failure detectors: FLOAT by hand and against a linear programme, the others' closed forms, rows that do not mix."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from robopolicy.core.errors import CheckpointError, DataError
from robopolicy.failures import DETECTORS
from robopolicy.failures.detector import Calibrated, Rollout, Seen, indices_of, load_detector
from robopolicy.failures.fiper import FiperDetector, chunk_entropy, smoothed
from robopolicy.failures.float import FloatDetector
from robopolicy.failures.nearest import FarthestDetector, NearestDetector, ProgressDetector
from robopolicy.failures.scoring import auroc
from robopolicy.failures.transport import prefix_costs, sinkhorn
from robopolicy.failures.value import ValueDetector

NO_CHUNKS = np.zeros((1, 0, 0), dtype=np.float32)
EYE = np.eye(2, dtype=np.float32)


def index_after(detector, *vectors):
    detector.start(1)
    indices = [detector.watch(Seen(np.array([vector], np.float32), NO_CHUNKS), np.array([0])) for vector in vectors]
    return np.concatenate(indices)


@pytest.mark.checks("ARMADA")
@pytest.mark.parametrize(
    ("vector", "expected"),
    # unregularised 0, 1 - 1/sqrt(2) times 1/2, 1/2; epsilon .1 leaves 1 / (1 + e^5) of each row in the other column
    [((1, 0), 0.5 / (1 + np.exp(5))), ((1, 1), 0.5 * (1 - np.sqrt(0.5))), ((-1, 0), 0.5 + 0.5 / (1 + np.exp(5)))],
)
def test_float_of_two_demonstrated_vectors_by_hand(vector, expected):
    detector = FloatDetector()
    detector.fit([EYE], [], 2)
    np.testing.assert_allclose(index_after(detector, vector), [expected], atol=1e-6)


def test_float_accumulates_and_takes_the_cheapest_demonstration():
    far = np.array([[0.0, 1.0], [0.0, -1.0]], np.float32)
    detector, alone = FloatDetector(epsilon=0.01), FloatDetector(epsilon=0.01)
    detector.fit([far, EYE], [], 2)
    alone.fit([EYE], [], 2)
    np.testing.assert_allclose(index_after(detector, (1, 0), (0, 1)), index_after(alone, (1, 0), (0, 1)))
    np.testing.assert_allclose(
        index_after(alone, (1, 0), (0, 1), (0, 1)), [0, 0, 1 / 6], atol=1e-3
    )  # beyond N: 1/3 each
    wrong = index_after(detector, (-1, 0), (-1, 0))
    assert wrong[0] < wrong[1]
    few = FloatDetector(candidates=1, epsilon=0.01)
    few.fit([far, EYE], [], 2)
    assert index_after(few, (0, 1), (1, 0))[1] > 0.4  # the nearest by the first vector alone


@pytest.mark.checks("ARMADA")
def test_sinkhorn_reaches_the_optimum_of_the_linear_programme():
    draws = np.random.default_rng(0)
    cost, rows, columns = draws.uniform(size=(6, 5)), np.full(6, 1 / 6), np.full(5, 1 / 5)
    sums = np.concatenate([np.kron(np.eye(6), np.ones(5)), np.kron(np.ones(6), np.eye(5))])
    best = linprog(cost.ravel(), A_eq=sums, b_eq=np.concatenate([rows, columns]))
    tensors = [torch.from_numpy(each)[None] for each in (cost, rows, columns)]
    plan = sinkhorn(*tensors, epsilon=0.001, iterations=50_000)[0].numpy()
    assert abs((plan * cost).sum() - best.fun) < 1e-3
    np.testing.assert_allclose(plan.sum(1), rows, atol=1e-6)
    np.testing.assert_allclose(plan.sum(0), columns, atol=1e-6)


def test_padding_and_the_merged_future_change_nothing():
    draws = np.random.default_rng(1)
    vectors = draws.normal(size=(3, 4, 5))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    prefix = vectors[0, :2][:, ::-1].copy()
    lengths = np.array([4, 2, 3])
    merged = prefix_costs(vectors, lengths, prefix, 6, 0.1)
    for number, length in enumerate(lengths):
        cost = np.zeros((length, 6))  # every decision to come its own column
        cost[:, :2] = 1 - vectors[number, :length] @ prefix.T
        masses = (torch.full((1, int(size)), 1 / size, dtype=torch.float64) for size in (length, 6))
        plan = sinkhorn(torch.from_numpy(cost)[None], *masses, epsilon=0.1)[0].numpy()
        np.testing.assert_allclose(merged[number], (plan * cost).sum(0)[:2], atol=1e-5)


def test_distances_sum_or_keep_their_maximum_and_progress_counts():
    demonstration = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]], np.float32)
    path = (0, 2), (1, 0), (0, 0), (2, 1), (2, 0)
    for detector, expected in (
        (NearestDetector(), np.cumsum([2, 0, 0, 1, 0]) / np.sqrt(2)),
        (FarthestDetector(), np.full(5, 2) / np.sqrt(2)),
        (ProgressDetector(), [0, 0, 1, 0, 1]),  # phases 0, .5, 0, 1, 1
    ):
        detector.fit([demonstration], [], 5)
        np.testing.assert_allclose(index_after(detector, *path), expected, atol=1e-6)


def rollouts(count, seed=0, length=6):
    """Return rollouts that stay near the demonstrations, and failed ones that leave them in their second half."""
    draws = np.random.default_rng(seed)
    made = []
    for number in range(count):
        good, steps = number % 2 == 0, length if number % 3 else length - 2
        embedding = draws.normal(scale=0.1, size=(steps, 4)).astype(np.float32)
        embedding[:, 0] += np.arange(steps)
        spread = np.full((steps, 1, 1), 0.1)
        if not good:
            embedding[steps // 2 :, 1] += 2
            spread[steps // 2 :] = 1.0
        chunks = (spread * draws.normal(size=(steps, 8, 3))).astype(np.float32)
        made.append(Rollout(embedding, chunks, good, 4 * steps))
    return made


DEMONSTRATIONS = [each.embedding for each in rollouts(12, seed=9) if each.success]


@pytest.mark.parametrize("name", DETECTORS.ours)
def test_rows_do_not_mix_and_a_saved_detector_goes_on_alike(name, tmp_path):
    detector = DETECTORS.load(name)()
    detector.fit(DEMONSTRATIONS, rollouts(20), 6)
    tested = rollouts(9, seed=1)
    alone, together = indices_of(detector, tested, batch_size=1), indices_of(detector, tested)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)  # networks of single precision
    about = {"checkpoint": "abc", "engine": {"engine": "lean"}, "cameras": {}}
    Calibrated(name, detector, np.full(6, 0.5), about).save(tmp_path / "saved")
    loaded = load_detector(tmp_path / "saved", about)
    for one, other in zip(together, indices_of(loaded.detector, tested), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    with pytest.raises(CheckpointError, match="calibrated for another engine"):
        load_detector(tmp_path / "saved", {**about, "engine": {"engine": "reference"}})
    # a row that starts again forgets its episode, the other one does not
    loaded.start(2)
    both, first = np.array([0, 1]), Seen(tested[0].embedding[[0, 0]], tested[0].chunks[[0, 0]])
    start, _ = loaded.watch(first, both)
    loaded.reset(np.array([1]))
    again, _ = loaded.watch(Seen(first.embedding[1:], first.chunks[1:]), np.array([1]))
    np.testing.assert_allclose(again, start[1:], atol=1e-4)


@pytest.mark.parametrize("name", ["float", "nearest", "fiper", "value"])
def test_detectors_tell_failed_from_successful_rollouts(name):
    detector = DETECTORS.load(name)()
    detector.fit(DEMONSTRATIONS, rollouts(40), 6)
    tested = rollouts(20, seed=5)
    last = np.array([index[-1] for index in indices_of(detector, tested)])
    good = np.array([each.success for each in tested])
    assert auroc(last[~good], last[good]) >= 0.85


def test_entropy_is_that_of_the_samples_and_windows_are_means():
    samples = np.zeros((2, 4, 1))
    samples[1, :, 0] = [-1, 1, -1, 1]
    np.testing.assert_allclose(chunk_entropy(samples), [np.log(1e-3), np.log(1.001)])
    signs = np.stack([np.arange(5.0), np.zeros(5)], 1)
    np.testing.assert_allclose(smoothed(signs, 3)[:, 0], [0, 0.5, 1, 2, 3])


def test_what_is_missing_is_named():
    good = [each for each in rollouts(6) if each.success]
    with pytest.raises(DataError, match="successful and failed"):
        ValueDetector().fit(DEMONSTRATIONS, good, 6)
    with pytest.raises(DataError, match="successful rollouts"):
        FiperDetector().fit(DEMONSTRATIONS, [], 6)
    with pytest.raises(DataError, match="demonstrations"):
        FloatDetector().fit([], good, 6)


def test_an_alarm_stays():
    detector = NearestDetector()
    detector.fit([EYE], [], 3)
    watched = Calibrated("nearest_max", detector, np.array([0.1, 9.0, 9.0]), {})
    watched.start(2)
    rows = np.array([0, 1])
    alarms = [
        watched.watch(Seen(np.array(pair, np.float32), np.zeros((2, 0, 0))), rows)[1].tolist()
        for pair in ([(1, 0), (3, 0)], [(1, 0), (1, 0)])
    ]
    assert alarms == [[False, True], [False, True]]
