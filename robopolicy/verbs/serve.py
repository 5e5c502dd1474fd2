"""Serves a policy to robots: openpi's websocket protocol, /healthz and /metrics, on loopback by default.

Any openpi client can connect; images of other sizes are resized. plan.model=CHECKPOINT adds planning with a world model
to every policy call. inference.engine selects the inference engine (see robopolicy optimize). serve.chunking=rtc makes
each new chunk continue the actions that the robot is executing. To listen beyond loopback, set serve.host,
serve.api_key (or ROBOPOLICY_API_KEY), and a certificate. Events are logged on standard error, one JSON object per line;
/livez, /readyz and /metrics report the server's health.
"""

import os
import warnings

from robopolicy.building.planning import with_planning
from robopolicy.building.policies import choose_device, load_acting
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.structured import narrowed
from robopolicy.inference.configuration import CHUNKINGS
from robopolicy.policies.loading import missing_fps_message
from robopolicy.serving.configuration import ServerConfig
from robopolicy.serving.server import ServerSettings, serve
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Serve a policy to robots over a websocket (openpi's protocol)",
    sections=("run", "plan", "inference", "serve"),
    example="robopolicy serve runs/finetune/push_cube/0/checkpoint",
    targets=("serve.policy",),
)


def run(config: Config) -> int:
    """Serve until interrupted."""
    section = config.serve
    if section.policy is None:
        raise ConfigError("No policy given. Usage: robopolicy serve CHECKPOINT")
    CHUNKINGS.path(section.chunking)
    device = choose_device(config.run)
    loaded = load_acting(config.inference, section.policy, device, section.chunking)
    policy = with_planning(config.plan, loaded, device)
    if not policy.spec.fps:
        warnings.warn(missing_fps_message(section.policy), RobopolicyWarning, stacklevel=1)
    key = section.api_key or os.environ.get("ROBOPOLICY_API_KEY", "")

    def announce(port: int) -> None:
        scheme = "ws" if section.certificate is None else "wss"
        print(f"Serving {section.policy} at {scheme}://{section.host}:{port} (Ctrl-C stops)", flush=True)

    settings = vars(narrowed(ServerConfig, section)) | {"api_key": key, "seed": config.run.seed, "device": device}
    serve(policy, ServerSettings(**settings), announce)
    return 0
