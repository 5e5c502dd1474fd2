"""What agents learn from recorded data, each formula against loops over rows; and what all of them do alike."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.configuration import (
    AGENTS,
    CalQlConfig,
    CqlConfig,
    NeighbourIndex,
    PrdcConfig,
    ReBracConfig,
    SacConfig,
    Td3BcConfig,
)
from robopolicy.rl.offline.iql import Iql
from robopolicy.rl.offline.sac import Cql, Sac
from robopolicy.rl.offline.td3 import Prdc, ReBrac, Td3Bc

SMALL = {"width": 16, "depth": 1}
DISCOUNT = 0.99


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def decisions(count=24, state=3, action=4, seed=0):
    """Chunks of one to three steps; some end the task, of some it is not known what came next or what they led to."""
    draws = generator(seed)
    steps = torch.randint(1, 4, (count,), generator=draws)
    terminated = torch.rand(count, generator=draws) < 0.25
    known = ~terminated & (torch.rand(count, generator=draws) < 0.7)
    outcome = torch.where(torch.rand(count, generator=draws) < 0.5, torch.randn(count, generator=draws), -math.inf)
    actions, following = (torch.rand(count, action, generator=draws) * 2 - 1 for _ in range(2))
    return Transitions(
        state=5 + 3 * torch.randn(count, state, generator=draws),
        action=actions,
        reward=torch.randn(count, generator=draws),
        next_state=5 + 3 * torch.randn(count, state, generator=draws),
        terminated=terminated,
        decay=DISCOUNT ** steps.float(),
        next_action=torch.where(known[:, None], following, 7.0),
        next_known=known,
        outcome=outcome,
    )


def made(name, state=3, action=4, seed=0, **settings):
    return AGENTS.builds(name)(AGENTS.configuration(name)(**{**SMALL, **settings}), state, action, seed)


def begun(agent, data):
    agent.begin(data)
    return agent


@torch.no_grad()
def loud(agent, data):
    """Return the agent, begun, with outputs of size 1 where it begins with small ones: formulas show in them."""
    if isinstance(agent, ReBrac | Prdc):
        for part in (agent.actor, agent.slow_actor, agent.critics, agent.slow_critics):
            part.members.weights[-1].mul_(200)
    if isinstance(agent, Iql):
        for part in (agent.actor, agent.critics, agent.slow, agent.values):
            part.members.weights[-1].mul_(100)
    return begun(agent, data)


def smoothed(agent, data, seed):
    """The action of TD3's target, [B, A]."""
    noise = 0.2 * torch.randn(data.action.shape, generator=generator(seed))
    return (agent.slow_actor(data.next_state) + noise.clamp(-0.5, 0.5)).clamp(-1, 1)


@torch.no_grad()
def test_targets_of_td3_decay_by_what_a_chunk_lasts():
    data = decisions()
    agent = begun(Td3Bc(Td3BcConfig(**SMALL), 3, 4, 0), data)
    value = agent.slow_critics(data.next_state, smoothed(agent, data, 1))
    expected = [
        float(data.reward[row] + (0 if data.terminated[row] else data.decay[row] * value[:, row].min()))
        for row in range(len(data))
    ]
    assert agent.target(data, generator(1)).tolist() == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
def test_rebrac_pays_in_targets_for_leaving_what_was_done_next_where_that_is_known():
    data = decisions()
    agent = loud(ReBrac(ReBracConfig(**SMALL, beta_critic=0.3), 3, 4, 0), data)
    action = smoothed(agent, data, 1)
    value = agent.slow_critics(data.next_state, action)
    expected, combinations = [], set()
    for row in range(len(data)):
        following = float(value[:, row].min())
        if data.next_known[row]:
            following -= 0.3 * sum(float(gap) ** 2 for gap in action[row] - data.next_action[row])
        combinations.add((bool(data.terminated[row]), bool(data.next_known[row])))
        over = bool(data.terminated[row])
        expected.append(float(data.reward[row]) + (0.0 if over else float(data.decay[row]) * following))
    assert combinations == {(True, False), (False, True), (False, False)}
    assert agent.target(data, generator(1)).tolist() == pytest.approx(expected, abs=1e-5)
    free = loud(ReBrac(replace(agent.config, beta_critic=0.0), 3, 4, 0), data)
    differs = free.target(data, generator(1)) != agent.target(data, generator(1))
    assert torch.equal(differs, data.next_known & ~data.terminated)


def test_rebrac_pays_in_the_actor_for_leaving_what_was_done():
    data = decisions()
    agent = loud(ReBrac(ReBracConfig(**SMALL, beta_actor=0.7), 3, 4, 0), data)
    action = agent.actor(data.state).detach().requires_grad_()
    loss = agent.actor_loss(data, action)
    value = agent.critics(data.state, action).min(0).values
    size = sum(abs(float(each.detach())) for each in value) / len(data)
    distance = [sum(float(gap) ** 2 for gap in row) for row in (action - data.action).detach()]
    expected = sum(0.7 * far - float(q.detach()) / size for far, q in zip(distance, value, strict=True)) / len(data)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
    (slope,) = torch.autograd.grad(loss, action)
    (climb,) = torch.autograd.grad(value.sum(), action)  # the size of Q is held fixed
    assert torch.allclose(slope, (2 * 0.7 * (action - data.action) - climb / size).detach() / len(data), atol=1e-6)


def test_rebrac_refuses_data_that_does_not_say_what_was_done_next():
    data = decisions()
    agent = ReBrac(ReBracConfig(**SMALL), 3, 4, 0)
    for lacking in (replace(data, next_action=None), replace(data, next_known=torch.zeros_like(data.terminated))):
        with pytest.raises(DataError, match="beta_critic=0"):
            agent.begin(lacking)
    with pytest.raises(DataError, match="next_action"):
        agent.update(replace(data, next_action=None), generator())
    begun(ReBrac(ReBracConfig(**SMALL, beta_critic=0.0), 3, 4, 0), replace(data, next_action=None)).update(
        replace(data, next_action=None), generator()
    )
    over = torch.ones_like(data.terminated)
    agent.begin(replace(data, terminated=over, next_known=~over))  # nothing follows anywhere: nothing to be known


def conservative_gap(agent, data, seed, calibrated):
    """Return the sum over critics of the mean of log sum exp(Q - log density) - Q(s, a), row by row."""
    draws, samples = generator(seed), agent.config.samples
    uniform = 2 * torch.rand(samples, *data.action.shape, generator=draws) - 1
    ahead = {}
    for name, state in (("here", data.state), ("next", data.next_state)):
        mean, spread = agent.actor.parameters_of(state)
        raw = mean + spread.exp() * torch.randn(samples, *mean.shape, generator=draws)
        density = torch.distributions.Normal(mean, spread.exp()).log_prob(raw) - (1 - raw.double().tanh() ** 2).log()
        ahead[name] = raw.tanh(), density.sum(-1)
    total = 0.0
    for critic in range(agent.config.critics):
        for row in range(len(data)):
            terms = []
            for k in range(samples):
                q = float(agent.critics(data.state[row : row + 1], uniform[k, row : row + 1])[critic])
                terms.append(q + data.action.shape[1] * math.log(2))  # a box of volume 2^A
                for actions, density in ahead.values():
                    q = float(agent.critics(data.state[row : row + 1], actions[k, row : row + 1])[critic])
                    terms.append((max(q, float(data.outcome[row])) if calibrated else q) - float(density[k, row]))
            recorded = float(agent.critics(data.state[row : row + 1], data.action[row : row + 1])[critic])
            total += (math.log(sum(math.exp(term) for term in terms)) - recorded) / len(data)
    return total


@torch.no_grad()
@pytest.mark.parametrize("config", [CqlConfig, CalQlConfig])
def test_the_conservative_term_against_a_loop(config):
    data = decisions(8, action=2)
    agent = begun(Cql(config(**SMALL, samples=3, alpha=2.0), 3, 2, 0), data)
    term, figures = agent.regulariser(data, agent.critics(data.state, data.action), generator(4))
    expected = conservative_gap(agent, data, 4, calibrated=config is CalQlConfig)
    assert float(term) == pytest.approx(2 * expected, rel=1e-4)
    assert float(figures["conservative_gap"]) == pytest.approx(expected / 2, rel=1e-4)
    other = conservative_gap(agent, data, 4, calibrated=config is not CalQlConfig)
    assert abs(other - expected) > 1e-3  # the loop can tell them apart


@torch.no_grad()
def test_weighted_samples_measure_the_whole_box():
    agent = Cql(CqlConfig(**SMALL, samples=4000), 1, 1, 0)
    agent.actor.members.weights[-1].mul_(0.2)
    state = torch.full((1, 1), 0.3)
    data = Transitions(state, torch.zeros(1, 1), torch.zeros(1), state, torch.zeros(1, dtype=torch.bool))
    gap = float(agent.regulariser(data, agent.critics(data.state, data.action), generator())[1]["conservative_gap"])
    grid = torch.linspace(-1, 1, 2001)[:, None]
    value = agent.critics(state.expand(len(grid), -1), grid)
    integral = torch.trapezoid(value.exp(), grid[:, 0]).log() - agent.critics(state, data.action)[:, 0]
    assert gap - math.log(3 * 4000) == pytest.approx(float(integral.mean()), abs=0.02)


def slopes(agent, data):
    term, _ = agent.regulariser(data, torch.zeros(agent.config.critics, len(data)), generator(2))
    return torch.autograd.grad(term, list(agent.critics.parameters()))


def test_cal_ql_lets_go_of_the_actors_samples_below_the_recorded_return_and_of_no_others():
    data = decisions(8, action=2)
    cql, cal_ql = (Cql(config(**SMALL, samples=5), 3, 2, 0) for config in (CqlConfig, CalQlConfig))
    hidden = replace(data, outcome=torch.full_like(data.reward, -math.inf))  # a time limit ended every episode
    for one, two in zip(slopes(cql, data), slopes(cal_ql, hidden), strict=True):
        assert torch.equal(one, two)
    # A return above every Q: the softmax still has its weight, but only uniform samples are pushed.
    cal_ql.critics.requires_grad_(False)
    kept = {}
    for level in (-math.inf, 50.0):
        held = replace(data, outcome=torch.full_like(data.reward, level))
        watched_actions = []

        def watched(state, action, seen=watched_actions):
            value = torch.zeros(2, len(action)).requires_grad_()
            seen.append(value)
            return value

        agent = Cql(cal_ql.config, 3, 2, 0)
        agent.critics.forward = watched
        term, figures = agent.regulariser(held, torch.zeros(2, len(data)), generator(2))
        kept[level] = torch.autograd.grad(term, watched_actions)[0].unflatten(1, (15, 8)).abs().amin((0, 2))
        assert float(figures["calibrated"]) == float(level > 0)
    assert bool((kept[-math.inf] > 0).all())
    assert bool((kept[50.0][:5] > 0).all()) and not bool(kept[50.0][5:].any())


def test_the_conservative_term_leaves_the_actor_alone_and_none_is_plain_sac():
    data = decisions()
    agent = Cql(CqlConfig(**SMALL), 3, 4, 0)
    term, _ = agent.regulariser(data, agent.critics(data.state, data.action), generator())
    term.backward()
    assert all(parameter.grad is None for parameter in agent.actor.parameters())
    free = Cql(CqlConfig(**SMALL, alpha=0.0), 3, 4, 0)
    alike = {"entropy_backup": False, "actor_learning_rate": 1e-4, "temperature": free.config.temperature}
    plain = Sac(SacConfig(**SMALL, critics=2, diversity=0.0, **alike), 3, 4, 0)
    for each in (free, plain):
        begun(each, data).update(data, generator(1))
    for one, two in zip(free.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@torch.no_grad()
def test_targets_without_entropy():
    data = decisions()
    agent = begun(Cql(CqlConfig(**SMALL), 3, 4, 0), data)
    action, _ = agent.actor.sample(data.next_state, generator(1))
    value = torch.where(data.terminated, 0.0, agent.slow(data.next_state, action).amin(0))
    assert torch.allclose(agent.target(data, generator(1)), data.reward + data.decay * value, atol=1e-6)


def test_cal_ql_refuses_data_without_returns():
    data, agent = decisions(), Cql(CalQlConfig(**SMALL), 3, 4, 0)
    with pytest.raises(DataError, match="outcome"):
        agent.begin(replace(data, outcome=None))
    with pytest.raises(DataError, match="time limit"):
        agent.begin(replace(data, outcome=torch.full_like(data.reward, -math.inf)))
    with pytest.raises(DataError, match="outcome"):
        agent.update(replace(data, outcome=None), generator())
    Cql(CqlConfig(**SMALL), 3, 4, 0).update(replace(data, outcome=None), generator())


def two_by_two():
    """Two states, in units of which one deviation is 50, and two actions in each."""
    state = torch.tensor([[0.0], [0.0], [100.0], [100.0]])
    action = torch.tensor([[-0.8], [-0.2], [0.3], [0.9]])
    return Transitions(state, action, torch.zeros(4), state, torch.ones(4, dtype=torch.bool))


@pytest.mark.checks("PRDC")
@pytest.mark.parametrize(
    ("beta", "expected"), [(50.0, [-0.2, 0.3]), (0.66, [-0.2, 0.3]), (0.58, [0.9, -0.8]), (0.0, [0.9, -0.8])]
)
def test_prdc_holds_to_the_same_state_where_beta_is_large_and_to_any_where_it_is_small(beta, expected):
    """Standardised, the states are 2 apart: the other one's action wins below sqrt(1.2^2 - .1^2) / 2 = .598 (first row)
    and sqrt(1.3^2 - .2^2) / 2 = .642 (second)."""
    agent = begun(Prdc(PrdcConfig(**SMALL, beta=beta), 1, 1, 0), two_by_two())
    actions = agent.nearest(torch.tensor([[0.0], [100.0]]), torch.tensor([[1.0], [-1.0]]))
    assert actions[:, 0].tolist() == pytest.approx(expected)


@pytest.mark.checks("PRDC")
@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_prdc_finds_what_looking_at_every_row_finds(beta):
    data = decisions(300)
    agent = begun(Prdc(PrdcConfig(**SMALL, beta=beta), 3, 4, 0), data)
    asked = decisions(20, seed=1)
    mean, std = data.state.double().mean(0), data.state.double().std(0, correction=0)
    expected = []
    for state, action in zip(asked.state, asked.action, strict=True):
        apart = beta**2 * ((data.state - state) / std).square().sum(-1) + (data.action - action).square().sum(-1)
        expected.append(int(apart.argmin()))
    assert torch.equal(agent.nearest(asked.state, asked.action), data.action[expected])
    assert torch.allclose(agent.actor.state.mean.double(), mean, atol=1e-5)


@pytest.mark.checks("PRDC")
def test_prdcs_actor_climbs_and_stays_near_its_neighbour():
    data = decisions()
    agent = loud(Prdc(PrdcConfig(**SMALL, alpha=1.5), 3, 4, 0), data)
    action = agent.actor(data.state).detach().requires_grad_()
    loss = agent.actor_loss(data, action)
    near, value = agent.nearest(data.state, action), agent.critics(data.state, action)[0]
    scale = 1.5 / value.detach().abs().mean()
    (slope,) = torch.autograd.grad(loss, action)
    (climb,) = torch.autograd.grad(value.sum(), action)
    assert float(loss.detach()) == pytest.approx(
        float((-scale * value.mean() + (action - near).square().mean()).detach()), abs=1e-6
    )
    expected = -scale * climb / len(data) + 2 * (action - near).detach() / action.numel()
    assert torch.allclose(slope, expected, atol=1e-6)


@pytest.mark.checks("PRDC")
def test_approximate_neighbours_are_nearly_always_the_nearest_and_never_far():
    draws = generator()
    cause = torch.randn(5000, 4, generator=draws)  # states and actions of a manifold, as recordings are
    state = (cause @ torch.randn(4, 12, generator=draws)).tanh() + 0.05 * torch.randn(5000, 12, generator=draws)
    action = (cause @ torch.randn(4, 6, generator=draws)).tanh() + 0.1 * torch.randn(5000, 6, generator=draws)
    data = Transitions(state, action, torch.zeros(5000), state, torch.zeros(5000, dtype=torch.bool))
    exact, quick = (
        begun(Prdc(PrdcConfig(**SMALL, index=index), 12, 6, 0), data)
        for index in (NeighbourIndex.EXACT, NeighbourIndex.APPROXIMATE)
    )
    rows = torch.randint(5000, (400,), generator=draws)
    near = (action[rows] + 0.2 * torch.randn(400, 6, generator=draws)).clamp(-1, 1)
    anywhere = torch.rand(400, 6, generator=draws) * 2 - 1
    for asked, recall in ((near, 0.95), (anywhere, 0.5)):
        action_pairs = [agent.nearest(state[rows], asked) for agent in (exact, quick)]
        assert float((action_pairs[0] == action_pairs[1]).all(-1).double().mean()) >= recall
    keys = torch.cat([2 * exact.actor.state(state), action], -1)  # beta is 2
    chosen = torch.cdist(action_pairs[1], action).argmin(-1)
    asked = torch.cat([2 * exact.actor.state(state[rows]), anywhere], -1)
    apart = torch.cdist(asked, keys)
    distance = apart.gather(1, chosen[:, None])[:, 0]
    assert bool((distance <= 2 * apart.amin(-1) + 1e-4).all()) and bool((distance > apart.amin(-1) + 1e-4).any())


@pytest.mark.checks("PRDC")
def test_prdc_asks_for_its_data_anew():
    data = decisions()
    agent = Prdc(PrdcConfig(**SMALL), 3, 4, 0)
    with pytest.raises(DataError, match="begin"):
        agent.nearest(data.state, data.action)
    agent.begin(data)
    tree = agent.tree()
    assert torch.equal(agent.nearest(data.state, data.action), data.action)
    for forget in (lambda: agent.restore(tree), lambda: agent.fit_statistics(data.state / 2)):
        agent.begin(data)
        forget()
        with pytest.raises(DataError, match="restore"):
            agent.update(data, generator())
            agent.update(data, generator())


@pytest.mark.parametrize("name", AGENTS.ours)
def test_a_restored_agent_goes_on_alike(name):
    data = decisions(60)
    one, two = (begun(made(name, seed=seed), data) for seed in (0, 1))
    draws = generator()
    for _ in range(3):
        one.update(data.draw(16, draws), draws)
    saved = one.tree()
    weights = {key: value.clone() for key, value in saved["weights"].items()}
    figures = [one.update(data, generator(5)), one.update(data, generator(6))]
    assert all(torch.equal(value, saved["weights"][key]) for key, value in weights.items())  # a copy, not a view
    two.restore(saved)
    two.begin(data)
    again = [two.update(data, generator(5)), two.update(data, generator(6))]
    for before, after in zip(figures, again, strict=True):
        assert before.keys() == after.keys()
        assert all(value.dim() == 0 and torch.equal(value, after[key]) for key, value in before.items())
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key]), key
    assert torch.equal(one.act(data.state, generator(1)), two.act(data.state, generator(1)))


@pytest.mark.parametrize("name", AGENTS.ours)
def test_values_can_be_climbed_and_actions_stay_in_their_box(name):
    data = decisions(6)
    agent = loud(made(name), data).double()
    state, action = data.state.double(), data.action.double().requires_grad_()
    values = agent.action_values(state, action)
    assert values.shape == (agent.critics.count, 6)
    assert torch.autograd.gradcheck(lambda asked: agent.action_values(state, asked), (action,), eps=1e-7, atol=1e-5)
    agent.float()
    assert agent.value(data.state).shape == (6,) and agent.discount == DISCOUNT
    for draws in (None, generator()):
        acted = agent.act(data.state, draws)
        assert acted.shape == (6, 4) and bool((acted.abs() <= 1).all())
    assert torch.equal(agent.act(data.state), agent.act(data.state))


@pytest.mark.parametrize("name", AGENTS.ours)
def test_what_a_chunk_lasts_discounts_what_follows_it(name):
    data = decisions()

    def loss(**changes):
        changed = replace(data, **changes)
        return float(loud(made(name), data).update(changed, generator(1))["critic_loss"])

    per_step = loss(decay=None)
    assert loss(decay=torch.full_like(data.reward, DISCOUNT)) == pytest.approx(per_step, rel=1e-6)
    assert loss() != pytest.approx(per_step, rel=1e-4)
    nothing_follows = loss(decay=torch.zeros_like(data.reward))
    assert loss(terminated=torch.ones_like(data.terminated)) == pytest.approx(nothing_follows, rel=1e-6)


@pytest.mark.parametrize("name", ["td3_bc", "rebrac", "prdc"])
def test_the_actor_of_td3_moves_at_every_other_step(name):
    data = decisions()
    agent = begun(made(name), data)
    moved = []
    for _ in range(4):
        before = [value.clone() for part in (agent.actor, agent.slow_critics) for value in part.parameters()]
        agent.update(data, generator())
        after = [value for part in (agent.actor, agent.slow_critics) for value in part.parameters()]
        changes = {not torch.equal(old, new) for old, new in zip(before, after, strict=True) if old.abs().sum()}
        moved.append(changes)
    assert moved == [{False}, {True}, {False}, {True}]


@pytest.mark.parametrize("name", ["rebrac", "prdc"])
def test_actors_and_critics_begin_small_and_slow_copies_are_copies(name):
    data = decisions()
    agent = begun(made(name), data)
    assert float(agent.act(data.state).abs().max()) < 0.02
    assert 0 < float(agent.action_values(data.state, data.action).detach().abs().max()) < 0.06
    for part, slow in ((agent.actor, agent.slow_actor), (agent.critics, agent.slow_critics)):
        assert all(torch.equal(one, two) for one, two in zip(part.parameters(), slow.parameters(), strict=True))
        assert not any(parameter.requires_grad for parameter in slow.parameters())
    assert not torch.equal(agent.actor.members.weights[-1], made(name, seed=1).actor.members.weights[-1])


def lessons(count=1500, seed=0):
    """A bandit: the best action is s / 2; three of four recorded ones miss it by .6 above, one by about .1."""
    draws = generator(seed)
    state = torch.rand(count, 1, generator=draws) * 2 - 1
    good = torch.rand(count, 1, generator=draws) < 0.25
    action = state / 2 + torch.where(good, 0.0, 0.5) + 0.1 * torch.randn(count, 1, generator=draws)
    action = action.clamp(-1, 1)
    over = torch.ones(count, dtype=torch.bool)
    reward = 1 - 4 * (action - state / 2).square()[:, 0]
    return Transitions(state, action, reward, state, over, outcome=reward, next_action=action, next_known=~over)


LEARNING = {
    "td3_bc": {"policy_delay": 1},
    "rebrac": {"policy_delay": 1},
    "prdc": {"policy_delay": 1, "alpha": 0.5},
    "iql": {"temperature": 10.0, "expectile": 0.9},
    "cql": {"samples": 4, "alpha": 0.5, "actor_learning_rate": 5e-3, "temperature": 0.05},
    "cal_ql": {"samples": 4, "alpha": 0.5, "actor_learning_rate": 5e-3, "temperature": 0.05},
    "edac": {"critics": 8, "temperature": 0.05},
    "rlpd": {"critics": 4, "temperature": 0.05},
    "mdpo": {"critics": 8, "temperature": 0.05},
}
LONG = ("cql", "cal_ql", "edac", "rlpd", "mdpo")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in LONG)) for each in AGENTS.ours]
)
def test_agents_exceed_what_they_imitate(name):
    data = lessons()
    settings = {"width": 24, "depth": 2, "learning_rate": 5e-3, "tau": 0.05, **LEARNING[name]}
    agent = begun(made(name, 1, 1, **settings), data)
    draws = generator(1)
    for _ in range(300):
        agent.update(data.draw(64, draws), draws)
    state = torch.linspace(-0.9, 0.9, 50)[:, None]

    def earned(action):
        return float((1 - 4 * (action - state / 2).square()).mean())

    copied, mean = (
        float(data.reward.mean()),
        earned(state / 2 + 0.375),
    )  # a recorded action, and what they are on average
    assert copied < 0.3 and mean < 0.5 and earned(agent.act(state)) > 0.7


@pytest.mark.long
@pytest.mark.checks("MDPO")
def test_a_mirror_step_multiplies_the_previous_policy_by_the_exponential_of_q():
    """Q = c atanh(a) is linear before squashing, where the previous policy is N(m, s): best is N(m + t c s^2, s)."""

    class Linear(torch.nn.Module):
        def forward(self, state, action):
            return 0.3 * torch.atanh(action.clamp(-1 + 1e-6, 1 - 1e-6)).sum(-1)[None]

    agent = made("mdpo", 1, 1, width=8, depth=1, learning_rate=1e-2, temperature=0.5, mirror_steps=10**6)
    agent.critics = Linear()
    state, draws = torch.zeros(512, 1), generator(0)
    mean, spread = (float(value[0, 0]) for value in agent.previous.parameters_of(state))
    for _ in range(800):
        agent.updates += 1
        agent.climb(state, draws)
    learned_mean, learned_spread = (float(value[0, 0].detach()) for value in agent.actor.parameters_of(state))
    assert learned_mean == pytest.approx(mean + 0.3 / 0.5 * math.exp(2 * spread), abs=0.1)
    assert learned_spread == pytest.approx(spread, abs=0.1)


@pytest.mark.checks("MDPO")
def test_the_previous_policy_is_a_copy_from_time_to_time():
    agent, data = made("mdpo", 1, 1, width=8, depth=1, mirror_steps=3, policy_delay=2), lessons(64)
    begun(agent, data)
    copies = []
    for _ in range(12):
        before = copy.deepcopy(agent.previous.state_dict())
        agent.update(data.draw(16, generator(0)), generator(0))
        copies.append(any(not torch.equal(value, before[name]) for name, value in agent.previous.state_dict().items()))
    assert [place + 1 for place, copied in enumerate(copies) if copied] == [6, 12]
    with pytest.raises(ConfigError, match="learn_temperature"):
        made("mdpo", 1, 1, learn_temperature=True)


def test_what_cannot_be_is_refused():
    for config, setting in (
        (ReBracConfig, {"beta_actor": -1.0}),
        (ReBracConfig, {"beta_critic": -1.0}),
        (PrdcConfig, {"beta": -1.0}),
        (CqlConfig, {"samples": 0}),
        (CqlConfig, {"alpha": -1.0}),
        (PrdcConfig, {"policy_delay": 0}),
        (Td3BcConfig, {"alpha": -1.0}),
    ):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            config(**setting)
