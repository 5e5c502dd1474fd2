"""Decides from offline evaluation whether a candidate may replace the incumbent policy, without real episodes.

Both are evaluated from the same initial states with the same random numbers, by evaluators that were not used in their
training. model: episodes in world models (worldmodel.data=[DATASET] worldmodel.transitions=1 trains one on a log
alone); fqe: a critic fitted to each policy on recorded data; critic: a critic of the recorded actions; importance:
logged actions weighted by each policy's likelihood (data from collect.chains=true). The candidate is accepted if the
lower bound of its improvement, by the bootstrap and by Student's t, exceeds gate.margin for every evaluator. The values
of fqe and critic are rejected as not credible if they exceed those of nine of ten recorded successes. Trials (world)
with the success of a classifier, world.success=PATH, are refused if it accepts more failures than it claims.
workers.count=N plays the episodes in world models in N processes, with equal results. Exit status 0: accepted, 1:
rejected. `checkpoint` in the run folder is a link to the policy that may act now: the candidate if it was accepted,
else the incumbent.
"""

import os
from pathlib import Path

from robopolicy.building.evaluators import (
    Elsewhere,
    build_evaluators,
    clipped_fraction,
    gate_episodes,
    warn_of_critics_alone,
    warn_of_divergence,
)
from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.workers import open_workers
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError
from robopolicy.evaluation.gate import Gate
from robopolicy.evaluation.report import report_for_run
from robopolicy.policies.loading import checkpoint_in, weights_hash
from robopolicy.runs import finish, open_fresh_run, output
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Decide by offline evaluation whether a policy may replace another",
    sections=("run", "world", "workers", "gate"),
    example="robopolicy gate runs/offline/push_t/0/checkpoint runs/train/push_t/0/checkpoint",
    targets=("gate.candidate", "gate.incumbent"),
    world_from={"gate.candidate": "", "gate.incumbent": ""},
)


def run(config: Config) -> int:
    """Run the gate, print the reasons, and return 0 for accepted, 1 for rejected."""
    section, device = config.gate, choose_device(config.run)
    if section.candidate is None or section.incumbent is None:
        raise ConfigError("Two policies are needed. Usage: robopolicy gate CANDIDATE INCUMBENT")
    folder = open_fresh_run(config, "gate", VERB.sections)
    candidate, incumbent = (load_policy(path, device) for path in (section.candidate, section.incumbent))
    with open_workers(config) as workers:
        elsewhere = Elsewhere(workers, [(incumbent, section.incumbent), (candidate, section.candidate)])
        recorded = gate_episodes(config, incumbent, device)
        judges = build_evaluators(config, incumbent, recorded, device, elsewhere=elsewhere)
        gate = Gate(judges, margin=section.margin, relative=section.relative_margin, confidence=section.confidence)
        verdict = gate.decide(candidate, incumbent)
    warn_of_divergence(judges)
    output.print(verdict.line("the candidate"))
    warn_of_critics_alone(section, verdict.accepted)
    link_to(checkpoint_in(section.candidate if verdict.accepted else section.incumbent), folder.checkpoint)
    weights = weights_hash(section.candidate)
    finish(config, folder, {"gate": verdict.to_json(), "candidate_weights": weights, **clipped_fraction(judges)})
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0 if verdict.accepted else 1


def link_to(checkpoint: Path, place: Path) -> None:
    """Make `place` a relative link to a checkpoint, at once: whoever serves it finds the old one or the new one."""
    new = place.with_name(f"{place.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(checkpoint.resolve(), place.parent.resolve()))
    new.replace(place)
