"""LeRobot's policies while a decision takes its time: all that they predict, real-time chunking as LeRobot's."""

import json
from pathlib import Path

import pytest
import torch
from lerobot_models import FRONT, xvla_config
from test_lerobot_diffusion import DIFFUSES, edited
from test_lerobot_policies import act_config, diffusion_config, dit_config, features, observed, save, tiny_clip
from test_lerobot_training import KINDS as FLOWS
from test_lerobot_training import language_folders, lerobots_own

from robopolicy.core.errors import ConfigError
from robopolicy.inference.chunking import Delay, RunningPlan, with_chunking
from robopolicy.policies.loading import load_policy

pytestmark = pytest.mark.long

ROWS, DELAY = 3, 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("chunking")
    dit = save(dit_config(tiny_clip(root / "clip")), root / "dit")
    with language_folders(root) as made:
        yield {
            **made,
            "act": save(act_config(cameras=(FRONT,)), root / "act"),
            "diffusion": save(diffusion_config(cameras=(FRONT,)), root / "diffusion"),
            "multi_task_dit": dit,
            "dit diffusion": edited(dit, root / "dit diffusion", **DIFFUSES),
            "xvla": save(xvla_config(root / "words", *features(environment=None, cameras=(FRONT,))), root / "xvla"),
        }


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("act", 6), ("diffusion", 7), ("multi_task_dit", 7), ("dit diffusion", 7), ("xvla", 6), ("smolvla", 6)],
)
def test_all_steps_that_lerobots_policy_predicts_are_known(folders: dict[str, Path], tmp_path, kind, steps):
    policy = load_policy(folders[kind])
    observation = observed(policy)
    plan = policy.predict(observation, seeded())
    assert plan.shape == (ROWS, steps, 2) and policy.spec.prediction == steps
    executed = policy.act(observation, seeded()).actions
    assert torch.equal(plan[:, : executed.shape[1]], executed)
    # LeRobot's own, told to execute them all.
    longer = load_policy(edited(folders[kind], tmp_path / "all", n_action_steps=steps))
    torch.testing.assert_close(plan, longer.act(observation, seeded()).actions)
    assert torch.equal(policy.act(observation, seeded()).actions, executed)  # nothing of it stays


@pytest.mark.parametrize("kind", FLOWS)
def test_real_time_chunking_without_the_jacobian_is_lerobots_own(folders: dict[str, Path], kind):
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    made = with_chunking(load_policy(folders[kind]), "lerobot_rtc", Delay(DELAY))
    observation = observed(made.policy)
    left, taken_apart = made.policy.spec.prediction - made.policy.spec.chunk, made.plans.guided
    rest = 0.5 * torch.randn((ROWS, left, 2), generator=torch.Generator().manual_seed(1))
    underway = RunningPlan(rest, torch.ones(ROWS, dtype=torch.int64), DELAY, made.policy.spec.chunk)
    plan = made.plans(made.policy, observation, seeded(), underway, deterministic=False)

    theirs, batch, postprocess = lerobots_own(folders[kind], observation)
    theirs.config.rtc_config = RTCConfig()
    theirs.init_rtc_processor()
    noise = torch.randn((ROWS, *taken_apart.noise_shape), generator=seeded())
    told = {"inference_delay": DELAY, "prev_chunk_left_over": taken_apart.network.normalised(rest)}
    actions = theirs.predict_action_chunk(batch, noise=noise, execution_horizon=left, **told)
    expected = postprocess(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])
    torch.testing.assert_close(plan, expected, atol=1e-5, rtol=0)
    unguided = taken_apart.predict(observation, seeded(), deterministic=True)
    assert (plan - unguided).abs().max() > 1e-2


@pytest.mark.parametrize("kind", [*FLOWS, "diffusion", "multi_task_dit", "dit diffusion"])
def test_a_plan_goes_on_with_what_is_executed_meanwhile(folders: dict[str, Path], kind):
    """Of a chunk that begins in the past the steps that are executed are led, and not those before them."""
    made = with_chunking(load_policy(folders[kind]), "rtc", Delay(DELAY))
    observation = observed(made.policy)
    unguided = made.plans.guided.predict(observation, seeded(), deterministic=True)
    other = made.plans.guided.predict(observation, torch.Generator().manual_seed(8), deterministic=True)
    rest = (unguided + other)[:, : made.policy.spec.prediction - made.policy.spec.chunk] / 2
    underway = RunningPlan(rest, torch.tensor([1, 1, 0]), DELAY, made.policy.spec.chunk)
    plan = made.plans(made.policy, observation, seeded(), underway, deterministic=False)
    torch.testing.assert_close(plan[2], unguided[2])  # whose episode begins
    off, before = ((each - rest[:, :1])[:2, 0].abs().mean() for each in (plan, unguided))
    assert off < 0.6 * before, (off, before)
    led = (plan - unguided).abs()[:2].mean((0, 2))
    assert led[0] > led[made.policy.spec.chunk :].max()


@pytest.mark.parametrize(("kind", "name"), [("diffusion", "rtc"), ("smolvla", "lerobot_rtc")])
def test_a_plan_is_led_the_short_way_round(folders: dict[str, Path], tmp_path, kind, name):
    """A plan underway that is a whole turn further in its angle is the same plan."""
    folder = edited(folders[kind], tmp_path / "turning")
    description = {"names": {"action": ["x", "yaw"]}, "units": {"action": "m, deg"}, "fps": 10}
    (folder / "robopolicy.json").write_text(json.dumps(description))
    made = with_chunking(load_policy(folder), name, Delay(DELAY))
    observation, left = observed(made.policy), made.policy.spec.prediction - made.policy.spec.chunk
    rest = 0.5 * torch.randn((ROWS, left, 2), generator=torch.Generator().manual_seed(1))

    def plan_after(rest: torch.Tensor) -> torch.Tensor:
        underway = RunningPlan(rest, torch.ones(ROWS, dtype=torch.int64), DELAY, made.policy.spec.chunk)
        return made.plans(made.policy, observation, seeded(), underway, deterministic=True)

    led, turned, further = (plan_after(rest + torch.tensor(more)) for more in ([0, 0], [0, 360.0], [5.0, 0]))
    torch.testing.assert_close(turned, led, atol=1e-2, rtol=0)
    assert (further - led).abs().max() > 0.1  # what does not go round is led as far as it takes


def test_prefetch_goes_on_with_what_lerobots_policy_predicted(folders: dict[str, Path]):
    policy = load_policy(folders["diffusion"])
    late = with_chunking(policy, "prefetch", Delay(2))
    observation, draws = observed(policy), seeded()
    late.act(observation, draws)
    first, again = policy.predict(observation, seeded()), draws.get_state()
    second = late.act(observation, draws).actions
    # An episode begins with holding still for two steps, so that its plan is two steps late.
    torch.testing.assert_close(second[:, :2], first[:, 1:3])
    fresh = torch.Generator()
    fresh.set_state(again)
    torch.testing.assert_close(second[:, 2:], policy.predict(observation, fresh)[:, 2:3])


def test_what_is_no_action_is_not_guided(folders: dict[str, Path]):
    with pytest.raises(ConfigError, match="gripper logits"):
        with_chunking(load_policy(folders["xvla"]), "rtc", Delay(DELAY))
    with pytest.raises(ConfigError, match="this is a LeRobotPolicy: choose synchronous"):
        with_chunking(load_policy(folders["act"]), "rtc", Delay(0))
