"""Whether a success classifier lies: its false accepts in played episodes, compared with the rate that it claims."""

from collections.abc import Sequence

from robopolicy.evaluation.intervals import percent, wilson
from robopolicy.evaluation.success import EvaluationResult, counted_rate

CONFIDENCE = 0.9
"""Confidence of the two-sided interval whose lower bound must not exceed the claimed rate: 95 % on one side."""


def reason_to_refuse(results: Sequence[EvaluationResult]) -> str:
    """Return why success supplied by a classifier cannot be trusted in these evaluations, "" if nothing speaks against
    it.

    The classifier claims a false-accept rate of at most max_false_accepts. It is refused if the lower bound of the
    measured rate exceeds that: of the failed episodes here, where the world reports its own success, else of its own
    failed test episodes.
    """
    classified = [each for each in results if each.classifier is not None]
    if not classified:
        return ""
    description = classified[0].classifier or {}
    claimed, checkpoint = float(description["max_false_accepts"]), description["checkpoint"]
    false_accepts = failures = 0
    for each in classified:
        if each.own_success is not None:
            false_accepts += int((each.success & ~each.own_success).sum())
            failures += int((~each.own_success).sum())
    here = counted_rate(false_accepts, failures)
    if failures and wilson(false_accepts, failures, CONFIDENCE)[0] > claimed:
        return (
            f"the success classifier {checkpoint} accepted {percent(here)} of the episodes that failed by the "
            f"simulator's own success, but claims at most {claimed:.0%}: add such episodes to its data "
            "(success.extra_datasets=[DATASET]) and train it again"
        )
    tested = description["false_accepts"]
    if tested["total"] and wilson(tested["count"], tested["total"], CONFIDENCE)[0] > claimed:
        return (
            f"the success classifier {checkpoint} accepted {percent(tested)} of its own failed test episodes, but "
            f"claims at most {claimed:.0%}: train it with more failed episodes (success.extra_datasets=[DATASET])"
        )
    return ""
