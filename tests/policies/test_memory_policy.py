"""The policy with memory: the promises of a policy, exact log-probabilities, imitation from the past, serving."""

import pytest
import torch

from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.spec import STATE, TASK, Field
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.loading import load_policy
from robopolicy.policies.memory import MemoryPolicy
from robopolicy.serving.inputs import Session
from robopolicy.testing.policy import check_policy

FIELDS, ACTION = {STATE: Field((2,))}, Field((2,), low=-1.0, high=1.0)


def made(fields=FIELDS, instructions=("",), **changes):
    config = MemoryPolicyConfig(**{"history": 5, "chunk": 2, "bins": 3, "width": 16, **changes})
    return MemoryPolicy(config, fields, ACTION, fps=10.0, instructions=instructions)


@pytest.mark.parametrize("changes", [{}, {"sink": False, "depth": 1}, {"history": 1}])
def test_it_keeps_the_promises_of_a_policy(changes):
    check_policy(made(instructions=("left", "right"), **changes), load_policy)


def test_choices_have_the_probabilities_that_it_says():
    policy = made(chunk=1)
    torch.nn.init.normal_(policy.head.weight)
    observation = {STATE: torch.randn(1, 5, 2).expand(4000, -1, -1)}
    decision = policy.act(observation, torch.Generator().manual_seed(0))
    scores = policy.log_prob({STATE: observation[STATE][:1]}, {"tokens": decision.latents["tokens"][:1]})
    tokens, (chances,) = decision.latents["tokens"], scores.extras["log_probabilities"].exp()
    counts = torch.nn.functional.one_hot(tokens, 3).float().mean(0)
    torch.testing.assert_close(counts, chances.detach(), atol=0.03, rtol=0)
    torch.testing.assert_close(decision.actions[:, 0], tokens.float() - 1)  # bins of an untouched normaliser: -1, 0, 1
    assert policy.act(observation, torch.Generator(), deterministic=True).latents["tokens"][0].tolist() == (
        chances.argmax(-1).tolist()
    )


@pytest.mark.checks("ReLIC")
@pytest.mark.long
def test_imitation_learns_to_repeat_what_was_shown_four_steps_ago():
    """A cue is seen in the oldest frame alone; without that frame nothing is better than chance, 1/3."""
    draw = torch.Generator().manual_seed(0)

    def batch(rows=256, history=5):
        states, cue = torch.randn(rows, 5, 2, generator=draw), torch.randint(3, (rows,), generator=draw) - 1
        states[:, 0, 0] = 5.0 * cue
        actions = cue[:, None, None].expand(-1, 1, 2).float()
        return {"observation": {STATE: states[:, -history:]}, "actions": actions, "action_valid": actions[..., 0] < 9}

    shares = []
    for history in (5, 4):
        policy = made(chunk=1, history=history)
        optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
        for _ in range(150):
            optimiser.zero_grad()
            policy.loss(batch(history=history), draw)["tokens"].mean().backward()
            optimiser.step()
        test = batch(1000, history)
        acted = policy.act(test["observation"], draw, deterministic=True)
        shares.append(float((acted.actions == test["actions"]).float().mean()))
    assert shares[0] > 0.95 and shares[1] < 0.45


@pytest.mark.checks("ReLIC")
def test_a_server_remembers_per_robot_and_forgets_with_the_episode():
    policy = made()
    frames = torch.randn(7, 2)
    robots = {name: Session(policy.spec) for name in ("one", "other")}
    seen = {}
    for step, frame in enumerate(frames.numpy()):
        seen["one"] = robots["one"].observe({STATE: frame})
        seen["other"] = robots["other"].observe({STATE: -frame})
        if step == 4:
            robots["other"].reset()

    def said(window):
        return policy.log_prob({STATE: window}, {"tokens": torch.zeros(1, 4, dtype=torch.int64)}).logp

    def served(name):
        return said(torch.tensor(seen[name][STATE]))

    torch.testing.assert_close(served("one"), said(frames[None, 2:]))
    fresh = torch.cat([-frames[5:6].expand(4, -1), -frames[6:]])[None]
    torch.testing.assert_close(served("other"), said(fresh))
    assert not torch.allclose(served("other"), said(-frames[None, 2:]))


def test_what_it_cannot_read_is_refused():
    with pytest.raises(ConfigError, match="vectors"):
        made({**FIELDS, "observation.images.top": Field((8, 8, 3), "uint8", 0, 255)})
    with pytest.raises(ConfigError, match="observation_keys"):
        made(observation_keys=("observation.other",))
    policy = made(instructions=("left", "right"))
    observation = {STATE: torch.zeros(1, 5, 2), TASK: ["up"]}
    with pytest.raises(SpecError, match="not trained on the instruction 'up'"):
        policy.act(observation, torch.Generator())
    with pytest.raises(ConfigError, match="choices"):
        policy.prepare_finetuning(3)
    assert policy.act({**observation, TASK: ["left"]}, torch.Generator()).actions.isfinite().all()
