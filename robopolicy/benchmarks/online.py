"""Online RL within few environment steps: agents with critics, with and without recorded data, next to PPO in the
chain.

All start from the same policy, and those that use data from the same log of its episodes. WSRL (arXiv:2412.07762)
retains no data and lets the frozen agent act before the first update; a run without that warm-up is its ablation. RLPD
(arXiv:2302.02948) has no offline phase, and half of every batch is recorded data; with operators (HIL-SERL,
arXiv:2410.21845) that half is what they did. DSRL (arXiv:2506.15799) steers the frozen policy by its noise. Success is
also measured after few updates, where agents lose success when online learning starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import mean_text, rate_text, short, spread_text
from robopolicy.benchmarks.runs import chosen_from, each_row, logged, pretrained, settings_of
from robopolicy.configuration import Config, compose
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json
from robopolicy.evaluation.plots import method_curves
from robopolicy.evaluation.report import Section
from robopolicy.runs import is_complete, output
from robopolicy.verbs import finetune, online
from robopolicy.verbs.bench import Benchmark, Table

STEPS = 100_000
"""Control steps in the world; bench.overrides=['online.steps=...'] can say otherwise."""
SMALL = "online.agent.width=128", "online.utd_ratio=0.5"
WATCHED = "online.evaluate_at=[0,1,100,500,2000]", "online.evaluate_every=4000"
CAL_QL = (
    "online.method=actions",
    "online.agent=cal_ql",
    "online.agent.critics=4",
    "online.agent.critic_subset=2",
    "online.agent.layer_norm=true",
    "online.pretrain_steps=2000",
)
"""WSRL's agent, small."""
ALONE = "online.method=actions", "online.agent.critics=4", "online.pretrain_steps=0"
HALF = "online.offline_ratio=0.5"
OPERATED = HALF, "online.assist.random_rate=0.02", "online.assist.operator_steps=8"
"""An expert takes over now and then, for eight control steps."""
FINISHED = HALF, "online.assist.no_progress_steps=8"
"""An expert takes over once a robot makes no progress for eight steps, and finishes its episode."""
EARLY = (1, 100, 500, 2000)
"""Updates by which a dip has been seen."""


@dataclass(frozen=True)
class Arm:
    """A method. settings: of `online`, or of `finetune` if `rows` is not 0; logged: whether it starts from the log."""

    title: str
    settings: tuple[str, ...] = ()
    logged: bool = False
    rows: int = 0


ARMS = {
    "dsrl": Arm("DSRL", ("online.method=dsrl", "online.agent.critics=4")),
    "edit": Arm(
        "EXPO: edits of the policy's chunks",
        ("online.method=edit", "online.agent.critics=4", "online.pretrain_steps=0", "online.offline_ratio=0.5"),
        logged=True,
    ),
    "edit_alone": Arm("EXPO without the log", ("online.method=edit", "online.agent.critics=4")),
    "wsrl": Arm("WSRL", CAL_QL, logged=True),
    "wsrl_cold": Arm("WSRL without warm-up", (*CAL_QL, "online.warmup=0"), logged=True),
    "cal_ql_half": Arm("Cal-QL, half of each batch recorded", (*CAL_QL, "online.offline_ratio=0.5"), logged=True),
    "rlpd": Arm(
        "RLPD",
        (*ALONE, HALF),
        logged=True,
    ),
    "rlpd_alone": Arm("RLPD without recorded data", ALONE),
    "hil_serl": Arm("HIL-SERL: short interventions, no recorded data", (*ALONE, *OPERATED)),
    "finished": Arm("HIL-SERL: operators finish episodes", (*ALONE, *FINISHED)),
    "ppo": Arm("PPO in the chain, 62 rows", rows=62),
    "ppo_250": Arm("PPO in the chain, 250 rows", rows=250),
}


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {arm: {seed: figures}}}}, after running what is missing under `root`."""
    return {"tasks": each_row(config, root, chosen_from(config, ARMS), measure)}


def measure(config: Config, root: Path, task: str, name: str, seed: int) -> dict[str, Any]:
    """Return base and result of an arm from the same initial states, and evaluations during training."""
    arm = ARMS[name]
    verb = "finetune" if arm.rows else "online"
    folder = root / task / verb / name / str(seed)
    if not is_complete(folder):
        learn(config, root, task, name, seed)
    result, records = read_json(folder / "result.json"), RunFolder(folder).metrics()
    results: dict[str, Any] = {
        policy_name: short(result[policy_name]["deterministic"]) for policy_name in ("base", "tuned")
    }
    evaluations = (
        result["evaluations"] if verb == "online" else [each for each in records if "deterministic_success" in each]
    )
    first_rate = next(iter(evaluations), {}).get(
        "deterministic_success", result["base"]["deterministic"]["success_rate"]
    )
    curve = [(each.get("env_steps", 0), each["deterministic_success"]) for each in evaluations]
    early_success = {
        str(each["updates"]): each["deterministic_success"] for each in evaluations if each.get("updates") in EARLY
    }
    fractions = [each["intervened"] for each in records if "intervened" in each]
    return {
        **results,
        **({"operated": [fractions[0], fractions[len(fractions) // 2], fractions[-1]]} if fractions else {}),
        "begins": first_rate,
        "early": early_success,
        "curve": curve,
        "env_steps": result["env_steps"],
        "seconds": result["seconds"],
        "difference": result["difference"],
    }


def learn(config: Config, root: Path, task: str, name: str, seed: int) -> None:
    """Run an arm, after the stages that it starts from."""
    arm, shared_settings = ARMS[name], settings_of(config, root, task, seed)
    policy = pretrained(config, root, task, "diffusion", seed) / "checkpoint"
    data = [f"online.dataset={logged(config, root, task, 'diffusion', seed)}"] if arm.logged else []
    output.print(Rule(f"[bold]{task}, seed {seed}: {arm.title}", align="left"))
    if not arm.rows:
        settings = f"online.steps={STEPS}", *SMALL, *WATCHED, *arm.settings, f"online.policy={policy}"
        online.run(compose([*settings, *shared_settings, *data, f"run.name={name}"]))
        return
    settings = [f"finetune.num_envs={arm.rows}", "finetune.target_success=null", "finetune.videos=0", *shared_settings]
    base_config = compose(settings)
    steps_per_iteration = (
        arm.rows * base_config.finetune.rollout_length * base_config.policy.config.chunk
    )  # control steps an iteration, at most
    iterations = max(1, base_config.online.steps // steps_per_iteration)
    arguments = f"finetune.iterations={iterations}", f"finetune.policy={policy}", f"run.name={name}"
    finetune.run(compose([*settings, *arguments]))


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return one table per task, with one row per arm."""
    header = ["method", "before, as it acts", *(f"after {count} updates" for count in EARLY)]
    header += ["in the end", "each seed [Wilson 95 %]", "operators' chunks: first, middle, last"]
    header += ["thousand steps", "minutes"]
    result_tables: list[Table] = []
    for task, arms in figures["tasks"].items():
        rows = list(next(iter(arms.values())).values())
        title = f"{task}: success, mean over {len(rows)} seeds (range), from a policy at "
        title += ", ".join(rate_text(row["base"]) for row in rows)
        lines = [_line(ARMS[name].title, list(seeds.values())) for name, seeds in arms.items()]
        result_tables.append(Table(title, header, lines))
    return result_tables


def _line(title: str, rows: list[Mapping[str, Any]]) -> list[str]:
    def early(count: int) -> str:
        rates = [row["early"][str(count)] for row in rows if str(count) in row["early"]]
        return f"{100 * sum(rates) / len(rates):.1f} %" if rates else ""

    fractions = [row["operated"] for row in rows if "operated" in row]
    means = [f"{100 * sum(each) / len(each):.0f} %" for each in zip(*fractions, strict=True)]
    return [
        title,
        spread_text(row["begins"] for row in rows),
        *map(early, EARLY),
        spread_text(row["tuned"]["success_rate"] for row in rows),
        ", ".join(rate_text(row["tuned"]) for row in rows),
        ", ".join(means),
        mean_text((row["env_steps"] / 1e3 for row in rows), 0),
        mean_text((row["seconds"] / 60 for row in rows), 1),
    ]


def picture(figures: Mapping[str, Any]) -> Section:
    """Return the plot of success against environment steps."""
    curves = {
        task: {ARMS[name].title: [each["curve"] for each in seeds.values()] for name, seeds in arms.items()}
        for task, arms in figures["tasks"].items()
    }
    bases = {
        task: sum(each["base"]["success_rate"] for each in seeds.values()) / len(seeds)
        for task, arms in figures["tasks"].items()
        for seeds in [next(iter(arms.values()))]
    }
    caption = "Success on validation starts: mean over seeds, band from the lowest to the highest."
    return Section("Success against steps in the world", caption, svg=method_curves(curves, bases))


BENCHMARK = Benchmark(
    "Which method learns most in 100,000 environment steps, and how much success is lost at the start?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
    lambda figures, root: [picture(figures)],
    picture=picture,
)
