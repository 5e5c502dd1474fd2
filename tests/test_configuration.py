import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from robopolicy import verbs
from robopolicy.cli import main
from robopolicy.configuration import Config, compose, described, groups, read_yaml
from robopolicy.configuration.description import RARE
from robopolicy.core.errors import ConfigError
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.policies.configuration import JointConfig
from robopolicy.policies.registry import POLICIES
from robopolicy.rl.offline.configuration import AGENTS
from robopolicy.training.offline.configuration import IMPROVERS
from robopolicy.verbs.verb import VERBS, declaration
from worldmodels.configuration import PixelDiffusionConfig
from worldmodels.registry import WORLD_MODELS


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_every_recipe_composes(recipe):
    config = compose([f"recipe={recipe}"])
    assert isinstance(config, Config)


@pytest.mark.parametrize("world", groups()["world"])
def test_every_world_composes(world):
    assert compose([f"world={world}"]).world.name


def test_defaults_are_composed_without_hydra_to_the_same():
    """compose([]) returns Config() at once; a setting with its default value goes through hydra."""
    assert compose([]) == Config() == compose(["run.seed=0"])


def test_overrides_outweigh_recipes_and_recipes_outweigh_defaults():
    assert compose(["recipe=push_t"]).world.name == "push_t"
    config = compose(["recipe=push_t", "world=push_cube", "policy.chunk=2", "train.fit.steps=7"])
    assert config.world.name == "push_cube"
    assert (config.policy.config.chunk, config.policy.config.prediction_steps, config.train.fit.steps) == (2, 8, 7)


def test_a_kind_brings_its_own_settings_and_keeps_its_own_defaults_where_one_is_changed():
    assert compose(["policy.kind=token", "policy.token.bins=17"]).policy.config.token.bins == 17
    assert compose(["policy.kind=flow"]).policy.config.kind.value == "flow"
    imagined = compose(["worldmodel.kind=pixel_diffusion", "worldmodel.config.edm.steps=1", "worldmodel.fit.warmup=7"])
    default = PixelDiffusionConfig()
    assert imagined.worldmodel.config == replace(default, edm=replace(default.edm, steps=1))
    assert imagined.worldmodel.fit == replace(Config().worldmodel.fit, warmup=7)


def test_what_a_recipe_says_of_its_own_kind_alone_goes_where_another_kind_is_chosen():
    chosen = compose(["recipe=push_t", "policy.kind=joint"])
    assert chosen.policy.config == JointConfig(chunk=8) and chosen.world.name == "push_t"
    with pytest.raises(ConfigError, match=r"policy\.kind=joint has no 'sampling_steps'"):
        compose(["recipe=push_t", "policy.kind=joint", "policy.sampling_steps=3"])


@pytest.mark.parametrize("name", ["metaworld/push-v3", "gymnasium:my_package:Thing-v0", "my_module:MyWorld"])
def test_worlds_of_suites_and_of_ones_own_are_named_as_they_are(name):
    assert compose(["recipe=push_t", f"world={name}"]).world.name == name
    assert compose([f"world.name={name}"]).world.name == name


def test_what_is_composed_is_read_back_as_it_was():
    for recipe in groups()["recipe"]:
        config = compose([f"recipe={recipe}"])
        assert from_plain(Config, to_plain(config)) == config


@pytest.mark.parametrize("verb", [name for name in VERBS.names() if name != "bench"])
def test_a_verb_reads_only_the_sections_that_its_run_folder_remembers(verb):
    source = ast.parse((Path(verbs.__file__).parent / f"{verb}.py").read_text())
    read = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config"
    }
    assert read - {"json", "replaced"} <= {*declaration(verb).sections}


@pytest.mark.long
def test_below_the_command_line_messages_name_arguments_not_configuration_keys():
    package = Path(verbs.__file__).parents[2]
    folders = [package / "robopolicy" / name for name in ("core", "nn", "policies", "rl", "training", "evaluation")]
    for file in [
        file for folder in (*folders, package / "worldmodels", package / "sims") for file in folder.rglob("*.py")
    ]:
        texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        for text in texts:
            assert not isinstance(text, str) or not re.search(r"\b(finetune|imagine|collect|train)\.[a-z_]+=", text), (
                file
            )


@pytest.mark.long
def test_help_and_the_list_of_algorithms_import_no_torch():
    code = (
        "import sys\nfrom robopolicy.cli import main\nfrom robopolicy.verbs.verb import VERBS\n"
        "assert main(['finetune', '--help']) == 0\n"
        "found = {'hydra', 'omegaconf', 'yaml'} & set(sys.modules)\nassert not found, found\n"
        "for verb in VERBS.names():\n    assert main([verb, '--help']) == 0\n"
        "assert main([]) == main(['algorithms']) == main(['algorithms', 'grpo']) == 0\n"
        "assert main(['algorithms', 'papers']) == 0\n"
        "found = {'torch', 'numpy', 'diffusers', 'mujoco', 'scipy'} & set(sys.modules)\nassert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["ensemble", "rssm", "video"])
def test_help_shows_the_chosen_kind_alone(kind, capsys):
    assert main(["worldmodel", f"worldmodel.kind={kind}", "--help"]) == 0
    text = capsys.readouterr().out
    assert ("burn_in" in text, "view_batch_size" in text) == (kind == "rssm", kind == "video")
    assert kind == "video" or len(text.splitlines()) < 120


def test_a_text_that_looks_like_a_number_stays_as_it_is():
    for name in ("1e3", "nan", "007", "true", "1_000", "2026.11"):
        assert compose([f"run.name={name}"]).run.name == name
    assert compose(["run.name='a b'", "world=push_t"]).run.name == "a b"


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
        ("world.imagination.uncertainty_quantile=1.5", "quantile is 1.5: it must lie between 0 and 1"),
        ("recipe=missing/file.yaml", "this file does not exist"),
        ("policy.widht=3", "policy.kind=diffusion has no 'widht'. Did you mean 'policy.width'"),
        ("policy.token.bins=3", "policy.kind=diffusion has no 'token'. Set policy.kind=token, which has it"),
        ("policy.image.chanels=3", "Did you mean 'channels'"),
        (
            "worldmodel.config.burn_in=3",
            "worldmodel.kind=ensemble has no 'burn_in'. Set worldmodel.kind=rssm, which",
        ),
        ("world=push_tea", "Did you mean 'push_t'"),
        ("drive.hold_values={a: 1, a: 2}", "drive.hold_values contains 'a' twice"),
        ("offline.improve={kind: awr, kind: dsrl}", "offline.improve contains 'kind' twice"),
        ("world.options={deep: {b: 1, b: 1}}", "world.options contains 'b' twice"),
    ],
)
def test_mistakes_name_the_key_and_the_nearest_name(override, text):
    with pytest.raises(ConfigError, match=text):
        compose([override])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["plan.kind=cem"], "plan.kind is for planning in a world model: set plan.model"),
        (["plan.candidates=16"], "plan.candidates is for planning in a world model"),
        (["plan.model=a", "plan.replan=4"], "plan.replan does not apply to plan.kind=candidates: set plan.kind=cem"),
        (["plan.model=a", "plan.objective=a:b"], "plan.objective does not apply to plan.kind=candidates"),
        (["plan.model=a", "plan.kind=mppi", "plan.rollouts=3"], "plan.rollouts does not apply to plan.kind=mppi"),
        (["imagine.method=sft", "imagine.refresh_every=10"], "refresh_every does not apply to imagine.method=sft"),
        (["imagine.method=sft", "imagine.bc_weight=0.1"], "bc_weight does not apply to imagine.method=sft"),
        (["imagine.refresh_uncertainty=1"], "set imagine.refresh_every"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(overrides, text):
    with pytest.raises(ConfigError, match=text):
        compose(overrides)


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


KINDS = {"policy": POLICIES, "worldmodel": WORLD_MODELS, "offline.agent": AGENTS, "offline.improve": IMPROVERS}


def test_what_help_only_names_exists_and_no_recipe_benchmark_or_readme_sets_it():
    package = Path(__file__).parents[1]
    parts = described(tuple(item for item in Config.__dataclass_fields__ if item != "json"), Config())
    for section, registry in KINDS.items():
        for kind in registry.ours:
            parts += described((section.partition(".")[0],), compose([f"{section}.kind={kind}"]))
    rare = {f"{part.path}.{key}" for part in parts for key in part.rare}
    assert {name for names in RARE.values() for name in names.split()} == {key.rpartition(".")[2] for key in rare}
    assert all(part.rare <= {key for key, *_ in part.keys} for part in parts)
    for recipe in (package / "configs" / "recipe").glob("*.yaml"):
        assert not rare & set(leaves(read_yaml(recipe))), recipe
    for file in (*(package / "robopolicy" / "benchmarks").rglob("*.py"), *package.rglob("README.md")):
        assert not rare & set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", file.read_text())), file


def leaves(tree: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted path of every setting in plain sections."""
    if not isinstance(tree, dict):
        yield path
        return
    for key, value in tree.items():
        yield from leaves(value, f"{path}.{key}".lstrip("."))


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
    assert [keys[f"run.{key}"][0] for key in ("seed", "overwrite", "name")] == ["0", "false", '""']
    assert keys["finetune.clip_base"][0] == "null" and keys["finetune.branch_at"][0] == "[]"
    assert "episode_mean" in keys["finetune.ratio_level"][1] and "One of" not in keys["policy.denoiser"][1]


@pytest.mark.long
def test_every_default_that_help_shows_can_be_given():
    shown = described(tuple(item for item in Config.__dataclass_fields__ if item != "json"), Config())
    given = [f"{section.path}.{key}={default}" for section in shown for key, default, _ in section.keys]
    assert compose(given) == compose([])


def test_a_program_of_hydras_in_the_same_process_keeps_its_own_groups():
    store = ConfigStore.instance()
    whole = store.repo["hydra"]["config.yaml"]
    compose(["recipe=push_t"])
    assert store.repo["hydra"]["config.yaml"] is whole and len(whole.node["defaults"]) > 5
    with pytest.raises(ConfigError):
        compose(["run.seed=[1"])
    assert store.repo["hydra"]["config.yaml"] is whole


def test_a_section_of_several_kinds_may_be_its_kind_alone():
    """A configuration saved by an earlier version has online.method as one word."""
    section = from_plain(Config, {"online": {"method": "actions"}}).online
    assert section.method == compose(["online.method=actions"]).online.method and section.method.kind == "actions"
