"""Runs that are killed at any operation on the disk end, once repeated, as if nobody had killed them: byte for byte."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killing import Found, Job, examine, kill_at, prepare, serve

SHARED = (
    "run.root=runs",
    "run.threads=1",
    "world=reach_planar",
    "world.batch_size=4",
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=4",
    "train.fit.steps=6",
    "train.fit.log_every=2",
    "train.fit.checkpoint_every=3",
    "train.evaluate_episodes=4",
    "finetune.iterations=3",
    "finetune.num_envs=4",
    "finetune.rollout_length=2",
    "finetune.evaluate_every=1",
    "finetune.evaluate_episodes=4",
    "finetune.checkpoint_every=2",
    "finetune.critic_width=16",
    "finetune.videos=1",
    "worldmodel.transitions=200",
    "worldmodel.config.members=2",
    "worldmodel.config.width=16",
    "worldmodel.fit.steps=6",
    "worldmodel.fit.log_every=2",
    "worldmodel.fit.checkpoint_every=3",
    "rank.episodes=4",
    "rank.noise=[none,medium,random]",
    "evaluate.episodes=4",
    "evaluate.videos=1",
)
BASE = "../base/runs/{}/reach_planar/0/{}"
DATA, POLICY, MODEL = (
    BASE.format(*each) for each in (("collect", "dataset"), ("train", "checkpoint"), ("worldmodel", "checkpoint"))
)
TUNED = f"finetune.policy={POLICY}"
REFRESHED = ("finetune.checkpoint_every=1", "imagine.refresh_every=1", "imagine.refresh_episodes=4")
BENCH = tuple(f'"{each}"' for each in SHARED[1:] if not each.startswith(("worldmodel", "rank", "evaluate.")))
JOBS = {
    "collect": ("collect", *SHARED, "json=figures/collect.json"),
    "graded": (
        *("collect", *SHARED, "collect.quality=medium", "collect.trial_episodes=12", "collect.reference_episodes=8"),
        "run.name=graded",
    ),
    "train": ("train", *SHARED, f"train.data={DATA}", "json=figures/train.json"),
    "offline": (
        *("offline", *SHARED, f"offline.dataset={DATA}", f"offline.policy={POLICY}", "offline.rounds=2"),
        *("offline.critic.steps=6", "offline.agent.width=8", "offline.improve.steps=2", "offline.improve.candidates=2"),
        *(
            "offline.evaluate_episodes=4",
            "gate.evaluators=[fqe]",
            "gate.steps=4",
            "gate.num_states=2",
            "gate.holdout=0.5",
        ),
    ),
    "online": (
        *("online", *SHARED, f"online.policy={POLICY}", "online.steps=260", "online.warmup=60", "online.num_envs=4"),
        *("online.agent.width=8", "online.agent.critics=2", "online.agent.depth=1", "online.batch_size=4"),
        *(
            "online.utd_ratio=0.1",
            "online.evaluate_at=[0,1]",
            "online.evaluate_episodes=4",
            "online.checkpoint_every=1",
        ),
    ),
    "agent": (
        *("online", *SHARED, f"online.dataset={DATA}", f"online.policy={POLICY}", "online.method=actions"),
        *(
            "online.steps=260",
            "online.warmup=60",
            "online.num_envs=4",
            "online.offline_ratio=0.5",
            "online.pretrain_steps=4",
        ),
        *("online.agent=cal_ql", "online.agent.width=8", "online.agent.samples=2", "online.batch_size=4"),
        *("online.utd_ratio=0.1", "online.evaluate_at=[0,1]", "online.evaluate_episodes=4", "run.name=agent"),
    ),
    "distill": (
        *("distill", *SHARED, f"distill.policy={POLICY}", "distill.fit.steps=6", "distill.fit.log_every=2"),
        *("distill.fit.checkpoint_every=3", "distill.episodes=4", "distill.evaluate_episodes=4"),
    ),
    "teach": (
        *("teach", *SHARED, f"teach.teacher={POLICY}", "teach.rounds=2", "teach.episodes=4", "teach.fit.steps=3"),
        *(
            "teach.last_round_steps=4",
            "teach.batch_size=8",
            "teach.fit.checkpoint_every=2",
            "teach.evaluate_episodes=4",
        ),
        *("world.cameras=[top]", "world.image_size=16", "policy.image.channels=[8,8,8]", "teach.videos=0"),
        "policy.observation_keys=[observation.state,observation.images.top]",
        "teach.auxiliary_keys=[observation.environment_state]",
    ),
    "finetune": ("finetune", *SHARED, TUNED),
    "worldmodel": ("worldmodel", *SHARED, f"worldmodel.data=[{DATA}]"),
    "imagine": (
        *(
            "imagine",
            *SHARED,
            TUNED,
            f"imagine.model={MODEL}",
            "imagine.real_eval_episodes=4",
            "imagine.divergence_threshold=null",
        ),
        *(*REFRESHED, "imagine.refresh_steps=3"),
    ),
    "imitate": (
        *("imagine", *SHARED, TUNED, f"imagine.model={MODEL}", "imagine.real_eval_episodes=0", "imagine.method=sft"),
        *("imagine.rounds=2", "imagine.rollouts_per_round=8", "imagine.imitate_steps=3", "run.name=imitate"),
    ),
    "rank": ("rank", *SHARED, f"rank.models=[{MODEL}]", "json=figures/rank.json"),
    "evaluate": ("evaluate", *SHARED, f"evaluate.policy={POLICY}", "json=figures/evaluate.json"),
    "bench": (
        *("bench", "algorithms", "run.root=runs", "run.threads=1", "bench.tasks=[reach_planar]", "bench.seeds=[0]"),
        *("bench.only=[PPO]", f"bench.overrides=[{','.join(BENCH)}]", "json=figures/bench.json"),
    ),
}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Callable[..., Any]]:
    """A process that has imported everything and computed nothing, so that it may fork; runs functions."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    there.close()

    def asked(*request: Any) -> Any:
        here.send(request)
        answer = here.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    yield asked
    here.send(None)
    process.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, zygote) -> Path:
    """Where the verbs before the others have run."""
    folder = tmp_path_factory.mktemp("killed")
    zygote(prepare, folder, [Job(verb, (verb, *SHARED)) for verb in ("collect", "train", "worldmodel")])
    return folder


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", JOBS)
def test_the_same_command_again_ends_as_if_nothing_had_happened(zygote, folder: Path, name: str):
    report: Found = zygote(examine, folder, Job(name, JOBS[name], int(os.environ.get("ROBOPOLICY_KILL_STRIDE", "1"))))
    print(
        f"{name}: {report.operations} operations, {report.states} states, {report.tried} tried, {len(report.wrong)} "
        f"wrong"
    )
    assert report.states > 10
    assert not report.wrong, "\n".join(f"killed before {place}: {wrong}" for place, wrong in report.wrong.items())


@pytest.mark.slow
def test_runs_that_are_killed_for_good_go_on(zygote, tmp_path: Path):
    zygote(prepare, tmp_path, [Job("collect", ("collect", *SHARED))])
    for name, operations in {"collect": (40, 100), "train": (66,)}.items():
        report: Found = zygote(kill_at, tmp_path, Job(name, JOBS[name]), operations)
        assert not report.wrong, report.wrong
