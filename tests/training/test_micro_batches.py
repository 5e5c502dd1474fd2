"""A minibatch in pieces takes the step of the whole, whatever the algorithm looks at, and holds what a piece needs."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeing_toys import CAMERA, SeeingWorld, denoising_policy, token_policy
from test_composition import CONFIG, MixedWorld
from torch.multiprocessing.reductions import StorageWeakRef

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Scores
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import STATE, TASK
from robopolicy.nn.micro_batches import in_micro_batches, loss_of, recomputed, scores_of, values_of
from robopolicy.nn.precision import backward_precision, is_lowered, training_precision
from robopolicy.policies.configuration import Likelihood
from robopolicy.rl.critic import state_critic
from robopolicy.rl.experimental.side_models import QEnsemble
from robopolicy.rl.presets import PRESETS, RatioLevel
from robopolicy.training.configuration import FinetuneConfig, FitConfig, PretrainConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.fit import fit
from robopolicy.training.guidance import Guidance
from robopolicy.training.update import Learner

UNHURRIED = {"best_of_n": {"warmup": 0}}
BY_MATCHING = {"ac_flow", "afd", "fpo"}
OTHERS = [
    {"coefficient": "clip_cov", "options": {"clip_cov": {"share": 0.2}}},
    {"coefficient": "bapo"},
    {"coefficient": "min_pro"},
    {"coefficient": "hapo"},
    {"coefficient": "dcpo"},
    {"coefficient": "grpo_guard"},
    {"weight": "duration", "ratio_level": RatioLevel.EPISODE_MEAN},
    {"ratio_level": RatioLevel.DECISION_MEAN, "scored_steps": 1},
    {"auxiliaries": ("bc", "kl_base", "kl_convex")},
    {"auxiliaries": ("velocity",)},
    {"auxiliaries": ("dagger",), "coefficient": "none"},
    {"auxiliaries": ("distill",), "options": {"distill": {"share": 0.5}}},
    {"auxiliaries": ("entropy",)},
    {
        "auxiliaries": ("spo", "best_of_n"),
        "models": ("q_ensemble",),
        "options": UNHURRIED | {"spo": {"warmup": 0, "gap": 0.0}},
    },
    {"proximal_policy": "average", "algorithm": "ppo"},
    {"algorithm": "ppo", "target_kl": 1e-6},
    {"algorithm": "ppo", "props_parts": 2},
]
ONLY = {"hapo": "tokens", "dcpo": "tokens", "dagger": "tokens", "entropy": "tokens", "velocity": "denoising"}
ONLY |= {"grpo_guard": "denoising", "spo": "denoising"}
"""dagger's regression draws noise for each piece: only where there is none is the gradient the same."""


def kind_of(changes: dict) -> str:
    named = [changes.get("coefficient"), *changes.get("auxiliaries", ())]
    return next((ONLY[name] for name in named if name in ONLY), "tokens")


def learned(kind: str, changes: dict, rows: int, monkeypatch) -> tuple[dict[str, float], list[torch.Tensor], set[int]]:
    """Return figures and gradients of one update, of a policy that has moved since it acted, and rows seen at once."""
    world = MixedWorld(6)
    make = token_policy if kind == "tokens" else denoising_policy
    scored = {"likelihood": Likelihood.MATCHING} if kind == "matching" else {}
    policy, teacher = make(world, cameras=True, **scored), make(world, seed=1, cameras=True, **scored)
    for each in (policy, teacher):
        each.prepare_finetuning()
    torch.manual_seed(0)
    critic = state_critic(world.spec.observation, 1, width=8, instructions=world.spec.instructions)
    torch.nn.init.normal_(critic.layers[-1].weight)
    results, at_once, plain, score = {}, set(), Learner.update, type(policy).log_prob

    def watched(self, observation, latents):
        if torch.is_grad_enabled() and self is policy:
            at_once.add(len(observation[TASK]))
        return score(self, observation, latents)

    def update(self, *arguments, **options):
        draws = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in self.parameters:
                weight.add_(0.05 * torch.randn(weight.shape, generator=draws))
        at_once.clear()
        results["figures"] = plain(self, *arguments, **options)
        weights = [*self.parameters, *self.critic_parameters]
        results["gradients"] = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        return results["figures"]

    # One minibatch an update: after a step Adam would make much of the rounding of gradients that are next to zero.
    settings = {"target_kl": None, "minibatch": 1000, "minibatch_episodes": 1000, "micro_batch": rows, **changes}
    config = replace(CONFIG, **settings, gradient_clip=1e6)
    with monkeypatch.context() as patched:
        patched.setattr(type(policy), "log_prob", watched)
        patched.setattr(Learner, "update", update)
        patched.setattr(QEnsemble, "values", lambda self, observation: torch.full((len(observation[STATE]),), -9.0))
        finetune(policy, critic, world, config, guidance=Guidance(teacher))
    return results["figures"], results["gradients"], set(at_once)


def require_equal(kind: str, changes: dict, rows: int, monkeypatch) -> None:
    whole, gradients, _ = learned(kind, changes, 0, monkeypatch)
    figures, again, at_once = learned(kind, changes, rows, monkeypatch)
    assert figures == pytest.approx(whole, rel=1e-4, abs=1e-5)
    assert max(at_once) <= rows
    size = max(float(gradient.abs().max()) for gradient in gradients)
    assert size > 0 or whole["kl_stop"]
    for one, other in zip(gradients, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * size)


def some(names, quick):
    """Return the cases of which those beside `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some(PRESETS, {"dppo", "gspo", "grape", "fpo", "prime"}))
def test_the_step_of_every_algorithm_is_the_whole_minibatchs(name, monkeypatch):
    kind = "matching" if name in BY_MATCHING else "denoising"
    options = UNHURRIED if name == "digi_q" else {}
    require_equal(kind, {"algorithm": name, "options": options}, 5, monkeypatch)


@pytest.mark.parametrize("number", some(range(len(OTHERS)), {0, 8, 10, 14, 15}), ids=lambda number: f"other {number}")
def test_the_step_of_other_mechanisms_is_the_whole_minibatchs(number, monkeypatch):
    require_equal(kind_of(OTHERS[number]), OTHERS[number], 4, monkeypatch)


def seen(policy, rows: int) -> dict:
    draws = torch.Generator().manual_seed(2)
    images = torch.randint(256, (rows, 1, *policy.spec.observation[CAMERA].shape), generator=draws, dtype=torch.uint8)
    texts = ["go left" if row % 3 else "go right" for row in range(rows)]
    return {STATE: torch.randn(rows, 1, 2, generator=draws), CAMERA: images, TASK: texts}


POLICIES = {
    "tokens": token_policy(SeeingWorld(1), cameras=True),
    "denoising": denoising_policy(SeeingWorld(1), cameras=True),
    "matching": denoising_policy(SeeingWorld(1), cameras=True, likelihood=Likelihood.MATCHING),
}
for each in POLICIES.values():
    each.prepare_finetuning()


def gradient(policy, loss: torch.Tensor) -> torch.Tensor:
    policy.zero_grad(set_to_none=True)
    loss.backward()
    grads = [weight.grad for weight in policy.trainable_parameters() if weight.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


@settings(deadline=None, max_examples=20)
@given(kind=st.sampled_from(list(POLICIES)), rows=st.integers(1, 9), at_once=st.integers(0, 10))
def test_scores_and_gradients_are_those_of_the_whole(kind, rows, at_once):
    policy = POLICIES[kind]
    observation = seen(policy, rows)
    latents = policy.act(observation, torch.Generator().manual_seed(3)).latents
    results_of_pieces: list[tuple[Scores, torch.Tensor]] = []
    for size in (0, at_once):
        with in_micro_batches(size):
            scores = scores_of(policy, observation, latents)
        loss = scores.logp.square().mean() + scores.entropy.mean() + sum(e.mean() for e in scores.extras.values())
        results_of_pieces.append((scores, gradient(policy, loss)))
    (whole, expected), (parts, again) = results_of_pieces
    for name in ("logp", "entropy"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6)
    assert set(parts.extras) == set(whole.extras)
    for name, value in whole.extras.items():
        torch.testing.assert_close(*torch.broadcast_tensors(parts.extras[name], value))
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-6)


def test_a_loss_in_pieces_is_computed_again_from_the_same_draws():
    policy, rows = POLICIES["denoising"], 6
    batch = {
        "observation": seen(policy, rows),
        "actions": torch.rand(rows, 1, 2),
        "action_valid": torch.ones(rows, 1, dtype=torch.bool),
    }
    with in_micro_batches(4):
        losses = loss_of(policy, batch, torch.Generator().manual_seed(0))["denoising"]
    surrogate_gradient = gradient(policy, losses.sum())
    seeds = torch.randint(2**62, (2,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = []
    for part, seed in zip((slice(0, 4), slice(4, 6)), seeds, strict=True):
        rest = {key: value[part] for key, value in batch["observation"].items()}
        piece = {key: value[part] for key, value in batch.items() if key != "observation"} | {"observation": rest}
        expected.append(policy.loss(piece, torch.Generator().manual_seed(seed))["denoising"])
    expected = torch.cat(expected)
    assert torch.equal(losses, expected)
    torch.testing.assert_close(surrogate_gradient, gradient(policy, expected.sum()))


def test_values_of_a_critic_are_those_of_the_whole():
    critic = state_critic({STATE: SeeingWorld(1).spec.observation[STATE]}, 1, width=8)
    torch.nn.init.normal_(critic.layers[-1].weight)
    observation = {STATE: torch.randn(7, 1, 2)}
    whole = critic(observation)
    with in_micro_batches(3):
        torch.testing.assert_close(values_of(critic, observation), whole)


def test_activations_of_one_piece_are_held_at_a_time():
    weight, held, alive = torch.nn.Parameter(torch.ones(())), [], []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            activation = x * weight
            ctx.save_for_backward(activation)
            held.append(StorageWeakRef(activation.untyped_storage()))
            return activation.clone()

        @staticmethod
        def backward(ctx, *grads):
            (activation,) = ctx.saved_tensors
            alive.append(sum(not ref.expired() for ref in held))
            return None, (grads[0] * activation).sum()

    def critic(observation):
        return Kept.apply(observation[STATE], weight)

    rows = {STATE: torch.ones(12)}
    critic(rows).sum()
    held.clear()
    with in_micro_batches(3):
        values_of(critic, rows).sum().backward()
    assert alive == [1, 1, 1, 1] and float(weight.grad) == 12


def test_what_is_computed_again_is_so_in_the_precision_it_was():
    lowered, x = [], torch.randn(8, 8, requires_grad=True)

    def network(value):
        lowered.append(is_lowered())
        return ((value @ value).sin() @ value).sum()

    def found(precision, function):
        x.grad = None
        with training_precision(precision):
            made = function(x)
        with backward_precision(precision):
            made.backward()
        return made.detach(), x.grad

    for precision in ("fp32", "bf16", "bf16_backward"):
        lowered.clear()
        made, gradients = found(precision, lambda value: recomputed(network, value))
        assert lowered == [precision == "bf16"] * 2
        expected = found(precision, network)
        assert torch.equal(made, expected[0]) and torch.equal(gradients, expected[1])


@pytest.mark.parametrize("kind", ["tokens", "denoising"])
def test_pretraining_in_pieces_takes_the_steps_of_whole_batches(kind, monkeypatch):
    """Of a policy whose loss draws nothing; others draw for each piece, and see as many samples at once."""

    def learned(micro_batch: int) -> tuple[float, torch.Tensor, set[int]]:
        make = token_policy if kind == "tokens" else denoising_policy
        policy, at_once = make(SeeingWorld(1), cameras=True), set()
        batch = {
            "observation": seen(policy, 10),
            "actions": torch.linspace(-1, 1, 20).reshape(10, 1, 2),
            "action_valid": torch.ones(10, 1, dtype=torch.bool),
        }
        loss = policy.loss
        monkeypatch.setattr(policy, "loss", lambda part, draws: at_once.add(len(part["actions"])) or loss(part, draws))
        config = FitConfig(steps=2, warmup=1, learning_rate=1e-2, ema_decay=0.0)
        result = fit(policy, iter([batch] * 2), config, Generators(0), micro_batch=micro_batch)
        return (
            next(iter(result.losses.values())),
            torch.cat([each.detach().flatten() for each in policy.parameters()]),
            at_once,
        )

    whole, weights, _ = learned(0)
    loss, learned_weights, at_once = learned(4)
    assert at_once == {4, 2}
    if kind == "tokens":
        assert loss == pytest.approx(whole, rel=1e-5)
        assert float((learned_weights - weights).abs().mean()) < 1e-5
    else:
        assert math.isfinite(loss) and loss != whole


def test_a_negative_size_is_refused():
    for config in (FinetuneConfig, PretrainConfig):
        with pytest.raises(ConfigError, match="micro_batch=-1"):
            config(micro_batch=-1)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_no_more_decisions_are_scored_at_once_than_a_step_has(algorithm, monkeypatch):
    """Without gradient as with it: what is checked, and compared with a reference, would else not fit into memory."""
    policy, rows = denoising_policy(SeeingWorld(4)), []
    policy.prepare_finetuning()
    scored = policy.log_prob
    monkeypatch.setattr(policy, "log_prob", lambda seen, latents: rows.append(len(seen[TASK])) or scored(seen, latents))
    given = {"group_size": 2, "groups": 2, "minibatch_episodes": 1} if algorithm == "grpo" else {"minibatch": 8}
    config = replace(CONFIG, algorithm=algorithm, auxiliaries=("kl_base",), rollout_length=8, iterations=1, **given)
    world = SeeingWorld(4)
    critic = state_critic({STATE: world.spec.observation[STATE]}, 1, width=8) if algorithm == "ppo" else None
    finetune(policy, critic, world, config)
    assert len(rows) > 4 and max(rows) <= 8
