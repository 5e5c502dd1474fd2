import pytest

from robopolicy.configuration import Config, compose, describe_sections, groups
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
    assert (config.policy.chunk, config.policy.prediction_steps, config.train.fit.steps) == (2, 8, 7)


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
    assert (config.world.name, config.policy.chunk) == ("push_t", 3)


def test_unknown_key_in_own_recipe_is_an_error(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("policy:\n  chnk: 3\n")
    with pytest.raises(ConfigError, match=r"policy\.chnk"):
        compose([f"recipe={path}"])


def test_help_describes_every_section():
    for name, text, rows in describe_sections(tuple(item for item in Config.__dataclass_fields__ if item != "json")):
        assert text and rows, name
