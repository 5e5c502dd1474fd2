"""Measurements of papers that take several fine-tuning runs, or two metrics of one: `measured_by` in papers.yaml.

Each is a function (configuration, folder of the benchmark, seed) -> {"baseline": value, "method": value}, as in
`paper_measurements`.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from robopolicy.benchmarks.paper_measurements import Values
from robopolicy.benchmarks.papers import arm_in, checkpoint_of, composed, last_of_each, mean_of, run_arm, tuned
from robopolicy.benchmarks.rates import pooled
from robopolicy.configuration import Config
from robopolicy.core.errors import DataError
from robopolicy.core.randomness import derive_seed
from robopolicy.runs import is_complete
from robopolicy.verbs import finetune

PREFERENCES = (
    "finetune.coefficient=tpo",
    "finetune.options.tpo.anchor=1",
    "finetune.weight=constant",
    "finetune.auxiliaries=[masked_preference]",
    "finetune.learning_rate=5e-5",
)
IMITATED = (
    "finetune.advantage=w_reinforce",
    "finetune.options.w_reinforce.positive=1",
    "finetune.options.w_reinforce.negative=0",
)
"""Both stages of recipe=opa_dpo."""


def distillation_alignment(config: Config, root: Path, seed: int) -> Values:
    """OPD-unmasked: cosine between what a teacher and what returns would change, at the forks of branching episodes;
    baseline: in groups that succeed in at least half of their episodes; method: in the others. Nothing is learned.
    """
    measuring = "finetune.models=[distillation_angle]", "finetune.branch_at=[2,5]", "finetune.teacher=<warm>"
    run = run_arm(
        config, root, arm_in("sparse", *measuring, "finetune.iterations=4", "finetune.learning_rate=1e-9"), seed
    )
    parts = ("baseline", "won"), ("method", "lost")
    return {part: mean_of(f"distillation_angle_{outcome}")(run) for part, outcome in parts}


def shared_episodes(config: Config, root: Path, seed: int) -> Values:
    """SAPO: success of two runs that learn at the same time from the same base policy, each alone, or from the other's
    groups beside as many own ones. Raises DataError if nothing was exchanged.
    """
    values: Values = {}
    for part in ("baseline", "method"):
        with TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
            shared = "finetune.replay=shared", f"finetune.options.shared.folder={folder}"
            arms = [
                arm_in(
                    "sparse",
                    "finetune.groups=16",
                    f"run.seed={derive_seed(seed, f'member {member}')}",
                    *((*shared, f"finetune.options.shared.member={member}") if part == "method" else ()),
                )
                for member in ("first", "second")
            ]
            pending = [pool.submit(tuned, composed(config, root, arm, seed), arm.task) for arm in arms]
            runs = [each.result() for each in pending]
        if part == "method" and not all(mean_of("shared_rows")(run) for run in runs):
            raise DataError("Both runs learned alone: neither read what the other had written in time.")
        values[part] = pooled([run["success"] for run in runs])
    return values


def corrected_preferences(config: Config, root: Path, seed: int) -> Values:
    """OPA-DPO: success of a policy that sees after preferences over own and corrected episodes; baseline: from the base
    policy for ten iterations; method: for five, from a reference that has imitated both for five.

    The teacher, which corrects failures, reads the state.
    """
    teacher = checkpoint_of(config, root, "push_cube", "warm", seed)
    corrected = f"finetune.teacher={teacher}", "finetune.allocator=correct", "finetune.models=[q_ensemble]"
    preferred = arm_in("sight", *corrected, *PREFERENCES)
    imitated = arm_in("sight", *corrected, *IMITATED, "finetune.iterations=5", "finetune.videos=0", "run.name=imitated")
    folder = root / preferred.task / "finetune" / "imitated" / str(seed)
    if not is_complete(folder):
        finetune.run(composed(config, root, imitated, seed))
    second = replace(preferred, settings=(*preferred.settings, f"finetune.policy={folder / 'checkpoint'}"))
    second = replace(second, settings=last_of_each((*second.settings, "finetune.iterations=5")))
    arms = {"baseline": preferred, "method": second}
    return {part: run_arm(config, root, arm, seed)["success"] for part, arm in arms.items()}
