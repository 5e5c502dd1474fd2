"""Digi-Q (arXiv:2502.15760): action values by temporal differences on data of older policies, best of N imitated."""

from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts
from torch import Tensor, nn

from robopolicy.core.policy import Decision, Scores
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.spec import STATE, Field
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import AuxiliaryInputs, Context, Tools
from robopolicy.rl.experimental.auxiliaries import best_of_n
from robopolicy.rl.experimental.side_models import FirstError, QEnsemble, td_target
from robopolicy.training.state import load_trainer, save_trainer


class Drawing(nn.Module):
    """Its decisions are always the same action; the log-probability of action a is -(a - mean)^2."""

    def __init__(self, action: float = 1.0):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(()))
        self.action, self.asked = action, 0
        self.spec = SimpleNamespace(chunk=2, action=Field((1,)), cameras=())

    def act(self, observation, generator, *, deterministic=False) -> Decision:
        rows = len(observation[STATE])
        self.asked += rows
        assert len(observation["task"]) == rows
        actions = torch.full((rows, 2, 1), self.action)
        return Decision(actions, {"action": actions[:, 0]}, torch.zeros(rows, 1), torch.ones(rows, 1, dtype=torch.bool))

    def log_prob(self, observation, latents) -> Scores:
        logp = -(latents["action"] - self.mean).square()
        return Scores(logp, torch.zeros_like(logp))


def tools(policy: nn.Module) -> Tools:
    def observe(rollouts, where):
        return {STATE: rollouts.observation[STATE][where], "task": [""] * int(where.sum())}

    return Tools(policy, None, None, {STATE: Field((3,))}, 1, ("",), observe, lambda *_: None)  # type: ignore[arg-type]


def context(seed: int = 0) -> Context:
    return Context(torch.Generator().manual_seed(seed), discount=0.5)


def corridor(count: int, seed: int = 0, mark: float = 0.0) -> Rollouts:
    """Two decisions of two steps, A then B; at B the action's sign pays 1 or 0, at A nothing depends on it.

    Behaviour: either sign at random. state: [which, mark, 0].
    """
    rollouts = make_rollouts([2] * count, list(range(count)), [0.0] * count, seed=seed)
    sign = torch.where(torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) < 0.5, -1.0, 1.0)
    rollouts.actions[:] = sign[..., None, None]
    state = torch.tensor([[-1.0, mark, 0.0], [1.0, mark, 0.0]])[None, :, None]
    rollouts.observation[STATE][:] = state
    rollouts.next_observation[STATE][:] = state.flip(1)
    paid = (sign[:, 1] > 0).float()
    rollouts.rewards["reward"][:, 1, 1] = paid
    rollouts.success[:, 1] = paid > 0
    return rollouts


@pytest.mark.checks("models/q_ensemble", "advantage/q_values", "Digi-Q")
def test_targets_by_hand():
    reward, decay = torch.tensor([1.0, 0.25, -1.0]), torch.tensor([0.81, 0.9, 0.81])
    following, over = torch.tensor([2.0, 5.0, -1.0]), torch.tensor([False, True, False])
    targets = td_target(reward, decay, following, over)
    torch.testing.assert_close(targets, torch.tensor([2.62, 0.25, -1.81]))


@pytest.mark.checks("models/q_ensemble", "advantage/q_values", "Digi-Q")
def test_values_are_of_the_actions_that_the_policy_draws_whoever_made_the_data():
    """Behaviour wins half the time at B; the policy would always win. Q(A) = .5^2 V(B), V(B) = Q(B, +1) = 1."""
    policy = Drawing(1.0)
    torch.manual_seed(0)
    model = QEnsemble(tools(policy), target="td", epochs=80, minibatch=256, width=16, tau=0.2, rate=1e-2)
    model.annotate(corridor(32), context())
    annotated_rollouts = model.annotate(corridor(32, seed=1), context(1))
    assert policy.asked == 2 * 32 + 2 * 64  # today's decisions, and as many of before
    v, q = annotated_rollouts.extras["v"], annotated_rollouts.extras["q"]
    assert float((v[:, 1] - 1.0).abs().max()) < 0.15  # the recorded actions alone would say .5
    assert float((q[:, 0] - 0.25).abs().max()) < 0.1  # the recorded continuation would say .125
    won = corridor(32, seed=1).row_success
    assert float((q[won, 1] - 1.0).abs().max()) < 0.15
    assert float(q[~won, 1].abs().max()) < 0.15


def seen_marks(model: QEnsemble, rollouts: Rollouts, seed: int) -> Tensor:
    """The marks of all rows that Q learns from in one call."""
    marks: list[Tensor] = []
    plain = model.network.members

    def spy(observation, actions):
        if torch.is_grad_enabled():
            marks.append(observation[STATE][:, 0, 1])
        return plain(observation, actions)

    model.network.members = spy  # type: ignore[method-assign]
    model.annotate(rollouts, context(seed))
    del model.network.members
    return torch.cat(marks)


@pytest.mark.checks("models/q_ensemble", "advantage/q_values", "Digi-Q")
def test_earlier_decisions_are_learned_from_and_the_oldest_make_room():
    model = QEnsemble(tools(Drawing()), target="td", epochs=1, width=8, capacity=24)
    assert seen_marks(model, corridor(8, mark=0.0), 0).unique().tolist() == [0.0]
    second = seen_marks(model, corridor(8, mark=1.0), 1)
    assert (second == 0.0).sum() == (second == 1.0).sum() == 16
    third = seen_marks(model, corridor(8, mark=2.0), 2)
    assert (third == 2.0).sum() == 16
    assert (third < 2.0).sum() == 16
    assert len(model.tree()["replayed"]["reward"]) == 24
    fourth = seen_marks(model, corridor(8, mark=3.0), 3)
    assert set(fourth.tolist()) == {1.0, 2.0, 3.0}  # 8 of the second call's and 16 of the third's were left
    fresh = QEnsemble(tools(Drawing()), target="td", epochs=1, width=8, replayed=0.0)
    for call in range(3):
        assert seen_marks(fresh, corridor(8, mark=float(call)), call).unique().tolist() == [float(call)]
    assert fresh.tree()["replayed"] == {}


@pytest.mark.checks("models/q_ensemble", "advantage/q_values", "Digi-Q")
def test_a_checkpoint_goes_on_byte_for_byte_with_what_was_kept(tmp_path):
    def make() -> QEnsemble:
        torch.manual_seed(0)
        return QEnsemble(tools(Drawing()), target="td", epochs=2, width=8, minibatch=16, capacity=40)

    whole, first, second = make(), make(), make()
    for model in (whole, first):
        for call in range(3):
            model.annotate(corridor(8, seed=call), context(call))
    save_trainer(tmp_path / "saved", {"model": first.tree()})
    second.restore(load_trainer(tmp_path / "saved")["model"])  # type: ignore[index]
    a, b = (model.annotate(corridor(8, seed=9), context(9)) for model in (whole, second))
    assert torch.equal(a.extras["q"], b.extras["q"])
    assert torch.equal(a.extras["v"], b.extras["v"])


@pytest.mark.checks("models/q_ensemble", "PAV")
def test_actions_that_do_not_matter_are_no_progress_on_average():
    """A minimum over members would lie below V everywhere, and a prover would charge every decision for it."""
    rollouts = corridor(256)
    rollouts.success[:, 1] = torch.rand(256, generator=torch.Generator().manual_seed(0)) < 0.5
    model = QEnsemble(tools(Drawing()))
    rollouts = model.annotate(rollouts, context())
    gain = rollouts.extras["q"] - rollouts.extras["v"]
    assert float(gain.mean()) == pytest.approx(0.0, abs=1e-6) and float(gain.std()) > 1e-4
    observation = {STATE: rollouts.observation[STATE].flatten(0, 1)}
    with torch.no_grad():
        members = model.network.members(observation, rollouts.actions.flatten(0, 1))
    torch.testing.assert_close(rollouts.extras["q"].flatten(), members.mean(0))


@pytest.mark.checks("models/q_ensemble", "advantage/q_values", "Digi-Q")
def test_the_preset_learns_by_differences_from_kept_data_and_imitates_the_best():
    algorithm = build_algorithm(AlgorithmConfig(algorithm="digi_q"))
    options = algorithm.models["q_ensemble"].keywords  # type: ignore[attr-defined]
    assert options["target"] == "td"
    assert list(algorithm.auxiliaries) == ["best_of_n"]
    model = algorithm.models["q_ensemble"](tools(Drawing()))
    model.annotate(corridor(4), context())  # type: ignore[attr-defined]
    assert len(model.tree()["replayed"]["reward"]) == 8


@pytest.mark.checks("auxiliaries/best_of_n", "Digi-Q")
def test_the_best_of_n_is_imitated_where_it_beats_the_state():
    class Choosing(Drawing):
        def act(self, observation, generator, *, deterministic=False) -> Decision:
            decision = super().act(observation, generator)
            candidate = torch.arange(len(decision.actions)) // 3  # three candidates of three states
            actions = torch.tensor([0.5, -2.0, 1.5])[candidate][:, None, None].expand_as(decision.actions)
            return Decision(actions, {"action": actions[:, 0]}, decision.logp, decision.mask)

    class Known:
        def values(self, observation):
            return torch.tensor([1.0, 1.0, 4.0])[observation[STATE][:, 0, 0].long()]

        def action_values(self, observation, actions):
            return actions[:, 0, 0].square()  # -2 is best, worth 4: no more than the third state

        def annotate(self, rollouts, context):
            return rollouts

        def tree(self):
            return {}

        def restore(self, tree):
            pass

    policy = Choosing()
    inputs = AuxiliaryInputs(
        observation={STATE: torch.tensor([0.0, 1.0, 2.0])[:, None, None], "task": [""] * 3},
        latents={},
        mask=torch.ones(3, 1, dtype=torch.bool),
        scores=Scores(torch.zeros(3, 1), torch.zeros(3, 1)),
        policy=policy,  # type: ignore[arg-type]
        context=Context(torch.Generator().manual_seed(0), iteration=2),
        models={"known": Known()},  # type: ignore[dict-item]
    )
    loss = best_of_n(inputs, candidates=3)
    # Two states of three imitate -2: (-2 - mean)^2 of each over three states, whose gradient at mean 0 is 4 a state.
    assert loss.item() == pytest.approx(8 / 3)
    (gradient,) = torch.autograd.grad(loss, policy.mean)
    assert gradient.item() == pytest.approx(8 / 3)


@pytest.mark.checks("models/q_ensemble", "IGPO")
def test_held_out_values_are_predicted_before_their_outcomes_are_learned():
    rollouts, plain, held_out = corridor(64), QEnsemble(tools(Drawing())), QEnsemble(tools(Drawing()), held_out=True)
    held_out.restore(plain.tree())
    # Of the same weights: what one has predicted after training is what the other predicts next.
    after = plain.annotate(rollouts, context())
    before = held_out.annotate(rollouts, context())
    assert not torch.allclose(before.extras["v"], after.extras["v"], atol=0.05)
    following = held_out.annotate(rollouts, context())
    torch.testing.assert_close(following.extras["v"], after.extras["v"])


@pytest.mark.checks("models/q_ensemble", "IGPO")
def test_before_its_first_outcomes_a_held_out_model_tells_no_decisions_apart():
    """Weights as they were drawn would credit decisions at random: the reward is the outcome alone."""
    rollouts = corridor(64)
    model = QEnsemble(tools(Drawing()), held_out=True)
    annotated = model.annotate(rollouts, context())
    rate = rollouts.row_success.float().mean()
    assert 0 < float(rate) < 1
    for name in ("q", "v"):
        torch.testing.assert_close(annotated.extras[name], torch.where(rollouts.alive, rate, 0.0))
    resumed = QEnsemble(tools(Drawing()), held_out=True)
    resumed.restore(model.tree())
    learned = model.annotate(rollouts, context()).extras["v"]
    assert not torch.allclose(learned[rollouts.alive], rate)
    torch.testing.assert_close(resumed.annotate(rollouts, context()).extras["v"], learned)


@pytest.mark.checks("models/first_error", "InT")
def test_the_first_error_of_a_failure_is_where_the_value_first_falls():
    rollouts = make_rollouts([4, 4, 3, 2], [0] * 4, [0.0, 1.0, 0.0, 0.0])
    values = torch.tensor([[0.6, 0.6, 0.3, 0.2], [0.6, 0.1, 0.1, 0.1], [0.5, 0.5, 0.5, 0.9], [0.1, 0.1, 0.9, 0.9]])
    marked = FirstError(None).annotate(rollouts.with_extras(v=values), context())  # type: ignore[arg-type]
    # It led from .6 to .3; a success has none; a failure may come of the last decision; one was lost before it began.
    assert marked.extras["first_error"].tolist() == [
        [False, True, False, False],
        [False] * 4,
        [False, False, True, False],
        [False] * 4,
    ]
    # What the student did before it; nothing where no error is found.
    assert marked.extras["before_error"].tolist() == [
        [True, False, False, False],
        [False] * 4,
        [True, True, False, False],
        [False] * 4,
    ]
