"""Our plugins for LeRobot: what it resolves by name, what its rollouts measure, and what is refused."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import robopolicy
from robopolicy.core.errors import CheckpointError, ConfigError, SpecError
from robopolicy.core.examples import example_observation
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.nn.configuration import ImageEncoderConfig
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.loading import saved_origin
from sims.registry import make_world

pytestmark = pytest.mark.long

pytest.importorskip(
    "lerobot_policy_robopolicy", reason="install it with: pip install -e robopolicy/plugins/lerobot_policy"
)

TOP = IMAGE_PREFIX + "top"
SEEDS = (1000, 1001, 1002)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """An untrained policy of push_cube with a camera, a history of two frames and chunks of three steps."""
    folder = tmp_path_factory.mktemp("ours") / "checkpoint"
    world = make_world("push_cube", 1, cameras=["top"], image_size=16)
    config = DenoisingPolicyConfig(
        width=16, depth=1, sampling_steps=2, denoising_steps=10, history=2, chunk=3, prediction_steps=4,
        image=ImageEncoderConfig(features=8, channels=(8, 8, 8)),
    )  # fmt: skip
    spec = world.spec
    policy = DenoisingPolicy(
        config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions, seed=3
    )
    policy.save(folder)
    world.close()
    return folder


def configured(checkpoint: Path | None, **options):
    from robopolicy.plugins.configuration_robopolicy import RobopolicyConfig

    return RobopolicyConfig(checkpoint=checkpoint, device="cpu", **options)


def loaded(checkpoint: Path, **options):
    from robopolicy.plugins.modeling_robopolicy import RobopolicyPolicy

    return RobopolicyPolicy(configured(checkpoint, **options))


def environment(**options):
    from robopolicy.plugins.environment import RobopolicyEnv

    return RobopolicyEnv(**{"task": "push_cube", "cameras": ["top"], "image_size": 16, **options})


def shown(rows: int = 2, size: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    spec = make_world("push_cube", 1).spec
    vectors = {key: torch.randn(rows, *field.shape, generator=generator) for key, field in spec.observation.items()}
    return {**vectors, TOP: torch.randint(0, 256, (rows, 3, size, size), generator=generator).float() / 255}


def test_lerobot_finds_everything_by_its_name(checkpoint):
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.envs.configs import EnvConfig
    from lerobot.envs.factory import make_env_config
    from lerobot.policies.factory import make_policy, make_policy_config, make_pre_post_processors
    from lerobot.utils.import_utils import register_third_party_plugins

    for name in ("lerobot_policy_robopolicy", "lerobot_env_robopolicy"):
        assert importlib.metadata.metadata(name)["Name"] == name  # LeRobot skips names with hyphens
    register_third_party_plugins()
    assert {"robopolicy"} <= set(PreTrainedConfig.get_known_choices()) & set(EnvConfig.get_known_choices())
    config = make_policy_config("robopolicy", checkpoint=checkpoint, device="cpu")
    shape = {"task": "push_cube", "cameras": ["top"], "image_size": 16}
    policy = make_policy(config, env_cfg=make_env_config("robopolicy", **shape))
    before, after = make_pre_post_processors(config)
    batch = before({**{key: value[0] for key, value in shown().items()}, "task": "push the cube"})
    assert batch[STATE].ndim == 2
    action = after(policy.select_action(batch))
    assert action.shape == (1, 2)
    assert {key: feature.shape for key, feature in config.input_features.items()}[TOP] == (3, 16, 16)


def test_settings_are_parsed_written_and_read_back(checkpoint):
    """As LeRobot's commands do, which keep them beside what they train; and all of it without the distributions."""
    import draccus
    from lerobot.configs.eval import EvalPipelineConfig
    from lerobot.configs.parser import load_plugin

    load_plugin("robopolicy.plugins")
    given = ["--env.type=robopolicy", "--env.task=push_cube", "--env.cameras=[front, top]", "--env.image_size=32"]
    given += ["--env.options={style: 1}", "--policy.type=robopolicy", f"--policy.checkpoint={checkpoint}"]
    config = draccus.parse(EvalPipelineConfig, args=[*given, "--policy.device=cpu", "--policy.deterministic=false"])
    assert config.env.options == {"style": 1}
    assert config.env.features["observation.images.front"].shape == (32, 32, 3)
    assert config.env.fps == 10
    assert (config.policy.checkpoint, config.policy.deterministic) == (checkpoint, False)
    assert draccus.decode(EvalPipelineConfig, draccus.encode(config)) == config


def test_a_rollout_of_lerobots_is_our_evaluation(checkpoint):
    """The same starts and the same noise give the same rewards, through images, history and chunks."""
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.scripts.lerobot_eval import rollout

    ours = robopolicy.load_policy(checkpoint)
    world = make_world("push_cube", 3, cameras=["top"], image_size=16, history=2)
    expected = evaluate_policy(world, ours, SEEDS)
    policy, config = loaded(checkpoint), environment()
    policy._episodes = SEEDS[0]  # LeRobot tells a policy no seeds: its episodes are counted
    vector = config.create_envs(3)["robopolicy"][0]
    processors = (*config.get_env_processors(), *make_pre_post_processors(policy.config))
    rollout_result = rollout(vector, policy, *processors, seeds=list(SEEDS))
    vector.close()
    kept = torch.cat([torch.ones(3, 1, dtype=torch.bool), ~rollout_result["done"][:, :-1]], dim=1)
    returns = (rollout_result["reward"] * kept).sum(1).numpy()
    np.testing.assert_allclose(returns, expected.returns, rtol=1e-5, atol=1e-6)
    assert kept.sum(1).tolist() == expected.lengths.tolist()
    assert np.ptp(returns) > 1e-3


def test_pictures_of_every_form_are_one_picture(checkpoint):
    policy, batch = loaded(checkpoint), shown()

    def first(**changed):
        policy.reset()
        policy._episodes = 0
        return policy.select_action({**batch, **changed})

    plain, whole = first(), (batch[TOP] * 255).round().to(torch.uint8)
    assert torch.equal(first(**{TOP: whole}), plain)
    assert torch.equal(first(**{TOP: whole.permute(0, 2, 3, 1)}), plain)
    flat = torch.full((2, 3, 32, 32), 0.6)
    assert torch.allclose(first(**{TOP: flat}), first(**{TOP: flat[..., ::2, ::2]}), atol=1e-5)
    assert not torch.allclose(first(**{TOP: flat}), plain, atol=1e-5)
    with pytest.raises(SpecError, match=r"floats from 0 to 1, or uint8; these range from 0 to 255"):
        first(**{TOP: whole.float() / whole.max() * 255 * (whole > 0)})


def test_rows_have_their_own_history_and_decide_every_chunk(checkpoint):
    policy = loaded(checkpoint)
    frames = [shown(seed=index) for index in range(5)]
    together = [policy.select_action(frame) for frame in frames]
    policy.reset()
    policy._episodes = 0
    first, second = policy.predict_action_chunk(frames[0]), None
    assert torch.equal(torch.stack(together[:3], 1), first)
    for frame in frames[1:3]:
        policy._see(frame)
    second = policy.predict_action_chunk(frames[3])
    assert torch.equal(torch.stack(together[3:], 1), second[:, :2])
    assert policy._seen[1][STATE].shape[:2] == (1, 2)
    assert torch.equal(
        torch.from_numpy(policy._seen[1][STATE][0]), torch.stack([frames[2][STATE][1], frames[3][STATE][1]])
    )
    with pytest.raises(SpecError, match="has 3 rows, but before it had 2: call reset"):
        policy.select_action(shown(rows=3))


def test_what_does_not_fit_is_said(checkpoint, tmp_path):
    from robopolicy.plugins.modeling_robopolicy import RobopolicyPolicy

    with pytest.raises(ConfigError, match=r"No checkpoint is given: set --policy\.checkpoint="):
        loaded(None)
    with pytest.raises(CheckpointError, match="does not exist"):
        loaded(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"is not a folder with a config\.json"):
        RobopolicyPolicy.from_pretrained(tmp_path)
    policy = loaded(checkpoint)
    with pytest.raises(SpecError, match="no camera 'top'"):
        policy.select_action({key: value for key, value in shown().items() if key != TOP})
    with pytest.raises(SpecError, match="has no observations"):
        policy.select_action({"action": torch.zeros(1, 2)})
    with pytest.raises(SpecError, match="'task' has 1 texts, but there are 2 rows"):
        policy.select_action({**shown(), "task": ["push"]})
    with pytest.raises(ConfigError, match="LeRobot cannot train policies of this type"):
        policy.forward({})
    blind = environment(cameras=[])
    with pytest.raises(SpecError, match="no camera 'top'"):
        made_for(blind, checkpoint)
    with pytest.raises(SpecError, match=r"Element 0 of '[\w.]+' is '\w+' for the policy, but '\w+' in the environment"):
        made_for(environment(task="push_t"), checkpoint)  # shapes alone would fit
    with pytest.raises(SpecError, match=r"shape \[\d+\]; 'observation\.\w+' needs"):
        made_for(environment(task="push_choice"), checkpoint)
    with pytest.raises(SpecError, match=r"actions have shape \[2\].*environment \[7\]"):
        made_for(environment(), checkpoint, action=7)
    with pytest.raises(ConfigError, match=r"no world 'push_cub'\. Did you mean 'push_cube'"):
        environment(task="push_cub")


def made_for(env, checkpoint: Path, action: int = 2):
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.factory import make_policy

    if action != 2:
        env.features["action"] = PolicyFeature(FeatureType.ACTION, (action,))
    return make_policy(configured(checkpoint), env_cfg=env)


def test_an_exported_folder_is_the_same_policy(checkpoint, tmp_path, capsys):
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    from robopolicy.plugins.__main__ import main

    folder = tmp_path / "exported"
    assert main([str(checkpoint), str(folder)]) == 0
    assert "--policy.path=" in capsys.readouterr().out
    config = PreTrainedConfig.from_pretrained(folder, cli_overrides=["--seed=4"])
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    batch = shown()
    assert torch.equal(policy.select_action(batch), loaded(checkpoint, seed=4).select_action(batch))
    assert saved_origin(folder) == saved_origin(checkpoint)
    observation = example_observation(robopolicy.load_policy(checkpoint).spec, 2, torch.Generator().manual_seed(0))
    decided = [
        robopolicy.load_policy(each).act(observation, torch.Generator().manual_seed(1)) for each in (folder, checkpoint)
    ]
    assert torch.equal(decided[0].actions, decided[1].actions)  # and it is a checkpoint here as well
    renamed = {"rename_observations_processor": {"rename_map": {"observation.images.above": TOP}}}
    before, _ = make_pre_post_processors(config, str(folder), preprocessor_overrides=renamed)
    assert TOP in before({"observation.images.above": batch[TOP]})
    assert main([str(checkpoint), str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err
    shutil.rmtree(checkpoint.parent / "copy", ignore_errors=True)
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(CheckpointError, match="does not exist"):
        get_policy_class("robopolicy").from_pretrained(folder)


def test_a_world_is_a_vector_environment():
    from robopolicy.plugins.vector_environment import NEW_ROLLOUT, WorldVectorEnvironment

    vector = WorldVectorEnvironment(make_world("push_cube", 3, cameras=["top"], image_size=16))
    observation, _ = vector.reset(seed=7)
    assert vector.observation_space.contains(observation)
    assert vector.call("_max_episode_steps") == (vector.world.spec.horizon,) * 3
    assert vector.call("task_description") == (vector.world.spec.instructions[0],) * 3
    with pytest.raises(AttributeError):
        vector.get_attr("robot")
    pictures = vector.call("render")
    assert len(pictures) == 3
    assert [picture.shape[-1] for picture in pictures[:2]] == [3, 3]
    assert np.array_equal(vector.render()[1], pictures[1])
    again, _ = vector.reset(seed=[7, 8, 9])
    assert np.array_equal(again["agent_pos"], observation["agent_pos"])
    with pytest.raises(ConfigError, match="2 seeds for 3 rows"):
        vector.reset(seed=[1, 2, None])
    for rests in (True, False):
        vector.reset(seed=7, options={NEW_ROLLOUT: True} if rests else None)
        for _ in range(vector.world.spec.horizon):
            observation, _, terminated, truncated, info = vector.step(np.zeros((3, 2), np.float32))
            assert "final_info" in info or not (terminated | truncated).any()
        assert truncated.all()
        assert not terminated.any()
        assert info["final_info"]["is_success"].tolist() == [False] * 3
        assert ("final_obs" in info) != rests
        if rests:
            assert np.array_equal(vector.step(np.ones((3, 2), np.float32))[0]["agent_pos"], observation["agent_pos"])
        else:
            assert not np.array_equal(info["final_obs"]["agent_pos"], observation["agent_pos"])
            assert not vector.step(np.zeros((3, 2), np.float32))[3].any()
    vector.close()


def test_an_expert_succeeds_in_lerobots_environment():
    """Success of a row that ended early counts, and only its own."""
    from sims.registry import make_expert

    vector = environment(cameras=[], task="reach_planar").create_envs(4)["robopolicy"][0]
    spec = vector.world.spec
    expert, won = make_expert("reach_planar", spec), np.zeros(4, bool)
    assert expert is not None
    observation, _ = vector.reset(seed=3, options={"lerobot_new_rollout": True})
    for _ in range(spec.horizon):
        fields = {
            "observation.state": observation["agent_pos"],
            "observation.environment_state": observation["environment_state"],
        }
        action = expert.act({key: value[:, None] for key, value in fields.items()})
        action[3] = 0.0
        observation, _, _, _, info = vector.step(action)
        won |= info.get("final_info", {}).get("is_success", np.zeros(4, bool))
    assert won.tolist() == [True, True, True, False]
    vector.close()


def lerobot_eval(folder: Path, *arguments: str) -> dict:
    """Run the command in a process of its own, as a user does."""
    command = [
        str(Path(sys.executable).with_name("lerobot-eval")),
        *arguments,
        f"--output_dir={folder}",
        "--policy.device=cpu",
    ]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder.parent, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "eval_info.json").read_text())


@pytest.mark.slow
def test_lerobot_eval_measures_the_success_that_we_measure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["recipe=reach_planar", "run.name=small"]
    robopolicy.collect(*settings, "collect.episodes=40")
    robopolicy.train(*settings, "train.fit.steps=400", "train.evaluate_episodes=20")
    trained = tmp_path / "runs" / "train" / "small" / "0" / "checkpoint"
    world = robopolicy.make_world("reach_planar", batch_size=50)
    ours = evaluate_policy(world, robopolicy.load_policy(trained), np.arange(1000, 1100))
    sizes = ["--eval.n_episodes=100", "--eval.batch_size=50", "--env.type=robopolicy", "--env.task=reach_planar"]
    result = lerobot_eval(tmp_path / "by_lerobot", "--policy.type=robopolicy", f"--policy.checkpoint={trained}", *sizes)
    print(f"lerobot-eval {result['overall']['pc_success']:.1f} %, ours {ours.text}")
    low, high = wilson(round(result["overall"]["pc_success"]), 100)
    assert low <= ours.interval[1]
    assert ours.interval[0] <= high
    assert ours.success_rate > 0.05
    assert len(result["overall"]["video_paths"]) == 10


@pytest.mark.slow
def test_lerobots_own_policy_in_our_environment_earns_what_it_earns_here(tmp_path):
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = environment(task="push_t", cameras=[])
    inputs = {config.features_map[key]: feature for key, feature in config.features.items() if key != "action"}
    act = ACTConfig(
        input_features=inputs, output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))}, chunk_size=6,
        n_action_steps=4, dim_model=32, n_heads=2, dim_feedforward=32, n_encoder_layers=1, n_vae_encoder_layers=1,
        latent_dim=4, device="cpu", pretrained_backbone_weights=None, push_to_hub=False,
    )  # fmt: skip
    torch.manual_seed(0)
    shapes = {**inputs, **act.output_features}
    stats = {key: {"mean": torch.zeros(item.shape), "std": torch.ones(item.shape)} for key, item in shapes.items()}
    for part in (get_policy_class("act")(act), *make_pre_post_processors(act, dataset_stats=stats)):
        part.save_pretrained(tmp_path / "act")
    world = robopolicy.make_world("push_t", batch_size=4)
    ours = evaluate_policy(world, robopolicy.load_policy(tmp_path / "act"), np.arange(1000, 1008))
    sizes = ["--eval.n_episodes=8", "--eval.batch_size=4", "--env.type=robopolicy", "--env.task=push_t"]
    result = lerobot_eval(tmp_path / "by_lerobot", f"--policy.path={tmp_path / 'act'}", *sizes)
    earned = result["per_task"][0]["metrics"]["sum_rewards"]
    np.testing.assert_allclose(earned, ours.returns, rtol=1e-3, atol=1e-3)
    assert np.ptp(earned) > 1e-2
