"""Serves a policy to robots: openpi's websocket protocol, /healthz and /metrics, on loopback unless told otherwise.

Any openpi client can connect; images of other sizes are resized. plan.model=CHECKPOINT makes the policy look ahead in a
world model before it answers; inference.engine= says who computes its decisions (robopolicy optimize);
serve.chunking=rtc lets plans follow on from those that robots are executing. To listen beyond loopback set serve.host
and serve.api_key (or ROBOPOLICY_API_KEY), and a certificate. What happens is logged on standard error, a line of JSON
an event; /livez, /readyz and /metrics say how the server is.
"""

import os
import warnings

from robopolicy.building.planning import with_planning
from robopolicy.building.policies import choose_device, load_acting
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.structured import narrowed
from robopolicy.inference.configuration import CHUNKINGS
from robopolicy.policies.loading import no_rate
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
        raise ConfigError("Which policy? Write: robopolicy serve CHECKPOINT")
    CHUNKINGS.path(section.chunking)
    device = choose_device(config.run)
    loaded = load_acting(config.inference, section.policy, device, section.chunking)
    policy = with_planning(config.plan, loaded, device)
    if not policy.spec.fps:
        warnings.warn(no_rate(section.policy), RobopolicyWarning, stacklevel=1)
    key = section.api_key or os.environ.get("ROBOPOLICY_API_KEY", "")

    def announce(port: int) -> None:
        scheme = "ws" if section.certificate is None else "wss"
        print(f"Serving {section.policy} at {scheme}://{section.host}:{port} (Ctrl-C stops)", flush=True)

    given = vars(narrowed(ServerConfig, section)) | {"api_key": key, "seed": config.run.seed, "device": device}
    serve(policy, ServerSettings(**given), announce)
    return 0
