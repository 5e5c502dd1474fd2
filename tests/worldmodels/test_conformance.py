"""Every kind of world model keeps the promises of `LearnedModel`, a stranger's too; who breaks one is told which."""

from dataclasses import replace

import dot_world
import point_world
import pytest
import torch

from robopolicy.testing.world_model import check_world_model
from worldmodels.configuration import (
    EnsembleConfig,
    LatentEnsembleConfig,
    PixelDiffusionConfig,
    ReadoutConfig,
    RssmConfig,
    VideoConfig,
)
from worldmodels.ensemble import EnsembleModel
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.pixel_diffusion import PixelDiffusionModel
from worldmodels.rssm.model import RssmModel
from worldmodels.video.model import VideoModel

outside = pytest.importorskip("outside_robotics.model", reason="install it with: pip install -e tests/outside")
LatentModel = outside.LatentModel

READOUT = ReadoutConfig(batch_size=8, imagined_steps=4, members=2)
KINDS = {
    "ensemble": (EnsembleModel, EnsembleConfig(members=2, width=16, depth=1, head_width=16), point_world),
    "ensemble, sampled": (EnsembleModel, EnsembleConfig(members=2, width=16, head_width=16, sample=True), point_world),
    "latent ensemble": (
        LatentEnsembleModel,
        LatentEnsembleConfig(
            features=4, batch_size=8, ensemble=EnsembleConfig(members=2, width=16, depth=1, head_width=16)
        ),
        dot_world,
    ),
    "rssm": (RssmModel, RssmConfig(size="tiny", batch_size=4, length=4), point_world),
    "rssm, images": (RssmModel, RssmConfig(size="tiny", batch_size=4, length=4), dot_world),
    "pixel diffusion": (
        PixelDiffusionModel,
        PixelDiffusionConfig(size="tiny", batch_size=4, readout=READOUT, precision="float32"),
        dot_world,
    ),
    "video": (
        VideoModel,
        VideoConfig(size="tiny", memory=2, stride=2, chunk=3, view_batch_size=4, readout=READOUT, precision="float32"),
        dot_world,
    ),
    "without a decoder": (LatentModel, outside.LatentConfig(), point_world),
}


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_keeps_its_promises(name):
    torch.set_num_threads(1)
    kind, config, world = KINDS[name]
    check_world_model(kind, config, world.SPEC, world.recorded(12))


class Chance(LatentModel):
    def imagine(self, latent, actions):
        moved, prediction = super().imagine(latent, actions + 0.01 * torch.randn_like(actions))
        return moved, prediction


class Neighbours(LatentModel):
    def imagine(self, latent, actions):
        return super().imagine({**latent, "z": latent["z"] + 0.1 * latent["z"].mean(0)}, actions)


class Writer(LatentModel):
    def imagine(self, latent, actions):
        latent["z"] += 0.1
        return super().imagine(latent, actions)


class Scalar(LatentModel):
    def loss(self, batch, generator):
        return {name: value.mean() for name, value in super().loss(batch, generator).items()}


class Forgetful(LatentModel):
    @classmethod
    def restore(cls, description, spec, weights):
        return super().restore(description, replace(spec, horizon=spec.horizon + 1), weights)


class Logits(LatentModel):
    def imagine(self, latent, actions):
        moved, prediction = super().imagine(latent, actions)
        return moved, replace(prediction, success=prediction.success.float())


class Unseeded(LatentModel):
    def batches(self, episodes, generator):
        return super().batches(episodes, torch.Generator().manual_seed(int(torch.randint(2**31, ()))))


class Deaf(LatentModel):
    def batches(self, episodes, generator):
        return super().batches(episodes, torch.Generator().manual_seed(0))


class Coarse(LatentModel):
    def calibrate(self, episodes):
        self.uncertainty_quantiles.copy_(torch.linspace(1, 0, 101))


class Frozen(LatentModel):
    def loss(self, batch, generator):
        return {name: 0.0 * value for name, value in super().loss(batch, generator).items()}


class Elsewhere(LatentModel):
    def show(self, latent):
        return {key: value + 1.0 for key, value in super().show(latent).items()}


class Together(LatentModel):
    def generate(self, latent, actions):
        predictions = []
        for action in actions.unbind(1):
            latent, prediction = self.imagine(latent, 0.9 * action)
            predictions.append(prediction)
        return latent, predictions


BROKEN = {
    Chance: "bitwise equal results",
    Neighbours: "same in a batch of one",
    Writer: "given latent is not modified",
    Scalar: r"loss 'latent' is \[N\]",
    Forgetful: "restore: the spec",
    Logits: r"success is \[B\] bool",
    Unseeded: "equal generators give equal batches",
    Deaf: "drawn with the given generator",
    Coarse: "sorted",
    Frozen: "change the weights",
    Elsewhere: "equals the decoded new latent",
    Together: "generate: steps equal those",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_promise_is_named(kind):
    with pytest.raises(AssertionError, match=BROKEN[kind]):
        check_world_model(kind, outside.LatentConfig(), point_world.SPEC, point_world.recorded(12))
