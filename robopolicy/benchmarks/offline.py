"""Policy improvement from the policy's own log by several methods, each with its baseline; then a staged rollout.

A policy trained by imitation records a log: its own episodes, successes and failures. Every method builds one candidate
from the log and the policy, by `robopolicy offline` without a gate and with its defaults, except for the settings named
here; agents that act themselves are trained on the same log. The simulator is used for evaluation only. A good and a
bad candidate are then deployed gradually next to the base policy (`robopolicy deploy`). Finally, operators correct the
policy, compared with the same number of further demonstrations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import rate_text, short, spread_text
from robopolicy.benchmarks.runs import BASES, chosen_from, each_task, logged, pretrained, settings_of
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json
from robopolicy.runs import is_complete, output
from robopolicy.verbs import collect, deploy, offline, online, train
from robopolicy.verbs.bench import Benchmark, Table

UNGATED = "offline.rounds=1", "offline.gated=false"
UNREAD = ("offline.critic.steps=1",)
"""For ways that ask no critic."""
EQUAL = "offline.improve.steps=1000", "offline.improve.learning_rate=1e-3"
"""Updates of the ways that imitate recorded actions."""
LAST_STEP = ("offline.improve.through=last",)


@dataclass(frozen=True)
class Way:
    """A method. improve: offline.improve; critic: offline.agent, "" if it needs none; settings: further settings."""

    improve: str
    critic: str = "iql"
    settings: tuple[str, ...] = ()
    base: str = "diffusion"


WAYS = {
    "imitation of everything": Way("weighted_imitation", "", ("offline.improve.temperature=0", *EQUAL)),
    "of the episodes that succeeded": Way("filtered_imitation", "", ("offline.improve.advantage=success",)),
    "of the better 30 %": Way("filtered_imitation"),
    "weighted (AWR)": Way("weighted_imitation", settings=EQUAL),
    "told what is better (RECAP)": Way("recap"),
    "the same, guidance 1": Way("recap", settings=("offline.improve.guidance=1",)),
    "best of 16, imitated": Way("best_of"),
    "the same, beside unguided synthetic episodes": Way(
        "best_of", settings=("offline.data=[recorded,guided]", "offline.guided.guidance=0")
    ),
    "the same, beside guided ones": Way("best_of", settings=("offline.data=[recorded,guided]",)),
    "best of 16, chosen (IDQL)": Way("idql", settings=("offline.improve.candidates=16", "offline.agent.expectile=0.7")),
    "noise chosen (DSRL)": Way("dsrl"),
    "PPO in the chain (RL-100)": Way("chain_ppo"),
    "Diffusion-QL": Way("diffusion_ql", "rebrac"),
    "Diffusion-QL, a critic of 4,000 updates": Way("diffusion_ql", "rebrac", ("offline.critic.steps=4000",)),
    "Diffusion-QL, last step": Way("diffusion_ql", "rebrac", LAST_STEP),
    "Diffusion-QL, a critic that asks of no other action": Way("diffusion_ql"),
    "adjoint matching": Way("adjoint_matching", "rebrac", base="flow"),
    "adjoint matching, a critic that asks of no other action": Way("adjoint_matching", base="flow"),
    "best of 16, imitated, of a flow": Way("best_of", base="flow"),
}
"""Row of the results -> how it comes about."""

AGENTS = ("td3_bc", "prdc", "rebrac", "iql")
"""Agents that decide themselves, after 4,000 updates on the log."""

NEW = {"improved": "best of 16, imitated", "spoilt": "Diffusion-QL, a critic of 4,000 updates"}
"""What is deployed -> the way that it came of."""
MIXES = {"step": "StepMix", "episode": "EpsMix"}

CORRECTIONS = {
    "the demonstrations alone": (),
    "40 more demonstrations": ("collect.episodes=40",),
    "its own successes of 100 episodes": ("collect.episodes=100", "collect.successes_only=true"),
    "40 corrected at once": ("collect.episodes=40", "collect.correct.no_progress_steps=20"),
    "40 corrected, 4 steps undone": (
        "collect.episodes=40",
        "collect.correct.no_progress_steps=20",
        "collect.correct.rewind=4",
    ),
    "40 corrected, 10 steps undone": (
        "collect.episodes=40",
        "collect.correct.no_progress_steps=20",
        "collect.correct.rewind=10",
    ),
}
"""What the demonstrations are learned with, from the beginning -> how it is recorded."""
BEYOND = 1000
"""What is added to the seed of these recordings, so that they are no episodes of the demonstrations."""
BY_EXPERT = ("40 more demonstrations",)

PARTS = {"ways": "candidates", "agents": "decide themselves", "deployment": "StepMix", "corrections": "RaC"}
"""What bench.only names."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {seed: {part: rows}}}}, after running what is missing under `root`."""
    parts = chosen_from(config, PARTS)
    return {"tasks": each_task(config, lambda task, seed: measure(config, root, task, seed, parts))}


def measure(config: Config, root: Path, task: str, seed: int, parts: Sequence[str]) -> dict[str, Any]:
    """Return the results of every part for one seed."""
    case = Case(config, root, task, seed)
    find = {
        "ways": lambda: {name: case.learned(name) for name in WAYS},
        "agents": lambda: {name: case.agent(name) for name in AGENTS},
        "deployment": lambda: {name: case.deployed(name) for name in NEW},
        "corrections": lambda: {name: case.corrected(name) for name in CORRECTIONS},
    }
    return {part: find[part]() for part in parts}


@dataclass(frozen=True)
class Case:
    """One task and seed of the benchmark, with its runs under root/task; missing ones are run."""

    config: Config
    root: Path
    task: str
    seed: int

    def settings(self, *chosen: str) -> Config:
        """Return the configuration of a run."""
        return compose([*settings_of(self.config, self.root, self.task, self.seed), *chosen])

    def place(self, verb: str, name: str, beyond: int = 0) -> Path:
        """Return the folder of a run whose seed is offset from that of the case."""
        return self.root / self.task / verb / name / str(self.seed + beyond)

    def announce(self, name: str) -> None:
        """Print the part that starts."""
        output.print(Rule(f"[bold]{self.task}, seed {self.seed}: {name}", align="left"))

    def base(self, name: str) -> Path:
        """Return the checkpoint of a pre-trained policy."""
        return pretrained(self.config, self.root, self.task, name, self.seed) / "checkpoint"

    def log(self, base: str) -> Path:
        """Return the dataset that a pre-trained policy recorded."""
        return logged(self.config, self.root, self.task, base, self.seed)

    def learned(self, name: str) -> dict[str, Any]:
        """Return the success of a candidate and of its base, without and with noise."""
        way, folder = WAYS[name], self.place("offline", slug(name))
        if not is_complete(folder):
            data, policy = self.log(way.base), self.base(way.base)
            self.announce(name)
            arguments = UNREAD if not way.critic else (f"offline.agent={way.critic}",)
            arguments += f"offline.dataset={data}", f"offline.policy={policy}", f"offline.improve={way.improve}"
            offline.run(self.settings(*UNGATED, *arguments, *way.settings, f"run.name={slug(name)}"))
        return judged(read_json(folder / "result.json"))

    def agent(self, name: str) -> dict[str, Any]:
        """Return the success of an agent trained on the log and of the policy that recorded it."""
        folder = self.place("online", name)
        if not is_complete(folder):
            data, policy = self.log("diffusion"), self.base("diffusion")
            self.announce(f"{name}, deciding itself")
            arguments = f"online.dataset={data}", f"online.policy={policy}", f"online.agent={name}", f"run.name={name}"
            online.run(self.settings("online.method=actions", "online.steps=0", *arguments))
        return judged(read_json(folder / "result.json"))

    def deployed(self, name: str) -> dict[str, Any]:
        """Return the results of a staged rollout, by mixing unit, and of replacing the base at once."""
        self.learned(NEW[name])
        new, results = self.place("offline", slug(NEW[name])) / "checkpoint", dict[str, Any]()
        for mix, title in MIXES.items():
            folder = self.place("deploy", f"{name}_{mix}")
            if not is_complete(folder):
                self.announce(f"{name} policy, {title}")
                arguments = f"deploy.policy={new}", f"deploy.base={self.base('diffusion')}", f"deploy.mix_per={mix}"
                deploy.run(self.settings(*arguments, f"run.name={name}_{mix}"))
            result = read_json(folder / "result.json")
            results[title] = result["deployed"]["mixed"]
            results["replaced at once"] = result["deployed"]["replaced"]
        return results

    def corrected(self, name: str) -> dict[str, Any]:
        """Return the success of a policy trained from scratch on demonstrations and the named data."""
        folder, settings = self.place("train", slug(name)), CORRECTIONS[name]
        if not is_complete(folder):
            self.announce(f"learning from {name}")
            arguments: list[str] = []
            if settings:
                actor = () if name in BY_EXPERT else (f"collect.policy={self.base('diffusion')}",)
                seed = f"run.seed={self.seed + BEYOND}"
                collect.run(self.settings(*settings, *actor, seed, f"run.name={slug(name)}"))
                arguments = [f"train.extra_datasets=[{self.place('collect', slug(name), BEYOND)}/dataset]"]
            self.base("diffusion")
            data = f"train.data={self.place('collect', 'data')}/dataset"
            train.run(self.settings(*BASES["diffusion"].of(self.task), data, *arguments, f"run.name={slug(name)}"))
        return {"tuned": short(read_json(folder / "result.json")["policy"]["deterministic"])}


def slug(name: str) -> str:
    """Return a name in a form for folders."""
    return "_".join("".join(sign if sign.isalnum() else " " for sign in name).split())


def judged(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return base and result of a run, without and with noise, and the difference from the same initial states."""
    results: dict[str, Any] = {name: short(result[name]["deterministic"]) for name in ("base", "tuned")}
    results |= {f"{name}_with_noise": short(result[name]["stochastic"]) for name in ("base", "tuned")}
    return {**results, "difference": result["difference"], "seconds": result["seconds"]}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return a table of each measured part for every task."""
    result_tables: list[Table] = []
    for task, seeds in figures["tasks"].items():
        parts = {part: [each[part] for each in seeds.values() if part in each] for part in PARTS}
        seeds_text = f"mean over {len(seeds)} seeds (range), each seed [Wilson 95 %]"
        if parts["ways"]:
            lines = [line for base in ("diffusion", "flow") for line in _ways(parts["ways"], base)]
            result_tables.append(
                Table(f"{task}, candidates of a policy's own log: {seeds_text}", [*WAYS_HEADER], lines)
            )
        if parts["agents"]:
            rows = parts["agents"]
            lines = [_line("the policy that recorded", [each[AGENTS[0]] for each in rows], "base")[:3]]
            lines += [_line(name, [each[name] for each in rows], "tuned")[:3] for name in AGENTS]
            result_tables.append(
                Table(f"{task}, agents that decide themselves: {seeds_text}", ["agent", "success", "each seed"], lines)
            )
        if parts["deployment"]:
            result_tables.append(_deployment(task, parts["deployment"]))
        if parts["corrections"]:
            rows = parts["corrections"]
            lines = [_line(name, [each[name] for each in rows], "tuned")[:3] for name in CORRECTIONS]
            header = ["learns from the demonstrations and", "success", "each seed"]
            result_tables.append(Table(f"{task}, operators that correct: {seeds_text}", header, lines))
    return result_tables


WAYS_HEADER = "candidate", "success", "each seed", "with noise", "critic"


def _ways(rows: Sequence[Mapping[str, Any]], base: str) -> list[list[str]]:
    ways_of_base = {name: way for name, way in WAYS.items() if way.base == base}
    first = [each[next(iter(ways_of_base))] for each in rows]
    lines = [[*_line(f"**none: the {base} policy that recorded**", first, "base"), ""]]
    return lines + [
        [*_line(name, [each[name] for each in rows], "tuned"), way.critic and f"`{way.critic}`"]
        for name, way in ways_of_base.items()
    ]


def _line(name: str, rows: Sequence[Mapping[str, Any]], who: str) -> list[str]:
    noisy = [row[f"{who}_with_noise"]["success_rate"] for row in rows if f"{who}_with_noise" in row]
    return [
        name,
        spread_text(row[who]["success_rate"] for row in rows),
        ", ".join(rate_text(row[who]) for row in rows),
        spread_text(noisy) if noisy else "",
    ]


def _deployment(task: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    header = ["new policy", "who acts", "success, seed by seed", "share of the new one at last"]
    header += ["worst below the floor, in standard errors"]
    lines = [
        [
            f"{name}: {NEW[name]}",
            title,
            ", ".join(f"{100 * each[name][title]['success_rate']:.1f} %" for each in rows),
            ", ".join(f"{100 * each[name][title]['share_at_last']:.0f} %" for each in rows),
            ", ".join(f"{each[name][title]['worst_margin']:+.1f}" for each in rows),
        ]
        for name in NEW
        for title in (*MIXES.values(), "replaced at once")
    ]
    floors = ", ".join(f"{100 * each['spoilt']['StepMix']['floor']:.1f} %" for each in rows)
    return Table(f"{task}, 500 episodes of deployment above a floor of {floors}", header, lines)


BENCHMARK = Benchmark(
    "How much does a policy improve from its own log only, and is it safe to deploy the result?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
    bulky=frozenset({"running", "shares"}),
)
