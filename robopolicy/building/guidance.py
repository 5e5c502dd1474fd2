"""Builds the additional inputs of fine-tuning: a teacher, demonstrated states, expert episodes, a planner."""

from pathlib import Path

from robopolicy.building.planning import planned_acting
from robopolicy.building.policies import adapt_policy_to_world, choose_device, load_policy
from robopolicy.building.worlds import build_controller
from robopolicy.configuration import Config
from robopolicy.core.episodes import Episodes, require_recorded
from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.policies.abilities import Tunable
from robopolicy.policies.denoising import share_scored_steps
from robopolicy.rl.preferences import read_pairs
from robopolicy.rl.registry import Need, setting_for
from robopolicy.runs import default_path
from robopolicy.training.collection import start_pool
from robopolicy.training.demonstrations import Demonstrations, demonstrate
from robopolicy.training.guidance import OF_THE_SAME_STEPS, Guidance
from robopolicy.training.task_teachers import TaskTeachers


def load_guidance(
    config: Config, world: World, imagined: Path | None = None, policy: Trainable | None = None
) -> Guidance:
    """Load the inputs of the configured mechanisms: a teacher, demonstrated states, successful expert episodes.

    imagined: checkpoint of the world model that `world` runs in, None for other worlds; policy: the policy being
    fine-tuned.
    """
    section, device = config.finetune, choose_device(config.run)
    needs = section.resolved().needs
    needs_experts = section.expert_episode_fraction or Need.EXPERTS in needs
    experts = load_experts(config, world) if needs_experts else None
    teacher = load_teachers(config, world, policy, needs)
    acting = planned_acting(config.plan, world, imagined, device)
    pairs = None if section.preference_pairs is None else read_pairs(section.preference_pairs)
    return Guidance(teacher, demonstrations_of_pool(config, world), experts, acting, pairs)


def acting_guidance_of(config: Config, world: World, policy: Trainable) -> Guidance:
    """Load the inputs that the acting policy needs: a teacher, and a world model for planning."""
    section = config.finetune
    needs, device = section.resolved().needs, choose_device(config.run)
    teacher = (
        load_teachers(config, world, policy, needs)
        if section.teacher_fraction or section.teacher_episode_fraction
        else None
    )
    return Guidance(teacher, acting=planned_acting(config.plan, world, config.world.model, device))


def load_experts(config: Config, world: World) -> Episodes:
    """Read the successful episodes of finetune.expert_datasets, by default from the dataset that `collect` wrote."""
    paths = config.finetune.expert_datasets or (
        default_path(config, "collect", "dataset", None, "finetune.expert_datasets"),
    )
    experts = Episodes.concatenate([read_dataset(path, cameras=world.spec.cameras) for path in paths])
    fields = {key: field for key, field in world.spec.observation.items() if key in experts.observation_fields}
    require_recorded("the experts' data", experts, fields, world.spec.action)
    return experts if experts.success is None else experts.select(experts.success)


def load_teachers(
    config: Config, world: World, policy: Trainable | None, needs: frozenset[Need]
) -> Policy | TaskTeachers | None:
    """Load the teacher, or those of finetune.teachers as one; None if there is none."""
    section = config.finetune
    if section.teachers:
        teachers = {text: load_teacher(config, path, world, policy, needs) for text, path in section.teachers.items()}
        return TaskTeachers(teachers, world.spec.instructions)
    return None if section.teacher is None else load_teacher(config, section.teacher, world, policy, needs)


def load_teacher(
    config: Config, folder: Path, world: World, policy: Trainable | None, needs: frozenset[Need]
) -> Policy:
    """Load a teacher of `policy`; if it must compute log-probabilities of that policy's steps, prepare it in the same
    way.

    Raises as `load_policy` does, and ConfigError when a LeRobot teacher provides no log-probabilities here.
    """
    teacher = adapt_policy_to_world(world, load_policy(folder, choose_device(config.run)))
    if not needs & OF_THE_SAME_STEPS:
        return teacher  # it is asked what it would do, as it is
    if isinstance(teacher, Tunable):
        teacher = teacher.tuned_by(config.lerobot).to_trainable()
    share_scored_steps(teacher, policy)
    return teacher


def demonstrations_of_pool(config: Config, world: World) -> Demonstrations | None:
    """Let the expert play from the pool of initial states, if a hint or allocator starts episodes in its states."""
    section, spec = config.finetune, world.spec
    needing = [entry for entry in section.resolved().entries if Need.DEMONSTRATIONS in entry.needs]
    if not needing:
        return None
    if not section.num_initial_states:
        raise ConfigError(
            f"finetune.{setting_for(needing[0].slot, needing[0].name)} needs initial states that repeat: set "
            "finetune.num_initial_states=N, for example 64."
        )
    expert = build_controller(config.world, world, section.expert)
    seeds, tasks = start_pool(config.run.seed, section.num_initial_states, len(spec.instructions))
    return demonstrate(world, expert, seeds, tasks)


keep_former_names(
    __name__,
    {
        "guidance_of": "load_guidance",
        "experts_of": "load_experts",
        "teacher_of": "load_teacher",
        "demonstrated": "demonstrations_of_pool",
    },
)
