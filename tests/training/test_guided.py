"""Synthetic data for the critic: drawn and guided towards the policy, or imagined in short rollouts (RAVL)."""

from dataclasses import replace

import pytest
import torch

from robopolicy.building.policies import load_policy
from robopolicy.cli import main
from robopolicy.configuration.composition import compose
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK, Field, PolicySpec, WorldSpec
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.rl.offline.decisions import recorded_decisions
from robopolicy.rl.offline.interface import Interface
from robopolicy.training.offline.configuration import GuidedConfig
from robopolicy.training.offline.guided import GuidedGenerator, as_episodes, decided
from robopolicy.verbs import offline
from robopolicy.verbs.offline import imagined_episodes
from worldmodels import save_world_model
from worldmodels.configuration import EnsembleConfig, TrajectoryConfig
from worldmodels.ensemble import EnsembleModel
from worldmodels.trajectory_diffusion import TrajectoryDiffusion

FIELDS = {STATE: Field((1,)), ENVIRONMENT_STATE: Field((1,))}
ACTION = Field((1,), low=-1.0, high=1.0)
CAMERA = "observation.images.top"


def walks(count=24, length=10) -> Episodes:
    """A point moves by a tenth of its actions, which are anything; it succeeds beyond 0.3."""
    draws, steps = torch.Generator().manual_seed(0), count * length
    actions = 2 * torch.rand(count, length, 1, generator=draws) - 1
    place = torch.cat([torch.zeros(count, 1, 1), 0.1 * actions.cumsum(1)], 1)
    won = (place[:, 1:, 0] > 0.3).long().cummax(1).values.bool()
    return Episodes(
        observation_fields=FIELDS,
        action_field=ACTION,
        fps=10.0,
        observation={STATE: place.flatten(0, 1), ENVIRONMENT_STATE: torch.ones(steps + count, 1)},
        actions=actions.flatten(0, 1),
        lengths=torch.full((count,), length),
        tasks=("go",) * count,
        rewards={"progress": (place.diff(dim=1)).flatten(), "success": torch.zeros(steps)},
        step_success=won.flatten(),
        terminated=torch.zeros(count, dtype=torch.bool),
        final_known=torch.ones(count, dtype=torch.bool),
    )


class Says:
    """Decides 0.5 + 0.1 * (newest place - oldest place) + 0.01 * step of the chunk."""

    spec = PolicySpec({STATE: FIELDS[STATE]}, ACTION, 2, 3, 3, 0, 10.0, ("go",))

    def reset(self, rows=None):
        """Nothing is remembered."""

    def act(self, observation, generator, deterministic=False):
        assert observation[TASK] == ["go"] * len(observation[STATE])
        place = observation[STATE][:, :, 0]
        first = 0.5 + 0.1 * (place[:, 1] - place[:, 0])
        actions = (first[:, None] + 0.01 * torch.arange(3))[..., None]
        none = torch.zeros(len(actions), 0)
        return Decision(actions, {}, none, none.bool())


def generator_of(length=4) -> TrajectoryDiffusion:
    spec = WorldSpec("walk", FIELDS, ACTION, 10.0, 10, rewards=("progress", "success"), instructions=("go",))
    config = TrajectoryConfig(length=length, width=16, head_width=8)
    return TrajectoryDiffusion.build(config, spec, walks(), 0)


@pytest.mark.checks("Policy-Guided Diffusion")
def test_actions_are_likely_as_they_are_near_what_the_policy_decides_at_every_chunk():
    model = generator_of()
    model.std[-1] = 2.0
    place = torch.tensor([[0.0, 1.0, 2.0, 5.0], [3.0, 3.0, 3.0, 3.0]])
    states = torch.stack([place, torch.ones_like(place)], -1).flatten(0, 1)
    # A decision at step 0 (its history is the first frame twice) for steps 0 to 2, and one at step 3 for itself.
    expected = torch.tensor([[0.5, 0.51, 0.52, 0.8], [0.5, 0.51, 0.52, 0.5]])
    actions = torch.zeros(8, 1, requires_grad=True)
    logp = decided(Says(), model, "go", 0)(states, actions)
    assert torch.allclose(logp, -0.5 * (expected.flatten() / 2).square())
    (slope,) = torch.autograd.grad(logp.sum(), actions)
    assert torch.allclose(slope[:, 0], expected.flatten() / 4)


@pytest.mark.checks("Policy-Guided Diffusion")
def test_what_is_drawn_ends_with_success_and_is_cut_else(monkeypatch):
    model = generator_of()
    monkeypatch.setattr(model.heads, "succeeded", lambda state: state[:, 0] > 0.3)
    monkeypatch.setattr(model.heads, "progress", lambda before, action, after: after[:, 0] - before[:, 0])
    model.heads.bonus = 2.0
    place = torch.tensor([[0.0, 0.1, 0.4, 0.2], [0.0, 0.1, 0.2, 0.3]])
    steps = torch.stack([place, torch.ones_like(place), torch.full_like(place, 3.0)], -1)
    made = as_episodes(model, steps, walks())
    assert made.lengths.tolist() == [2, 3] and made.terminated.tolist() == [True, False]
    assert made.observation[STATE][:, 0].tolist() == pytest.approx([0.0, 0.1, 0.4, 0.0, 0.1, 0.2, 0.3])
    assert made.step_success.tolist() == [False, True, False, False, False]
    assert made.reward.tolist() == pytest.approx([0.1, 2.3, 0.1, 0.1, 0.1])
    assert made.actions[:, 0].tolist() == [1.0] * 5  # clipped to the recorded range
    decisions = recorded_decisions(Episodes.concatenate([walks(), made]), Interface(FIELDS, ACTION, chunk=2), 0.9)
    assert decisions.transitions.terminated[-5:].tolist() == [True, True, False, False, False]
    assert len(decisions) == walks().step_count + 5  # those that are cut are worth what is behind them


def drawn_for(policy, episodes: Episodes, config: GuidedConfig) -> Episodes:
    generators = Generators(0)
    return GuidedGenerator(policy, episodes, config, generators, 0).draw(policy, generators["guided"])


@pytest.mark.long
@pytest.mark.checks("Policy-Guided Diffusion")
def test_guidance_brings_what_is_drawn_nearer_to_the_policy():
    config = GuidedConfig(episodes=32, length=4, steps=30, width=32)
    drawn = {strength: drawn_for(Says(), walks(), replace(config, guidance=strength)) for strength in (0.0, 3.0)}
    assert all(len(each) == 32 and bool(each.actions.isfinite().all()) for each in drawn.values())
    distance = {strength: float((each.actions - 0.5).square().mean()) for strength, each in drawn.items()}
    assert distance[3.0] < 0.8 * distance[0.0]


def test_what_cannot_be_drawn_is_refused_with_the_reason():
    data, config = walks(), GuidedConfig(episodes=2, length=4, steps=1)
    pictures = replace(
        data,
        observation_fields={**FIELDS, CAMERA: Field((2, 2, 3), "uint8")},
        observation={**data.observation, CAMERA: torch.zeros(data.step_count + len(data), 2, 2, 3, dtype=torch.uint8)},
    )
    for given, error, text in (
        (pictures, ConfigError, "support vector observations only, but the policy reads images"),
        (replace(data, tasks=("go", *data.tasks[1:-1], "stay")), ConfigError, "need data of one task"),
        (replace(data, step_success=None), DataError, "does not record which steps succeeded"),
        (replace(data, final_known=torch.zeros(len(data), dtype=torch.bool)), DataError, "lacks final observations"),
    ):
        with pytest.raises(error, match=text):
            drawn_for(Says(), given, config)
    with pytest.raises(ConfigError, match="guidance at least 0"):
        GuidedConfig(guidance=-1.0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Recorded walks, a policy and a world model of them."""
    root = tmp_path_factory.mktemp("log")
    write_dataset(walks(), root / "data")
    config = DenoisingPolicyConfig(chunk=2, prediction_steps=2, width=8, depth=1, sampling_steps=2, denoising_steps=4)
    DenoisingPolicy(config, FIELDS, ACTION, fps=10.0, instructions=("go",)).save(root / "policy")
    spec = WorldSpec("walk", FIELDS, ACTION, 10.0, 10, rewards=("progress", "success"), instructions=("go",))
    save_world_model(EnsembleModel.build(EnsembleConfig(members=2, width=8), spec, walks(), 0), root / "model")
    return root


def settings(log, root, *more) -> list[str]:
    small = ["world=push_cube", "offline.gated=false", "offline.evaluate_episodes=0", "offline.rounds=1"]
    small += ["offline.critic.steps=2", "offline.critic.batch_size=8", "offline.improve.steps=1"]
    small += ["offline.improve.observations=8", "offline.improve.candidates=2", "offline.agent.width=8"]
    small += [f"offline.policy={log / 'policy'}", f"offline.dataset={log / 'data'}", f"run.root={root}"]
    return [*small, *more]


@pytest.mark.long
def test_guided_decisions_join_or_replace_the_recorded_ones(log, tmp_path, capsys):
    small = [
        "offline.guided.episodes=6",
        "offline.guided.length=4",
        "offline.guided.steps=2",
        "offline.guided.width=16",
    ]
    for name, text in (("recorded,guided", "recorded (170 steps), 6 guided"), ("guided", "episodes: 6 guided")):
        chosen = settings(log, tmp_path, *small, f"offline.data=[{name}]", f"run.name={name.replace(',', '_')}")
        assert main(["offline", *chosen, "offline.agent=td3_bc"]) == 0
        assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
@pytest.mark.checks("Policy-Guided Diffusion", "RAVL")
@pytest.mark.parametrize("source", ["guided", "imagined"])
def test_episodes_are_drawn_again_by_the_agent_as_it_learns(source, log, tmp_path, monkeypatch):
    acting = []
    played, drawn = offline.imagined_episodes, GuidedGenerator.draw
    monkeypatch.setattr(offline, "imagined_episodes", lambda *inputs: acting.append(inputs[1]) or played(*inputs))
    monkeypatch.setattr(GuidedGenerator, "draw", lambda *inputs: acting.append(inputs[1]) or drawn(*inputs))
    small = ["offline.guided.episodes=6", "offline.guided.length=4", "offline.guided.steps=2"]
    small += [
        "offline.guided.width=16",
        "offline.imagined_episodes=20",
        "offline.imagined_steps=4",
        f"offline.model={log / 'model'}",
    ]
    small += ["offline.critic.redraw_every=1", "offline.critic.steps=3", "offline.agent=td3_bc"]
    assert main(["offline", *settings(log, tmp_path, *small, f"offline.data=[recorded,{source}]")]) == 0
    assert [type(policy).__name__ for policy in acting] == ["DenoisingPolicy", "AgentPolicy", "AgentPolicy"]


def test_recorded_episodes_cannot_be_drawn_again(log, tmp_path, capsys):
    assert main(["offline", *settings(log, tmp_path, "offline.critic.redraw_every=1")]) == 2
    assert "set offline.data=[recorded,imagined]" in " ".join(capsys.readouterr().err.split())


@pytest.mark.checks("RAVL")
def test_ravl_learns_from_short_imagined_rollouts_whose_end_is_no_end_of_the_task(log, tmp_path, capsys):
    ravl = [
        "offline.agent=edac",
        "offline.agent.critics=3",
        "offline.data=[recorded,imagined]",
        "offline.imagined_episodes=20",
    ]
    ravl += ["offline.imagined_steps=4", f"offline.model={log / 'model'}"]
    config = compose(settings(log, tmp_path, *ravl))
    assert config.offline.agent.config.diversity > 0 and config.offline.agent.config.builds.endswith("sac:Sac")
    policy = load_policy(log / "policy")
    made = imagined_episodes(config, policy, torch.device("cpu"), "offline/imagined")
    cut = ~made.success
    assert made.lengths[cut].tolist() == [4] * int(cut.sum()) and int(cut.sum())
    assert not bool(made.terminated[cut].any()) and bool(made.final_known.all())
    begun = made.observation[STATE][made.frame_starts]
    assert bool(torch.isin(begun, walks().observation[STATE]).all()) and not bool((begun == 0).all())
    data = recorded_decisions(made, Interface(FIELDS, ACTION, chunk=2), 0.9).transitions
    last = data.next_known.logical_not() & cut[data.episode]
    assert int(last.sum()) and not bool(data.terminated[last].any())  # so what lies behind the end is asked for
    assert main(["offline", *settings(log, tmp_path, *ravl, "run.name=ravl")]) == 0
    assert "recorded (170 steps), 20 imagined" in " ".join(capsys.readouterr().out.split())
