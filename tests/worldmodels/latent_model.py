"""A world model without a decoder, as a stranger might write one: an encoder, and all else in its latent (TD-MPC)."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from robopolicy.core.spec import Field
from robopolicy.core.vectors import StateVector
from worldmodels.protocol import LATENT, Imagined, draws_of

SIZE = 12


class LatentModel(nn.Module):
    """Predicts its own next latent, the reward and success; the encoder learns with them, its targets stand still."""

    context = 1

    def __init__(self, config, spec, seed=0):
        super().__init__()
        self.config, self.reads = config, {key: spec.observation[key] for key in StateVector.of(spec).keys}
        self.vector = StateVector.of(spec)
        self.spec = replace(spec, observation={LATENT: Field((SIZE,))}, rewards=("reward",), history=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(nn.Linear(self.vector.size, 32), nn.SiLU(), nn.Linear(32, SIZE), nn.Tanh())
            self.step = nn.Sequential(nn.Linear(SIZE + spec.action.size, 64), nn.SiLU(), nn.Linear(64, SIZE))
            self.heads = nn.Sequential(nn.Linear(2 * SIZE, 64), nn.SiLU(), nn.Linear(64, 2))
        self.register_buffer("uncertainty_quantiles", torch.zeros(101))
        self.register_buffer("threshold", torch.zeros(()))

    @classmethod
    def build(cls, config, spec, episodes, seed):
        return cls(config, spec, seed)

    def description(self):
        return {"reads": {key: field.to_json() for key, field in self.reads.items()}}

    @classmethod
    def restore(cls, description, spec, weights):
        reads = {key: Field.from_json(field) for key, field in description["reads"].items()}
        return cls(None, replace(spec, observation=reads))

    def stages(self):
        return {"latents": (self, 1.0)}

    def batches(self, episodes, generator):
        data = episodes.transitions(self.vector)
        while True:
            rows = torch.randint(len(data.state), (256,), generator=generator)
            yield {name: getattr(data, name)[rows] for name in ("state", "action", "next_state", "reward", "success")}

    def loss(self, batch, generator):
        before = self.encoder(batch["state"])
        with torch.no_grad():
            after = self.encoder(batch["next_state"])
        guess = before + self.step(torch.cat([before, batch["action"]], -1))
        reward, logit = self.heads(torch.cat([before, guess], -1)).unbind(-1)
        return {
            "latent": 100 * (guess - after).square().mean(-1),
            "reward": 10 * (reward - batch["reward"]).square(),
            "success": functional.binary_cross_entropy_with_logits(logit, batch["success"].float(), reduction="none"),
        }

    def calibrate(self, episodes):
        self.uncertainty_quantiles.copy_(torch.linspace(0, 1, 101))

    @torch.no_grad()
    def initial(self, context, seeds):
        vector = torch.from_numpy(self.vector.pack({key: context.last(key) for key in self.vector.keys}))
        given = torch.from_numpy(np.asarray(seeds, dtype=np.int64))
        return {"z": self.encoder(vector), "seed": given, "step": torch.zeros_like(given)}

    def show(self, latent):
        return {LATENT: latent["z"]}

    @torch.no_grad()
    def imagine(self, latent, actions):
        before = latent["z"]
        after = before + self.step(torch.cat([before, actions.float()], -1))
        reward, logit = self.heads(torch.cat([before, after], -1)).unbind(-1)
        success = logit > self.threshold
        noise = torch.from_numpy(draws_of(latent, 1)[:, 0].astype(np.float32))
        seen = Imagined({LATENT: after}, {"reward": reward}, success, torch.zeros_like(success), noise)
        return {"z": after, "seed": latent["seed"], "step": latent["step"] + 1}, seen
