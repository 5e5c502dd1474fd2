"""Collection alternating with learning: groups of complete episodes with the same initial state, or streams that
continue across episode ends.

Groups are for algorithms that compare outcomes, streams for those with a critic.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.images import Keeping
from robopolicy.core.policy import Policy, Trainable, is_condition
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.core.rollouts import HELPED_GROUPS, Rollouts, concatenate
from robopolicy.core.segments import Segments
from robopolicy.core.spec import WorldSpec
from robopolicy.core.world import Snapshot, Snapshots, World
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.branch_rules import RULES
from robopolicy.rl.collect import Streams, play, start_streams
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import Branching, EpisodePlayer, Request, groups_of
from robopolicy.rl.initial_states import (
    AsksTeacher,
    Beliefs,
    ComparesDemonstrated,
    ContinuesEpisodes,
    GivesHelp,
    LimitsLengths,
    RedrawsGroups,
    SeesLengths,
    SeesRollouts,
    SeesStarts,
    SetsBudgets,
    Uniform,
)
from robopolicy.rl.registry import Need, Slot
from robopolicy.training.acting import TakesOver
from robopolicy.training.collection.protocol import while_collecting
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import Demonstrations, newest_vectors, reached_share
from robopolicy.training.experience import conditions_of, with_executed


def start_pool(seed: int, starts: int, instructions: int = 1) -> tuple[np.ndarray, list[int]]:
    """Return the seeds [starts] of a run's pool of initial states and, with several instructions (n), the instruction
    of each: i mod n.
    """
    tasks = [start % instructions for start in range(starts)] if instructions > 1 else []
    return episode_seeds(seed, "starts", starts), tasks


def in_all_words(requests: Sequence[Request], spec: WorldSpec) -> list[Request]:
    """Return the requests with the instructions of each group's episodes rotating through the wordings of its goal."""
    places: Counter[int] = Counter()
    rotated: list[Request] = []
    for request in requests:
        wordings = spec.wordings(request.task)
        turn = wordings.index(request.task) + places[request.group]
        rotated.append(replace(request, task=wordings[turn % len(wordings)]))
        places[request.group] += 1
    return rotated


def branching_of(config: FinetuneConfig) -> Branching:
    """Return the configured branching of episodes."""
    uncertain, rule = config.branch_by == "uncertainty", RULES.get(config.branch_by)
    at = () if rule else config.branch_at
    return Branching(at, config.branch_width, config.branch_sampling_step, uncertain, rule)


ValuesOf = Callable[[Rollouts], Tensor | None]
"""Map from rollouts to V of every chunk's state, [B, T], None before there are values."""


def teacher_takes_over(algorithm: Algorithm) -> bool:
    """Whether the algorithm's allocator lets the teacher play."""
    allocator = algorithm.allocator()
    return isinstance(allocator, AsksTeacher) or (isinstance(allocator, ContinuesEpisodes) and allocator.by_teacher)


def require_one_player(algorithm: Algorithm, config: FinetuneConfig) -> None:
    """Raise ConfigError, naming the setting, if the allocator continues played episodes or lets the teacher play, and
    these settings exclude it.
    """
    allocator = algorithm.allocator()
    if not isinstance(allocator, ContinuesEpisodes | AsksTeacher | RedrawsGroups):
        return
    name = algorithm.resolved.slots[Slot.ALLOCATOR][0].entry.name
    plain = FinetuneConfig()
    settings = ("shards", "staleness", "policy_lag", "props_parts", "overprovision", "branch_at", "branch_by")
    for setting in settings:
        if getattr(config, setting) != (default := getattr(plain, setting)):
            raise ConfigError(
                f"allocator={name} adds episodes when groups are complete, which are played here by one policy, which "
                f"{setting}={getattr(config, setting)} excludes: set {setting}={default}, or choose another allocator."
            )
    if Need.MEANS in algorithm.needs and teacher_takes_over(algorithm):
        raise ConfigError(
            f"allocator={name}: the means of a teacher's steps are not those of the policy, which another mechanism of "
            "this algorithm reads: choose another coefficient or allocator."
        )


class EpisodeCollector:
    """Collects the groups that the algorithm's sampler and allocator request, from the states that its hint selects.

    seed: root of the initial states' seeds; generator: source of the policy's random numbers; demonstrations: states
    that hints start from; acts: acting policy, None for the learner; images: storage mode of camera images;
    values: for allocators that read values.
    """

    def __init__(
        self,
        world: World,
        policy: Trainable,
        algorithm: Algorithm,
        config: FinetuneConfig,
        seed: int,
        generator: torch.Generator,
        demonstrations: Demonstrations | None = None,
        acts: Policy | None = None,
        *,
        images: Keeping = "plain",
        values: ValuesOf | None = None,
    ):
        self.world = world
        self.policy = policy
        self.config = config
        self.seed = seed
        self.generator, self.demonstrations = generator, demonstrations
        self.sampler = algorithm.sampler()
        self.allocator = algorithm.allocator()
        if isinstance(self.allocator, ContinuesEpisodes) and not isinstance(world, Snapshots):
            raise ConfigError(
                f"The world '{world.spec.name}' does not support snapshots, so episodes cannot be continued in it."
            )
        if getattr(self.allocator, "reads_observed", False) and not isinstance(self.sampler, Beliefs):
            raise ConfigError(
                "options.knapsack.surplus=true tells initial states that never succeeded from others, but "
                f"{type(self.sampler).__name__} predicts rates without counting results: set surplus=false, or choose "
                "another sampler."
            )
        if isinstance(self.sampler, SeesStarts):
            self.sampler.look = self.first_observations
        self.hint = None if algorithm.hint is None else algorithm.hint()
        self.rotates_words = Need.PARAPHRASES in algorithm.needs
        self.values, self.takes_over = values, acts if isinstance(acts, TakesOver) else None
        actor, branching = policy if acts is None else acts, branching_of(config)
        self.player = EpisodePlayer(world, actor, branching, max_idle_chunks=config.max_idle_chunks, images=images)
        self.provision = math.ceil((1 + config.overprovision) * config.groups)
        self.parts = 1 + (self.allocator.redraws if isinstance(self.allocator, RedrawsGroups) else 0)
        self.begun: dict[int, tuple[int, float]] = {}

    def collect(self, iteration: int) -> Rollouts:
        """Return an iteration's episodes, padded to the longest, collected with the current policy."""
        return self.batch(iteration, iteration)

    def batch(self, number: int, version: int) -> Rollouts:
        """Return the episodes of batch `number`, with `start` and `hint` [B, T] among their extras."""
        with while_collecting(number):
            rollouts = self._finished(self._groups_with_signal(number, version), version)
            if isinstance(self.allocator, SetsBudgets):
                rollouts = rollouts.with_extras(
                    budget=budget_of(rollouts.task, self.world.spec, self.allocator.budgets)
                )
            if not isinstance(self.allocator, GivesHelp):
                return rollouts
            return settle_helped(rollouts, self.policy, self.world.spec.instructions, self.allocator)

    @property
    def held(self) -> set[int]:
        """Groups that were requested and not yet returned."""
        return self.player.held

    def _play(
        self, requests: Sequence[Request], batch: int, version: int, groups: int | None = None, *, again: int = 0
    ) -> Rollouts:
        """Play requests until `groups` groups are complete (None: all).

        again: number of the round that adds episodes to groups of the same batch, 0 for the groups themselves.
        """
        return self.player.play(requests, self.generator, groups=groups, version=version)

    def _finished(self, rollouts: Rollouts, version: int) -> Rollouts:
        """Return rollouts with the log-probabilities of the executed part of chunks."""
        rollouts = with_executed(rollouts, self.policy, self.world.spec.instructions, version)
        # Held episodes too: only now does the policy have the weights that acted in them.
        self.player.rescore(lambda held: self._executed(held, version))
        return rollouts

    def _executed(self, held: Rollouts, version: int) -> Tensor:
        """Compute log-probabilities of the executed part of chunks [n, 1, K] while the policy still has the acting
        weights.
        """
        return with_executed(held, self.policy, self.world.spec.instructions, version).logp_behaviour

    def restart(self) -> None:
        """Release the world; unfinished episodes resume from their saved states at the next call."""
        self.player.suspend()

    def close(self) -> None:
        """Do nothing; no background work exists."""

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Update sampler and hint with each initial state's success, mean absolute advantage and depth in its
        demonstration, if initial states come from a pool and recur.
        """
        start_numbers, place = torch.unique(collected.extras["start"][:, 0], return_inverse=True)

        def per_start(values: Tensor, index: Tensor) -> np.ndarray:
            total = torch.zeros(len(start_numbers), dtype=torch.float64, device=values.device)
            return total.index_add_(0, index, values.double()).cpu().numpy()

        episodes = per_start(torch.ones_like(place), place)
        # One chunk of an episode rarely succeeds: what it is paid for is its outcome then.
        by_chunk = isinstance(self.allocator, ComparesDemonstrated)
        success_counts = per_start(collected.row_return > 0 if by_chunk else collected.row_success, place)
        group_index = torch.searchsorted(start_numbers, prepared.extras["start"][:, 0].contiguous())
        size = prepared.extras["advantage"].abs().sum((1, 2)) / prepared.extras["episode_steps"][:, 0].clamp(min=1)
        advantage = per_start(size, group_index) / episodes
        starts = start_numbers.cpu().numpy()
        if isinstance(self.allocator, SeesRollouts):
            self.allocator.observe_rollouts(collected)
        if not self.config.num_initial_states:
            return  # numbers of places in the batch: other initial states have them in the next iteration
        self.sampler.observe(starts, success_counts, episodes, advantage)
        if isinstance(self.allocator, SeesLengths):
            rows = (collected.extras["start"][:, 0], collected.alive.sum(1), collected.row_success)
            self.allocator.observe_lengths(*(each.cpu().numpy() for each in rows))
        if self.hint is not None:
            depth = per_start(collected.extras["hint"][:, 0], place) / episodes
            self.hint.observe(starts, depth, success_counts / episodes)

    def _groups_with_signal(self, batch: int, version: int) -> Rollouts:
        """Play groups, and others for those without both outcomes if the allocator redraws them."""
        rollouts = self._groups(batch, version)
        for part in range(1, self.parts):
            groups = Segments.of(rollouts.group)
            rate = groups.mean(rollouts.row_success.double())
            lacking_count = self.config.groups - int(((rate > 0) & (rate < 1)).sum())
            if not lacking_count:
                break
            redrawn_rollouts = self._groups(batch, version, part, lacking_count)
            rollouts = concatenate([rollouts, redrawn_rollouts], same_groups=True)
        return rollouts

    def _groups(self, batch: int, version: int, part: int = 0, count: int | None = None) -> Rollouts:
        """Play the groups that sampler and allocator request, plus the episodes that the allocator adds after seeing
        the outcomes.

        part: number of times that groups of this batch were drawn before; count: of groups, None for all of a batch.
        """
        config, first = self.config, (batch * self.parts + part) * self.provision
        name = f"{batch}/{part}" if part else str(batch)
        seeds, starts = self._propose(name, self.provision - len(self.held) if count is None else count)
        requests, sizes = self._requests(batch, name, first, seeds, starts), self._sizes(starts)
        group_target = config.groups if config.overprovision else None
        if isinstance(self.allocator, ContinuesEpisodes):
            rollouts = self._continued(self.allocator, requests(list(sizes)), batch, version)
        else:
            rollouts = self._play(requests(list(sizes)), batch, version, group_target)
        for again in range(1, getattr(self.allocator, "rounds", 1) + 1):
            extra_episodes = self._more(rollouts, first, len(seeds))
            if not sum(extra_episodes):
                break
            added = self._play(requests(extra_episodes), batch, version, again=again)
            rollouts = concatenate([rollouts, added], same_groups=True)
        helped = self._helped(rollouts, (first, batch, version), seeds, starts) if len(rollouts.group) else None
        if helped is not None:
            rollouts = helped
        if isinstance(self.allocator, AsksTeacher):
            teacher_requests = requests([self.allocator.samples] * len(seeds))
            rollouts = self._taught(self.allocator, rollouts, teacher_requests, (first, batch, version), starts)
        rollouts = self._with_origins(rollouts)
        groups_kept = self.held
        self.begun = {group: origin for group, origin in self.begun.items() if group in groups_kept}
        if isinstance(self.allocator, ComparesDemonstrated) and self.demonstrations is not None:
            return rollouts.with_extras(demonstrated=demonstrated_next(rollouts, self.demonstrations))
        return rollouts

    def _requests(
        self, batch: int, name: str, first: int, seeds: np.ndarray, starts: np.ndarray
    ) -> Callable[[list[int]], list[Request]]:
        """Return a function from group sizes [n] to the requests of new groups from initial states [n], with numbers
        from `first` on, and note where these begin. name: of the draw.
        """
        # Group numbers never repeat in a run: held groups of an earlier batch keep theirs.
        _, pool = start_pool(self.seed, self.config.num_initial_states, len(self.world.spec.instructions))
        tasks = [pool[start] for start in starts] if pool else []
        states, depths = self._hinted(batch, name, starts)
        limits = self.allocator.limits(starts) if isinstance(self.allocator, LimitsLengths) else [0] * len(starts)
        origins_of_batch = zip(starts.tolist(), depths, strict=True)
        self.begun |= {first + number: origin for number, origin in enumerate(origins_of_batch)}

        def requests(sizes: list[int]) -> list[Request]:
            new_requests = groups_of(seeds, sizes, tasks)
            if isinstance(self.allocator, SetsBudgets):
                new_requests = with_budgets(new_requests, self.world.spec, self.allocator.budgets)
            placed_requests = [
                replace(item, group=first + item.group, state=states[item.group], limit=limits[item.group])
                for item in new_requests
            ]
            return in_all_words(placed_requests, self.world.spec) if self.rotates_words else placed_requests

        return requests

    def _sizes(self, starts: np.ndarray) -> Sequence[int]:
        """Return the planned sizes of groups from initial states [n], [n]."""
        rates = self.sampler.predict(starts)
        if isinstance(self.sampler, Beliefs) and getattr(self.allocator, "reads_observed", False):
            rates = self.sampler.observed(starts)
        return self.allocator.plan(rates, self.config.group_size)

    def _with_origins(self, rollouts: Rollouts) -> Rollouts:
        """Add `start` and `hint` [B, T] of each row's group."""
        origins = [self.begun[group] for group in rollouts.group.tolist()]
        device, shape = rollouts.group.device, rollouts.shape
        start = torch.tensor([start for start, _ in origins], device=device)
        depth = torch.tensor([depth for _, depth in origins], device=device)
        return rollouts.with_extras(start=start[:, None].expand(shape), hint=depth[:, None].expand(shape))

    def _more(self, rollouts: Rollouts, first: int, count: int) -> list[int]:
        """Return the number of episodes that the allocator adds to each of the groups [n] from number `first`, given
        the outcomes.

        Raises ConfigError when it adds episodes to over-provisioned groups, which are used for learning as soon as they
        are complete.
        """
        places = (rollouts.group - first).cpu()
        if self.config.overprovision:
            places = torch.unique(places, return_inverse=True)[1]
            count = int(places.max()) + 1
        extra_episodes = self.allocator.extend(*_results(places, rollouts, count))
        if self.config.overprovision and (sum(extra_episodes) or isinstance(self.allocator, GivesHelp)):
            raise ConfigError(
                f"The allocator {type(self.allocator).__name__} adds episodes to a group after seeing its outcomes, "
                "but with overprovision groups are used as soon as they are complete: set overprovision=0, or "
                "choose another allocator."
            )
        return list(extra_episodes)

    def _helped(
        self, rollouts: Rollouts, place: tuple[int, int, int], seeds: np.ndarray, starts: np.ndarray
    ) -> Rollouts | None:
        """Play the episodes with help that the allocator requests, and append them, marked; None if it gives no help.

        place: first group number, batch and version.
        """
        if not isinstance(self.allocator, GivesHelp):
            return None
        first, batch, version = place
        context = Context(torch.Generator(), iteration=batch, iterations=self.config.iterations)
        results = _results((rollouts.group - first).cpu(), rollouts, len(seeds))
        requests: list[Request] = []
        counts = self.allocator.helped(*results, context)
        for number, (count, depth) in enumerate(zip(counts, self.allocator.depths(results[0]), strict=True)):
            members = (rollouts.group == first + number).nonzero().squeeze(1)
            task = int(rollouts.task[members[0], 0])
            request, start = Request(int(seeds[number]), first + number, task), int(starts[number])
            if depth and self.demonstrations is not None:
                depths = [depth] * count
                if self.allocator.ahead:
                    failed_rows = integers(members[~rollouts.row_success[members]])[:count]
                    depths = [self._reached(rollouts, row, start) + self.allocator.ahead for row in failed_rows]
                states = [self.demonstrations.state(start, each)[0] for each in depths]
                requests += [replace(request, state=state) for state in states if state is not None]
            elif not depth:
                requests += [replace(request, task=other) for other in self._other_words(task, batch)] * count
        parts = [rollouts]
        if requests:
            parts.append(self._play(requests, batch, version, again=1))
        marked = [part.with_extras(helped=torch.full_like(part.alive, is_added)) for is_added, part in enumerate(parts)]
        return concatenate(marked, same_groups=True) if requests else marked[0]

    def _other_words(self, task: int, batch: int) -> list[int]:
        """Return another wording of instruction `task`, in turn, if there is one and the allocator gives it."""
        spec = self.world.spec
        is_plain = spec.meaning(spec.instructions[task]) == spec.instructions[task]
        if getattr(self.allocator, "from_plain", False) and not is_plain:
            return []
        wordings = other_wordings(spec, task)
        return [wordings[batch % len(wordings)]] if wordings else []

    def _reached(self, rollouts: Rollouts, row: int, start: int) -> float:
        """Return the fraction of its demonstration that an episode came near to."""
        assert self.demonstrations is not None
        path = self.demonstrations.vectors.get(start)
        if path is None:
            return 0.0
        fields = [value for _, value in sorted(rollouts.observation.items()) if isinstance(value, Tensor)]
        states = torch.cat([value[row, rollouts.alive[row], -1].flatten(1).double() for value in fields], -1)
        return reached_share(np.asarray(states.cpu()), np.array(path))

    def _continued(
        self, allocator: ContinuesEpisodes, requests: Sequence[Request], batch: int, version: int
    ) -> Rollouts:
        """Play requests, then what the allocator continues, until it names nothing more; added episodes are marked."""
        context = Context(torch.Generator(), iteration=batch, iterations=self.config.iterations)
        counts: list[int] = []

        def grow(rollouts: Rollouts) -> list[tuple[int, int]]:
            counts.append(len(rollouts.group))
            if self.takes_over is not None:
                self.takes_over.teaching = True
            values = None if self.values is None else self.values(rollouts)
            return allocator.continuations(rollouts, values, len(counts) - 1, context)

        try:
            rollouts = self.player.play(requests, self.generator, version=version, grow=grow)
        finally:
            if self.takes_over is not None:
                self.takes_over.teaching = False
        is_added = torch.arange(len(rollouts.group), device=rollouts.group.device) >= counts[0]
        return rollouts.with_extras(helped=is_added[:, None].expand(rollouts.shape).contiguous())

    def _taught(
        self,
        allocator: AsksTeacher,
        rollouts: Rollouts,
        requests: Sequence[Request],
        place: tuple[int, int, int],
        starts: np.ndarray,
    ) -> Rollouts:
        """Let the teacher play requests, then one more from within a demonstration for groups in which it failed, of
        which only successes stay; append its episodes, marked.

        place: first group number, batch and version; starts: of the groups, [n].
        """
        first, batch, version = place
        assert self.takes_over is not None  # which Need.TEACHER asks for
        self.takes_over.teaching = True
        try:
            episodes = self._play(requests, batch, version, again=1)
            rate, _ = _results((episodes.group - first).cpu(), episodes, len(starts))
            guided_requests: list[Request] = []
            if allocator.depth and (demonstrations := self.demonstrations) is not None:
                for number in np.flatnonzero(rate == 0).tolist():
                    state, _ = demonstrations.state(int(starts[number]), allocator.depth)
                    example = next(item for item in requests if item.group == first + number)
                    guided_requests += [] if state is None else [replace(example, state=state)]
            parts = [rollouts, episodes]
            if guided_requests:
                guided_episodes = self._play(guided_requests, batch, version, again=2)
                parts.append(guided_episodes.take(guided_episodes.row_success.nonzero().squeeze(1)))
        finally:
            self.takes_over.teaching = False
        parts = [part.with_extras(helped=torch.full_like(part.alive, place > 0)) for place, part in enumerate(parts)]
        return concatenate(parts, same_groups=True)

    def _hinted(self, batch: int, name: str, starts: np.ndarray) -> tuple[list[Snapshot | None], list[float]]:
        """Return the demonstrated state that each group starts from (None: the initial state), and its depth in the
        demonstration.
        """
        if self.hint is None or self.demonstrations is None:
            return [None] * len(starts), [0.0] * len(starts)
        context = Context(torch.Generator(), iteration=batch, iterations=self.config.iterations)
        # Of the draw's name, not of a generator that moves: a resumed run draws the same.
        draws = np.random.default_rng(derive_seed(self.seed, f"hints/{name}"))
        depths = self.hint.depth(starts, self.sampler.predict(starts), context, draws)
        start_states = [
            self.demonstrations.state(int(start), float(depth)) for start, depth in zip(starts, depths, strict=True)
        ]
        return [state for state, _ in start_states], [depth for _, depth in start_states]

    def _propose(self, name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seeds [n] and indices [n] of the initial states to play; n = count unless the sampler wants fewer.

        name: of the draw.
        """
        config = self.config
        if not config.num_initial_states:
            return episode_seeds(self.seed, f"finetune/{name}", count), np.arange(count)
        draws = np.random.default_rng(derive_seed(self.seed, f"starts/{name}"))
        starts = self.sampler.propose(count, config.num_initial_states, draws)
        return start_pool(self.seed, config.num_initial_states)[0][starts], starts

    def first_observations(self, starts: np.ndarray) -> np.ndarray:
        """Return the vector fields and the instruction (one-hot) of initial states [n] of the pool, [n, D]; resets the
        world.

        Raises ConfigError when episodes are in flight, which over-provisioning allows.
        """
        if self.config.overprovision:
            raise ConfigError(
                f"{type(self.sampler).__name__} looks at initial states by resetting the world, but with overprovision "
                "episodes continue in it: set overprovision=0, or choose another sampler."
            )
        self.player.suspend()
        texts = self.world.spec.instructions
        seeds, pool = start_pool(self.seed, self.config.num_initial_states, len(texts))
        rows = self.world.batch_size
        parts: list[Any] = []
        for first in range(0, len(starts), rows):
            wave = np.resize(starts[first : first + rows], rows)  # surplus rows repeat the wave
            options = {"task": np.array(pool)[wave]} if pool else None
            observation = self.world.reset(seeds=seeds[wave], options=options)
            fields = [newest_vectors(observation)]
            if options is not None:
                fields.append(np.eye(len(texts))[options["task"]])
            parts.append(np.concatenate(fields, 1)[: len(starts) - first])
        return np.concatenate(parts)

    def tree(self) -> dict[str, Any]:
        """Return the state of the sampler and the hint, and the unfinished groups."""
        return {
            "sampler": self.sampler.state(),
            "allocator": self.allocator.state() if isinstance(self.allocator, Uniform) else {},
            "hint": {} if self.hint is None else self.hint.state(),
            "player": self._player_tree(),
            "begun": {str(group): list(origin) for group, origin in self.begun.items()},
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.sampler.restore(tree["sampler"])
        if isinstance(self.allocator, Uniform) and tree.get("allocator"):
            self.allocator.restore(tree["allocator"])
        begun = {int(group): (start, depth) for group, (start, depth) in tree["begun"].items()}
        if self._restore_player(tree["player"]):
            self.begun = begun
        elif begun:
            warnings.warn(
                f"{len(begun)} unfinished groups were collected with another finetune.shards and are dropped.",
                RobopolicyWarning,
                stacklevel=3,
            )
        if self.hint is not None:
            self.hint.restore(tree["hint"])

    def _player_tree(self) -> dict[str, Any]:
        return self.player.tree()

    def _restore_player(self, tree: Mapping[str, Any]) -> bool:
        """Restore the unfinished episodes, unless they were collected with another number of shards."""
        if "states" in tree:
            return False
        self.player.restore(tree)
        return True


def _results(places: Tensor, rollouts: Rollouts, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return success rates and numbers of episodes [n] by the place of each row's group, [B]."""
    episode_counts = np.bincount(places, minlength=count)
    success_counts = np.bincount(places, rollouts.row_success.cpu(), count)
    return success_counts / np.maximum(episode_counts, 1), episode_counts


def demonstrated_next(rollouts: Rollouts, demonstrations: Demonstrations) -> Tensor:
    """Return the demonstrations' vector fields as many control steps later as each row's first chunk, [B, T, D]; NaN
    without a demonstration.
    """
    rows = (rollouts.extras["start"][:, 0], rollouts.extras["hint"][:, 0], rollouts.duration[:, 0])
    vectors = [demonstrations.vector(*each) for each in zip(*(row.tolist() for row in rows), strict=True)]
    size = next((len(vector) for vector in vectors if vector is not None), 1)
    table = np.array([np.full(size, np.nan) if vector is None else vector for vector in vectors])
    return torch.tensor(table, device=rollouts.group.device)[:, None].expand(-1, rollouts.shape[1], -1).contiguous()


def with_budgets(requests: Sequence[Request], spec: WorldSpec, budgets: Sequence[float]) -> list[Request]:
    """Give the i-th episode of every group the wording of budget i mod n; raises ConfigError without n wordings."""
    counts, new_requests = Counter[int](), list[Request]()
    for request in requests:
        wordings = sorted([request.task, *other_wordings(spec, request.task)])
        if len(wordings) != len(budgets):
            raise ConfigError(
                f"allocator=budgets: '{spec.instructions[request.task]}' has {len(wordings)} wordings for "
                f"{len(budgets)} budgets, which a policy hears in them: set world.options.phrasing=all, a task with "
                "that number (Task.paraphrases), or options.budgets.budgets."
            )
        new_requests.append(replace(request, task=wordings[counts[request.group] % len(wordings)]))
        counts[request.group] += 1
    return new_requests


def budget_of(task: Tensor, spec: WorldSpec, budgets: Sequence[float]) -> Tensor:
    """Return the budget of every chunk and the horizon, in control steps, [B, T, 2], by the index of its wording."""
    places = [sorted([index, *other_wordings(spec, index)]).index(index) for index in range(len(spec.instructions))]
    steps = torch.tensor([budgets[min(place, len(budgets) - 1)] * spec.horizon for place in places])
    budget = steps.to(task.device)[task]
    return torch.stack([budget, torch.full_like(budget, float(spec.horizon))], -1)


def other_wordings(spec: WorldSpec, task: int) -> list[int]:
    """Return the indices of the world's instructions that say the same as number `task` in other words."""
    plain = spec.meaning(spec.instructions[task])
    return [index for index, text in enumerate(spec.instructions) if index != task and spec.meaning(text) == plain]


def settle_helped(
    rollouts: Rollouts, policy: Trainable, instructions: tuple[str, ...], allocator: GivesHelp
) -> Rollouts:
    """Give helped episodes the instruction that they are scored under, and the group that they are compared with.

    Their log-probabilities stay those that they were chosen with, so the ratio is that of the present policy under the
    plain instruction to the acting one with help.
    """
    helped = rollouts.extras["helped"][:, 0]
    if not bool(helped.any()):
        return rollouts
    groups = Segments.of(rollouts.group)
    if allocator.forget:
        plain = groups.maximum(rollouts.task[:, 0].double(), ~helped)[groups.index].long()
        rollouts = replace(rollouts, task=torch.where(helped[:, None], plain[:, None], rollouts.task))
        if any(is_condition(name) for name in rollouts.latents):  # what a frozen encoder made of the other words
            conditions = conditions_of(rollouts, policy, instructions)
            rollouts = replace(rollouts, latents={**rollouts.latents, **conditions})
    if not allocator.together:
        rollouts = replace(rollouts, group=rollouts.group + helped.long() * HELPED_GROUPS)
    return rollouts


class StreamCollector:
    """Continues every row of `world` from where the previous iteration stopped, `rollout_length` policy calls at a
    time.

    seed: root of the episodes' seeds; generator: source of the policy's random numbers; acts: acting policy, None for
    the learner; images: storage mode of camera images.
    """

    def __init__(
        self,
        world: World,
        policy: Trainable,
        rollout_length: int,
        seed: int,
        generator: torch.Generator,
        acts: Policy | None = None,
        *,
        images: Keeping = "plain",
    ):
        self.world = world
        self.policy = policy
        self.rollout_length = rollout_length
        self.seed = seed
        self.acts: Policy = policy if acts is None else acts
        self.generator = generator
        self.images: Keeping = images
        self.streams: Streams | None = None

    def collect(self, iteration: int) -> Rollouts:
        """Return [num_envs, rollout_length] action chunks of the current policy."""
        return self.batch(iteration, iteration)

    def batch(self, number: int, version: int) -> Rollouts:
        """Return the next chunks; when streams restart, the batch number determines their seeds."""
        with while_collecting(number):
            if self.streams is None:
                self.streams = start_streams(self.world, self.acts, self.seed, f"finetune/{number}")
            arguments = self.world, self.acts, self.rollout_length, self.generator, self.streams
            rollouts = play(*arguments, version=version, images=self.images)
            return with_executed(rollouts, self.policy, self.world.spec.instructions)

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Do nothing; seeds follow one another regardless of outcomes."""

    def restart(self) -> None:
        """Reset the world, so that the next call starts new episodes."""
        self.streams = None

    def close(self) -> None:
        """Do nothing; no background work exists."""

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; after a checkpoint streams restart."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""
