"""Imitation of imagined successes (Ctrl-World): what is kept, what is fitted, and which round's policy is returned."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bandit_toys import BanditWorld, ChainPolicy, mean_reward

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import STATE
from robopolicy.core.world import Step
from robopolicy.training import imagined
from robopolicy.training.imagined import synthesise_and_imitate
from robopolicy.training.stopping import StoppingRule, StoppingSettings

ROUNDS, ROLLOUTS = 2, 128


class TracedWorld(BanditWorld):
    """The bandit, which also says what its state was after every control step, as recordings want it."""

    def step(self, actions: np.ndarray) -> Step:
        step = super().step(actions)
        return replace(step, trace={STATE: step.observation[STATE].repeat(actions.shape[1], 1)})


@pytest.mark.checks("Ctrl-World")
def test_all_imagined_successes_so_far_are_imitated_and_the_best_round_is_returned(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    policy, world = ChainPolicy(std=0.4), TracedWorld(64, horizon=1)
    with torch.no_grad():
        policy.second.bias.copy_(torch.tensor([0.8, -0.2]))  # so that some succeed, and most do not
    played: list[Episodes] = []
    fitted: list[Episodes] = []
    record, pretrain = imagined.record, imagined.pretrain

    def recorded(*arguments, **options):
        played.append(record(*arguments, **options))
        return played[-1]

    def learned(policy, episodes, config, seed):
        fitted.append(episodes)
        return pretrain(policy, episodes, config, seed=seed)

    monkeypatch.setattr(imagined, "record", recorded)
    monkeypatch.setattr(imagined, "pretrain", learned)
    figures_of_rounds: list[tuple[float, dict]] = []

    def evaluate(actor, deterministic):
        figures = mean_reward(actor, deterministic)
        if deterministic:
            figures_of_rounds.append(
                (figures["success"], {name: value.clone() for name, value in actor.state_dict().items()})
            )
        return figures

    result = synthesise_and_imitate(
        policy, world, rounds=ROUNDS, rollouts=ROLLOUTS, steps=60, batch_size=64, learning_rate=3e-3, seed=0,
        evaluate=evaluate, course=StoppingRule(StoppingSettings()),
    )  # fmt: skip
    assert result.iterations == ROUNDS and [len(part.lengths) for part in played] == [ROLLOUTS] * ROUNDS
    kept = [int(part.success.sum()) for part in played]
    assert 0 < kept[0] < ROLLOUTS, "some of them fail, or nothing is filtered"
    for number, episodes in enumerate(fitted):
        assert bool(episodes.success.all()) and len(episodes.lengths) == sum(kept[: number + 1])
    assert figures_of_rounds[-1][0] > figures_of_rounds[0][0] + 0.2, "imitating successes raises success"
    best = max(figures_of_rounds, key=lambda each: each[0])[1]
    assert all(torch.equal(value, best[name]) for name, value in policy.state_dict().items())
