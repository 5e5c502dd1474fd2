"""Fine-tuning in imagination: refreshing the world model with new data, and imitation of synthesised episodes.

Sources: WoVR (refresh the model where the policy goes); Ctrl-World, arXiv:2510.10125 (synthesise, filter, imitate).
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.randomness import Generators, derive_seed, episode_seeds
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import cameras_of
from robopolicy.core.storage import (
    read_errors,
    read_object,
    recover_folder,
    remove_leftovers,
    replace_folder,
    write_json,
)
from robopolicy.core.world import World
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.record import record
from robopolicy.nn.sharing import load_trainable_state, trainable_state
from robopolicy.training.acting import Acting
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.finetune import Confirm, Evaluate, FinetuneResult
from robopolicy.training.fit import fit_stages
from robopolicy.training.pretrain import pretrain
from robopolicy.training.stopping import EndReason, StoppingRule, score
from worldmodels import load_world_model, save_world_model
from worldmodels.protocol import LearnedModel, fields_read

WAITING = ".model.robopolicy-waiting-"
"""Folder name prefix of a refreshed model until the list of refreshes names its iteration."""


class ModelRefresh:
    """Refreshes the model: every `every` iterations, record the policy in the real world and continue training the
    model on the recording.

    models: all instances of the same model (kept equal); real: world to record in; data: dataset that the model was
    trained on; run: stores the recordings, the refreshed model and the list of refreshes, so that a killed run can
    resume; in_reality: as in `SimVsImagined`. Follows WoVR's co-evolution of world model and policy.
    """

    def __init__(
        self,
        models: Sequence[LearnedModel],
        real: World,
        data: Path,
        run: RunFolder,
        every: int,
        episodes: int,
        steps: int,
        seed: int,
        in_reality: Callable[[Policy], Policy] = lambda policy: policy,
    ):
        if not data.exists():
            raise DataError(f"Refreshing a world model needs the data that it was trained on, but {data} is missing.")
        self.models = models
        self.real = real
        self.data = data
        self.run = run
        self.every = every
        self.episodes = episodes
        self.steps = steps
        self.seed = seed
        self.in_reality = in_reality
        self.record_path = run.path / "refreshes.json"
        done = read_object(self.record_path) if self.record_path.exists() else {"iterations": [], "env_steps": 0}
        with read_errors(self.record_path):
            self.iterations, self.env_steps = [int(each) for each in done["iterations"]], int(done["env_steps"])
        self._tidy()
        if self.iterations:
            self._share(load_world_model(run.path / "model").state_dict())

    def __call__(self, iteration: int, policy: Policy) -> bool:
        """Refresh the model if it is due and not done yet; return whether the model differs from now on."""
        if iteration % self.every or iteration in self.iterations:
            return iteration in self.iterations
        model = self.models[0]
        generators = Generators(derive_seed(self.seed, f"refresh/{iteration}"), next(model.parameters()).device)
        seeds = episode_seeds(self.seed, f"refresh/{iteration}", self.episodes)
        new_episodes = record(self.real, self.in_reality(policy), seeds, generator=generators["act"])
        folder = self.run.path / "recorded"
        write_dataset(new_episodes, folder / str(iteration), images="png", existing="replace")
        earlier = [read_dataset(folder / str(done)) for done in self.iterations]
        cameras = cameras_of(fields_read(model))
        all_episodes = Episodes.concatenate([read_dataset(self.data, cameras=cameras), *earlier, new_episodes])
        # The same seed at every refresh: the split does not depend on how often the model was refreshed.
        training, held_out = all_episodes.split(0.1, torch.Generator().manual_seed(derive_seed(self.seed, "split")))
        fit_stages(model, training, FitConfig(steps=self.steps, learning_rate=1e-3, warmup=20), generators)
        model.calibrate(held_out)
        # Evaluation and training imagine in copies of the model; figures would not compare if one stayed behind.
        self._share(model.state_dict())
        self.iterations.append(iteration)
        self.env_steps += new_episodes.step_count
        # Not yet `model`: a kill before the list is written would refresh it twice
        waiting = self.run.path / f"{WAITING}{iteration}"
        save_world_model(model, waiting)
        write_json(self.record_path, {"iterations": self.iterations, "env_steps": self.env_steps})
        replace_folder(waiting, self.run.path / "model")
        return True

    def _tidy(self) -> None:
        """Complete or undo an interrupted refresh; a refreshed model is valid once the list names its iteration."""
        if (folder := self.run.path / "recorded").is_dir():
            remove_leftovers(folder)
        for waiting in self.run.path.glob(f"{WAITING}*"):
            if waiting.name.removeprefix(WAITING) in map(str, self.iterations):
                replace_folder(waiting, recover_folder(self.run.path / "model"))
            else:
                shutil.rmtree(waiting)

    def _share(self, weights: Mapping[str, Tensor]) -> None:
        for model in self.models:
            model.load_state_dict(weights)
            model.eval()


def synthesise_and_imitate(
    policy: Trainable,
    world: World,
    *,
    rounds: int,
    rollouts: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    evaluate: Evaluate,
    confirm: Confirm | None = None,
    course: StoppingRule,
    run: RunFolder | None = None,
    acting: Acting | None = None,
) -> FinetuneResult:
    """Improve `policy` by imitating its own imagined successes; at the end it has the best round's weights.

    Every round plays `rollouts` noisy episodes in the imagined `world`, stores those that the model predicts to succeed
    (of all rounds so far), and fits the policy to them. The policy is evaluated before the first and after every round,
    and `course` decides whether to continue. A round counts as an iteration. acting: builds the acting policy, None for
    `policy` itself.
    """
    generators = Generators(seed, next(policy.parameters()).device)
    successes = []
    imagined_steps = 0
    turn = 0
    best: dict[str, Any] = {}
    weights: dict[str, Tensor] = {}
    if run is not None:  # it begins anew after a kill, and so do its metrics
        run.rewind("iteration", -1)
    for turn in range(rounds + 1):
        figures: dict[str, Any] = {"iteration": turn, "env_steps": imagined_steps}
        if turn:
            seeds = episode_seeds(seed, f"synthesis/{turn}", rollouts)
            player = policy if acting is None else acting(policy)
            episodes = record(world, player, seeds, generator=generators["act"])
            assert episodes.success is not None
            imagined_steps += episodes.step_count
            figures |= {"env_steps": imagined_steps, "success": float(episodes.success.float().mean())}
            if bool(episodes.success.any()):
                # Successes of earlier rounds stay: the policy is fitted to all of them, or it would forget the starts
                # that this round happened to miss.
                successes.append(episodes.select(episodes.success))
            if successes:
                config = PretrainConfig(batch_size, FitConfig(steps=steps, learning_rate=learning_rate, warmup=20))
                pretrain(policy, Episodes.concatenate(successes), config, seed=derive_seed(seed, f"imitate/{turn}"))
        for mode, deterministic in (("deterministic", True), ("stochastic", False)):
            figures |= {f"{mode}_{name}": value for name, value in evaluate(policy, deterministic).items()}
        if confirm is not None:
            figures = course.confirmed(figures, partial(confirm, policy, turn))
        course.observe(figures)
        if run is not None:
            run.log(figures)
        # The first round that reaches the target is kept even if an earlier, unconfirmed one scored higher.
        if course.ended is EndReason.TARGET or not best or score(figures) > score(best):
            best, weights = figures, {name: value.clone() for name, value in trainable_state(policy).items()}
        if course.ended is not None:
            break
    load_trainable_state(policy, weights)
    if run is not None:
        policy.save(run.checkpoint)
    return FinetuneResult(turn, imagined_steps, course.ended or EndReason.ITERATIONS, best)
