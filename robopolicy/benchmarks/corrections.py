"""Learning from operators: recovery and correction (RaC), corrections alone, HG-DAgger, and fresh demonstrations; and
eight robots that share one operator, round by round (ARMADA).

All arms continue from one base policy, with equally many updates. At equal frames, each round has the same number of
operators' control steps, recoveries included, and the same alarm calls the operator; what the operator then does
differs. In the fleet, each round has the same number of episodes, and what calls the operator differs. Operators are
the tasks' scripted experts. HG-DAgger's watches all the time, which here is an alarm by the reward's progress, hands
back, and only corrections are imitated (Kelly et al. 2019, arXiv:1810.02890).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.rule import Rule

from robopolicy.benchmarks.rates import mean_text, rate_text, short, spread_text
from robopolicy.benchmarks.runs import chosen_from, demonstrations, each_task, pretrained, settings_of
from robopolicy.configuration import Config, compose
from robopolicy.core.storage import read_json
from robopolicy.evaluation.success import EvaluationResult, compare
from robopolicy.evaluation.tables import difference_text
from robopolicy.runs import is_complete, output
from robopolicy.verbs import collect, detect, train
from robopolicy.verbs.bench import Benchmark, Table

WATCHED = "collect.correct.no_progress_steps=8", "collect.correct.operators=0"
"""Alarm of somebody who watches a robot all the time."""
TURN = ("collect.correct.operator_steps=10",)
"""HG-DAgger's operator hands back after a second."""
CONTINUED = ("train.fit.steps=1000",)
"""Learning of a round, from the policy of the round before."""
FLEET = "world.batch_size=8", "collect.episodes=40", "world.options.horizon=180"
"""Robots that wait for an operator are given three times a task's time limit; evaluations keep the limit."""
ONE_OPERATOR = ("collect.correct.operators=1",)
SEED_STEP = 1000
"""Added to the seed per round, so that no two rounds play the same episodes."""


@dataclass(frozen=True)
class Arm:
    """A way of learning from operators. collect, train: settings of a round; detects: whether a failure detector is
    calibrated for the policy of each round, which calls the operator; policy: whether a policy acts at all.
    """

    collect: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    detects: bool = False
    policy: bool = True


HALF = ("train.shares={demonstration: 0.5, autonomous: 0}",)
"""Half of the samples are demonstrations, and half are what operators did, recoveries and corrections as they come."""
EQUAL_FRAMES = {
    "demonstrations": Arm(policy=False),
    "corrections": Arm(WATCHED, HALF),
    "rac": Arm((*WATCHED, "collect.correct.recover_steps=20"), HALF),
    "hg_dagger": Arm((*WATCHED, *TURN), HALF),
}
"""Arms with the same number of operators' control steps."""
FLEETS = {
    "detector": Arm(ONE_OPERATOR, detects=True),
    "random": Arm((*ONE_OPERATOR, "collect.correct.random_rate=0.02")),
    "nobody": Arm(("collect.successes_only=true",)),
    "watched": Arm((*WATCHED, *TURN), HALF),
}
"""Arms with eight robots; nobody: without operators, the policy learns from its own successes."""
ROUNDS = {**dict.fromkeys(EQUAL_FRAMES, 2), **dict.fromkeys(FLEETS, 3)}
FRAMES = {"pick_place": 180, "stack": 300}
"""Operators' control steps of a round, half of what the base's demonstrations have or less."""
TITLES = {
    "demonstrations": "fresh demonstrations",
    "corrections": "corrections alone",
    "rac": "recovery and correction (RaC)",
    "hg_dagger": "HG-DAgger",
    "detector": "FLOAT calls one operator (ARMADA)",
    "random": "random alarms call one operator",
    "nobody": "no operator, its own successes",
    "watched": "eight operators watch (HG-DAgger)",
}


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"tasks": {task: {seed: {"base": rate, arm: rounds}}}}, after running what is missing under `root`."""
    arms = chosen_from(config, {**EQUAL_FRAMES, **FLEETS})
    return {"tasks": each_task(config, lambda task, seed: measure(config, root, task, seed, arms))}


def measure(config: Config, root: Path, task: str, seed: int, arms: Sequence[str]) -> dict[str, Any]:
    """Return the base's success and every arm's rounds, on one task and seed."""
    case = Case(config, root, task, seed)
    base = read_json(case.base() / "result.json")["policy"]
    return {"base": rates(base), **{arm: case.rounds(arm, base) for arm in arms}}


def rates(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the success of a policy without and with exploration noise."""
    return {mode: short(policy[mode]) for mode in ("deterministic", "stochastic")}


@dataclass(frozen=True)
class Case:
    """One task and seed, with its runs under root/task; missing ones are run."""

    config: Config
    root: Path
    task: str
    seed: int

    def base(self) -> Path:
        """Return the run folder of the base policy."""
        return pretrained(self.config, self.root, self.task, "diffusion", self.seed)

    def place(self, verb: str, name: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.root / self.task / verb / name / str(seed)

    def settings(self, *chosen: str) -> Config:
        """Return the configuration of a run."""
        return compose([*settings_of(self.config, self.root, self.task, self.seed), *chosen])

    def rounds(self, name: str, base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return by round what an arm recorded, and the success of its policy, also compared with the base's."""
        policy, results = self.base() / "checkpoint", dict[str, dict[str, Any]]()
        data: list[Path] = []
        for number in range(1, ROUNDS[name] + 1):
            recording = self.recorded(name, number, policy)
            data.append(recording / "dataset")
            training = self.learned(name, number, policy, data)
            policy, helped = training / "checkpoint", read_json(recording / "result.json")
            result, counts = read_json(training / "result.json"), helped.get("interventions", {})
            success: dict[str, Any] = {}
            if "policy" in result:
                evaluations = [EvaluationResult.from_json(each["deterministic"]) for each in (base, result["policy"])]
                success = {**rates(result["policy"]), "difference": compare(*evaluations).to_json()}
            results[str(number)] = {
                **success,
                "recorded_episodes": helped["episodes"],
                "recorded_success": helped["success_rate"],
                "operator_steps": counts.get("steps", 0 if ARMS[name].policy else helped["steps"]),
                "recovering_steps": counts.get("recovering_steps", 0),
                "waiting_steps": counts.get("waiting_steps", 0),
                "takeovers": counts.get("takeovers", 0),
                "seconds": result["seconds"],
            }
        return results

    def recorded(self, name: str, number: int, policy: Path) -> Path:
        """Return the run folder of a round's recording."""
        arm, run_name = ARMS[name], f"{name}_{number}"
        seed = self.seed + SEED_STEP * number
        folder = self.place("collect", run_name, seed)
        if not is_complete(folder):
            output.print(Rule(f"[bold]{self.task}, seed {self.seed}, {name}: round {number}", align="left"))
            settings = [f"run.name={run_name}", f"run.seed={seed}", *(FLEET if name in FLEETS else ()), *arm.collect]
            if arm.policy:
                settings.append(f"collect.policy={policy}")
            if arm.detects:
                settings.append(f"collect.correct.detector={self.detector(run_name, policy)}")
            if name in EQUAL_FRAMES:
                settings += self.budget(arm)
            collect.run(self.settings(*settings))
        return folder

    def budget(self, arm: Arm) -> list[str]:
        """Return the settings that limit a round's recording to the operators' steps; of demonstrations, the nearest
        number of episodes, which are as long as the base's on average.
        """
        frames = FRAMES.get(self.task, FRAMES["pick_place"])
        if arm.policy:
            return ["collect.episodes=200", f"collect.correct.frames={frames}"]
        counts = read_json(demonstrations(self.root, self.task, self.seed).parent / "result.json")
        return [f"collect.episodes={max(1, round(frames * counts['episodes'] / counts['steps']))}"]

    def detector(self, run_name: str, policy: Path) -> Path:
        """Return the folder of a detector that is calibrated for a policy."""
        folder = self.place("detect", run_name, self.seed)
        if not is_complete(folder):
            arguments = [f"detect.policy={policy}", "detect.detectors=[float]", "detect.episodes=200"]
            arguments.append(f"detect.demonstrations={demonstrations(self.root, self.task, self.seed)}")
            arguments += [f"detect.output={folder / 'detectors'}", f"run.name={run_name}"]
            detect.run(self.settings(*arguments))
        return folder / "detectors" / "float"

    def learned(self, name: str, number: int, policy: Path, data: Sequence[Path]) -> Path:
        """Return the run folder of a round's learning, on the demonstrations and all recordings of the arm."""
        folder = self.place("train", f"{name}_{number}", self.seed)
        if not is_complete(folder):
            extra = ",".join(map(str, data))
            arguments = [f"run.name={name}_{number}", f"train.policy={policy}", f"train.extra_datasets=[{extra}]"]
            arguments.append(f"train.data={demonstrations(self.root, self.task, self.seed)}")
            if name in EQUAL_FRAMES and number < ROUNDS[name]:  # only what comes out at last is compared
                arguments.append("train.evaluate_episodes=0")
            train.run(self.settings(*CONTINUED, *ARMS[name].train, *arguments))
        return folder


ARMS = {**EQUAL_FRAMES, **FLEETS}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return for every task a table of the arms with equal frames, and one of the fleet's rounds, of the seeds measured
    with all arms of the table that were measured at all.
    """
    result: list[Table] = []
    for task, seeds in figures["tasks"].items():
        for arms, table in ((EQUAL_FRAMES, _equal_table), (FLEETS, _fleet_table)):
            measured = [arm for arm in arms if any(arm in row for row in seeds.values())]
            rows = [row for row in seeds.values() if all(arm in row for arm in measured)]
            if measured and rows:
                result.append(table(task, rows, measured))
    return result


def _equal_table(task: str, rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> Table:
    base = ["base", *rates_texts([row["base"] for row in rows]), "", "", "", ""]
    header = ["continues with", *RATES, "points above the base, each seed [95 %]"]
    header += ["operators' steps", "of these recovering", "takeovers"]
    title = f"{task}, equally many steps of operators: {seeds_text(rows)}"
    return Table(title, header, [base, *(_equal_line(arm, [row[arm] for row in rows]) for arm in arms)])


def _fleet_table(task: str, rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> Table:
    base = ["base", "", *rates_texts([row["base"] for row in rows]), "", ""]
    lines = [line for arm in arms for line in _fleet_lines(arm, [row[arm] for row in rows])]
    header = ["who calls an operator", "round", *RATES, "interventions an episode", "success of the recorded"]
    return Table(f"{task}, eight robots, round by round: {seeds_text(rows)}", header, [base, *lines])


def seeds_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of seeds and of episodes of an evaluation."""
    seeds = "one seed" if len(rows) == 1 else f"mean over {len(rows)} seeds (range)"
    return f"{seeds}, {rows[0]['base']['deterministic']['episodes']} paired episodes"


RATES = "success", "each seed [Wilson 95 %]", "with noise"


def rates_texts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells of `RATES`, from the rates of every seed."""
    plain = [row["deterministic"] for row in rows]
    noisy = spread_text(row["stochastic"]["success_rate"] for row in rows)
    return [spread_text(each["success_rate"] for each in plain), ", ".join(map(rate_text, plain)), noisy]


def _equal_line(arm: str, seeds: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return the line of an arm; seeds: its rounds, seed by seed."""
    last = [rounds[str(len(rounds))] for rounds in seeds]
    sums = [
        mean_text((sum(each[name] for each in rounds.values()) for rounds in seeds), 0)
        for name in ("operator_steps", "recovering_steps", "takeovers")
    ]
    return [TITLES[arm], *rates_texts(last), ", ".join(difference_text(each["difference"]) for each in last), *sums]


def _fleet_lines(arm: str, seeds: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Return a line for every round of an arm: what it recorded, and the policy that learned from it."""
    lines: list[list[str]] = []
    for number in seeds[0]:
        rounds = [each[number] for each in seeds]
        interventions = mean_text((each["takeovers"] / each["recorded_episodes"] for each in rounds), 2)
        success = spread_text(each["recorded_success"] for each in rounds)
        lines.append([TITLES[arm], number, *rates_texts(rounds), interventions, success])
    return lines


BENCHMARK = Benchmark(
    "How much does a policy learn from operators who recover and correct, and how few can serve eight robots?",
    ("tasks", "seeds", "only", "overrides"),
    benchmark,
    tables,
)
