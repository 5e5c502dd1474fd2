"""Chooses by initial state which of several policies acts: the one with the highest predicted success minus its cost.

A value model (V0) reads the outcomes of route.context episodes of each policy and predicts its success from other
initial states, without being fitted to it. It is trained on synthetic policies in a minute and saved as `checkpoint` of
the run: route.model=CHECKPOINT takes it again, with other policies too, and finetune.sampler=value with
finetune.options.value.predictor=context and finetune.options.value.model=CHECKPOINT predicts by it. All policies play
all of route.episodes initial states, so the table has each of them alone, the router, and the best choice in hindsight;
the router is compared with the policy that is best in the context. Initial states are vectors, and the instruction
where a world has several.
"""

from typing import Any

import numpy as np

from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import TASK
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.world import World
from robopolicy.evaluation.intervals import compare_paired
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import counted_rate, evaluate_policy, require_success
from robopolicy.evaluation.tables import difference_text, route_rows
from robopolicy.rl.in_context_value import InContextValue, brier_score, load_value_model, routes, train_value_model
from robopolicy.runs import finish, open_fresh_run, output, print_table, runs_of
from robopolicy.training.demonstrations import newest_vectors
from robopolicy.verbs.job import evaluation_seeds
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Choose between policies by initial state, by predicted success and cost",
    sections=("run", "world", "route"),
    example="robopolicy route world=push_cube route.policies=[FAST,SLOW] route.costs=[0,0.1]",
    world_from={"route.policies": ""},
)
STARTS = 512
"""Initial states on which a value model is trained."""


def run(config: Config) -> int:
    """Let all policies play, predict, choose and compare."""
    section, seed = config.route, config.run.seed
    if len(section.policies) < 2:
        raise ConfigError("Choosing needs at least 2 policies: route.policies=[A,B].")
    if section.costs and len(section.costs) != len(section.policies):
        raise ConfigError(
            f"route.costs has {len(section.costs)} numbers for {len(section.policies)} policies: give one per policy."
        )
    folder = open_fresh_run(config, "route", VERB.sections)
    clock = folder.clock()
    seeds = {
        "context": episode_seeds(seed, "route/context", section.context),
        "evaluated": evaluation_seeds(config, section.episodes),
        "training": episode_seeds(seed, "route/training", STARTS),
    }
    names, outcomes, starts = played(config, seeds)
    if section.model is None:
        output.print("Training a value model on synthetic policies.")
        model = train_value_model(starts["training"], seed=seed)
    else:
        model = load_value_model(section.model)
    model.save(folder.path / "checkpoint")
    costs = np.array(section.costs or [0.0] * len(names))
    result = routed(model, outcomes, starts, costs, names)
    print_table("Choice between policies", *route_rows(result["routes"]))
    output.print(f"Router against {result['alone']}: {difference_text(result['difference'])}", soft_wrap=True)
    finish(config, folder, {**result, "seconds": clock.seconds})
    output.print(f"Report: {report_for_run(folder.path)}")
    return 0


def played(config: Config, seeds: dict[str, Array]) -> tuple[list[str], dict[str, Array], dict[str, Array]]:
    """Return the policies' names, their success [K, n] in the context and where they are evaluated, and the initial
    states [n, D] by name of `seeds`.
    """
    device, paths = choose_device(config.run), config.route.policies
    names = runs_of(paths)
    success: dict[str, list[Array]] = {"context": [], "evaluated": []}
    starts: dict[str, Array] = {}
    for name, path in zip(names, paths, strict=True):
        policy = load_policy(path, device)
        world = build_world(config.world, policy, episodes=config.route.episodes, seed=config.run.seed, device=device)
        require_success(world)
        starts = starts or {part: initial_states(world, numbers) for part, numbers in seeds.items()}
        for part, rows in success.items():
            options = {"generator_seed": config.run.seed, "device": device, "label": f"{name}, {part}"}
            rows.append(evaluate_policy(world, adapt_policy_to_world(world, policy), seeds[part], **options).success)
        world.close()
    return list(names), {part: np.array(rows) for part, rows in success.items()}, starts


def initial_states(world: World, seeds: Array) -> Array:
    """Return the vector fields of first observations, and the instruction (one-hot) if there are several, [n, D]."""
    texts, rows = list(world.spec.instructions), world.batch_size
    parts: list[Array] = []
    for first in range(0, len(seeds), rows):
        wave = np.resize(seeds[first : first + rows], rows)  # surplus rows repeat the wave
        observation = world.reset(seeds=wave)
        fields = [newest_vectors(observation)]
        if len(texts) > 1:
            fields.append(np.eye(len(texts))[[texts.index(text) for text in observation[TASK]]])
        parts.append(np.concatenate(fields, 1)[: len(seeds) - first])
    return np.concatenate(parts)


def routed(
    model: InContextValue, outcomes: dict[str, Array], starts: dict[str, Array], costs: Array, names: list[str]
) -> dict[str, Any]:
    """Return the success of every policy alone, of the router and of the best choice in hindsight, JSON-ready."""
    context, won = outcomes["context"], outcomes["evaluated"]
    count, ones = won.shape[1], np.ones(context.shape[1])
    success = np.array(
        [model.predict(starts["context"], each.astype(float), ones, starts["evaluated"]) for each in context]
    )
    router, best = routes(success, costs), routes(won.astype(float), costs)
    everywhere = np.arange(count)

    def way(name: str, policy: Array, routed: int | None) -> dict[str, Any]:
        rate = counted_rate(int(won[policy, everywhere].sum()), count)
        return {"name": name, "success": rate, "cost": float(costs[policy].mean()), "routed": routed}

    ways = [way(name, np.full(count, place), int((router == place).sum())) for place, name in enumerate(names)]
    ways += [way("router", router, None), way("best in hindsight", best, None)]
    alone = int(np.argmax(context.mean(1) - costs))
    mean = np.broadcast_to(context.mean(1)[:, None], won.shape)
    return {
        "routes": ways,
        "alone": names[alone],
        "difference": compare_paired(won[alone], won[router, everywhere]).to_json(),
        "brier": {"model": brier_score(success, won), "mean": brier_score(mean, won)},
    }
