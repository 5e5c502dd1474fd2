"""Offline agents on tasks of which there are only imaginary rollouts: the protocol of ImagineBench on `tidy`.

Real rollouts show the nine training instructions. What is asked for comes in three tiers: the same tasks in other words
(rephrase), three held-out combinations (easy), two instructions in a row (hard). Imaginary rollouts are those of an
imitation policy in a world model, both trained on the real rollouts and their labels alone; those that succeed by the
task's criterion on the imagined states are kept and labelled with what was asked. Agents learn from real rollouts, from
real and imaginary ones of all tiers, and, as the bound, from real rollouts of the novel tasks too. They read the state
and the words of the instruction and act in every control step. Source: Pang et al. 2025, arXiv:2505.10010, where a
language model imagines and a sentence encoder reads the instructions; no language model is part of this package.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.rule import Rule
from torch import Tensor

from robopolicy.benchmarks.rates import rate_of, rate_text, spread_text
from robopolicy.benchmarks.runs import chosen_from, demonstrations, modelled, pretrained, settings_of
from robopolicy.building.policies import load_policy
from robopolicy.configuration import Config, compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.spec import TASK, Observation
from robopolicy.core.storage import read_json, write_json
from robopolicy.core.transitions import Transitions
from robopolicy.core.world import Rows
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.data.record import record
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.rl.offline.configuration import AGENTS, AgentConfig, CqlConfig, IqlConfig, ReBracConfig, Td3BcConfig
from robopolicy.rl.offline.decisions import recorded_decisions
from robopolicy.rl.offline.interface import Interface
from robopolicy.runs import output
from robopolicy.verbs import collect
from robopolicy.verbs.bench import Benchmark, Table
from robopolicy.verbs.logged import with_reward
from sims.composed import JOIN, in_order, text_of
from sims.instructions import instruction_set
from sims.registry import load_task, make_world
from sims.task import Task
from worldmodels import load_world_model
from worldmodels.env import ImaginedWorld, StateCriterion
from worldmodels.protocol import Context, LearnedModel

TASK_NAME = "tidy"
TIERS: Mapping[str, Mapping[str, str]] = {
    "rephrase": {"phrasing": "paraphrased"},
    "easy": {"instructions": "held_out"},
    "hard": {"instructions": "composed"},
}
"""Tier -> options of the world."""
AGENT_KINDS: Mapping[str, tuple[str, AgentConfig]] = {
    "bc": ("td3_bc", Td3BcConfig(alpha=0.0, learning_rate=1e-3)),
    "td3_bc": ("td3_bc", Td3BcConfig(learning_rate=1e-3)),
    "cql": ("cql", CqlConfig()),
    "iql": ("iql", IqlConfig()),
    "rebrac": ("rebrac", ReBracConfig()),
}
"""What bench.only names -> registered agent and its settings. bc: TD3+BC without its value term."""
DATA = {"real": "real", "imaginary": "and imaginary of the novel", "bound": "and real of the novel"}
UPDATES, BATCH = 10_000, 256
NOVEL = 300
"""Rollouts of each tier: real ones, and initial states from which one is imagined."""
EPISODES = 100
"""Evaluation episodes of each tier."""
MODEL = ("worldmodel.transitions=1",)
"""The world model learns from the real rollouts alone."""


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Return {"agents": {agent: {seed: {data: {tier: rate}}}}, "imagined": {seed: {tier: share kept}}}."""
    agents = chosen_from(config, AGENT_KINDS)
    results: dict[str, Any] = {"agents": {agent: {} for agent in agents}, "imagined": {}}
    for seed in config.bench.seeds:
        sources: dict[str, list[Episodes]] = {}
        for agent in agents:
            path = root / TASK_NAME / agent / f"{seed}.json"
            if not path.exists():
                sources = sources or gathered(config, root, seed)
                write_json(path, {data: learned_and_judged(agent, data, sources, seed) for data in DATA})
            results["agents"][agent][str(seed)] = read_json(path)
        results["imagined"][str(seed)] = read_json(root / TASK_NAME / "imagined" / f"{seed}.json")
    return results


# -- rollouts ----------------------------------------------------------------------------------------------------------


def gathered(config: Config, root: Path, seed: int) -> dict[str, list[Episodes]]:
    """Return the rollouts of each entry of DATA, with success as their reward; the real ones are first."""
    policy = load_policy(pretrained(config, root, TASK_NAME, "diffusion", seed) / "checkpoint")
    model = load_world_model(modelled(config, root, TASK_NAME, "ensemble", seed, MODEL) / "checkpoint")
    real = rewarded(read_dataset(demonstrations(root, TASK_NAME, seed)))
    novel = [real_of(config, root, seed, tier) for tier in TIERS]
    imaginary = {tier: imagined(model, policy, tier, seed) for tier in TIERS}
    share = {tier: len(each) / NOVEL for tier, each in imaginary.items()}
    write_json(root / TASK_NAME / "imagined" / f"{seed}.json", share)
    output.print(f"Imaginary rollouts kept: {', '.join(f'{tier} {value:.0%}' for tier, value in share.items())}")
    successes = [rewarded(each) for each in imaginary.values() if len(each)]
    return {"real": [real], "imaginary": [real, *successes], "bound": [real, *novel]}


def rewarded(episodes: Episodes) -> Episodes:
    """Return episodes whose reward is their success, without labels of a teacher."""
    return replace(with_reward(episodes, "success"), labels=None, label_steps=None, seeds=None)


def real_of(config: Config, root: Path, seed: int, tier: str) -> Episodes:
    """Return the expert's rollouts of a tier, recorded if they are missing."""
    options = [f"world.options.{name}={value}" for name, value in TIERS[tier].items()]
    name = f"novel_{tier}"
    collect.run(
        compose(
            [
                *settings_of(config, root, TASK_NAME, seed),
                *options,
                f"collect.episodes={NOVEL}",
                'collect.label_policy=""',
                f"run.name={name}",
            ]
        )
    )
    return rewarded(read_dataset(demonstrations(root, TASK_NAME, seed, name)))


def imagined(model: LearnedModel, policy: Policy, tier: str, seed: int) -> Episodes:
    """Return the successful rollouts of a policy in a world model, labelled with the texts of a tier."""
    task, seeds = load_task(TASK_NAME), episode_seeds(seed, f"imagined/{tier}", NOVEL)
    world = make_world(TASK_NAME, NOVEL, **TIERS[tier])
    observation = world.reset(seeds=seeds)
    texts, spec = np.array(observation[TASK]), world.spec
    world.close()
    parts = [parts_of(spec.meaning(str(text))) for text in texts]
    frames = {key: observation[key][:, -1:] for key in task.observation}
    rows, episodes = np.arange(NOVEL), list[Episodes]()
    for place in range(max(map(len, parts))):
        instructions = np.array([parts[row][place] for row in rows])
        draws = Generators(derive_seed(seed, f"imagined/{tier}/{place}"))["act"]
        rollouts = played_in(model, policy, task, Context(frames, instructions), seeds[rows], draws)
        assert rollouts.success is not None
        successes = rollouts.success.nonzero()[:, 0]
        episodes = [each.select(successes) for each in (*episodes, rollouts)]
        rows = rows[successes.numpy()]
        if not len(rows):
            break
        last = episodes[-1].frame_starts + episodes[-1].lengths
        frames = {key: episodes[-1].observation[key][last].numpy()[:, None] for key in task.observation}
    if len(episodes) == 1 or not len(rows):
        return replace(episodes[0], tasks=tuple(map(str, texts[rows])))
    joined = in_a_row(*episodes)
    return joined.select([row for row in range(len(joined)) if fulfils(task, joined, row)])


def parts_of(text: str) -> list[str]:
    """Return the instructions of a text that may ask for several in a row."""
    return text.split(JOIN)


def played_in(
    model: LearnedModel, policy: Policy, task: Task, context: Context, seeds: np.ndarray, draws: torch.Generator
) -> Episodes:
    """Return one imagined episode for each row of a context [R, 1, ...]; seeds: of the episodes [R]."""
    row_of_seed = {int(seed): row for row, seed in enumerate(seeds)}

    def starts(some: np.ndarray) -> Context:
        rows = [row_of_seed[int(seed)] for seed in some]
        texts = None if context.task is None else context.task[rows]
        return Context({key: value[rows] for key, value in context.observation.items()}, texts)

    criterion = StateCriterion(task.succeeded, tuple(task.observation), 1.0)
    world = ImaginedWorld(model, starts, len(seeds), criterion=criterion)
    return record(world, policy, seeds, generator=draws)


def in_a_row(first: Episodes, second: Episodes) -> Episodes:
    """Return episodes [E] that go on with those of `second` [E], which begin in the last frame of `first`."""

    def steps(name: str) -> Tensor:
        parts = [torch.split(getattr(each, name), each.lengths.tolist()) for each in (first, second)]
        return torch.cat([part for pair in zip(*parts, strict=True) for part in pair])

    def frames(key: str) -> Tensor:
        before = torch.split(first.observation[key], (first.lengths + 1).tolist())
        after = torch.split(second.observation[key], (second.lengths + 1).tolist())
        return torch.cat([part for one, two in zip(before, after, strict=True) for part in (one[:-1], two)])

    success = [torch.zeros(first.step_count, dtype=torch.bool), second.step_success]
    success_parts = [
        torch.split(part, each.lengths.tolist()) for part, each in zip(success, (first, second), strict=True)
    ]
    return replace(
        second,
        observation={key: frames(key) for key in second.observation},
        actions=steps("actions"),
        lengths=first.lengths + second.lengths,
        tasks=tuple(text_of(*pair) for pair in zip(first.tasks, second.tasks, strict=True)),
        step_success=torch.cat([part for pair in zip(*success_parts, strict=True) for part in pair]),
        rewards=None,
        seeds=None,
    )


def fulfils(task: Task, episodes: Episodes, row: int) -> bool:
    """Return whether an episode did what its composed text asks for, in this order."""
    first = int(episodes.frame_starts[row])
    frames = {
        key: episodes.observation[key][first : first + int(episodes.lengths[row]) + 1].double().numpy()
        for key in task.observation
    }
    flags = [task.succeeded({**frames, TASK: np.array(text)})[None] for text in parts_of(episodes.tasks[row])]
    return bool(in_order(flags[0], flags[1], np.zeros(1, dtype=bool))[0].any())


# -- agents ------------------------------------------------------------------------------------------------------------


class Words:
    """Features of an instruction: which of the known words each of its parts contains, [N, 2 * words].

    texts: source of the words; others are ignored. A text that is no composition has an empty second part.
    """

    def __init__(self, texts: Sequence[str]):
        words = {word for text in texts for part in parts_of(text) for word in part.split()}
        self.words = {word: place for place, word in enumerate(sorted(words))}
        self.size = 2 * len(self.words)

    def __call__(self, observation: TensorObservation) -> Tensor:
        """Return the features [N, size] of the texts under `task`."""
        features = torch.zeros(len(observation[TASK]), 2, len(self.words))
        for row, text in enumerate(observation[TASK]):
            for place, part in enumerate(parts_of(str(text))):
                for word in set(part.split()) & self.words.keys():
                    features[row, place, self.words[word]] = 1.0
        return features.flatten(1)


class ReadsWords:
    """An agent as a controller in every control step; told: text of the world -> text that the agent reads instead."""

    def __init__(self, agent: OfflineAgent, interface: Interface, told: Mapping[str, str] | None = None):
        self.agent = agent
        self.interface = interface
        self.told = told or {}

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; no row [R] has state."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] for an observation [B, H, ...] with texts `task` [B]."""
        texts = [self.told.get(str(text), str(text)) for text in observation[TASK]]
        state = self.interface.state({**observation, TASK: np.array(texts)})
        with torch.no_grad():
            return self.interface.to_world(self.agent.act(state))[:, 0]


def learned_and_judged(name: str, data: str, sources: Mapping[str, Sequence[Episodes]], seed: int) -> dict[str, Any]:
    """Return the success of an agent by tier, after learning from the data of an entry of DATA.

    "wrong": success of what the rephrased world asks for when the agent is told of another task.
    """
    output.print(Rule(f"[bold]{name}: {DATA[data]}, seed {seed}", align="left"))
    agent, interface = learned(name, sources[data], seed)
    rates = {tier: judged(ReadsWords(agent, interface), tier, seed) for tier in TIERS}
    return {**rates, "wrong": judged(ReadsWords(agent, interface, other_texts()), "rephrase", seed)}


def learned(name: str, parts: Sequence[Episodes], seed: int, updates: int = UPDATES) -> tuple[OfflineAgent, Interface]:
    """Return an agent after `updates` on rollouts, and its interface; inputs are standardised by the first, real
    ones, and words that these lack are not scaled.
    """
    real = parts[0]
    words = Words([text for part in parts for text in part.tasks])
    interface = Interface(
        real.observation_fields, real.action_field, features=words, feature_size=words.size, history=1
    )
    kind, settings = AGENT_KINDS[name]
    agent: OfflineAgent = AGENTS.builds(kind)(settings, interface.size, interface.actions, derive_seed(seed, "agent"))
    each = [recorded_decisions(part, interface, settings.discount).transitions for part in parts]
    agent.begin(each[0])
    batches, draws = Transitions.join(each), Generators(derive_seed(seed, "learn"))
    with progress(name, updates) as advance:
        for _ in range(updates):
            agent.update(batches.draw(BATCH, draws["batches"]), draws["update"])
            advance()
    return agent, interface


def judged(controller: ReadsWords, tier: str, seed: int) -> dict[str, float]:
    """Return success in the world of a tier."""
    world = make_world(TASK_NAME, EPISODES, **TIERS[tier])
    evaluation = evaluate_policy(world, controller, episode_seeds(seed, f"judged/{tier}", EPISODES), label=tier)
    world.close()
    return rate_of(round(evaluation.success_rate * EPISODES), EPISODES)


def other_texts() -> dict[str, str]:
    """Return paraphrase -> a paraphrase of the next training instruction."""
    task = load_task(TASK_NAME)
    plain = instruction_set(task).texts
    pairs = itertools.pairwise([*plain, plain[0]])
    return {
        text: other
        for goal, following in pairs
        for text, other in zip(task.paraphrases[goal], task.paraphrases[following], strict=True)
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return success by agent, data and tier, and the shares of imaginary rollouts that were kept."""
    lines: list[list[str]] = []
    for agent, seeds in figures["agents"].items():
        for data in DATA:
            rows = [row[data] for row in seeds.values()]
            spread = [spread_text(row[tier]["success_rate"] for row in rows) for tier in (*TIERS, "wrong")]
            lines.append([agent, DATA[data], *spread, ", ".join(rate_text(row["easy"]) for row in rows)])
    header = ["agent", "learns from", *TIERS, "rephrase, told of another task", "easy, each seed [Wilson 95 %]"]
    shares = figures["imagined"].values()
    share_lines = [[tier, spread_text(share[tier] for share in shares)] for tier in TIERS]
    title = f"{TASK_NAME}: success by tier, mean over seeds (range)"
    return [Table(title, header, lines), Table("Imaginary rollouts that were kept", ["tier", "share"], share_lines)]


BENCHMARK = Benchmark(
    "Do imaginary rollouts of novel instructions teach offline agents what the real ones do not show?",
    ("seeds", "only", "overrides"),
    benchmark,
    tables,
)
