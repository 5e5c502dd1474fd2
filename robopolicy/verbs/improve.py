"""Improves a checkpoint with a simulator or recorded data: prints a plan of commands, runs them, reports the result.

world=NAME evaluates the checkpoint, fine-tunes it with RL in this simulator, and evaluates both policies on the same
initial states. data=LOG improves it from recorded data alone, through a gate. With both, it fine-tunes in the
simulator; the log's successful episodes are imitated as well if the world has several instructions. With neither, the
simulator is the one in which the checkpoint was trained. The improved policy is chosen only if the paired test (or the
gate, by more than fitted Q evaluation) finds it better; otherwise the base policy is kept. Time and memory are
estimated from a short measurement; improve.plan_only=true stops after the plan. Every command of the plan also works by
itself. If interrupted, run the same command again: finished stages are kept, the interrupted one resumes. Exit status
0: an improved policy was chosen, 1: the base policy is kept.
"""

import math
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.rule import Rule
from torch import nn

from robopolicy.building.policies import choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config, compose, groups
from robopolicy.configuration.sections.run import DEMONSTRATIONS, WORLD_MODEL, RunSection, WorldSection
from robopolicy.configuration.sections.tools import ImprovementSection
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.machine import in_bytes
from robopolicy.core.origin import origin_of, renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.progress import format_duration
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_object, write_json
from robopolicy.core.structured import to_plain
from robopolicy.data.lerobot_reading import read_information
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.tables import difference_text
from robopolicy.policies.abilities import WrapsModule
from robopolicy.policies.loading import foreign_format
from robopolicy.runs import finish, finished, open_run, output, run_path
from robopolicy.verbs.verb import VERBS, Verb, declaration, setting

VERB = Verb(
    summary="Improve a checkpoint with a simulator or a log: plan, run, compare",
    sections=("run", "world", "improve"),
    example="robopolicy improve runs/train/push_t/0/checkpoint world=push_t",
    targets=("improve.policy",),
    short={"data": "improve.data"},
    world_from={"improve.policy": "unassumed", "improve.data": "alone"},
    resumes=True,
)
PLAN = "plan.json"
"""File with the plan, which a resumed run follows."""
COSTS = "costs.json"
"""File with the seconds of the stages so far."""
TRIED = 64
"""Number of episodes of each evaluation in the measurement."""
PARTS = (0.02, 0.02, 0.1)
"""Fractions of the updates of `offline` in its short runs, of which the first only loads what they need."""
SIMULATED = (
    "Fine-tuning in the simulator reached 98.3 % [97.0, 99.1] on push_t and 98.5 % [97.2, 99.2] on pick_place; the log "
    "alone, through the gate, 94.3 % [92.2, 95.9] and 94.8 % [92.8, 96.3] (docs/results.md)."
)
IMITATING = (
    "The world has several instructions: there, imitating demonstrations while fine-tuning raised success from 84.3 to "
    "92.2 % (docs/results.md), so the successful episodes of the log are imitated as well."
)


UNSURE = (
    "Fitted Q evaluation alone also accepts worse policies, so the base policy remains the one to serve until the "
    "candidate is evaluated or deployed gradually. A world model trained on the log can evaluate it as well: "
    "\"improve.overrides=['gate.evaluators=[model,fqe]','gate.models=[MODEL]','world.imagination.initial_states=data']\""
)


def run(config: Config) -> int:
    """Plan, run the stages, choose a policy, write the page; return 0 if the improved policy was chosen, else 1."""
    section = config.improve
    if section.policy is None:
        raise ConfigError("No policy given. Usage: robopolicy improve CHECKPOINT world=NAME")
    require_something(config)
    if not (config.run.name or config.world.name):
        config = config.replaced(run=replace(config.run, name="log"))
    root = run_path(config, "improve")
    if section.plan_only:
        show(plan_of(config, root))
        return 0
    folder = open_run(config, "improve", VERB.sections)
    result = finished(folder)
    if result is not None:
        output.print(f"{folder.path} is done; run.overwrite=true starts over.")
        return report(result["improve"])
    place = folder.path / PLAN
    plan = read_object(place) if place.exists() else plan_of(config, root)
    write_json(place, plan)
    show(plan)
    result = (in_simulator if config.world.name else from_log)(config, plan, folder)
    finish(config, folder, result)
    output.print(f"Report: {report_for_run(folder.path)}")
    return report(result["improve"])


def require_something(config: Config) -> None:
    """Raise ConfigError when neither a simulator nor a log defines success."""
    name = config.world.name
    if name == WORLD_MODEL:
        raise ConfigError(
            "world=worldmodel: improve compares policies in a simulator, because success in a world model is only "
            "imagined. Set the simulator (world=NAME); or fine-tune in the world model: robopolicy imagine "
            "finetune.policy=CHECKPOINT"
        )
    if name == DEMONSTRATIONS:
        raise ConfigError("world=demonstrations replays recordings and reports no success: pass them as data=LOG.")
    if not name and config.improve.data is None:
        raise ConfigError(
            f"{config.improve.policy} does not record its world, so success is undefined. Set a simulator "
            "(world=NAME), a log (data=LOG), or both."
        )


def plan_of(config: Config, root: Path) -> dict[str, Any]:
    """Return the plan, JSON-ready: available inputs, stages with settings and estimated seconds, and the reasons.

    Raises the errors of the planned verbs: their settings are tried in the measurement.
    """
    section, device = config.improve, choose_device(config.run)
    path = section.policy or Path()
    foreign, policy = foreign_format(path), load_policy(path, device)
    module = policy.module if isinstance(policy, WrapsModule) else policy
    weights = sum(weight.numel() for weight in module.parameters()) if isinstance(module, nn.Module) else 0
    reads = ", ".join(policy.spec.observation)
    graphics = "cuda" if torch.cuda.is_available() else "no GPU"
    plan: dict[str, Any] = {
        "found": {
            "checkpoint": f"{path}: {foreign.library if foreign else 'robopolicy'} {type(policy).__name__}"
            f"{f', {weights:,} weights' if weights else ''}; reads {reads}",
            "device": f"{device} ({graphics}), threads: {config.run.threads}",
        },
        "reasons": [],
        "limits": [],
    }
    if section.data is not None:
        look_at_log(section.data, policy, plan)
    plan_stages = plan_simulator if config.world.name else plan_log
    plan_stages(config, root, policy, plan)
    return plan


def look_at_log(data: Path, policy: Policy, plan: dict[str, Any]) -> None:
    """Add the content of the log to the plan; raises DataError when it is not a dataset."""
    information = read_information(data, renaming_of(policy))
    columns = information["features"]
    plan["labels"] = [name for name in ("reward", "success") if f"next.{name}" in columns]
    label_text = " and ".join(plan["labels"]) or "neither reward nor success"
    episodes, steps = information["total_episodes"], information["total_frames"]
    plan["found"]["log"] = f"{data}: {episodes:,} episodes, {steps:,} steps, with {label_text}"


def plan_simulator(config: Config, root: Path, policy: Policy, plan: dict[str, Any]) -> None:
    """Plan evaluation, fine-tuning and the paired evaluation; raises SpecError when policy and world do not fit."""
    section, name = config.improve, config.world.name
    path = section.policy or Path()
    world = build_world(config.world, policy, batch_size=1)
    spec = world.spec
    world.close()
    by = "success" if spec.reports_success else "return, because it reports no success"
    plan["found"]["simulator"] = f"{name}: compared by {by}; episodes of at most {spec.horizon} control steps"
    recipe = recipe_of(config, policy)
    stage = partial(stage_of, config, root)
    tuning = [f"recipe={recipe}", setting("finetune.policy", path), "finetune.videos=0"]
    if len(spec.instructions) > 1 and "success" in plan.get("labels", ()):
        tuning += ["finetune.auxiliaries=[experts]", setting("finetune.expert_datasets", [str(section.data)])]
        plan["reasons"].append(IMITATING)
    elif section.data is not None:
        plan["reasons"].append(f"{SIMULATED} The log is therefore not used.")
    else:
        plan["reasons"].append(f"There is a simulator. {SIMULATED.partition(';')[0]} (docs/results.md).")
        if "experts" in (composed(stage("tuned", "finetune", tuning)).finetune.auxiliaries or ()):
            tuning.append("finetune.auxiliaries=[]")
            plan["reasons"].append("The recipe also imitates demonstrations, which data=DEMONSTRATIONS would add.")
    plan["reasons"].append(f"Settings: {'defaults' if recipe == 'none' else f'recipe={recipe}'}.")
    count = f"evaluate.episodes={section.episodes}"
    tuned_stage = stage("tuned", "finetune", tuning)
    speed = speed_of_finetuning(tuned_stage, config)
    iterations = iterations_within(config, tuned_stage, speed)
    tuned_stage = stage("tuned", "finetune", [*tuning, f"finetune.iterations={iterations}"])
    better = setting("evaluate.policy", root / "finetune" / "tuned" / str(config.run.seed) / "checkpoint")
    base = stage("base", "evaluate", [setting("evaluate.policy", path), count, "evaluate.videos=0"])
    both = stage("result", "evaluate", [better, setting("evaluate.base", path), count])
    plan["stages"] = [
        {**base, "seconds": 2 * section.episodes * speed["episode"]},
        {**tuned_stage, "seconds": seconds_of_finetuning(tuned_stage, speed)},
        {**both, "seconds": 4 * section.episodes * speed["episode"]},
    ]
    target = composed(tuned_stage).finetune.target_success
    early = "" if target is None else f"; it ends earlier at {target:.0%} success in validation"
    plan["estimate"] = (
        f"from one iteration of {speed['iteration']:.1f} s and {speed['episodes']} episodes of "
        f"{1000 * speed['episode']:.0f} ms, measured just now on this machine: an upper bound, because episodes become "
        f"shorter when they succeed{early}"
    )
    plan["memory"] = speed["memory"]
    plan["limits"] += [
        f"Success elsewhere: on a robot, or in {name} from other initial states than those of its resets.",
        f"The variation of training: this is one training run (seed {config.run.seed}). The interval covers the "
        "choice of episodes only; another run.seed gives another policy.",
        "The environment steps of validation during fine-tuning are not counted.",
    ]


def plan_log(config: Config, root: Path, policy: Policy, plan: dict[str, Any]) -> None:
    """Plan offline improvement behind the gate; raises DataError when the log does not define success."""
    section, data = config.improve, str(config.improve.data)
    has_reward = any(each.startswith("offline.reward=") for each in section.overrides)
    if not (plan["labels"] or has_reward):
        raise DataError(
            f"{data} records neither rewards (next.reward) nor success (next.success), so success is undefined. Set "
            "a simulator as well (world=NAME), or a function that returns the rewards of the recorded episodes: "
            "\"improve.overrides=['offline.reward=package.module:function']\""
        )
    if origin := origin_of(policy):
        plan["reasons"].append(
            f"world={origin.name}, which the checkpoint records, would add a simulator for comparison."
        )
    plan["reasons"] += [
        "There is a log and no simulator: a critic is fitted to the log, and candidates are trained from it.",
        "A candidate replaces the policy only if fitted Q evaluation, on held-out episodes, finds it better.",
    ]
    settings = [setting("offline.dataset", data), setting("offline.policy", section.policy), "gate.evaluators=[fqe]"]
    settings += ["world=demonstrations", setting("world.data", data), "offline.evaluate_episodes=0"]
    if "reward" not in plan["labels"] and not has_reward:
        settings.append("offline.reward=success")
    if section.iterations:
        settings.append(f"offline.rounds={section.iterations}")
    stage = stage_of(config, root, "improved", "offline", settings)
    once, fixed = speed_of_offline(stage)
    rounds = composed(stage).offline.rounds
    if section.minutes:
        rounds = min(rounds, int((60 * section.minutes - fixed) / once))
        if rounds < 1:
            raise too_short(section.minutes, fixed + once)
        stage["settings"].append(f"offline.rounds={rounds}")
    plan["stages"] = [{**stage, "seconds": fixed + rounds * once}]
    plan["estimate"] = (
        f"from short runs of offline, measured just now on this machine and extrapolated to offline.rounds={rounds} of "
        f"{format_duration(once)} each"
    )
    plan["memory"] = memory_used()
    plan["limits"] += [
        "Real success: nothing was executed. The gate estimates values from recorded episodes.",
        "Errors of the gate: on two tasks, fitted Q evaluation accepted 7 of 61 and 3 of 86 candidates that were "
        "worse (robopolicy/benchmarks/README.md, gate).",
        "States that the log does not contain.",
    ]


def recipe_of(config: Config, policy: Policy) -> str:
    """Return improve.recipe, by default the recipe with the name of the world, or none."""
    if config.improve.recipe:
        return config.improve.recipe
    if foreign_format(config.improve.policy or Path()) is not None:
        return "none"  # recipes set the number of denoising steps of robopolicy's own policies
    name = config.world.name + ("_pixels" if policy.spec.cameras else "")
    return name if name in groups()["recipe"] else "none"


def stage_of(config: Config, root: Path, name: str, verb: str, settings: Sequence[str]) -> dict[str, Any]:
    """Return a stage: its name, verb, and complete settings, in a run folder below `root`."""
    sections = declaration(verb).sections
    stage_settings = [each for each in config.improve.overrides if each.partition("=")[0].split(".")[0] in sections]
    run = changes("run", replace(config.run, root=root, name=name, overwrite=False), RunSection())
    return {"name": name, "verb": verb, "settings": [*settings, *world_settings(config), *run, *stage_settings]}


def changes(section: str, values: object, defaults: object) -> list[str]:
    """Return the settings of a section that differ from its defaults, as they are written on the command line."""
    plain, usual = to_plain(values), to_plain(defaults)
    result: list[str] = []
    for key, value in plain.items():
        if isinstance(value, Mapping) and isinstance(usual[key], Mapping):
            inner = {name: each for name, each in value.items() if name not in usual[key] or each != usual[key][name]}
            result += [setting(f"{section}.{key}.{name}", each) for name, each in inner.items()]
        elif value != usual[key]:
            is_world_name = (section, key) == ("world", "name")  # which is read before hydra reads quotes
            result.append(f"world={value}" if is_world_name else setting(f"{section}.{key}", value))
    return result


def world_settings(config: Config) -> list[str]:
    """Return the settings that name and change the world, as they are written on the command line."""
    return changes("world", config.world, WorldSection(name="")) if config.world.name else []


def composed(stage: Mapping[str, Any]) -> Config:
    """Return the configuration of a stage, as composed from the command line of the stage."""
    return compose(list(stage["settings"]), sections=declaration(stage["verb"]).sections)


def command(stage: Mapping[str, Any]) -> str:
    """Return the command line of a stage."""
    return shlex.join(["robopolicy", stage["verb"], *stage["settings"]])


def speed_of_finetuning(stage: Mapping[str, Any], config: Config) -> dict[str, float]:
    """Run one iteration and short evaluations; return the seconds of an iteration, of an episode and of loading, the
    number of episodes, and the memory in bytes.
    """
    episodes = min(TRIED, config.improve.episodes)
    small = ["finetune.iterations=1", "finetune.critic_warmup=0", "finetune.evaluate_every=0", "finetune.patience=0"]
    small += ["finetune.target_success=null", f"finetune.evaluate_episodes={episodes}"]
    output.print("Measuring one iteration of fine-tuning ...")
    seconds, _, metrics, result = trial(stage, small, config)
    last = metrics[-1]
    iteration = last["seconds_collect"] + last["seconds_update"]
    modes = [result[name][mode] for name in ("base", "tuned") for mode in ("deterministic", "stochastic")]
    evaluation_seconds = sum(mode["seconds"] for mode in modes)
    count = sum(mode["episodes"] for mode in modes)
    return {
        "iteration": iteration,
        "episode": evaluation_seconds / count,
        "episodes": count,
        "loading": max(seconds - iteration - evaluation_seconds, 0.0),
        "memory": memory_used(),
    }


def seconds_of_finetuning(stage: Mapping[str, Any], speed: Mapping[str, float]) -> float:
    """Return the estimated seconds of a fine-tuning stage."""
    section = composed(stage).finetune
    every = section.evaluate_every
    validations = 1 + math.ceil(section.iterations / every) if every else 0
    episodes = section.evaluate_episodes * (2 * validations + 4)
    return speed["loading"] + section.iterations * speed["iteration"] + episodes * speed["episode"]


def iterations_within(config: Config, stage: Mapping[str, Any], speed: Mapping[str, float]) -> int:
    """Return the number of fine-tuning iterations: the requested ones that fit the time budget."""
    section = composed(stage).finetune
    most = config.improve.iterations or section.iterations
    if not config.improve.minutes:
        return most
    judging = 6 * config.improve.episodes * speed["episode"]

    def needed(iterations: int) -> float:
        limited = {**stage, "settings": [*stage["settings"], f"finetune.iterations={iterations}"]}
        return judging + seconds_of_finetuning(limited, speed)

    first = needed(1)
    each = (needed(101) - first) / 100  # with its part of the validations
    iterations = min(most, 1 + int((60 * config.improve.minutes - first) / each))
    if iterations < 1:
        raise too_short(config.improve.minutes, first)
    return iterations


def too_short(minutes: float, seconds: float) -> ConfigError:
    """Return the error that the time budget is too short for one iteration or round."""
    least = math.ceil(seconds / 6) / 10
    return ConfigError(f"improve.minutes={minutes:g} is too short here: the shortest plan takes {least:g} minutes.")


def speed_of_offline(stage: Mapping[str, Any]) -> tuple[float, float]:
    """Run `offline` with few updates; return the seconds of one complete round, and of everything else.

    Differences are measured in CPU time, which other processes do not disturb, and converted to wall time.
    """
    section = composed(stage)
    plain = {"offline.critic.steps": section.offline.critic.steps, "gate.steps": section.gate.steps}
    if steps := getattr(section.offline.improve.config, "steps", 0):
        plain["offline.improve.steps"] = steps
    output.print("Measuring short runs of offline ...")
    runs = []
    for part in PARTS:
        small = [f"{key}={max(1, round(part * steps))}" for key, steps in plain.items()]
        runs.append(trial(stage, [*small, "offline.rounds=1"])[:2])
    _, (wall, busy), (longer_wall, longer_busy) = runs
    waiting = (wall + longer_wall) / max(busy + longer_busy, 0.01)
    slope = max(longer_busy - busy, 0.01) / (PARTS[2] - PARTS[1]) * waiting
    return slope, max(busy * waiting - PARTS[1] * slope, 0.0)


def trial(
    stage: Mapping[str, Any], small: Sequence[str], config: Config | None = None
) -> tuple[float, float, list[dict[str, Any]], dict[str, Any]]:
    """Run a stage with smaller settings in a temporary folder; return its seconds, CPU seconds, metrics and result.

    config: of `improve`, where a recipe may be at fault for an error, which then says so.
    """
    with tempfile.TemporaryDirectory() as place, silence():
        settings = [*stage["settings"], *small, setting("run.root", place), "run.tracker="]
        configuration = composed({**stage, "settings": settings})
        start_time, busy = time.perf_counter(), cpu_seconds()
        try:
            VERBS.load(stage["verb"])(configuration)
        except ConfigError as error:
            recipe = next((each for each in settings if each.startswith("recipe=")), "")
            if config is None or config.improve.recipe or recipe in ("", "recipe=none"):
                raise
            raise ConfigError(f"{error} (The plan uses {recipe}; improve.recipe=none uses the defaults.)") from error
        seconds, busy = time.perf_counter() - start_time, cpu_seconds() - busy
        folder = RunFolder(run_path(configuration, stage["verb"]))
        return seconds, busy, folder.metrics(), finished(folder) or {}


@contextmanager
def silence() -> Iterator[None]:
    """Suppress the output of verbs."""
    before, output.quiet = output.quiet, True
    try:
        yield
    finally:
        output.quiet = before


def cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children so far, in seconds."""
    return sum(os.times()[:4])


def memory_used() -> float:
    """Return the largest memory of this process so far in bytes, that of the GPU included."""
    unit = 1 if sys.platform == "darwin" else 1024
    process_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return process_memory + (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)


def show(plan: Mapping[str, Any]) -> None:
    """Print the plan."""
    say = partial(output.print, markup=False, soft_wrap=True)
    output.print(Rule("[bold]Plan", align="left"))
    for label, text in plan["found"].items():
        say(f"{label.capitalize()}: {text}.")
    for reason in plan["reasons"]:
        say(f"- {reason}")
    for number, stage in enumerate(plan["stages"], 1):
        say(f"{number}. {stage['name']}, about {format_duration(stage['seconds'])}:\n   {command(stage)}")
    total = sum(stage["seconds"] for stage in plan["stages"])
    say(f"About {format_duration(total)} and {in_bytes(round(plan['memory']))} of memory, {plan['estimate']}.")


def run_stage(stage: Mapping[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Run a stage unless it has a result, add its time to the costs, and return its result."""
    config = composed(stage)
    place = RunFolder(run_path(config, stage["verb"]))
    output.print(Rule(f"[bold]{stage['name']}: robopolicy {stage['verb']}", align="left"))
    if (result := finished(place)) is not None:
        output.print(f"{place.path} is done.")
        return result
    costs = costs_in(folder)
    start_time, busy = time.perf_counter(), cpu_seconds()
    try:
        VERBS.load(stage["verb"])(config)
    finally:
        earlier = costs.get(stage["name"], {"seconds": 0.0, "cpu_seconds": 0.0})
        spent = {"seconds": time.perf_counter() - start_time, "cpu_seconds": cpu_seconds() - busy}
        write_json(folder.path / COSTS, {**costs, stage["name"]: {key: earlier[key] + spent[key] for key in spent}})
    return finished(place) or {}


def costs_in(folder: RunFolder) -> dict[str, Any]:
    """Return the costs of the stages so far, by name."""
    place = folder.path / COSTS
    return read_object(place) if place.exists() else {}


def in_simulator(config: Config, plan: Mapping[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Run the stages in the simulator and return the result; stops if RL has no learning signal."""
    first, tuning, last = plan["stages"]
    results = {"base": run_stage(first, folder)}
    modes = [results["base"]["policy"][mode] for mode in ("deterministic", "stochastic")]
    if all(mode["reports_success"] and not mode["successes"] for mode in modes):
        count = sum(mode["episodes"] for mode in modes)
        reason = f"The base policy succeeds in 0 of {count} episodes: RL has no learning signal, so it stops here."
        summary = outcome(config, plan, folder, results, None, reason, remedies(config))
        return {**summary, "verdicts": {"base": brief(results["base"]["policy"])}}
    results["tuned"] = run_stage(tuning, folder)
    results["result"] = run_stage(last, folder)
    difference = results["result"]["difference"]
    quantity = "return" if difference.get("of") == "return" else "success"
    change = (
        f"Difference in {quantity} on the same {difference['episodes']} initial states: {difference_text(difference)}"
    )
    better = difference["low"] > 0
    if not better:
        change += ". The interval does not lie above zero, so the base policy is kept"
    path = composed(last).evaluate.policy if better else None
    more = f"improve.iterations={2 * composed(tuning).finetune.iterations}"
    advice = [] if better else [f"{again(config, 'run.name=longer', more)}   # twice the iterations"]
    summary = outcome(config, plan, folder, results, path, f"{change}.", advice)
    verdicts = {"base": results["result"]["base"], "improved" if better else "tuned": results["result"]["policy"]}
    return {**summary, "verdicts": {name: brief(each) for name, each in verdicts.items()}, "difference": difference}


def again(config: Config, *settings: str) -> str:
    """Return the command of this run with other settings."""
    improve_settings = changes(
        "improve", replace(config.improve, policy=None, data=None, iterations=0), ImprovementSection()
    )
    data = [] if config.improve.data is None else [setting("data", config.improve.data)]
    return shlex.join(
        [
            "robopolicy",
            "improve",
            str(config.improve.policy),
            *world_settings(config),
            *data,
            *improve_settings,
            *settings,
        ]
    )


def brief(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluation of a policy without the outcomes of single episodes."""
    modes = {mode: verdict[mode] for mode in ("deterministic", "stochastic")}
    return {mode: {k: v for k, v in values.items() if k != "per_episode"} for mode, values in modes.items()}


def remedies(config: Config) -> list[str]:
    """Return advice for a base policy that never succeeds."""
    policy, data = shlex.quote(str(config.improve.policy)), shlex.quote(str(config.improve.data or "DATASET"))
    policy_setting = (
        "policy.kind=lerobot policy.path" if foreign_format(config.improve.policy or Path()) else "train.policy"
    )
    world = config.world.name
    return [
        f"robopolicy doctor {data} doctor.policy={policy}   # data, policy and simulator: do units and rates agree?",
        f"robopolicy train {data} {policy_setting}={policy} run.name=more   # more or better demonstrations",
        f"robopolicy teach expert world={world} run.name=taught   # an expert labels the states that a policy reaches",
        "world.options.reward=package.module:function   # a dense reward, which measures progress",
    ]


def from_log(config: Config, plan: Mapping[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Run the offline stage and return the result."""
    (stage,) = plan["stages"]
    result = run_stage(stage, folder)
    accepted, rounds = result["accepted"], result["rounds"]
    settings = composed(stage)
    path, base = run_path(settings, "offline") / "checkpoint", config.improve.policy
    reason = f"The gate accepted {accepted} of {len(rounds)} candidates."
    advice = [
        f"robopolicy deploy {path} {base} world=NAME   # replaces the base gradually, with a minimum success rate"
    ]
    advice.append(f"robopolicy evaluate {path} evaluate.base={base} world=NAME   # in a simulator, if there is one")
    sure = accepted and not {"model", "world"}.isdisjoint(settings.gate.evaluators)
    if accepted and not sure:
        reason += f" {UNSURE}"
    if not accepted:
        reason += " The base policy is kept."
        more = "improve.overrides=['offline.extra_datasets=[DATASET]']"
        advice = [f"{again(config, 'run.name=more', more)}   # more episodes, ideally the policy's own"]
    summary = outcome(config, plan, folder, {stage["name"]: result}, path if sure else None, reason, advice)
    return {**summary, "rounds": rounds, "accepted": accepted}


def outcome(
    config: Config,
    plan: Mapping[str, Any],
    folder: RunFolder,
    results: Mapping[str, Mapping[str, Any]],
    improved: Path | None,
    reason: str,
    advice: Sequence[str],
) -> dict[str, Any]:
    """Return the entries of result.json: the chosen policy and why, the costs of every stage, and what to try next.

    improved: checkpoint of the policy that was found better, None to keep the base.
    """
    costs = {name: {"seconds": 0.0, "cpu_seconds": 0.0} for name in results} | costs_in(folder)
    limits = list(plan["limits"])
    for name, result in results.items():
        if result.get("seconds", 0.0) > costs[name]["seconds"]:  # the verb's own clock survives a kill
            costs[name] = {**costs[name], "seconds": result["seconds"]}
            limits.append(f"The CPU time of '{name}' before the job was killed.")
    stages = [
        {
            **stage,
            "command": command(stage),
            "folder": str(run_path(composed(stage), stage["verb"])),
            "estimated_seconds": stage["seconds"],
            **costs[stage["name"]],
            "env_steps": steps_in(results[stage["name"]]),
        }
        for stage in plan["stages"]
        if stage["name"] in results
    ]
    summary = {
        "improved": improved is not None,
        "policy": str(improved or config.improve.policy),
        "reason": reason,
        "serve": shlex.join(["robopolicy", "serve", str(improved or config.improve.policy)]),
        "stages": stages,
        "found": plan["found"],
        "plan": plan["reasons"],
        "estimate": plan["estimate"],
        "memory": memory_used(),
        "estimated_memory": plan["memory"],
        "limits": limits,
        "next_steps": list(advice),
    }
    return {"improve": summary, "seconds": sum(stage["seconds"] for stage in stages)}


def steps_in(result: Mapping[str, Any]) -> int:
    """Return the environment steps of a stage; of an evaluation, those of its episodes."""
    if "env_steps" in result:
        return int(result["env_steps"])
    policies = (result[name] for name in ("base", "policy") if name in result)
    return sum(policy[mode]["steps"] for policy in policies for mode in ("deterministic", "stochastic"))


def report(summary: Mapping[str, Any]) -> int:
    """Print the chosen policy and the command that serves it; return the exit status."""
    say = partial(output.print, markup=False, soft_wrap=True)
    say(summary["reason"])
    say(f"{'Improved' if summary['improved'] else 'Base'} policy: {summary['policy']}\nServe it: {summary['serve']}")
    if summary["next_steps"]:
        say("What to try next:\n" + "\n".join(f"  {line}" for line in summary["next_steps"]))
    return 0 if summary["improved"] else 1
