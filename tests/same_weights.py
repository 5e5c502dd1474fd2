"""Do two commits compute the same? Runs every learning verb on small jobs and prints a hash of each file of weights.

    python tests/same_weights.py FOLDER > before.json      # at one commit
    python tests/same_weights.py FOLDER2 > after.json      # at another, on the same kind of machine; then compare

A change that only moves code must leave every hash as it is (about ten CPU minutes; one thread, for sums depend on it).
"""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL = (
    *("run.threads=1", "world.batch_size=8", "collect.episodes=24"),
    *("train.fit.steps=60", "train.evaluate_episodes=16", "finetune.iterations=10", "finetune.num_envs=8"),
    *("finetune.rollout_length=4", "finetune.evaluate_every=5", "finetune.evaluate_episodes=16"),
    *("finetune.critic_width=16", "finetune.minibatch=64", "finetune.videos=0", "finetune.target_success=null"),
    *("worldmodel.transitions=600", "worldmodel.fit.steps=40", "evaluate.videos=0"),
)
PUSH_T = ("recipe=push_t", "policy.width=32", "policy.depth=1")
TOKENS = ("recipe=push_choice", "policy.token.depth=1", "finetune.groups=4", "finetune.group_size=4")
DATA, POLICY = "runs/collect/push_t/0/dataset", "runs/train/push_t/0/checkpoint"
ENSEMBLE = "runs/worldmodel/push_t/0/checkpoint"
RSSM = ("worldmodel.kind=rssm", "run.name=rssm")
CRITIC = (
    "offline.critic.steps=20",
    "offline.agent.width=16",
    "offline.improve.steps=10",
    "offline.improve.candidates=2",
)
GATE = ("gate.evaluators=[fqe]", "gate.steps=20", "gate.num_states=4", "gate.holdout=0.5")
JOBS = {
    "collect": ("collect", *PUSH_T),
    "train": ("train", *PUSH_T),
    "finetune": ("finetune", *PUSH_T),
    "collect tokens": ("collect", *TOKENS),
    "train tokens": ("train", *TOKENS),
    "finetune tokens": ("finetune", *TOKENS),
    "ensemble": ("worldmodel", *PUSH_T, f"worldmodel.data=[{DATA}]", "worldmodel.config.members=2"),
    "rssm": ("worldmodel", *PUSH_T, f"worldmodel.data=[{DATA}]", *RSSM),
    "imagine": (
        "imagine",
        *PUSH_T,
        f"imagine.model={ENSEMBLE}",
        "finetune.iterations=5",
        "imagine.real_eval_episodes=8",
    ),
    "offline": ("offline", *PUSH_T, f"offline.dataset={DATA}", f"offline.policy={POLICY}", *CRITIC, *GATE),
    "teach": (
        *("teach", *PUSH_T, f"teach.teacher={POLICY}", "teach.rounds=2", "teach.episodes=8"),
        *("teach.fit.steps=20", "teach.last_round_steps=20", "teach.evaluate_episodes=16", "teach.videos=0"),
    ),
}


def weights(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of weights and of episodes below `folder`, by its path there."""
    files = sorted(path for kind in ("*.safetensors", "*.parquet") for path in folder.rglob(kind))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def main(folder: Path) -> int:
    """Run all jobs below `folder` and print the hashes; the status of the first job that fails."""
    from robopolicy.cli import main as robopolicy

    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for name, (verb, *arguments) in JOBS.items():
        print(f"== {name}", file=sys.stderr)
        recipe = [each for each in arguments if each.startswith("recipe=")]
        rest = [each for each in arguments if not each.startswith("recipe=")]
        if status := robopolicy([verb, *recipe, *SMALL, *rest]):
            return status
    print(json.dumps(weights(folder), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
