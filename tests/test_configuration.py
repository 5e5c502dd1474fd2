import pytest

from robopolicy.configuration import Config, compose, described, groups
from robopolicy.core.errors import ConfigError


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_every_recipe_composes(recipe):
    config = compose([f"recipe={recipe}"])
    assert isinstance(config, Config)


@pytest.mark.parametrize("world", groups()["world"])
def test_every_world_composes(world):
    assert compose([f"world={world}"]).world.name


def test_overrides_outweigh_recipes_and_recipes_outweigh_defaults():
    assert compose(["recipe=push_t"]).world.name == "push_t"
    config = compose(["recipe=push_t", "world=push_cube", "policy.chunk=2", "train.fit.steps=7"])
    assert config.world.name == "push_cube"
    assert (config.policy.config.chunk, config.policy.config.prediction_steps, config.train.fit.steps) == (2, 8, 7)


def test_lists_options_and_null_are_overridable():
    config = compose(["collect.noise=[none,0.3]", "world.options.threads=1", "finetune.target_kl=null"])
    assert config.collect.noise == ("none", "0.3")
    assert config.world.options == {"threads": 1}
    assert config.finetune.target_kl is None


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("finetune.iteratons=3", "Did you mean 'finetune.iterations'"),
        ("polcy.chunk=3", "Did you mean 'policy'"),
        ("recipe=push_tt", "Did you mean 'push_t'"),
        ("policy.kind=difusion", "Did you mean 'diffusion'"),
        ("finetune.discount=2", "discount"),
        ("world.imagination.quantile=1.5", "share of steps"),
        ("recipe=missing/file.yaml", "no such file"),
    ],
)
def test_mistakes_name_the_key_and_the_nearest_name(override, text):
    with pytest.raises(ConfigError, match=text):
        compose([override])


def test_own_recipe_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("world:\n  name: push_t\npolicy:\n  chunk: 3\n")
    config = compose([f"recipe={path}"])
    assert (config.world.name, config.policy.config.chunk) == ("push_t", 3)


def test_unknown_key_in_own_recipe_is_an_error(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("policy:\n  chnk: 3\n")
    with pytest.raises(ConfigError, match=r"policy\.chnk"):
        compose([f"recipe={path}"])


def test_help_describes_every_section_and_every_key():
    sections = described(tuple(item for item in Config.__dataclass_fields__ if item != "json"), Config())
    assert {"finetune", "world.imagination", "worldmodel.config", "policy.image"} <= {
        section.path for section in sections
    }
    for section in sections:
        assert section.text, section.path
        for key, default, text in section.keys:
            assert default and text.endswith("."), f"{section.path}.{key}"


def test_help_shows_defaults_as_they_are_written_and_choices_that_no_text_names():
    keys = {
        f"{section.path}.{key}": rest
        for section in described(("run", "finetune", "policy"), Config())
        for key, *rest in section.keys
    }
    assert [keys[f"run.{key}"][0] for key in ("seed", "fresh", "name")] == ["0", "false", '""']
    assert keys["finetune.clip_base"][0] == "null" and keys["finetune.branch_at"][0] == "[]"
    assert "episode_mean" in keys["finetune.ratio_level"][1] and "One of" not in keys["policy.denoiser"][1]


def test_every_default_that_help_shows_can_be_given():
    shown = described(tuple(item for item in Config.__dataclass_fields__ if item != "json"), Config())
    given = [f"{section.path}.{key}={default}" for section in shown for key, default, _ in section.keys]
    assert compose(given) == compose([])
