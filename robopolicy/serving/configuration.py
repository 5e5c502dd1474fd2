"""What can be set about a policy server and about a robot, attached or simulated, that asks one; imports neither."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.holding import POSITIONS
from robopolicy.core.ranges import Count, Natural, NonNegative, Positive
from robopolicy.core.structured import REGISTRY

LONGEST_KEY = 4096
"""Characters of an API key: a header of twice as many is refused by servers."""


def require_key(key: str) -> None:
    """Raise ConfigError, without saying it, where an API key cannot be sent in a header, "" excepted."""
    if not key.isprintable():
        wrong = "holds a line break or the like"
    elif key != key.strip():
        wrong = "begins or ends with a space"
    elif any(ord(each) > 255 for each in key):
        wrong = "holds characters beyond Latin's"
    elif len(key) > LONGEST_KEY:
        wrong = f"has {len(key)} characters, more than {LONGEST_KEY}"
    else:
        return
    raise ConfigError(f"The API key {wrong}: no header could carry it. Make one with: openssl rand -hex 16")


@dataclass(frozen=True)
class ServerConfig:
    """A policy server."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback it needs an api_key."""
    port: Natural = 8000
    """Port to listen on, 0 for any free one."""
    api_key: str = ""
    """What clients must show, or set the environment's ROBOPOLICY_API_KEY."""
    rename: dict[str, str] = field(default_factory=dict)
    """A client's names -> the policy's fields: {images/cam_high: observation.images.top}."""
    maximum_batch: Count = 16
    """Most requests answered in one forward pass."""
    maximum_waiting: Count = 256
    """Most requests that wait for it; more are told that the server is busy."""
    deadline: Positive = 10.0
    """Seconds after which a request is given up."""
    stall: Positive = 10.0
    """Seconds after which a policy that computes counts as hanging: /livez then answers 503."""
    chunking: str = field(default="synchronous", metadata={REGISTRY: "robopolicy.inference.configuration:CHUNKINGS"})
    """How plans follow on from the one that a robot is executing: not (synchronous), or around what is left of it (rtc,
    trained_rtc, lerobot_rtc, ensembling, bidirectional). For robots that say what is left, as `drive` does; others get
    chunks. Needs a policy whose prediction_steps go beyond its chunk.
    """
    chunking_options: dict[str, Any] = field(default_factory=dict)
    """Its own settings, such as serve.chunking_options.max_guidance_weight=10."""
    session_expiry: Positive = 600.0
    """Seconds after which the history of a robot that asks for nothing is forgotten."""
    with_parent: bool = False
    """End when the process that started the server does, however that ends."""
    certificate: Path | None = None
    """PEM file of a TLS certificate: clients then connect to wss://."""
    certificate_key: Path | None = None
    """PEM file of its private key, where the certificate's file does not hold it."""
    origins: tuple[str, ...] = ()
    """Web pages that may connect from a browser, such as [https://console.example]; others are refused."""

    def __post_init__(self) -> None:
        """Raise ConfigError for what no server can answer with."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: choose 1 to 65535, or 0 for any free one.")
        counts = {"maximum_batch": self.maximum_batch, "maximum_waiting": self.maximum_waiting}
        seconds = {"deadline": self.deadline, "stall": self.stall, "session_expiry": self.session_expiry}
        for name, value in (counts | seconds).items():
            if not value > 0:
                raise ConfigError(f"{name} is {value}: it is more than 0.")
        if self.certificate_key is not None and self.certificate is None:
            raise ConfigError(
                f"certificate_key is {self.certificate_key}, and without its certificate nothing is encrypted: set "
                "serve.certificate=FILE too."
            )
        require_key(self.api_key)


@dataclass(frozen=True)
class ServerAddress:
    """Where a robot's server is."""

    host: str = "127.0.0.1"
    """The server's name, or its whole address: wss://robot.example:8000."""
    port: Natural | None = None
    """The server's port; 8000 unless set, or that of a whole address."""
    api_key: str = ""
    """The server's key, if it wants one, or set the environment's ROBOPOLICY_API_KEY."""
    certificate: Path | None = None
    """PEM file of a certificate to trust, such as a server's self-signed one (serve.certificate); it is wss:// then."""


@dataclass(frozen=True)
class RobotSettings:
    """How a simulated robot is driven."""

    prefetch: Natural = 0
    """Ask for the next chunk when so many steps are left, where the server is slower than half a step: acting on what
    was seen so many steps ago costs success.
    """
    latency_steps: Natural = 0
    """Control steps that every answer is held back, an episode's first excepted: how a slower server would do."""
    blend: Natural = 0
    """Over so many steps a new chunk takes over from the old one: angles such as yaw the short way round, grippers and
    toggles at once.
    """
    turns: dict[str, NonNegative] = field(default_factory=dict)
    """Elements of the action that go round -> one turn, in the policy's units: {yaw: 6.2832}; 0 for those that neither
    go round nor switch, although their names say so.
    """
    switches: tuple[str, ...] = ()
    """Elements of the action that change at once."""
    hold: Literal["auto", "zero", "last"] = "auto"
    """What elements of an action do, while the robot holds still, of which neither name nor unit says it: go to zero
    (velocities, differences), or stay (last: positions). auto: as the served policy's world has it (its latency_hold);
    where that does not say, zero for a simulated robot, and an attached one asks.
    """
    positions: tuple[str, ...] = POSITIONS
    """Elements of the action that stay at their place while the robot holds still, by name, whatever they are."""
    neutral: dict[str, float] = field(default_factory=dict)
    """Elements of the action that go to a value instead, in the policy's units: {x.vel: 0, throttle: 0.5}."""
    max_age: NonNegative | None = None
    """Seconds after which an observation is too old to act on; as long as two chunks take, unless set."""
    change: Positive | None = None
    """Most by which an action may differ from the one before, in the policy's units; an episode's first from where the
    robot is.
    """
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Least and most of elements of the action, in the policy's units: {x.vel: [-0.2, 0.2]}. An attached robot needs
    them, or change, where the policy has no bounds of its own (LeRobot's have none).
    """
    unbounded: bool = False
    """Whether an attached robot may be sent any action where nothing bounds it."""
    patience: NonNegative = 5.0
    """Seconds that a server may fail, or be silent, before the drive ends; the robot holds still meanwhile."""

    def __post_init__(self) -> None:
        """Raise ConfigError for what no robot can be driven by."""
        if self.change is not None and not 0 < self.change < math.inf:
            raise ConfigError(f"change is {self.change}: an action may differ from the last by more than 0, or null.")
        if not all(math.isfinite(value) for value in self.neutral.values()):
            raise ConfigError(f"neutral is {self.neutral}: each is a finite number, in the policy's units.")
        if not all(0 <= value < math.inf for value in self.turns.values()):
            raise ConfigError(f"turns is {self.turns}: each is one turn, more than 0, or 0 for none.")
        for name, bound in self.bounds.items():
            if len(bound) != 2 or not all(map(math.isfinite, bound)) or bound[0] > bound[1]:
                raise ConfigError(f"bounds has {name}: {list(bound)}: it is [LOW, HIGH], finite, and low at most high.")
        if self.max_age is not None and not self.max_age > 0:
            raise ConfigError(f"max_age is {self.max_age}: more than 0 seconds, or null.")
        if min(self.prefetch, self.latency_steps, self.blend) < 0:
            raise ConfigError(
                f"prefetch is {self.prefetch}, latency_steps {self.latency_steps} and blend {self.blend}: choose 0 "
                "control steps or more."
            )
        if not 0 < self.patience < math.inf:
            raise ConfigError(f"patience is {self.patience}: more than 0 seconds, for an answer takes some time.")


@dataclass(frozen=True)
class AttachedRobot:
    """A robot of LeRobot's."""

    robot: str = ""
    """A LeRobot robot to drive instead of a world: its type, such as so101_follower (built in, or of an installed
    lerobot_robot_* package), or the dotted path of its RobotConfig.
    """
    robot_options: dict[str, Any] = field(default_factory=dict)
    """The fields of its configuration: {port: /dev/ttyACM0, id: mine, cameras: {front: {type: opencv, ...}}}."""
    rename: dict[str, str] = field(default_factory=dict)
    """The robot's motors and cameras -> the policy's elements and fields, where names differ:
    {shoulder_pan.pos: shoulder_pan_position, front: observation.images.top}.
    """
    scale: dict[str, float] = field(default_factory=dict)
    """The robot's motors -> the policy's units in one of the robot's, 1 unless set: {shoulder_pan.pos: 0.0174533}
    where the policy learned radians and the robot counts degrees.
    """
    task: str = ""
    """The robot's instruction, empty for the policy's only one."""
    seconds: Positive = 30.0
    """How long an episode of the robot lasts."""
    answers_within: Positive = 1.0
    """Seconds that the robot may take for an observation or an action before it is stopped."""
    camera_age: Positive = 1.0
    """Seconds that a camera may show one and the same picture while the robot moves, before it counts as frozen."""
