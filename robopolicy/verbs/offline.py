"""Improves a policy from recorded data alone: fits a critic, trains candidates, and accepts the better ones through a
gate.

No real step is played (except by gate.evaluators=[world]) until base and result are evaluated at the end; that
evaluation is not used for selection. offline.agent selects the critic's algorithm; offline.improve selects how a
candidate is trained from the incumbent. best_of: imitate the best of several sampled actions according to the critic;
weighted_imitation: imitate recorded actions weighted by their advantage; chain_ppo: PPO on the critic through the
denoising chain; diffusion_ql: follow the critic's gradient through that chain; adjoint_matching: tilt a flow policy by
the critic; recap: imitate all data, conditioned on labels of its quality; filtered_imitation: imitate only the better
fraction; dsrl: freeze the policy and choose its initial noise; idql: choose among its sampled actions at inference.
Candidates are evaluated in a world model that `worldmodel` trained on the log (gate.models), or by critics
(gate.evaluators=[fqe]) on held-out episodes (gate.holdout). A rejected candidate is discarded and the step size is
reduced. offline.gated=false accepts every candidate, for comparison. The critic can also use synthetic data:
offline.data=[recorded,guided] samples from a diffusion model of the log, guided towards the policy. RAVL is
offline.agent=edac offline.data=[recorded,imagined] offline.imagined_steps=10 offline.model=MODEL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robopolicy.building.evaluators import build_evaluators, clipped_fraction, warn_of_critics_alone, warn_of_divergence
from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.worlds import build_critic, build_world
from robopolicy.configuration import Config
from robopolicy.configuration.sections.recorded import GateSection
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import Policy, Trainable, require_trainable
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import narrowed
from robopolicy.core.transitions import Transitions
from robopolicy.data.record import record
from robopolicy.evaluation.evaluators import FqeEvaluator
from robopolicy.evaluation.gate import Evaluator, Gate
from robopolicy.evaluation.scores import known_anchors
from robopolicy.evaluation.success import compared
from robopolicy.rl.offline.configuration import AGENTS
from robopolicy.rl.offline.decisions import recorded_decisions
from robopolicy.runs import default_path, output
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.critics import AgentPolicy, Redraw, critic_interface, fit_agent
from robopolicy.training.offline.configuration import IMPROVERS
from robopolicy.training.offline.guided import GuidedGenerator
from robopolicy.training.offline.improvers import Imagination, Improver, OfflineContext, Wraps
from robopolicy.training.offline.rounds import Rounds, improve_in_rounds
from robopolicy.verbs.job import Job, evaluate_in_own_world, normalised, starting_checkpoint
from robopolicy.verbs.logged import print_decisions, split_data
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Offline RL: improve a policy from recorded data, accepted through a gate",
    sections=("run", "world", "workers", "finetune", "gate", "offline"),
    example="robopolicy offline runs/collect/push_t/0/dataset offline.policy=runs/train/push_t/0/checkpoint",
    targets=("offline.dataset",),
    world_from={"offline.policy": "train/checkpoint"},
    resumes=True,
)


def run(config: Config) -> int:
    """Fit the critic, improve the policy, evaluate the result."""
    refuse_unread(config.gate)
    job = Job.open(config, "offline", VERB.sections)
    if job is None:
        return 0
    section = config.offline
    folder, device = job.folder, job.device
    path = default_path(config, "train", "checkpoint", section.policy, "offline.policy")
    base, policy = load_policy(path, device), require_trainable(load_policy(path, device))
    improver: Improver = IMPROVERS.builds(section.improve.kind)(section.improve.config)
    if getattr(section.improve.config, "tunes_chain", False):
        policy.prepare_finetuning(config.finetune.finetuned_steps, train_encoder=config.finetune.train_encoder)
    training, held_out = split_data(config, policy, device)
    judges: list[Evaluator] = []
    gate = None
    if section.gated:
        gate_section = config.gate
        judges = build_evaluators(
            config, policy, held_out, device, [section.model] if section.model is not None else []
        )
        gate = Gate(
            judges,
            margin=gate_section.margin,
            relative=gate_section.relative_margin,
            confidence=gate_section.confidence,
        )
    clock = folder.clock()
    lesson = learn_critic(config, policy, training, folder, device)
    if isinstance(improver, Wraps):
        policy = improver.wrap(policy, lesson, derive_seed(config.run.seed, "wrapped")).to(device)
    remember_origin(policy, origin_of(base))
    remember_renaming(policy, section.rename or renaming_of(base))
    seed = derive_seed(config.run.seed, "offline")
    rounds = improve_in_rounds(policy, lesson, improver, gate, section.rounds, seed=seed, run=folder)
    seconds = clock.seconds
    for each in judges:
        if isinstance(each, FqeEvaluator):  # rounds before a kill were judged by another process
            verdicts = (record.get("verdict", {}) for record in rounds.records)
            each.clipped = [share for verdict in verdicts for share in verdict.get("clipped", ())]
    for line in rounds.lines:
        output.print(line, markup=False, soft_wrap=True)
    warn_of_divergence(judges)
    warn_of_critics_alone(config.gate, gate is not None and rounds.accepted > 0)
    result: dict[str, Any] = {
        **starting_checkpoint(path),
        "episodes": len(training),
        "held_out": len(held_out),
        "steps": training.step_count,
        "rounds": list(rounds.records),
        "accepted": rounds.accepted,
        "env_steps": sum(int(record.get("verdict", {}).get("env_steps", 0)) for record in rounds.records),
        "selected_by": [each.name for each in judges],
        "seconds": seconds,
        **clipped_fraction(judges),
    }
    real_verdicts = judged_for_real(config, {"base": base, "tuned": policy}, {"base": path, "tuned": folder.checkpoint})
    print_rounds(rounds, section.rounds)
    job.finish(real_verdicts | result)
    return 0


def refuse_unread(section: GateSection) -> None:
    """Raise ConfigError when gate settings are given that only `gate` and `bakeoff` read."""
    ways = {
        "data": "evaluators use a fraction of the episodes (gate.holdout=0.3) that is excluded from training",
        "candidate": "candidates are trained here (offline.improve); robopolicy gate compares two policies",
        "incumbent": "the policy to improve is offline.policy=CHECKPOINT",
    }
    for name, way in ways.items():
        if getattr(section, name):
            raise ConfigError(f"offline does not use gate.{name}: {way}.")
    if "importance" in section.evaluators:
        raise ConfigError(
            "gate.evaluators=[importance] works only in robopolicy gate and bakeoff, with the denoising chains in "
            "gate.data."
        )


def learn_critic(
    config: Config, policy: Trainable, episodes: Episodes, folder: RunFolder, device: torch.device
) -> OfflineContext:
    """Fit a critic to the recorded action chunks, and to imagined ones if configured; return it with the data and its
    interface.
    """
    section, seed = config.offline, config.run.seed
    sources = Sources(config, policy, episodes, device)
    parts = sources.draw(policy, "")
    print_sources(parts)
    episodes = joined(parts)
    deployed = getattr(section.improve.config, "deploys_critic", False)
    interface = critic_interface(policy, episodes, deployed=deployed)
    agent_config = section.agent.config
    data = recorded_decisions(episodes, interface, agent_config.discount)
    print_decisions(data)
    agent = AGENTS.builds(section.agent.kind)(
        agent_config, interface.size, interface.actions, derive_seed(seed, "agent")
    )
    if getattr(section.improve.config, "imagines", False):
        return OfflineContext(agent.to(device), data, interface, imagination(config, policy, device))
    generators = Generators(derive_seed(seed, "critic"), device)
    fitting = section.critic
    redraw = None
    if fitting.redraw_every:
        require_synthetic(section.data)
        acting = AgentPolicy(agent, interface, policy.spec.fps)

        def drawn(step: int) -> Transitions:
            redrawn = joined(sources.draw(acting, f" {step}"))
            return recorded_decisions(redrawn, interface, agent_config.discount).transitions

        redraw = Redraw(fitting.redraw_every, drawn)
    fit_agent(
        agent.to(device), data.transitions, fitting.steps, fitting.batch_size, generators, run=folder, redraw=redraw
    )
    return OfflineContext(agent, data, interface)


def require_synthetic(data: Sequence[str]) -> None:
    """Raise ConfigError when no part of the data can be drawn again."""
    if set(data) == {"recorded"}:
        raise ConfigError(
            "offline.critic.redraw_every draws imagined or guided episodes again: set offline.data=[recorded,imagined] "
            "or [recorded,guided]."
        )


class Sources:
    """The critic's training episodes as offline.data selects them: recorded, imagined and guided ones."""

    def __init__(self, config: Config, policy: Policy, recorded: Episodes, device: torch.device):
        self.config = config
        self.device = device
        self.recorded = recorded
        self.guided = None
        if "guided" in config.offline.data:
            draws = Generators(derive_seed(config.run.seed, "offline/guided"), device)
            weights_seed = derive_seed(config.run.seed, "guided weights")
            self.guided = GuidedGenerator(policy, recorded, config.offline.guided, draws, weights_seed)

    def draw(self, policy: Policy, label: str) -> dict[str, Episodes]:
        """Return recorded episodes and those drawn with `policy`, by source; label: names the draw, for its random
        numbers.
        """
        parts: dict[str, Episodes] = {}
        if "recorded" in self.config.offline.data:
            parts["recorded"] = self.recorded
        if "imagined" in self.config.offline.data:
            parts["imagined"] = imagined_episodes(self.config, policy, self.device, f"offline/imagined{label}")
        if self.guided is not None:
            draws = Generators(derive_seed(self.config.run.seed, f"offline/guided{label}"), self.device)
            parts["guided"] = self.guided.draw(policy, draws["guided"]).to(self.device)
        return parts


def joined(parts: Mapping[str, Episodes]) -> Episodes:
    """Return the episodes of all sources, without a copy of the only one."""
    first, *others = parts.values()
    return Episodes.concatenate([first, *others]) if others else first


def print_sources(parts: Mapping[str, Episodes]) -> None:
    """Print the number of episodes and steps per source, unless all are recorded."""
    if set(parts) != {"recorded"}:
        counts = ", ".join(f"{len(part)} {name} ({part.step_count} steps)" for name, part in parts.items())
        output.print(f"The critic is trained on episodes: {counts}.")


def imagination(config: Config, policy: Policy, device: torch.device) -> Imagination:
    """Return the imagined world of offline.model for learning, with the settings of the section finetune."""
    section, tuning = config.offline, config.finetune
    if section.model is None:
        raise ConfigError(f"offline.improve={section.improve.kind} trains in a world model: set offline.model=PATH.")
    imagined_section = config.world.imagined_by(section.model)
    world = build_world(imagined_section, policy, batch_size=tuning.num_envs, seed=config.run.seed, device=device)
    settings = narrowed(FinetuneConfig, tuning)
    new_critic = lambda seed: build_critic(world, tuning, seed).to(device)  # noqa: E731
    return Imagination(world, settings, new_critic, partial(adapt_policy_to_world, world))


def imagined_episodes(config: Config, policy: Policy, device: torch.device, label: str) -> Episodes:
    """Return episodes that the policy plays in the imagination of offline.model, from the simulator's initial states.

    With offline.imagined_steps they start at recorded steps and are truncated after this many steps, without a task
    end. label: names the draw, for its random numbers.
    """
    section = config.offline
    assert section.model is not None  # which the section asks for
    imagined_section = config.world.imagined_by(section.model)
    if section.imagined_steps:
        short = replace(imagined_section.imagination, max_steps=section.imagined_steps, initial_states="data")
        path = default_path(config, "collect", "dataset", section.dataset, "offline.dataset")
        imagined_section = replace(imagined_section, imagination=short, data=path)
    world = build_world(imagined_section, policy, episodes=section.imagined_episodes, device=device)
    seeds = episode_seeds(config.run.seed, label, section.imagined_episodes)
    episodes = record(world, policy, seeds, generator=Generators(config.run.seed, device)[label])
    world.close()
    return episodes.to(device)


def judged_for_real(config: Config, policies: Mapping[str, Policy], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Evaluate base and result in the world; print and return the results. Returns nothing without
    offline.evaluate_episodes.

    paths: checkpoints of the policies.
    """
    count = config.offline.evaluate_episodes
    if not count:
        return {}
    verdicts = evaluate_in_own_world(config, policies, count, choose_device(config.run), paths)
    dataset = default_path(config, "collect", "dataset", config.offline.dataset, "offline.dataset")
    return compared(verdicts) | normalised(verdicts, known_anchors(dataset, verdicts["base"].deterministic.world))


def print_rounds(found: Rounds, rounds: int) -> None:
    """Print the number of accepted candidates, and advice if there were none."""
    output.print(f"{found.accepted} of {rounds} candidates accepted.")
    if not found.accepted:
        output.print(
            f"No candidate was accepted; the policy is unchanged. {why_refused(found)}", markup=False, soft_wrap=True
        )


def why_refused(found: Rounds) -> str:
    """Return why the evaluators rejected all candidates, and what to try."""
    other = "another critic (offline.agent=edac) or improvement method (offline.improve=idql)"
    judgements = [each for record in found.records for each in record.get("verdict", {}).get("judgements", ())]
    worse = [each for each in judgements if max(each["bootstrap"][1], each["student"][1]) < 0]
    incredible = [each for each in judgements if each["ceiling"] is not None and each["candidate"] > each["ceiling"]]
    short = [each for each in judgements if 0 < each["low"] <= each["margin"]]
    count = len(judgements)
    if worse:
        return (
            f"{len(worse)} of {count} evaluations found a candidate significantly worse. Try a smaller learning rate "
            f"(offline.improve.learning_rate), more episodes (offline.extra_datasets=[DATASET]), or {other}."
        )
    if incredible:
        return (
            f"{len(incredible)} of {count} evaluations valued a candidate above nearly all recorded successes, which "
            f"is not credible. Use more episodes (offline.extra_datasets=[DATASET], ideally the policy's own), or "
            f"{other}."
        )
    if short:
        return (
            f"{len(short)} of {count} evaluations found a candidate better, but not by the margin of "
            f"{short[0]['margin']:.3g}: decrease gate.margin or gate.relative_margin, or run more rounds, "
            f"offline.rounds."
        )
    starts = max((each["starts"] for each in judgements), default=256)
    return (
        f"No candidate was significantly better in {count} evaluations: evaluate from more initial states "
        f"(gate.num_states={4 * starts}), use more episodes (offline.extra_datasets=[DATASET], ideally the policy's "
        f"own), or "
        f"{other}."
    )
