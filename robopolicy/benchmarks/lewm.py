"""LeWM's own code on our recordings: its model, loss and planner, from the package stable-worldmodel.

Maes et al. 2026, arXiv:2603.19312. The package has the classes (LeWM, Predictor, Embedder, MLP, SIGReg, CEMSolver),
which run unchanged; the training script is not in it, so its loss and settings are written here after
https://github.com/lucas-maes/le-wm (training script of 2026): three frames, each five control steps and one
action block after the other, predict the next one; squared error plus .09 SIGReg (1024 directions, 17 knots); AdamW
with weight decay 1e-3, clipped at 1, one per cent of warm-up, cosine to 0. Smaller, for one core: see `Size` (theirs:
224 px in patches of 14, width 192, 12 layers, a predictor of 6 layers with 16 heads of 64, batches of 128 at a rate of
5e-5 for 100 epochs, 30 rounds of planning).
"""

import contextlib
import io
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import require_extra
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import IMAGE_PREFIX
from robopolicy.nn.vision import MEAN, STD
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit

HISTORY, BLOCK = 3, 5
"""Frames that predict the next one; control steps, and so actions, between two frames."""

WEIGHT = 0.09
KNOTS, DIRECTIONS = 17, 1024
"""WEIGHT, KNOTS and DIRECTIONS: of SIGReg."""

HORIZON = 5
"""Action blocks of a plan, all of which are executed."""


@dataclass(frozen=True)
class Size:
    """Sizes of model, training and planning.

    width, depth, heads, patch: of the vision transformer; width is that of the embeddings, too. predictor_depth,
    predictor_heads, head_width, feed_forward: of the predictor; hidden: of both projectors; steps, batch, rate: of
    training; samples, rounds, elites: of the planner.
    """

    width: int = 128
    depth: int = 4
    heads: int = 4
    patch: int = 16
    predictor_depth: int = 3
    predictor_heads: int = 4
    head_width: int = 32
    feed_forward: int = 512
    hidden: int = 512
    steps: int = 600
    batch: int = 64
    rate: float = 1e-3
    samples: int = 300
    rounds: int = 10
    elites: int = 30


TINY = Size(16, 1, 2, 16, 1, 2, 8, 16, 16, steps=4, batch=8, samples=8, rounds=2, elites=2)


def require_package() -> Any:
    """Import stable_worldmodel and transformers; raises ConfigError without the extra `lewm`."""
    require_extra("transformers", "lewm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its notices of environments that are not installed
        return require_extra("stable_worldmodel", "lewm")


def build(size: Size, image_size: int, actions: int) -> nn.Module:
    """Return their model for square images of `image_size` px and `actions` elements A of an action."""
    package = require_package()
    from stable_worldmodel.wm.lewm import module  # pyright: ignore[reportMissingImports]
    from transformers import ViTConfig, ViTModel

    width = size.width
    vision: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "image_size": image_size,
        "patch_size": size.patch,
    }
    predictor = module.Predictor(
        num_frames=HISTORY,
        depth=size.predictor_depth,
        heads=size.predictor_heads,
        mlp_dim=size.feed_forward,
        input_dim=width,
        hidden_dim=width,
        output_dim=width,
        dim_head=size.head_width,
        dropout=0.1,
    )
    projectors = [module.MLP(width, size.hidden, width, nn.BatchNorm1d) for _ in range(2)]
    actions_encoder = module.Embedder(input_dim=BLOCK * actions, emb_dim=width)
    encoder = ViTModel(ViTConfig(**vision), add_pooling_layer=False)
    return package.wm.LeWM(encoder, predictor, actions_encoder, *projectors)


def pixels_of(frames: Tensor) -> Tensor:
    """Return uint8 frames [..., height, width, 3] as their networks read them, [..., 3, height, width]."""
    return ((frames.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).movedim(-1, -3).contiguous()


def window_starts(episodes: Episodes) -> Tensor:
    """Return the indices [W] of the steps with which HISTORY action blocks of one episode begin."""
    steps = torch.arange(episodes.step_count)
    ends = (episodes.starts + episodes.lengths)[episodes.episode_of_step]
    return steps[steps + HISTORY * BLOCK <= ends]


class Learner(nn.Module):
    """Their model and SIGReg as a `Regression`; model: `build`; camera: key of the frames."""

    def __init__(self, model: Any, sigreg: nn.Module, camera: str, batch: int):
        super().__init__()
        self.model: Any = model
        self.sigreg = sigreg
        self.camera, self.batch = camera, batch

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield pixels [N, 4, 3, height, width] and standardised action blocks [N, 3, 5 A] indefinitely."""
        frames, starts = episodes.observation[self.camera], window_starts(episodes)
        low, scale = action_statistics(episodes)
        actions = (episodes.actions - low) / scale
        while True:
            rows = starts[torch.randint(len(starts), (self.batch,), generator=generator)]
            first = rows + episodes.episode_of_step[rows]
            index = first[:, None] + BLOCK * torch.arange(HISTORY + 1)
            blocks = actions[rows[:, None] + torch.arange(HISTORY * BLOCK)]
            yield {"pixels": pixels_of(frames[index]), "action": blocks.reshape(self.batch, HISTORY, -1)}

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"predicted", "sigreg"}, each [N], for a batch of `batches`: squared error of the embeddings of the
        frames after each block, and WEIGHT times SIGReg of all, the same for every row.
        """
        with torch.random.fork_rng(devices=[]):  # their dropout and directions draw from the global generator
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            output = self.model.encode(dict(batch))
            embedding = output["emb"]
            predicted = self.model.predict(embedding[:, :HISTORY], output["act_emb"])
            guard = WEIGHT * self.sigreg(embedding.transpose(0, 1))
        error = (predicted - embedding[:, 1:]).square().mean((1, 2))
        return {"predicted": error, "sigreg": guard.expand(len(error))}


def action_statistics(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of recorded actions, [A] each."""
    return episodes.actions.mean(0), episodes.actions.std(0, correction=0).clamp_min(1e-8)


def trained(episodes: Episodes, camera: str, size: Size, seed: int, folder: Path) -> tuple[nn.Module, float]:
    """Return their model trained on `episodes`, and the processor seconds of that; an interrupted training resumes.

    camera: name of the only field that it reads; folder: of metrics and resume point.
    """
    key = IMAGE_PREFIX + camera
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lewm"))
        model = build(size, episodes.observation[key].shape[-2], episodes.actions.shape[-1])
    sigreg = require_package().wm.SIGReg(KNOTS, DIRECTIONS)
    learner, generators = Learner(model, sigreg, key, size.batch), Generators(derive_seed(seed, "lewm"))
    settings = FitConfig(
        steps=size.steps,
        learning_rate=size.rate,
        final_rate=0.0,
        warmup=max(1, size.steps // 100),
        weight_decay=1e-3,
        ema_decay=0.0,
        log_every=50,
        checkpoint_every=50,
    )
    marks = [time.process_time()]

    def cpu_seconds() -> dict[str, float]:
        marks.append(time.process_time())
        return {"cpu_seconds": marks[-1] - marks[-2]}

    run = RunFolder(folder)
    batches = learner.batches(episodes, generators["batches"])
    fit(learner, batches, settings, generators, run=run, label="LeWM", evaluate=cpu_seconds)
    return model.eval(), sum(record["cpu_seconds"] for record in run.metrics())


class Planner:
    """Their CEM towards one goal picture a row; all HORIZON blocks of a plan are executed, as in their evaluation.

    model: of `trained`; key: of the frames that it reads; statistics: of its actions (`action_statistics`); bounds: of
    an action, [A] each; goals: uint8 [B, height, width, 3].
    """

    def __init__(
        self,
        model: nn.Module,
        size: Size,
        key: str,
        statistics: tuple[Tensor, Tensor],
        bounds: tuple[np.ndarray, np.ndarray],
        goals: np.ndarray,
        seed: int,
    ):
        package = require_package()
        from gymnasium.spaces import Box

        self.key, self.bounds = key, bounds
        self.mean, self.std = (each.numpy() for each in statistics)
        self.goals = pixels_of(torch.from_numpy(goals))[:, None]
        self.solver = package.solver.CEMSolver(
            model,
            batch_size=1,  # 0.1.1 cannot compare the goals of several
            num_samples=size.samples,
            n_steps=size.rounds,
            topk=size.elites,
            seed=derive_seed(seed, "plans") % 2**31,
        )
        space = Box(-1, 1, (len(goals), len(self.mean)))
        plan = package.PlanConfig(horizon=HORIZON, receding_horizon=HORIZON, action_block=BLOCK)
        self.solver.configure(action_space=space, n_envs=len(goals), config=plan)

    def act(self, observation: Mapping[str, np.ndarray], running: np.ndarray) -> tuple[np.ndarray, int]:
        """Return actions [B, 25, A] within the bounds, 0 in rows that are not `running` [B], and the number planned."""
        rows = np.flatnonzero(running)
        pixels = pixels_of(torch.from_numpy(observation[self.key][rows, -1]))[:, None]
        idle = torch.zeros(len(rows), 1, BLOCK * len(self.mean))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how long it took
            plan = self.solver.solve({"pixels": pixels, "goal": self.goals[rows], "action": idle})
        blocks = plan["actions"].numpy().reshape(len(rows), HORIZON * BLOCK, -1)
        actions = np.zeros((len(running), *blocks.shape[1:]))
        actions[rows] = np.clip(self.mean + self.std * blocks, *self.bounds)
        return actions, len(rows)
