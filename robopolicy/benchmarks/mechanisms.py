"""Ablation studies of RL fine-tuning methods: does the claim of each paper hold on a small task (push_cube)?

All variants of a check are fine-tuned from the same pre-trained policies and the same initial states, and differ in one
thing. Reported is the success rate of the policy after the last iteration (not the best one on the way), on the same
validation episodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robopolicy.benchmarks.rates import rate_of, rate_text, spread_text
from robopolicy.benchmarks.runs import Outcome, Variant, chosen_from, run_variant
from robopolicy.configuration import Config
from robopolicy.verbs.bench import Benchmark, Table

TASK = "push_cube"
SMALL = (
    "finetune.algorithm=grpo",
    "finetune.iterations=25",
    "finetune.groups=32",
    "finetune.group_size=8",
    "finetune.evaluate_every=25",
    "finetune.target_success=null",
    "finetune.learning_rate=3e-4",
    "finetune.clip=0.05",
    "finetune.clip_base=0.05",
    "finetune.target_kl=0.03",
    "finetune.videos=0",
)
"""Settings of every check: 256 episodes an iteration, 25 iterations, small policy updates."""

SPARSE = "finetune.rewards=[success_only]"
SMALL_GROUPS = ("finetune.group_size=4", "finetune.groups=64")
TOKENS = (
    "finetune.learning_rate=1.5e-4",
    "finetune.minibatch=1024",
    "finetune.epochs=2",
    "finetune.clip=0.2",
)
"""Settings of token policies; NGRPO and PRIME were made for tokens, and denoising policies collapse under them."""

STALE = (
    "finetune.policy_lag=8",
    "finetune.learning_rate=1e-3",
    "finetune.target_kl=null",
    "finetune.clip=0.2",
    "finetune.clip_base=0.2",
)
"""Update sizes that are fine on-policy, on data that is eight updates old (off-policy)."""


@dataclass(frozen=True)
class Ablation:
    """An ablation study: a claim, and the variants that are compared.

    claim: statement of the paper; variants: name -> settings on top of SMALL, the baseline first and the method last;
    base: name of the pre-trained policy (BASES in robopolicy.benchmarks.runs); figures: column -> metric that is
    averaged over the runs of a variant.
    """

    claim: str
    variants: Mapping[str, tuple[str, ...]]
    base: str = "diffusion"
    figures: Mapping[str, Callable[[Outcome], float]] | None = None


def mean_of(name: str, last: int | None = None) -> Callable[[Outcome], float]:
    """Return a function that averages a metric over the iterations (the last few) of a run."""

    def average(run: Outcome) -> float:
        values = [record[name] for record in run.records if name in record][-(last or 10**9) :]
        return sum(values) / max(1, len(values))

    return average


SIGNAL = {"episodes with signal": mean_of("signal")}

ABLATIONS: dict[str, Ablation] = {
    "mc_grpo": Ablation(
        "With two episodes a start, a median of three is a better baseline than a mean of two.",
        {
            "GRPO, 2 a start": ("finetune.group_size=2", "finetune.groups=128"),
            "MC-GRPO, 2 + the median": (
                "finetune.algorithm=mc_grpo",
                "finetune.group_size=3",
                "finetune.groups=128",
            ),
        },
    ),
    "ngrpo": Ablation(
        "A virtual success makes groups of failures teach.",
        {
            "GRPO": (SPARSE, *SMALL_GROUPS, *TOKENS),
            "NGRPO": (
                SPARSE,
                *SMALL_GROUPS,
                *TOKENS,
                "finetune.algorithm=ngrpo",
                "finetune.options.ngrpo.best=1.0",
            ),
        },
        base="token_novice",
        figures=SIGNAL,
    ),
    "gdpo": Ablation(
        "Rewards of different scales are both learned if each is normalised by itself.",
        {
            "GRPO of the sum": ("finetune.rewards=[effort]", "finetune.options.effort.cost=10.0"),
            "GDPO": (
                "finetune.advantage=gdpo",
                "finetune.rewards=[effort]",
                "finetune.options.effort.cost=10.0",
            ),
        },
        figures={"effort reward": mean_of("reward_effort", 3)},
    ),
    "gigpo": Ablation(
        "Comparing what followed equal states adds credit within episodes from the same start.",
        {
            "GRPO": (),
            "GiGPO": (
                "finetune.algorithm=gigpo",
                "finetune.options.gigpo.resolution=2.0",
                "finetune.options.gigpo.scale=true",
            ),
        },
    ),
    "mopps": Ablation(
        "Choosing starts of predicted success near one half leaves fewer groups without signal.",
        {
            "uniform": (SPARSE, *SMALL_GROUPS, "finetune.num_initial_states=256"),
            "MoPPS": (SPARSE, *SMALL_GROUPS, "finetune.num_initial_states=256", "finetune.sampler=mopps"),
        },
        base="warm",
        figures=SIGNAL,
    ),
    "knapsack": Ablation(
        "Large groups where outcomes are uncertain leave fewer groups without signal at the same budget.",
        {
            "uniform": (SPARSE, *SMALL_GROUPS, "finetune.num_initial_states=64"),
            "knapsack": (SPARSE, *SMALL_GROUPS, "finetune.num_initial_states=64", "finetune.allocator=knapsack"),
        },
        base="warm",
        figures=SIGNAL,
    ),
    "stale": Ablation(
        "Eight updates behind, adaptive bounds (BAPO) and steps scaled by the effective sample size (VCPO) hold.",
        {
            "PPO clip": STALE,
            "BAPO": (
                *STALE,
                "finetune.coefficient=bapo",
                "finetune.options.bapo.low=[0.9,0.99]",
                "finetune.options.bapo.high=[1.01,1.2]",
                "finetune.options.bapo.step=0.01",
            ),
            "VCPO": (*STALE, "finetune.controllers=[vcpo]"),
        },
        figures={"effective sample size": mean_of("sequence_ess")},
    ),
    "spear": Ablation(
        "Imitating one's own rare successes helps where success is rare and nothing else is paid.",
        {"GRPO": (SPARSE,), "SPEAR": ("finetune.algorithm=spear", "finetune.options.spear.weight=1.0")},
        base="novice",
    ),
    "tree_po": Ablation(
        "Branches from snapshots give as many leaves for fewer environment steps, with baselines by subtree.",
        {
            "GRPO, 8 episodes a start": (),
            "TreePO, 2 roots x 4 leaves": (
                "finetune.algorithm=branch_grpo",
                "finetune.advantage=tree_po",
                "finetune.group_size=2",
                "finetune.branch_at=[2,5]",
            ),
        },
        figures={"steps / 1e3": lambda run: run.result["env_steps"] / 1e3},
    ),
    "prime": Ablation(
        "An implicit process reward learned from outcomes is better than the outcomes alone.",
        {
            "RLOO of outcomes": ("finetune.algorithm=rloo", SPARSE, *TOKENS),
            "PRIME": ("finetune.algorithm=prime", SPARSE, *TOKENS),
        },
        base="token",
        figures={"process accuracy": mean_of("process_accuracy", 5)},
    ),
}


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"checks": {name: {variant: results}}}, running what is missing."""
    return {"checks": {name: measure(config, root, name) for name in chosen_from(config, ABLATIONS)}}


def measure(config: Config, root: Path, name: str) -> dict[str, dict[str, Any]]:
    """Return success rates (pooled over seeds) and other results of every variant of a check."""
    check = ABLATIONS[name]
    rows = {}
    for place, (variant, settings) in enumerate(check.variants.items()):
        label = f"{name}_{place}"
        runs = [
            run_variant(config, root, TASK, label, Variant(check.base, (*SMALL, *settings)), seed)
            for seed in config.bench.seeds
        ]
        averages = {key: sum(map(of, runs)) / len(runs) for key, of in (check.figures or {}).items()}
        rows[variant] = {
            **{
                f"{when} {mode}": rate(runs, mode, index)
                for mode in MODES
                for when, index in (("base", 0), ("last", -1))
            },
            "seeds": [evaluations(run)[-1]["deterministic_success"] for run in runs],
            "figures": averages,
        }
    return rows


MODES = ("deterministic", "stochastic")


def evaluations(run: Outcome) -> list[Mapping[str, Any]]:
    """Return the metrics of all iterations of a run with an evaluation."""
    return [record for record in run.records if "deterministic_success" in record]


def rate(runs: Sequence[Outcome], mode: str, index: int) -> dict[str, float]:
    """Return the success rate over all seeds' validation episodes, with its Wilson interval.

    index: number of the evaluation in a run, 0 before fine-tuning, -1 the last.
    """
    episodes = sum(run.result["base"][mode]["episodes"] for run in runs)
    successes = sum(
        round(evaluations(run)[index][f"{mode}_success"] * run.result["base"][mode]["episodes"]) for run in runs
    )
    return rate_of(successes, episodes)


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table for each check."""
    result_tables = []
    for name, rows in figures["checks"].items():
        extra = list(next(iter(rows.values()))["figures"])
        header = ["variant", "base", "after", "after, with noise", "seeds: mean (range)", *extra]
        lines = []
        for variant, row in rows.items():
            rates = [rate_text(row[key]) for key in ("base deterministic", "last deterministic", "last stochastic")]
            spread = spread_text(row["seeds"])
            lines.append([variant, *rates, spread, *(f"{row['figures'][key]:,.2f}" for key in extra)])
        result_tables.append(Table(f"{name}: {ABLATIONS[name].claim}", header, lines))
    return result_tables


BENCHMARK = Benchmark(
    f"Are the claims of ten papers visible on {TASK}, after the last iteration?",
    ("seeds", "only", "overrides"),
    benchmark,
    tables,
)
