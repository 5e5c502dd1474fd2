"""Gated rounds: each builds a candidate from the incumbent, which replaces it only if the gate accepts it.

Every round starts from the incumbent. A refused candidate is discarded completely, and the step size shrinks. Nothing
here runs in the real world, and policies are selected without it.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.core.run import RunFolder
from robopolicy.training.offline.improvers import Improver, OfflineContext
from robopolicy.training.state import load_trainer, save_trainer


class GateDecision(Protocol):
    """Result of a gate for one candidate."""

    @property
    def accepted(self) -> bool:
        """Whether the candidate may replace the incumbent."""
        ...

    def line(self, what: str) -> str:
        """Return the reasons in one line; what: name of the candidate, such as "round 3"."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        ...


class Decides(Protocol):
    """Gate: decides whether a candidate replaces the incumbent."""

    def decide(self, candidate: Policy, incumbent: Policy) -> GateDecision:
        """Evaluate both policies again and compare them."""
        ...


@dataclass(frozen=True)
class Rounds:
    """Result of the rounds: number of accepted rounds, and a record of each."""

    accepted: int
    records: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def lines(self) -> list[str]:
        """Log lines of the gate."""
        return [str(record["gate"]) for record in self.records if "gate" in record]


def improve_in_rounds(
    policy: Trainable,
    lesson: OfflineContext,
    improver: Improver,
    gate: Decides | None,
    rounds: int,
    *,
    seed: int = 0,
    shrink: float = 0.5,
    run: RunFolder | None = None,
) -> Rounds:
    """Improve `policy` in place, in `rounds` rounds; it ends as the last accepted candidate, or unchanged.

    gate: None accepts every candidate. shrink: factor of the step size after a refusal, reset by an acceptance. run:
    receives one line of metrics per round, the initial policy in `base`, the incumbent in `checkpoint` and a resume
    point after every round. After a kill, the same call resumes and gives a bit-identical result.
    """
    improver.prepare(policy)
    place = None if run is None else run.path / "resume" / "rounds"
    state = None if place is None else load_trainer(place)
    done = 0
    step = 1.0
    records = list[dict[str, Any]]()
    if state is not None:
        done = int(state["round"])
        step = float(state["step"])
        records = list(state["records"])
        policy.load_state_dict(state["policy"])
    if run is not None:
        run.rewind("round", done)
        if state is None:
            policy.save(run.path / "base")
            policy.save(run.checkpoint)
    device = next(policy.parameters()).device
    with progress("Gated rounds", rounds) as advance:
        advance(done)
        for number in range(done + 1, rounds + 1):
            start = time.perf_counter()
            candidate = copy.deepcopy(policy)
            # Of the round's number alone: it draws alike whether earlier rounds were accepted, refused or resumed.
            generators = Generators(derive_seed(seed, f"round/{number}"), device)
            figures = improver.improve(candidate, lesson, generators, step, f"round {number}")
            record: dict[str, Any] = {"round": number, "step_size": step, **figures}
            verdict = None if gate is None else gate.decide(candidate, policy)
            is_accepted = verdict is None or verdict.accepted
            if verdict is not None:
                record |= {"gate": verdict.line(f"round {number}"), "verdict": verdict.to_json()}
            record |= {"accepted": is_accepted, "seconds": time.perf_counter() - start}
            if is_accepted:
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


keep_former_names(__name__, {"Verdict": "GateDecision"})
