"""Former names of settings work for one release with a note; saved runs and checkpoints are read under either name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from robopolicy.configuration import Config, compose, groups
from robopolicy.configuration.composition import _tagged_sections
from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.structured import from_plain, renamed, to_plain, with_current_names
from robopolicy.rl.offline.configuration import IqlConfig
from robopolicy.runs import open_fresh_run, open_run
from robopolicy.serving.configuration import ServerConfig
from robopolicy.training.configuration import FinetuneConfig, OnlineConfig, PretrainConfig
from worldmodels.configuration import VideoConfig

PAIRS = {
    "imagine.watch=3": "imagine.real_eval_episodes=3",
    "gate.judges=[fqe]": "gate.evaluators=[fqe]",
    "world.imagination.penalty=0.3": "world.imagination.uncertainty_penalty=0.3",
    "finetune.actor_rate=1": "finetune.learning_rate=1",
    "finetune.units=3": "finetune.finetuned_steps=3",
    "finetune.props=3": "finetune.props_parts=3",
    "policy.hidden_words=0.2": "policy.word_dropout=0.2",
    "policy.finetuned_units=3": "policy.finetuned_steps=3",
    "lerobot.checkpointing=true": "lerobot.gradient_checkpointing=true",
    "offline.agent.rate=1": "offline.agent.learning_rate=1",
    "offline.agent.kind=edac offline.agent.subset=3": "offline.agent.kind=edac offline.agent.critic_subset=3",
    "drive.turns={yaw: 1}": "drive.periods={yaw: 1}",
    "worldmodel.kind=video worldmodel.config.moving=3": "worldmodel.kind=video worldmodel.config.motion_weight=3",
    "recipe=push_cube_video worldmodel.config.moving=3": "recipe=push_cube_video worldmodel.config.motion_weight=3",
    "worldmodel.config.positive_share=0.5": "worldmodel.config.positive_fraction=0.5",
    "policy.kind=joint policy.joint.width=8": "policy.kind=joint policy.width=8",
    "worldmodel.kind=rssm worldmodel.rssm.burn_in=3": "worldmodel.kind=rssm worldmodel.config.burn_in=3",
}
"""Settings under a former name, and the same under the current one."""

CONSTRUCTED = (FinetuneConfig, PretrainConfig, OnlineConfig, IqlConfig, VideoConfig, ServerConfig)
"""Settings that callers of the Python interface construct."""


def words(text: str) -> list[str]:
    return text.split(" ", text.count("=") - 1)


def setting(text: str) -> tuple[str, str]:
    key, _, value = words(text)[-1].partition("=")
    return key, value


@pytest.mark.parametrize("old", PAIRS)
def test_a_former_name_works_with_one_note(old: str):
    new = PAIRS[old]
    with pytest.warns(RobopolicyNote) as notes:
        assert compose(words(old)) == compose(words(new))
    assert [str(note.message) for note in notes] == [f"{setting(old)[0]} is now {setting(new)[0]}."]


@pytest.mark.parametrize("old", PAIRS)
def test_two_names_with_different_values_are_refused(old: str):
    key, value = setting(old)
    first = f"{key}={value}"
    others = {"[": "[model]", "{": "{roll: 2}", "t": "false"}
    other = f"{setting(PAIRS[old])[0]}={others.get(value[0], '2')}"
    kinds = words(old)[:-1]
    with pytest.raises(ConfigError, match=r"same setting, given as .* keep one"):
        compose([*kinds, other, first])
    with pytest.warns(RobopolicyNote):
        assert compose([*kinds, first, words(PAIRS[old])[-1]]) == compose(words(PAIRS[old]))


def test_a_recipe_may_use_former_names_and_the_command_line_takes_precedence(tmp_path: Path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "gate: {judges: [fqe], by: return}\nworldmodel: {kind: video, video: {moving: 3.0}, without: [1]}\n"
        "world: {name: push_t, imagination: {starts: data}}\n"
    )
    with pytest.warns(RobopolicyNote) as notes:
        config = compose([f"recipe={recipe}", "gate.evaluators=[critic]", "worldmodel.config.motion_weight=4.0"])
    assert (config.gate.evaluators, config.gate.metric) == (("critic",), "return")
    assert config.worldmodel.config == VideoConfig(motion_weight=4.0) and config.worldmodel.exclude_episodes == (1,)
    assert config.world.imagination.initial_states == "data"
    assert {str(note.message) for note in notes} == {
        *("gate.judges is now gate.evaluators.", "gate.by is now gate.metric."),
        *("worldmodel.video is now worldmodel.config.", "worldmodel.without is now worldmodel.exclude_episodes."),
        "worldmodel.config.moving is now worldmodel.config.motion_weight.",
        "world.imagination.starts is now world.imagination.initial_states.",
    }
    recipe.write_text("gate: {judges: [fqe], evaluators: [model]}\n")
    with pytest.raises(ConfigError, match=r"'gate\.judges' is now 'gate\.evaluators', and both are given"):
        compose([f"recipe={recipe}"])


def test_a_former_value_works_with_a_note():
    with pytest.warns(RobopolicyNote, match=r"^finetune\.time_limit=end is now finetune\.time_limit=terminate\.$"):
        assert compose(["finetune.time_limit=end"]) == compose(["finetune.time_limit=terminate"])
    assert FinetuneConfig(**with_current_names(FinetuneConfig, {"time_limit": "cut"})) == FinetuneConfig()


def former(tree: object, kind: object) -> object:
    """Return plain settings under the first of their former names, as an earlier version saved them."""
    if not isinstance(tree, dict) or not hasattr(kind, "__dataclass_fields__"):
        return tree
    names = {new: old for old, new in reversed(renamed(kind if isinstance(kind, type) else type(kind)).items())}
    return {names.get(key, key): former(value, getattr(kind, key, None)) for key, value in tree.items()}


def saved(path: Path, config: Config) -> dict[str, Any]:
    written = yaml.safe_load(path.read_text())
    return {name: former(section, getattr(config, name)) for name, section in written.items()}


@pytest.mark.parametrize("again", [open_run, open_fresh_run])
def test_a_run_of_an_earlier_version_resumes_as_the_same_run(tmp_path: Path, again):
    config = compose([f"run.root={tmp_path}", "run.name=x", "recipe=push_t"])
    sections = ("run", "world", "finetune", "imagine", "gate")
    folder = open_run(config, "imagine", sections).path
    (folder / "metrics.jsonl").write_text("")
    (folder / "result.json").write_text("{}")
    earlier = saved(folder / "config.yaml", config)
    assert "watch" in earlier["imagine"] and "judges" in earlier["gate"] and "starts" in earlier["world"]["imagination"]
    (folder / "config.yaml").write_text(yaml.safe_dump(earlier))
    assert again(config, "imagine", sections).path == folder
    assert (folder / "result.json").exists()
    with pytest.raises(ConfigError, match=r"imagine\.real_eval_episodes"):
        open_run(
            compose([f"run.root={tmp_path}", "run.name=x", "recipe=push_t", "imagine.watch=7"]), "imagine", sections
        )


def test_every_class_reads_what_an_earlier_version_saved():
    config = Config()
    for kinds in [section.kinds for _, section in _tagged_sections()]:
        for name in kinds.ours:
            own = kinds.configuration(name)()
            assert from_plain(type(own), former(to_plain(own), own)) == own, name
    for name in Config.__dataclass_fields__:
        section = getattr(config, name)
        if section is not None and name not in ("policy", "worldmodel", "offline", "online"):
            assert from_plain(type(section), former(to_plain(section), section)) == section, name


def test_no_former_name_is_in_use_again():
    kinds = [kinds.configuration(name) for kinds in (s.kinds for _, s in _tagged_sections()) for name in kinds.ours]
    for kind in [*kinds, *(type(getattr(Config(), name)) for name in Config.__dataclass_fields__ if name != "json")]:
        fields = set(kind.__dataclass_fields__)
        assert not fields & renamed(kind).keys(), kind
        assert set(renamed(kind).values()) <= fields, kind


def test_code_that_reads_a_setting_by_its_former_name_works_with_a_note():
    agent = IqlConfig(learning_rate=0.02)
    with pytest.warns(DeprecationWarning, match=r"IqlConfig\.rate is now learning_rate"):
        assert agent.rate == 0.02
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        agent.speed


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_our_recipes_use_the_current_names(recipe, recwarn):
    compose([f"recipe={recipe}"])
    assert not [note for note in recwarn if "is now" in str(note.message)]


@pytest.mark.parametrize("kind", CONSTRUCTED, ids=lambda kind: kind.__name__)
def test_the_constructor_of_settings_accepts_former_names(kind: type):
    for former, present in renamed(kind).items():
        value = getattr(kind(), present)
        with pytest.warns(DeprecationWarning, match=rf"{kind.__name__}\({former}=\) is now called {present}\."):
            assert kind(**{former: value}) == kind()
        with pytest.warns(DeprecationWarning, match=f"{kind.__name__}.{former} is now {present}"):
            assert getattr(kind(), former) == value
        with pytest.raises(TypeError, match=f"'{former}' is the former name of '{present}'"):
            kind(**{former: value, present: value})
