"""Over-provisioned groups (APRIL): what is asked for, what comes back, and what a checkpoint keeps of the rest."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bandit_toys import BanditWorld, ChainPolicy, SavesRows

from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.episodes import EpisodePlayer
from robopolicy.training.collection.episodes import EpisodeCollector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import decisions_at
from robopolicy.training.finetune import finetune

pytestmark = pytest.mark.long

CONFIG = FinetuneConfig(
    algorithm="grpo",
    coefficient="decoupled_ppo",
    groups=16,
    group_size=8,
    overprovision=0.25,
    epochs=1,
    minibatch=256,
    actor_warmup=1,
    learning_rate=1e-2,
    evaluate_every=0,
)


class Uneven(BanditWorld):
    """Episodes of 1 to 24 steps, most of them short, by the row's seed and how often it was played."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size, horizon=24)
        self.draws = np.random.default_rng(0)

    def reset(self, rows=None, seeds=None, options=None):
        super().reset(rows, seeds, options)
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.time[chosen] = 24 - np.ceil(self.draws.beta(1, 3, len(chosen)) * 24).astype(int)
        return self.observe()


class Saved(SavesRows, Uneven):
    """The same, with rows that can be saved."""


def collector_of(config: FinetuneConfig, world: Any = None, policy: ChainPolicy | None = None) -> EpisodeCollector:
    algorithm = build_algorithm(config)
    acting = torch.Generator().manual_seed(0)
    return EpisodeCollector(world or Uneven(64), policy or ChainPolicy(), algorithm, config, 0, acting)


@pytest.mark.checks("APRIL")
def test_whole_groups_come_back_and_only_what_is_missing_is_asked_for():
    collector, asked, returned = collector_of(CONFIG), [], Counter()
    play = collector.player.play

    def counting(requests, generator, **options):
        asked.append(len({request.group for request in requests}))
        return play(requests, generator, **options)

    collector.player.play = counting
    recycled = 0
    for iteration in range(100):
        before = set(collector.player.held)
        rollouts = collector.collect(iteration)
        sizes = Counter(rollouts.group.tolist())
        assert len(sizes) == 16, "as many groups as an iteration learns from"
        assert set(sizes.values()) == {8}, "complete ones"
        returned.update(sizes)
        complete_before = before - collector.player.held
        assert complete_before <= set(sizes), "what was left over comes first"
        recycled += len(before & set(sizes))
        assert len(collector.player.held) == 4, "the backlog is what was over-provisioned, and never more"
        assert set(collector.begun) == collector.player.held
        for group in sizes:
            rows = rollouts.take(
                torch.tensor([place for place, of in enumerate(rollouts.group.tolist()) if of == group])
            )
            start = rows.observation["observation.state"][:, 0]
            assert bool((start == start[0]).all()), "a group begins alike"
    assert asked == [20, *[16] * 99]
    assert max(returned.values()) == 8, "no group comes back twice"
    assert recycled > 100


def begun_by(player: EpisodePlayer) -> dict[int, list[list[float]]]:
    """The actions so far of the episodes of every group that is held, in the order in which they began."""
    rows_of_groups: dict[int, dict[int, list[float]]] = {}
    for part in player.parts:
        for (number, group, step), action in zip(
            part["place"].tolist(), part["actions"][:, 0, 0].tolist(), strict=True
        ):
            actions = rows_of_groups.setdefault(group, {}).setdefault(number, [])
            assert len(actions) == step
            actions.append(action)
    return {group: [rows[number] for number in sorted(rows)] for group, rows in rows_of_groups.items()}


@pytest.mark.checks("APRIL")
def test_what_is_in_flight_goes_on_where_it_was():
    """The decisions so far of episodes that are held are the first ones of what comes back, made by older policies."""
    collector, held, gone_on = collector_of(CONFIG), {}, 0
    for iteration in range(12):
        rollouts = collector.collect(iteration)
        versions = [row[alive].tolist() for row, alive in zip(rollouts.policy_version, rollouts.alive, strict=True)]
        assert all(row == sorted(row) for row in versions)
        for group, episodes in held.items():
            rows = [row for row, of in enumerate(rollouts.group.tolist()) if of == group]
            for row, begun in zip(rows, episodes, strict=False):  # later ones had not begun
                assert rollouts.actions[row, : len(begun), 0, 0].tolist() == begun
                assert max(versions[row][: len(begun)]) < iteration, "played before this iteration"
                gone_on += len(versions[row]) > len(begun)
        held = begun_by(collector.player)
    assert gone_on > 20


def test_a_batch_does_not_wait_for_the_longest_episodes():
    steps = {}
    for share in (0.0, 0.5):
        world = Uneven(256)
        collector = collector_of(replace(CONFIG, overprovision=share), world)
        for iteration in range(20):
            collector.collect(iteration)
        steps[share] = world.calls
    assert steps[0.5] < 0.75 * steps[0.0]


def test_every_decision_keeps_the_score_of_the_version_that_made_it():
    """Also those whose chunk was cut short and whose group was complete only versions later."""
    torch.manual_seed(0)
    policy = ChainPolicy(chunk=4)
    collector, weights, stale_cut = collector_of(CONFIG, Uneven(64), policy), {}, 0
    for iteration in range(12):
        weights[iteration] = {name: value.clone() for name, value in policy.state_dict().items()}
        rollouts = collector.collect(iteration)
        cut = rollouts.alive & (~rollouts.valid).any(-1)
        stale_cut += int((cut & (rollouts.policy_version < iteration)).sum())
        for version in rollouts.policy_version[rollouts.alive].unique().tolist():
            acted = ChainPolicy(chunk=4)
            acted.load_state_dict(weights[version])
            here = rollouts.alive & (rollouts.policy_version == version)
            with torch.no_grad():
                expected = acted.log_prob(*decisions_at(rollouts, here, ("", ""))).logp
            torch.testing.assert_close(rollouts.logp_behaviour[here], expected, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    assert stale_cut > 0


@pytest.mark.parametrize("world", [Uneven, Saved])
def test_a_run_that_goes_on_from_a_checkpoint_has_kept_its_backlog(world, tmp_path: Path):
    class Fresh(world):
        """Draws lengths by seed, so that another process draws the same."""

        def reset(self, rows=None, seeds=None, options=None):
            self.draws = np.random.default_rng([int(seed) % 2**32 for seed in seeds])
            return super().reset(rows, seeds, options)

    config, finals = replace(CONFIG, groups=6, group_size=4, checkpoint_every=2), []
    for name, parts in (("whole", (8,)), ("parts", (2, 4, 8))):
        for iterations in parts:
            policy = ChainPolicy()
            finetune(policy, None, Fresh(16), replace(config, iterations=iterations), RunFolder(tmp_path / name))
        finals.append(policy.state_dict())
    for key, value in finals[0].items():
        assert torch.equal(value, finals[1][key]), key
    whole, parts = (RunFolder(tmp_path / name).metrics() for name in ("whole", "parts"))
    for mine, theirs in zip(whole, parts, strict=True):
        assert {k: v for k, v in mine.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }
    if world is Saved:
        assert any(record["staleness"] > 0 for record in whole[3::2]), "decisions from before a checkpoint are used"


def test_allocators_that_look_at_outcomes_first_are_refused(monkeypatch: pytest.MonkeyPatch):
    config = replace(CONFIG, allocator="dars")
    never = torch.zeros(1, dtype=torch.bool)
    monkeypatch.setattr(Rollouts, "row_success", property(lambda self: never.expand(len(self.group))))
    with pytest.raises(ConfigError, match="set overprovision=0"):
        collector_of(config).collect(0)
    with pytest.raises(ConfigError, match="unfinished groups would move to the next part"):
        replace(CONFIG, props_parts=2)
