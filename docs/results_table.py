"""Results page and the README's headlines, computed from assets/figures/*.json.

`python docs/results_table.py` and every build of the documentation write docs/results.md and the headlines of
README.md; a test fails if they differ from the figures.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# (Paths of two arms are unpacked into a claim.)

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
RESULTS = ROOT / "robopolicy" / "benchmarks" / "README.md"
HEADLINES = re.compile(r"<!-- headlines -->\n.*?<!-- end -->", re.DOTALL)
LONG = "../robopolicy/benchmarks/README.md"
"""The long tables, from docs/."""
MODE = "deterministic"
"""Without exploration noise."""
EPISODES = 200
"""Episodes of a rate whose file does not say it; `pooled` checks it against the stored interval."""


class Claim(NamedTuple):
    """One line of the summary: patterns of keys lead to the rates of all seeds, `*` and `?` as in file names."""

    text: str
    benchmark: str
    baseline: tuple[str, ...] | None
    result: tuple[str, ...]
    compared: str = "before"


class Pooled(NamedTuple):
    """A success rate over all episodes of all seeds, its Wilson interval (95 %), and the range over seeds."""

    rate: float
    low: float
    high: float
    seeds: int
    episodes: int
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{100 * self.rate:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    @property
    def range(self) -> str:
        """Range over seeds, in percent."""
        return f"{100 * self.lowest:.1f} to {100 * self.highest:.1f}" if self.seeds > 1 else "one seed"


def _recipe(text: str, name: str, seeds: str = "1?") -> Claim:
    return Claim(text, "recipes", ("recipes", name, seeds, "base"), ("recipes", name, seeds, "tuned"))


def _sight(text: str, task: str, before: str, after: str, compared: str = "before") -> Claim:
    paths = (("tasks", task, arm, "*", "deterministic") for arm in (before, after))
    return Claim(text, "sight", next(paths), next(paths), compared)


def _language(text: str, arm: str, before: str = "imitation", key: str = "asked") -> Claim:
    return Claim(text, "language", ("arms", before, "*", key), ("arms", arm, "*", key), "imitation")


def _delay(text: str, task: str, delay: str = "1/2") -> Claim:
    arms = ("synchronous", "tuned to decide ahead")
    return Claim(text, "delay", *(("tasks", task, arm, "*", delay) for arm in arms), "robot waits")


def _imagined(text: str, task: str, arm: str) -> Claim:
    return Claim(text, "imagination", ("tasks", task, arm, "base"), ("tasks", task, arm, "tuned"))


def _stage(text: str, task: str, after: str) -> Claim:
    paths = (("tasks", task, "*", stage, "policy", "deterministic") for stage in ("imitation", after))
    return Claim(text, "rl100", *paths)


def _ablation(text: str, check: str, before: str, after: str) -> Claim:
    return Claim(text, "mechanisms", *(("checks", check, arm, "last deterministic") for arm in (before, after)), before)


def _vla(text: str, kind: str) -> Claim:
    return Claim(text, "vla", ("kinds", kind, "*", "base"), ("kinds", kind, "*", "tuned"))


def _offline(text: str, way: str) -> Claim:
    return Claim(text, "offline", *(("tasks", "push_cube", "*", "ways", way, key) for key in ("base", "tuned")))


def _online(text: str, method: str) -> Claim:
    return Claim(text, "online", *(("tasks", "push_cube", method, "*", key) for key in ("base", "tuned")))


def _planned(text: str, task: str, plan: str) -> Claim:
    paths = (("tasks", task, plan, "*", arm, "deterministic") for arm in ("base", "policy"))
    return Claim(text, "test_time_planning", *paths, "no planning")


PUSH_T = _recipe("Push-T: PPO on the denoising steps of a diffusion policy (`make demo`)", "push_t", "1?_threads_1")
PICK_PLACE = _recipe("Pick and place with a six-joint arm: the same", "pick_place", "1?_threads_1")
IMAGINED = _imagined("Push-T: PPO inside a learned world model, no further simulator step", "push_t", "ensemble")
CAMERA = _recipe(
    "Push-T from a 64-pixel camera, auxiliary state loss in imitation: PPO on images", "push_t_pixels", "1?_threads_1"
)
SMOLVLA = _vla("A tiny SmolVLA (random weights, LeRobot's classes): PPO on its flow steps", "smolvla")
TIDY = _language("Nine instructions, arm with two cameras: DAgger (before: imitation that reads the state)", "cameras")

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "Fine-tuning in simulation": (
        PUSH_T,
        PICK_PLACE,
        _recipe("Push a cube to a goal: the same", "push_cube"),
        _recipe("Reach a point with a planar arm: the same", "reach_planar"),
        _recipe("Push the cube that the instruction names: PPO on the tokens of a small VLA", "push_choice"),
        _recipe("Gymnasium-Robotics' FetchPush: PPO on denoising steps", "fetch_push"),
        *(
            Claim(
                f"{task}: GRPO, which needs no critic",
                "algorithms",
                *(("tasks", key, "GRPO", name) for name in ("base", "tuned")),
            )
            for task, key in (("Push-T", "push_t"), ("Push a cube", "push_cube"))
        ),
        _ablation("GDPO normalises each reward by itself; GRPO on their sum", "gdpo", "GRPO of the sum", "GDPO"),
        _ablation("Data eight updates old: BAPO's adaptive bounds", "stale", "PPO clip", "BAPO"),
        _ablation("No gain: MC-GRPO's median of three", "mc_grpo", "GRPO, 2 a start", "MC-GRPO, 2 + the median"),
        _ablation("Worse: PRIME's implicit process reward", "prime", "RLOO of outcomes", "PRIME"),
    ),
    "VLAs, cameras and language": (
        SMOLVLA,
        _vla("The same SmolVLA: DAgger from a scripted expert", "smolvla_taught"),
        _vla("A tiny pi0: PPO on its flow steps", "pi0"),
        _vla("The same pi0: DAgger from a scripted expert", "pi0_taught"),
        CAMERA,
        _recipe("Push a cube from a 64-pixel camera: PPO on images", "push_cube_pixels", "1?_threads_1"),
        _sight(
            "Push-T from images: auxiliary state prediction in imitation, then PPO",
            *("push_t", "ppo", "telling_ppo", "PPO without it"),
        ),
        _sight("Push-T: DAgger from the tuned policy that reads the state", "push_t", "imitation", "tuned"),
        _language("Nine instructions, state input: PPO with an imitation loss", "demonstrations"),
        TIDY,
        _language("Held-out instructions: PPO with an imitation loss", "demonstrations", key="held_out"),
        _language("Held-out instructions: DAgger on the nine others", "distillation", key="held_out"),
    ),
    "Inference": (
        _delay("Pick and place, inference takes half a chunk: fine-tuned with the delay", "pick_place"),
        _delay("Push-T, the same", "push_t"),
        _delay("A moving goal, the same", "push_cube_moving"),
        *(
            Claim(
                "Push-T: " + text,
                "inference",
                *(("tasks", "push_t", policy, "*", way, "success") for way in ("reference", engine)),
                compared,
            )
            for text, policy, engine, compared in (
                ("DDIM with 10 steps", "hundred_steps", "DDIM 10", "100 steps"),
                ("one step, distilled", "ten_steps", "one step, distilled", "10 steps"),
            )
        ),
    ),
    "World models": (
        IMAGINED,
        _imagined("The same from pictures, behind the model's encoder, from demonstrations on", "push_t", "pictures"),
        _imagined("Push a cube: the same from pictures", "push_cube", "pictures"),
        _imagined("Pick and place: PPO inside a world model", "pick_place", "ensemble"),
        _imagined("Push a cube: PPO inside a world model", "push_cube", "ensemble"),
        _imagined(
            "Push a cube: PPO inside a model of only 5,000 recorded steps, whose errors it exploits",
            "push_cube",
            "narrow",
        ),
        _imagined("Reach a point from images: PPO inside a pixel diffusion model", "reach_planar", "pixel_diffusion"),
        _planned("Push a cube: best of 8 action chunks by a world model", "push_cube", "8 candidates"),
        _planned("Pick and place: best of 32 action chunks", "pick_place", "32 candidates"),
        Claim(
            "Reach a point: a joint model of actions, futures and values plans",
            "joint",
            *(("seeds", "*", f"all episodes, {arm}") for arm in ("no planning", "best of 8")),
            "no planning",
        ),
    ),
    "Recorded data": (
        _stage("Push-T from its own log through the gate, no simulator step", "push_t", "offline"),
        _stage("Push-T: then online rounds, distilled into one denoising step", "push_t", "one_step"),
        _stage("Pick and place from its own log through the gate", "pick_place", "offline"),
        _stage("Push a cube from images, from its own log through the gate", "push_cube_pixels", "offline"),
        _offline("Push a cube from a log: imitate the critic's best of 16", "best of 16, imitated"),
        _offline("Push a cube from a log: Diffusion-QL", "Diffusion-QL"),
        _offline(
            "Push a cube from a log: Diffusion-QL, critic with 4,000 updates", "Diffusion-QL, a critic of 4,000 updates"
        ),
        _online("Push a cube: WSRL, 100,000 steps online", "wsrl"),
        _online("Push a cube: DSRL (noise steering), 100,000 steps online", "dsrl"),
        Claim(
            "LIBERO's ten libero_object tasks, 20 demonstrations of a planner, states: DSRL, 120,000 steps online",
            "libero_rl",
            *(("arms", "demonstrations_20", "*", "suites", "libero_object", arm, MODE) for arm in ("base", "tuned")),
        ),
    ),
}
"""Claims in the order of the page, by its sections."""


@cache
def figures(benchmark: str) -> Mapping[str, Any]:
    """Return the published figures of a benchmark."""
    return json.loads((ROOT / "assets" / "figures" / f"{benchmark}.json").read_text())


def leaves(node: Any, pattern: tuple[str, ...]) -> Iterator[Any]:
    """Yield what lies below `node` under all keys that match a pattern, one part a level."""
    if not pattern:
        yield node
        return
    keys = [pattern[0]] if pattern[0] in node else [key for key in node if fnmatchcase(key, pattern[0])]
    for key in keys:
        yield from leaves(node[key], pattern[1:])


def pooled(benchmark: str, pattern: tuple[str, ...]) -> Pooled:
    """Return the success rate of a claim over all of its seeds.

    Raises ValueError if nothing matches, or a stored interval is not that of the stored number of episodes.
    """
    rates = list(leaves(figures(benchmark), pattern))
    if not rates:
        raise ValueError(f"assets/figures/{benchmark}.json has nothing under {pattern}")
    successes = episodes = 0
    values: list[float] = []
    for rate in rates:
        value, count = rate.get("success_rate", rate.get("success")), rate.get("episodes", EPISODES)
        low = wilson(round(value * count), count)[0]
        if abs(low - rate["low"]) > 2e-3:
            raise ValueError(f"{benchmark} {pattern}: {value} of {count} episodes has not the interval of {rate}")
        successes, episodes = successes + round(value * count), episodes + count
        values.append(value)
    each = _seeds(benchmark, pattern) or values
    return Pooled(successes / episodes, *wilson(successes, episodes), len(each), episodes, min(each), max(each))


def _seeds(benchmark: str, pattern: tuple[str, ...]) -> list[float]:
    """Return every seed's rate of a result that is stored as one rate over its seeds, beside it; else nothing."""
    (above, *more), last = list(leaves(figures(benchmark), pattern[:-1])), pattern[-1]
    if more or not isinstance(above, Mapping):
        return []
    if last == "tuned" and isinstance(above.get("each"), list):
        return [each if isinstance(each, float) else each["tuned"]["success_rate"] for each in above["each"]]
    return list(above["seeds"]) if last == "last deterministic" else []


@cache
def anchors() -> dict[str, str]:
    """Return the anchor of every benchmark's section in the long tables."""
    headings = re.findall(r"^## (.*`(\w+)`)$", RESULTS.read_text(), re.MULTILINE)
    return {name: slug(heading) for heading, name in headings}


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headlines() -> str:
    """Return the README's table of results."""
    rows = []
    for claim in (PUSH_T, PICK_PLACE, IMAGINED, CAMERA, SMOLVLA, TIDY):
        before, after = pooled(claim.benchmark, claim.baseline or ()), pooled(claim.benchmark, claim.result)
        rows.append((claim.text, f"{100 * before.rate:.1f} %", f"**{after}**", f"{after.range} ({after.seeds} seeds)"))
    return markdown_table(("result", "before", "after [95 %]", "range over seeds"), rows)


INTRODUCTION = f"""# Results

Every number on this page is computed from `assets/figures/*.json` when the documentation is built. The last column
links to the [long tables]({LONG}) with every seed, the settings and the command that repeats the measurement.

- **Success** is the fraction of episodes that succeed, without exploration noise, pooled over training seeds. Square
  brackets contain Wilson's 95 % interval, the precision with which the episodes measure these policies.
- **Range over seeds** is the variation of training: expect a new seed inside this range, not inside the interval.
- Compared policies play the same initial states. Rows with other tasks or seeds are not comparable with each other.
- All tasks are simulated. Except for `full_size`, everything ran on two CPU cores. `tiny` means a network of LeRobot's
  own class with random initial weights, small enough for that."""


def page() -> str:
    """Return the results page in Markdown: how to read it, and a table for every part of `CLAIMS`."""
    parts = [INTRODUCTION]
    for section, claims in CLAIMS.items():
        rows = []
        for claim in claims:
            before = pooled(claim.benchmark, claim.baseline) if claim.baseline else None
            after = pooled(claim.benchmark, claim.result)
            told = (
                "" if before is None else f"{before}" + (f" ({claim.compared})" if claim.compared != "before" else "")
            )
            counted = f"{after.seeds} x {after.episodes // after.seeds}"
            link = _link(claim.benchmark)
            rows.append((claim.text, told, f"**{after}**", after.range, counted, link))
        head = ("claim", "before, or compared with", "success [95 %]", "range over seeds", "seeds x episodes", "tables")
        parts += [f"## {section}", markdown_table(head, rows)]
    parts += ["## Other measurements", markdown_table(("claim", "figure", "tables"), list(_others()))]
    return "\n\n".join(parts) + "\n"


def _others() -> Iterator[tuple[str, str, str]]:
    """Yield claims that are no success rates: claim, figure, link."""
    for claim, benchmark, figure in (
        ("The gate accepts candidates that are truly worse (by a world model of the log)", "gate", _gate("high", -1)),
        ("The gate accepts candidates that are truly better", "gate", _gate("low", 1)),
        ("Rank correlation of imagined and real success, ten policies for Push-T", "ranking", _order("push_t")),
        (
            "Rank correlation of imagined and real success, ten policies for pick and place",
            "ranking",
            _order("pick_place"),
        ),
        (
            "Rank correlation of imagined and real success, ten policies for push_cube, in a model of pictures",
            "ranking",
            _order("push_cube", "latent_ensemble"),
        ),
        (
            "Rank correlation of imagined and real success, ten policies for Push-T, in a model of pictures",
            "ranking",
            _order("push_t", "latent_ensemble"),
        ),
        (
            "DDIM with 10 of 100 steps on Push-T: speed-up of a policy call",
            "inference",
            _speed("hundred_steps", "DDIM 10"),
        ),
        ("Compiled engine, same actions: speed-up", "inference", _speed("ten_steps", "compiled")),
        ("Native engine compared with gymnasium's SyncVectorEnv: simulation speed", "sims", _simulation()),
        ("PPO on the action expert of a full-size pi0, random weights: GPU memory", "full_size", _memory()),
    ):
        yield claim, f"**{figure}**", _link(benchmark)


def _link(benchmark: str) -> str:
    return f"[`{benchmark}`]({LONG}#{anchors()[benchmark]})"


def _gate(bound: str, sign: int) -> str:
    """Return how many candidates of a kind, all tasks and seeds, the default evaluator of the gate accepts."""
    found = [
        each
        for each in leaves(figures("gate"), ("tasks", "*", "*", "candidates", "*"))
        if sign * each["true"][bound] > 0
    ]
    accepted = sum(each["judges"]["model"]["better"] for each in found)
    low, high = wilson(accepted, len(found))
    return f"{accepted} of {len(found)}: {100 * accepted / len(found):.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _order(task: str, model: str = "ensemble") -> str:
    """Return Spearman's rank correlation in models of a kind: mean and range over the seeds of the model."""
    found = list(leaves(figures("ranking"), ("tasks", task, model, "*", "statistics", "spearman", "value")))
    return f"{sum(found) / len(found):.2f} ({min(found):.2f} to {max(found):.2f}, {len(found)} seeds)"


def _speed(policy: str, way: str) -> str:
    """Return the range over seeds of how much faster a policy call is than the reference."""
    pairs = leaves(figures("inference"), ("tasks", "push_t", policy, "*"))
    ratios = [each["reference"]["median_ms"] / each[way]["median_ms"] for each in pairs]
    return f"{min(ratios):.1f} to {max(ratios):.1f} times ({len(ratios)} seeds)"


def _simulation() -> str:
    return f"{figures('sims')['ratios']['native engine / SyncVectorEnv']:.1f} times"


def _memory() -> str:
    return f"{figures('full_size')['finetuning']['pi0']['expert']['bytes'] / 1e9:.0f} GB"


def headed(text: str) -> str:
    """Return the text of the README with its headlines computed anew."""
    return HEADLINES.sub(lambda _: f"<!-- headlines -->\n{headlines()}\n<!-- end -->", text)


def write() -> None:
    """Write the results page and the README's headlines; files that do not change keep their time."""
    for path, text in ((PAGE, page()), (README, headed(README.read_text()))):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write()
