"""Twelve instructions in one scene: success of PPO, GRAPE and on-policy distillation for a language-conditioned policy.

`tidy`: nine instructions are trained, three combinations of known words are held out. PPO and GRAPE start from the
imitation policy with about the same number of episodes; PPO runs alone and, as in the recipe, with an imitation loss on
its demonstrations (DAPG). On-policy distillation starts without imitation, with labels of the scripted expert on the
student's states (DAgger), for a policy that reads the state and one that reads images. All policies are evaluated from
the same initial states: with the instruction, another instruction, a paraphrase, and held-out instructions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.algorithms import GRAPE
from robopolicy.benchmarks.rates import rate_of, rate_text, short, spread_text
from robopolicy.benchmarks.runs import Variant, chosen_from, pretrained, run_variant, settings_of
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json
from robopolicy.runs import is_complete, output
from robopolicy.verbs import evaluate, teach
from robopolicy.verbs.bench import Benchmark, Table

TASK = "tidy"
EPISODES = 200
HELD_OUT = 100
"""Episodes that ask for what was held out."""
BASE = "imitation"
PPO, BESIDE = "PPO", "demonstrations"
ALONE = "finetune.auxiliaries=[]"
"""Leaves out the recipe's imitation on the side."""

GROUPS, ROUNDS = 512, 160
"""Episodes of an iteration of GRAPE, and its iterations: about as many episodes as PPO's longest run, of 200, has."""
SLOW = ALONE, "finetune.learning_rate=5e-5", "finetune.epochs=2", "finetune.options.gcpg.own=0"
"""How GRAPE learns here: with the steps that it takes on push_cube it learns its pairs by heart, and success falls."""

ARMS = {
    BASE: "imitation of 1,000 demonstrations",
    "hidden words": "imitation, a tenth of the words hidden",
    PPO: "PPO in the flow",
    BESIDE: "PPO, imitating its demonstrations on the side",
    "GRAPE": "GRAPE",
    "distillation": "on-policy distillation from the expert",
    "cameras": "the same, by two cameras in the place of the state",
}
"""What bench.only names."""
IMITATED = {BASE: "diffusion", "hidden words": "hidden_words"}
"""Arm -> name of its pre-trained policy (`runs.BASES`)."""
BY_PPO: dict[str, tuple[str, ...]] = {PPO: (ALONE,), BESIDE: ()}
"""Arm -> what it changes about the recipe."""
TAUGHT = {"distillation": TASK, "cameras": f"{TASK}_pixels"}
"""Arm -> recipe of its student."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"arms": {arm: {seed: figures}}}, after running what is missing under `root`."""
    arms = chosen_from(config, ARMS)
    return {"arms": {arm: {str(seed): measure(config, root, arm, seed) for seed in config.bench.seeds} for arm in arms}}


def measure(config: Config, root: Path, arm: str, seed: int) -> dict[str, Any]:
    """Return the success of an arm's policy: with instructions, with noise, under the controls and on held-out
    instructions.
    """
    policy, costs = learned(config, root, arm, seed)
    trained = judged(config, root, arm, policy, seed, EPISODES)
    held_out = judged(config, root, f"{arm}_held_out", policy, seed, HELD_OUT, "world.options.instructions=held_out")
    verdicts, controls = trained["policy"], trained["controls"]["policy"]
    return {
        "asked": short(verdicts["deterministic"]),
        "with_noise": short(verdicts["stochastic"]),
        "held_out": short(held_out["policy"]["deterministic"]),
        "instructions": {
            f"{text}{note}": short(rate)
            for each, note in ((verdicts, ""), (held_out["policy"], " (held out)"))
            for text, rate in each["deterministic"]["by_instruction"].items()
        },
        "controls": {name: each if "refused" in each else short(each) for name, each in controls.items()},
        **costs,
    }


def learned(config: Config, root: Path, arm: str, seed: int) -> tuple[Path, dict[str, float]]:
    """Return the checkpoint of an arm, and the control steps and seconds of its training beyond imitation."""
    if arm in TAUGHT:
        return taught(config, root, arm, seed)
    if arm in IMITATED:
        return pretrained(config, root, TASK, IMITATED[arm], seed) / "checkpoint", {"env_steps": 0}
    settings = BY_PPO[arm] if arm in BY_PPO else as_many_episodes(config, root, seed)
    result = run_variant(config, root, TASK, arm, Variant("diffusion", (*settings, "finetune.videos=0")), seed).result
    place = root / TASK / "finetune" / arm / str(seed) / "checkpoint"
    return place, {name: result[name] for name in ("env_steps", "seconds", "iterations")}


def taught(config: Config, root: Path, arm: str, seed: int) -> tuple[Path, dict[str, float]]:
    """Return the checkpoint of a student of the expert, and the number of control steps."""
    place = root / TASK / "teach" / arm / str(seed)
    if not is_complete(place):
        output.print(Rule(f"[bold]{ARMS[arm]}, seed {seed}", align="left"))
        arguments = "teach.teacher=expert", "teach.rounds=8", "teach.episodes=200", "teach.evaluate_episodes=0"
        settings = f"run.name={arm}", "teach.videos=0"
        teach.run(compose([*arguments, *settings, *settings_of(config, root, TASK, seed, TAUGHT[arm])]))
    return place / "checkpoint", {"env_steps": read_json(place / "result.json")["env_steps"]}


def as_many_episodes(config: Config, root: Path, seed: int) -> tuple[str, ...]:
    """Return the settings with which GRAPE collects about as many episodes as PPO."""
    size = compose([*settings_of(config, root, TASK, seed), *GRAPE]).finetune.group_size
    return *GRAPE, *SLOW, f"finetune.groups={GROUPS // size}", f"finetune.iterations={ROUNDS}"


def judged(
    config: Config, root: Path, name: str, policy: Path, seed: int, episodes: int, *settings: str
) -> dict[str, Any]:
    """Return the result of `robopolicy evaluate`, run once."""
    folder = root / TASK / "evaluate" / name / str(seed)
    if not is_complete(folder):
        arguments = (
            f"evaluate.policy={policy}",
            f"run.name={name}",
            f"evaluate.episodes={episodes}",
            "evaluate.videos=0",
        )
        evaluate.run(compose([*arguments, *settings_of(config, root, TASK, seed), *settings]))
    return read_json(folder / "result.json")


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return the success of every arm with its controls, and the success of every instruction."""
    first = next(iter(next(iter(figures["arms"].values())).values()))
    names = list(first["controls"])
    header = ["policy", "success", "each seed [Wilson 95 %]", "with noise", "held-out compositions"]
    header += [*(f"told: {name.replace('_', ' ')}" for name in names), "thousand steps"]
    lines: list[list[str]] = []
    for arm, seeds in figures["arms"].items():
        rows = list(seeds.values())
        line = [ARMS[arm], spread_text(row["asked"]["success_rate"] for row in rows)]
        line.append(", ".join(rate_text(row["asked"]) for row in rows))
        line += [spread_text(row[part]["success_rate"] for row in rows) for part in ("with_noise", "held_out")]
        line += [_control([row["controls"][name] for row in rows]) for name in names]
        lines.append([*line, f"{sum(row['env_steps'] for row in rows) / len(rows) / 1e3:,.0f}"])
    return [Table("Nine instructions, mean over seeds (range)", header, lines), _by_instruction(figures["arms"])]


def _control(found: Sequence[Mapping[str, Any]]) -> str:
    """Return success under a control, or the number of refused instructions."""
    if any("refused" in each for each in found):
        return "refused: words that it never heard"
    return spread_text(each["success_rate"] for each in found)


def _by_instruction(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return success of every instruction over the episodes of all seeds, one column per arm."""
    rows = {arm: [row["instructions"] for row in seeds.values()] for arm, seeds in arms.items()}
    texts = sorted({text for each in rows.values() for row in each for text in row})

    def rate(arm: str, text: str) -> str:
        rates = [row[text] for row in rows[arm] if text in row]  # a seed's starts may never ask for it
        done = sum(round(each["success_rate"] * each["episodes"]) for each in rates)
        return rate_text(rate_of(done, sum(int(each["episodes"]) for each in rates))) if rates else ""

    lines = [[text, *(rate(arm, text) for arm in arms)] for text in texts]
    return Table("By instruction, over all seeds", ["instruction", *(ARMS[arm] for arm in arms)], lines)


BENCHMARK = Benchmark(
    "How far do PPO, GRAPE and a teacher improve a policy with instructions, and does it condition on them?",
    ("seeds", "only", "overrides"),
    benchmark,
    tables,
)
