"""Overprovisioned collection (APRIL): more groups in flight than an iteration needs. Measures speed and final success.

Speed is measured with a policy that mostly succeeds: most episodes end early, and a few that run to the time limit
determine the duration of an iteration. The collection methods alternate in one process. Training uses GRPO with a
decoupled ratio from the same base policies, with the same number of episodes.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.benchmarks.algorithms import GENTLE, TOKEN_GRPO
from robopolicy.benchmarks.rates import rate_text, short, spread_text
from robopolicy.benchmarks.runs import FORMER_PPO, Variant, chosen_from, pretrained, run_variant
from robopolicy.building.policies import choose_device
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose
from robopolicy.core.policy import require_trainable
from robopolicy.core.progress import progress
from robopolicy.core.structured import narrowed
from robopolicy.policies import load_policy
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.training.collection.episodes import EpisodeCollector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.verbs.bench import Benchmark, Table

SHARES = {"waits for all": 0.0, "half more in flight": 0.5, "as many more": 1.0, "twice as many more": 2.0}
"""Row of the table -> finetune.overprovision."""

LEARNING = ("finetune.algorithm=grpo", "finetune.coefficient=decoupled_ppo", *GENTLE)

GOOD = "finetune.target_success=0.9", "finetune.videos=0"
POLICIES = {"diffusion": Variant("diffusion", GOOD), "token": Variant("token", (*TOKEN_GRPO, *GOOD))}
"""Whose episodes are collected: fine-tuned until most of them succeed. Tokens take most of their time in the network,
which answers for every row, whether or not its episode has ended.
"""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"speed": {task: {policy: {method: results}}}, "learning": {task: {method: runs}}}, running what is
    missing.
    """
    policies = chosen_from(config, POLICIES)
    speed, learning = {}, {}
    for task in config.bench.tasks:
        speed[task] = {name: speed_of(config, root, task, name) for name in policies}
        learning[task] = {way: learned(config, root, task, way) for way in ("waits for all", "as many more")}
    return {"speed": speed, "learning": learning}


def speed_of(config: Config, root: Path, task: str, name: str) -> dict[str, dict[str, Any]]:
    """Return episodes per second (median over rounds) and statistics of the collected episodes for every collection
    method.

    success: of all episodes; staleness: mean age of action chunks, in iterations; held: maximum number of groups left
    over.
    """
    run_variant(config, root, task, f"good_{name}", POLICIES[name], config.bench.seeds[0])
    checkpoint = root / task / "finetune" / f"good_{name}" / str(config.bench.seeds[0]) / "checkpoint"
    run_config = compose(
        [f"recipe={task}", *FORMER_PPO.get(task, ()), *LEARNING, "finetune.groups=32", *config.bench.overrides]
    )
    device, section = choose_device(run_config.run), narrowed(FinetuneConfig, run_config.finetune)
    policy = require_trainable(load_policy(checkpoint, device))
    collectors = {}
    for way, share in SHARES.items():
        world = build_world(run_config.world, policy, batch_size=section.groups * section.group_size, device=device)
        settings, draws = replace(section, overprovision=share), torch.Generator(device).manual_seed(0)
        collectors[way] = EpisodeCollector(world, policy, build_algorithm(settings), settings, 0, draws)
    rows_of: dict[str, list[dict[str, float]]] = {way: [] for way in SHARES}
    with progress(f"{task}, {name}", config.bench.rounds * len(SHARES)) as advance:
        for turn in range(config.bench.rounds):
            for way, collector in collectors.items():
                rows_of[way].append(timed(collector, turn))
                advance()
    for collector in collectors.values():
        collector.world.close()
    return {way: summary(rows[len(rows) // 4 :]) for way, rows in rows_of.items()}  # it takes turns to fill the backlog


def timed(collector: EpisodeCollector, turn: int) -> dict[str, float]:
    """Collect once; return the seconds and the collected rollouts."""
    start = time.perf_counter()
    rollouts = collector.collect(turn)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "episodes": len(rollouts.group),
        "successes": int(rollouts.row_success.sum()),
        "staleness": float((turn - rollouts.policy_version[rollouts.played]).float().mean()),
        "held": len(collector.player.held),
    }


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the summary of all timing rounds of one collection method."""
    return {
        "episodes_per_second": float(np.median([row["episodes"] / row["seconds"] for row in rows])),
        "success_rate": sum(row["successes"] for row in rows) / sum(row["episodes"] for row in rows),
        "staleness": float(np.mean([row["staleness"] for row in rows])),
        "held": max(int(row["held"]) for row in rows),
    }


def learned(config: Config, root: Path, task: str, way: str) -> list[dict[str, Any]]:
    """Return, for each seed, the success of base and fine-tuned policy, and the number of episodes."""
    rows = []
    for seed in config.bench.seeds:
        pretrained(config, root, task, "diffusion", seed)
        variant = Variant("diffusion", (*LEARNING, f"finetune.overprovision={SHARES[way]}", "finetune.videos=0"))
        run = run_variant(config, root, task, way.replace(" ", "_"), variant, seed)
        rates = {when: short(run.result[when]["deterministic"]) for when in ("base", "tuned")}
        episodes = sum(row["episodes"] for row in run.records if "episodes" in row)
        rows.append({**rates, "collected": int(episodes), "env_steps": run.result["env_steps"]})
    return rows


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return a table of speed, and a table of training results per task."""
    result_tables = []
    for task, policies in figures["speed"].items():
        lines = []
        for policy, ways in policies.items():
            reference_speed = next(iter(ways.values()))["episodes_per_second"]
            for way, row in ways.items():
                speed = row["episodes_per_second"]
                numbers = [f"{speed:.0f}", f"{speed / reference_speed:.2f}", f"{100 * row['success_rate']:.1f} %"]
                lines.append([f"{policy}, {way}", *numbers, f"{row['staleness']:.2f}", str(row["held"])])
        header = ["policy, groups", "episodes / s", "ratio", "success", "age, iterations", "most groups left over"]
        result_tables.append(Table(f"{task}: collecting 256 episodes of mixed length (median of turns)", header, lines))
    for task, ways in figures["learning"].items():
        lines = []
        for way, rows in ways.items():
            spreads = [spread_text(row[when]["success_rate"] for row in rows) for when in ("base", "tuned")]
            steps = np.mean([row["env_steps"] for row in rows])
            lines.append([way, *spreads, ", ".join(rate_text(row["tuned"]) for row in rows), f"{steps / 1e3:,.0f}"])
        header = ["groups", "base", "fine-tuned", "each seed", "steps / 1e3"]
        result_tables.append(Table(f"{task}: learning from them, mean over seeds (range)", header, lines))
    return result_tables


BENCHMARK = Benchmark(
    "How much faster is collection that does not wait for the longest episodes, and is learning as good?",
    ("tasks", "seeds", "only", "rounds", "overrides"),
    benchmark,
    tables,
)
