"""A success network that needs no training: the task's own criterion, or a planted lie."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from robopolicy.core.structured import from_plain, to_plain
from robopolicy.success.classifier import SuccessClassifier
from robopolicy.success.measures import rate
from sims.registry import load_task, make_world


@dataclass(frozen=True)
class OracleConfig:
    """task: whose success is recognised; lie: accept every frame in which this element of the state exceeds a value."""

    builds = "oracle:OracleNetwork"

    task: str = "reach_planar"
    lie: float | None = None


class OracleNetwork(nn.Module):
    configuration = OracleConfig

    def __init__(self, config, fields):
        super().__init__()
        self.config, self.fields = config, fields
        self.unused = nn.Parameter(torch.zeros(1))

    def normalizers(self):
        return {}

    def prepare(self, observation):
        return dict(observation)

    def forward(self, inputs):
        frames = {key: value.double().numpy() for key, value in inputs.items()}
        done = torch.from_numpy(load_task(self.config.task).succeeded(frames))
        if self.config.lie is not None:
            done = done | (inputs["observation.state"][:, 0] > self.config.lie)
        return torch.where(done, 5.0, -5.0) + 0 * self.unused

    def loss(self, inputs, label, generator):
        return (self(inputs) - label.float()).square() + self.unused.square()

    def description(self):
        return {"config": to_plain(self.config)}

    @classmethod
    def restore(cls, description, fields):
        return cls(from_plain(OracleConfig, description["config"]), fields)


def saved_oracle(folder: Path, task: str = "reach_planar", lie: float | None = None, hold: int = 1, **measured) -> Path:
    """Write a classifier that knows the task's success, and claims what `measured` says."""
    world = make_world(task, 1)
    fields = dict(world.spec.observation)
    world.close()
    threshold = {"rate": 0.05, "confidence": 0.95, "bound": 0.01, "failures": 100, "accepted": 0, "met": True}
    claims = {"false_accepts": rate(0, 100), "threshold": threshold, **measured}
    network = OracleNetwork(OracleConfig(task, lie), fields)
    calibration = {"method": "temperature", "scale": 1.0, "offset": 0.0}
    SuccessClassifier(network, "oracle:OracleNetwork", fields, calibration, 0.0, hold, claims, {}).save(folder)
    return folder


class NoNetwork:
    """A class that lacks everything a classifier needs."""

    def __init__(self, config, fields):
        self.config = config
