"""Success by a task's own criterion on imagined states, and experts that act on what is read off a latent."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.building.evaluators import played_evaluator
from robopolicy.building.planning import planner_alone, with_planning
from robopolicy.building.worlds import build_noisy_expert, build_world, state_criterion
from robopolicy.configuration import compose
from robopolicy.configuration.sections.worldmodel import PlanSection
from robopolicy.core.errors import ConfigError
from robopolicy.core.origin import WorldOrigin, remember_origin
from robopolicy.core.policy import Decision, to_tensors
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, PolicySpec
from robopolicy.data.record import record
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from robopolicy.verbs.rank import require_seen_by_experts
from sims.experts import Noise, NoisyController
from sims.registry import make_world
from sims.tasks.push_cube import TO_GOAL, TOLERANCE, PushCubeExpert
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig
from worldmodels.encoding import EncodedPolicy
from worldmodels.ensemble import EnsembleModel
from worldmodels.env import ImaginedWorld, StateCriterion
from worldmodels.images.drawing import FrameDrawing
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.protocol import LATENT, Imagined

pytestmark = pytest.mark.long

IMAGES = {"observation.images.top": Field((16, 16, 3), "uint8", 0, 255)}
TINY = EnsembleConfig(members=2, width=24, depth=1, head_width=8)
KINDS = {
    "states": (EnsembleModel, TINY),
    "latents": (
        LatentEnsembleModel,
        LatentEnsembleConfig(features=8, channels=(8, 8, 8), batch_size=16, ensemble=TINY),
    ),
    "blind": (LatentEnsembleModel, LatentEnsembleConfig(features=8, readout_step_ratio=0, ensemble=TINY)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints of models that learnt a little of push_cube: of states, of latents, of latents without a readout."""
    torch.set_num_threads(1)
    world = make_world("push_cube", 12, seed=0, cameras=("top",), image_size=16)
    expert = NoisyController(PushCubeExpert(), Noise(gaussian=0.3), 0, world.spec.action)
    episodes = record(world, expert, range(12), generator=torch.Generator())
    world.close()
    root = tmp_path_factory.mktemp("models")
    for name, (kind, config) in KINDS.items():
        model = kind.build(config, world.spec, episodes, 0)
        fit_stages(model, episodes, FitConfig(steps=30, learning_rate=3e-3), Generators(0))
        model.calibrate(episodes)
        remember_origin(model, WorldOrigin("push_cube"))
        save_world_model(model, root / name)
    return root


def section_of(folder, *settings):
    config = compose(["recipe=push_cube", f"world.model={folder}", "world.batch_size=6", *settings])
    return config.world.imagined_by(folder)


@pytest.mark.parametrize("kind", ["states", "latents"])
def test_a_cube_at_its_goal_is_success_and_pays_it(models, kind):
    world = build_world(section_of(models / kind, "world.imagination.success=state"))
    assert isinstance(world, ImaginedWorld)
    world.reset(seeds=range(6))
    rewards, ended = np.zeros(6), np.zeros(6, bool)
    actions = np.random.default_rng(0).uniform(-1, 1, (80, 6, 1, 2))
    for action in actions:
        step = world.step(action)
        to_goal = step.trace[ENVIRONMENT_STATE][:, -1, TO_GOAL]
        near = np.linalg.norm(to_goal, axis=-1) < TOLERANCE
        assert np.array_equal(step.success & ~ended, near & ~ended)
        rewards += step.rewards["success"].sum(1)
        ended |= step.ended
    succeeded = rewards > 0
    assert np.allclose(rewards[succeeded], rewards[succeeded][0] if succeeded.any() else 0)


def test_the_criterion_reads_every_step_and_its_instruction():
    asked = []

    def succeeded(seen):
        asked.append(seen["task"].tolist())
        return (seen[STATE][..., 0] > 0.5) & (seen["task"] == "a")

    criterion = StateCriterion(succeeded, (STATE,), 3.0)
    values = torch.tensor([[[0.2], [0.7]], [[0.9], [0.1]], [[0.9], [0.9]]])
    nothing = torch.zeros(3, 2)
    future = Imagined({STATE: values}, {"progress": nothing, "success": nothing}, nothing > 1, nothing > 1, nothing)
    result = criterion.applied(future, np.array(["a", "b", "a"]))
    assert result.success.tolist() == [[False, True], [False, False], [True, True]]
    assert result.rewards["success"].tolist() == [[0.0, 3.0], [0.0, 0.0], [3.0, 3.0]]
    assert result.rewards["progress"] is nothing and asked == [[["a"], ["b"], ["a"]]]


def test_success_of_the_model_ends_nothing_where_the_criterion_decides():
    values, hasty = torch.zeros(1, 2, 1), torch.tensor([[True, False]])
    nothing = torch.zeros(1, 2)
    future = Imagined({STATE: values}, {"success": nothing}, hasty, torch.tensor([[True, True]]), nothing)
    never = StateCriterion(lambda seen: seen[STATE][..., 0] > 1, (STATE,), 1.0)
    result = never.applied(future, np.array([""]))
    assert not result.success.any() and result.terminated.tolist() == [[False, True]]


def test_an_expert_plays_in_a_model_of_latents_off_which_its_state_is_read(models, monkeypatch):
    section = section_of(models / "latents", "world.imagination.success=state")
    world = build_world(section)
    assert set(world.spec.observation) == {LATENT, STATE, ENVIRONMENT_STATE}
    result = evaluate_policy(world, build_noisy_expert(section, world, "low", 0), range(6))
    assert result.episodes == 6 and result.steps > 6
    require_seen_by_experts([models / "latents", models / "states"], ["low"])
    with pytest.raises(ConfigError, match="without a readout of the state"):
        require_seen_by_experts([models / "blind"], ["low"])
    drawing = load_world_model(models / "latents")
    drawing.readout, drawing.drawing = None, FrameDrawing(IMAGES, drawing.spec.observation[LATENT].size, 0)
    monkeypatch.setattr("robopolicy.verbs.rank.load_world_model", lambda path: drawing)
    with pytest.raises(ConfigError, match="without a readout of the state"):
        require_seen_by_experts([models / "drawing"], ["low"])


def test_where_no_state_is_known_the_criterion_is_refused(models):
    with pytest.raises(ConfigError, match=r"reads .*observation\.environment_state.*neither imagines nor reads"):
        build_world(section_of(models / "blind", "world.imagination.success=state"))
    section = section_of(models / "states", "world.imagination.success=state")
    with pytest.raises(ConfigError, match="needs a task's criterion"):
        state_criterion(replace(section, simulator="gymnasium:Nothing-v0"), load_world_model(models / "states"))


class Still:
    """A policy that stands still, and remembers what it was shown."""

    def __init__(self, fields, world):
        self.spec = PolicySpec(fields, world.action, 1, 2, 2, 0, world.fps)
        self.shown = set()

    def act(self, observation, generator, *, deterministic=False):
        self.shown |= {key for key in observation if key in self.spec.observation}
        assert self.spec.observation.keys() <= observation.keys()
        return Decision(torch.zeros(len(observation[next(iter(self.spec.observation))]), 2, 2))

    def reset(self, rows=None): ...


@pytest.fixture
def policies(models):
    """A policy of states, one behind the encoder of the model of latents, and one behind another encoder."""
    states, latents, blind = (load_world_model(models / kind) for kind in ("states", "latents", "blind"))
    behind = (EncodedPolicy(Still(each.spec.observation, each.spec), each) for each in (latents, blind))
    return Still(states.spec.observation, states.spec), *behind


def test_an_evaluator_shows_each_policy_what_it_reads(models, policies):
    config = compose(["recipe=push_cube", "gate.num_states=4", "world.batch_size=4"])
    of_states, encoded, other = policies
    judge = played_evaluator(config, models / "latents", of_states, torch.device("cpu"))
    for policy in (of_states, encoded, of_states):
        assert judge.values(policy).shape == (4,)
    assert of_states.shown == {STATE, ENVIRONMENT_STATE} and encoded.policy.shown == {LATENT}
    with pytest.raises(ConfigError, match="reads the latent of another model"):
        judge.values(other)


def test_a_policy_of_states_plans_in_a_model_of_latents_and_one_of_other_latents_is_refused(models, policies):
    section = PlanSection(model=models / "latents", candidates=2, horizon=4)
    world = make_world("push_cube", 3, seed=0, cameras=("top",), image_size=16)
    observation = to_tensors(world.reset(seeds=range(3)))
    for policy in policies[:2]:
        planned = with_planning(section, policy)
        assert planned.act(observation, torch.Generator().manual_seed(0)).actions.shape == (3, 2, 2)
        assert planned.last_scores.shape == (3, 2)
    with pytest.raises(ConfigError, match=r"reads observation\..*images\.top.* does not imagine: .*plan\.kind=cem"):
        with_planning(section, policies[2])
    with pytest.raises(ConfigError, match=r"reads .*observation\.state.*readout_step_ratio"):
        with_planning(replace(section, model=models / "blind"), policies[0])
    world.close()


def of_cube(frames):
    assert frames.keys() == {LATENT, STATE, ENVIRONMENT_STATE}
    return -frames[ENVIRONMENT_STATE][:, TO_GOAL].norm(dim=-1)


def test_an_objective_is_given_what_is_read_off_a_latent(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "objectives", sys.modules[__name__])
    options = {"samples": 4, "elites": 2, "rounds": 1}
    section = PlanSection(
        model=models / "latents", kind="cem", horizon=3, options=options, objective="objectives:of_cube"
    )
    planner = planner_alone(section)
    world = make_world("push_cube", 3, seed=0, cameras=("top",), image_size=16)
    observation = to_tensors(world.reset(seeds=range(3)))
    assert planner.act(observation, torch.Generator().manual_seed(0)).actions.shape == (3, 2, 2)
    world.close()
