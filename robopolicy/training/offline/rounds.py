"""Gated rounds: a candidate is made of the incumbent, and replaces it only where the gate says so.

Every round starts from the incumbent, whatever became of the last candidate: a refused one is gone with all it learned,
and steps become smaller. Nothing here plays in the real world, and what is kept is chosen without it.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, derive
from robopolicy.core.run import RunFolder
from robopolicy.training.offline.improvers import Improver, Lesson
from robopolicy.training.state import load_trainer, save_trainer


class Verdict(Protocol):
    """What a gate says of a candidate."""

    @property
    def accepted(self) -> bool:
        """Whether it may replace the incumbent."""
        ...

    def line(self, what: str) -> str:
        """Return the reasons in a line; what: of which candidate, such as "round 3"."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        ...


class Decides(Protocol):
    """A gate."""

    def decide(self, candidate: Policy, incumbent: Policy) -> Verdict:
        """Compare both, scored anew."""
        ...


@dataclass(frozen=True)
class Rounds:
    """What came of it: how many rounds were accepted, and a record of each."""

    accepted: int
    records: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def lines(self) -> list[str]:
        """The gate's log."""
        return [str(record["gate"]) for record in self.records if "gate" in record]


def improve_in_rounds(
    policy: Trainable,
    lesson: Lesson,
    improver: Improver,
    gate: Decides | None,
    rounds: int,
    *,
    seed: int = 0,
    shrink: float = 0.5,
    run: RunFolder | None = None,
) -> Rounds:
    """Improve `policy` in place, in so many rounds; it ends as the last accepted candidate, or as it came.

    gate: None accepts every candidate. shrink: factor of the step size after a refusal, undone by an acceptance. run:
    gets a line of metrics a round, the policy as it came in `base`, the incumbent in `checkpoint` and a resume point
    after every round: the same call after a kill goes on from there and ends bit for bit in the same place.
    """
    improver.prepare(policy)
    place = None if run is None else run.path / "resume" / "rounds"
    saved = None if place is None else load_trainer(place)
    done = 0
    step = 1.0
    records = list[dict[str, Any]]()
    if saved is not None:
        done = int(saved["round"])
        step = float(saved["step"])
        records = list(saved["records"])
        policy.load_state_dict(saved["policy"])
    if run is not None:
        run.rewind("round", done)
        if saved is None:
            policy.save(run.path / "base")
            policy.save(run.checkpoint)
    device = next(policy.parameters()).device
    with progress("Gated rounds", rounds) as advance:
        advance(done)
        for number in range(done + 1, rounds + 1):
            started = time.perf_counter()
            candidate = copy.deepcopy(policy)
            # Of the round's number alone: it draws alike whether earlier rounds were accepted, refused or resumed.
            generators = Generators(derive(seed, f"round/{number}"), device)
            figures = improver.improve(candidate, lesson, generators, step, f"round {number}")
            record: dict[str, Any] = {"round": number, "step_size": step, **figures}
            verdict = None if gate is None else gate.decide(candidate, policy)
            accepted = verdict is None or verdict.accepted
            if verdict is not None:
                record |= {"gate": verdict.line(f"round {number}"), "verdict": verdict.to_json()}
            record |= {"accepted": accepted, "seconds": time.perf_counter() - started}
            if accepted:
                # In place, as callers hold this policy.
                policy.load_state_dict(candidate.state_dict())
                step = 1.0
            else:
                step *= shrink
            records.append(record)
            if run is not None and place is not None:
                run.log(record)
                policy.save(run.checkpoint)
                weights = dict(policy.state_dict())
                save_trainer(place, {"round": number, "step": step, "records": records, "policy": weights})
            advance(note=f"{sum(bool(each['accepted']) for each in records)} accepted")
    return Rounds(sum(bool(each["accepted"]) for each in records), tuple(records))
