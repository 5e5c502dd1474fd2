"""Settings of a policy server and of robots that use it, attached or simulated; imports neither."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from robopolicy.client import settings
from robopolicy.client.settings import ServerAddress as ServerAddress
from robopolicy.client.settings import require_key
from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, Positive
from robopolicy.core.structured import REGISTRY, FormerNames


@dataclass(frozen=True)
class ServerConfig(FormerNames):
    """A policy server."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "stall": "hang_timeout",
        "deadline": "request_timeout",
        "maximum_batch": "max_batch_size",
        "maximum_waiting": "max_queue_size",
        "with_parent": "exit_with_parent",
    }

    host: str = "127.0.0.1"
    """Address to listen on; addresses other than loopback require an api_key."""
    port: Natural = 8000
    """Port to listen on, 0 for any free port."""
    api_key: str = ""
    """Key that clients must send; it can also be set by the environment variable ROBOPOLICY_API_KEY."""
    rename: dict[str, str] = field(default_factory=dict)
    """Mapping from a client's names to the policy's fields: {images/cam_high: observation.images.top}."""
    max_batch_size: Count = 16
    """Maximum number of requests per forward pass."""
    max_queue_size: Count = 256
    """Maximum number of waiting requests; further ones get an error that the server is busy."""
    request_timeout: Positive = 10.0
    """Timeout of a request in seconds."""
    hang_timeout: Positive = 10.0
    """Seconds of computation after which the policy counts as hanging; /livez then answers 503."""
    chunking: str = field(default="synchronous", metadata={REGISTRY: "robopolicy.inference.configuration:CHUNKINGS"})
    """Consistency of a new chunk with the remaining actions of the last one: synchronous (none), or rtc, trained_rtc,
    lerobot_rtc, ensembling, bidirectional. It applies to robots that send their remaining actions, as `drive` does;
    others get independent chunks. It needs a policy whose prediction_steps exceed its chunk.
    """
    chunking_options: dict[str, Any] = field(default_factory=dict)
    """Options of the chunking method, such as serve.chunking_options.max_guidance_weight=10."""
    session_expiry: Positive = 600.0
    """Seconds without requests after which a robot's observation history is dropped."""
    exit_with_parent: bool = False
    """Stop when the process that started the server ends, for any reason."""
    certificate: Path | None = None
    """PEM file of a TLS certificate: clients then connect to wss://."""
    certificate_key: Path | None = None
    """PEM file of the certificate's private key, if the certificate file does not contain it."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may connect from a browser, such as [https://console.example]; others are refused."""
    record: Path | None = None
    """Folder in which everything is recorded as a LeRobotDataset; an existing one is continued. Robots that report no
    executed steps are recorded in FOLDER-decisions, one step per request.
    """
    record_limit: Positive = 50.0
    """Gigabytes of a recording after which nothing more is recorded."""
    opentelemetry: bool = False
    """Send a trace of every answer to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names (OpenTelemetry)."""
    detect: Path | None = None
    """Folder of failure detectors that `robopolicy detect` stored: their indices and alarms are in every answer."""
    detectors: tuple[str, ...] = ("float",)
    """Detectors of that folder to use; [] for all."""
    reload_on_change: bool = False
    """Serve a new checkpoint as soon as the folder or link of the policy changes. SIGHUP, and GET /reload with the key,
    do the same at once.
    """
    gate: Path | None = None
    """Run folder of `robopolicy gate`: a new checkpoint is served only if the last result there accepted it."""
    canary: Fraction = 1.0
    """Share of the sessions that a new checkpoint answers during its probation."""
    probation: Positive = 60.0
    """Seconds for which the old checkpoint stays loaded and comes back if the new one fails."""
    max_alarm_rate: Fraction = 0.5
    """Share of episodes with an alarm above which a new checkpoint fails (lower bound of the 95 % interval)."""

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid server settings."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 1 to 65535, or 0 for any free port.")
        counts = {"max_batch_size": self.max_batch_size, "max_queue_size": self.max_queue_size}
        seconds = {
            "request_timeout": self.request_timeout,
            "hang_timeout": self.hang_timeout,
            "session_expiry": self.session_expiry,
        }
        for name, value in (counts | seconds).items():
            if not value > 0:
                raise ConfigError(f"{name}={value} must be more than 0.")
        if self.certificate_key is not None and self.certificate is None:
            raise ConfigError(
                f"certificate_key={self.certificate_key} has no effect without a certificate: set "
                "serve.certificate=FILE too."
            )
        require_key(self.api_key)


@dataclass(frozen=True)
class ConsoleConfig:
    """Web page from which people watch robots, take them over and stop them."""

    port: Natural | None = None
    """Port of the page, such as 8080, or 0 for any free port; null for no page."""
    host: str = "127.0.0.1"
    """Address to listen on; addresses other than loopback require an api_key."""
    api_key: str = ""
    """Key that people must type in; it can also be set by the environment variable ROBOPOLICY_API_KEY."""
    certificate: Path | None = None
    """PEM file of a TLS certificate: the page's address then starts with https://."""
    certificate_key: Path | None = None
    """PEM file of the certificate's private key, if the certificate file does not contain it."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid port or key."""
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 1 to 65535, or 0 for any free port.")
        require_key(self.api_key)


class RobotSettings(settings.RobotSettings, FormerNames):
    """Settings for driving a robot."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "turns": "periods",
        "switches": "unblended",
        "neutral": "hold_values",
        "max_age": "max_observation_age",
        "change": "max_action_change",
        "patience": "server_timeout",
    }


class AttachedRobot(settings.AttachedRobot, FormerNames):
    """A LeRobot robot."""

    RENAMED: ClassVar[Mapping[str, str]] = {"answers_within": "robot_timeout", "camera_age": "frozen_camera_timeout"}
