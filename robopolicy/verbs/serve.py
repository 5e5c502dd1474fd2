"""Serves a policy to robots: openpi's websocket protocol, /healthz and /metrics, on loopback by default.

Any openpi client can connect; images of other sizes are resized. plan.model=CHECKPOINT adds planning with a world model
to every policy call. inference.engine selects the inference engine (see robopolicy optimize). serve.chunking=rtc makes
each new chunk continue the actions that the robot is executing. serve.record=FOLDER records everything,
serve.detect=FOLDER watches for failures. A new checkpoint in place of the old one is served without restart on SIGHUP,
or with serve.reload_on_change=true, and the old one comes back if it fails. To listen beyond loopback, set serve.host,
serve.api_key (or ROBOPOLICY_API_KEY), and a certificate. Events are logged on standard error, one JSON object per line;
/livez, /readyz and /metrics report the server's health. serve.console.port=8080 opens a web page from which people
watch robots that drive with drive.supervisor=ws://HOST:8080, take them over and stop them.
"""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from robopolicy.building.planning import with_planning
from robopolicy.building.policies import choose_device, fitted_for, load_acting, load_policy
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.policy import Policy
from robopolicy.core.storage import read_object
from robopolicy.core.structured import narrowed
from robopolicy.failures.watcher import Watcher, load_watcher
from robopolicy.inference.configuration import CHUNKINGS
from robopolicy.operators.assistance import Team
from robopolicy.operators.operator import Site
from robopolicy.policies.loading import checkpoint_in, missing_fps_message, weights_hash
from robopolicy.runs import RESULT
from robopolicy.serving.configuration import ConsoleConfig, ServerConfig
from robopolicy.serving.console.fleet import Fleet
from robopolicy.serving.console.site import Console
from robopolicy.serving.server import serve
from robopolicy.serving.versions import LoadedPolicy, ServerSettings
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Serve a policy to robots over a websocket (openpi's protocol)",
    sections=("run", "plan", "inference", "serve"),
    example="robopolicy serve runs/finetune/push_cube/0/checkpoint",
    targets=("serve.policy",),
)

FPS = 10
"""Control rate that a console assumes for a policy without one."""


def run(config: Config) -> int:
    """Serve until interrupted."""
    section = config.serve
    if section.policy is None:
        raise ConfigError("No policy given. Usage: robopolicy serve CHECKPOINT")
    CHUNKINGS.path(section.chunking)
    device = choose_device(config.run)
    paths = {"": section.policy, **section.policies}

    def load(name: str, first: bool = False) -> LoadedPolicy:
        """Return a policy as its checkpoint is now; a later one than the first only with the gate's consent."""
        version = weights_hash(paths[name])
        if section.gate is not None and not first:
            require_accepted(section.gate, version)
        acting = load_acting(config.inference, paths[name], device, section.chunking)
        # Rows of a batch are whichever robots ask together, so no plan may start from what a row did before.
        policy = with_planning(config.plan, acting, device, remembers=False)
        if not policy.spec.fps:
            warnings.warn(missing_fps_message(paths[name]), RobopolicyWarning, stacklevel=1)
        watcher = None if section.detect is None else detectors(config, paths[name], policy, first, device)
        return LoadedPolicy(policy, version[:8], watcher)

    loaded = {name: load(name, first=True) for name in paths}
    key = section.api_key or os.environ.get("ROBOPOLICY_API_KEY", "")

    def announce(port: int) -> None:
        scheme = "ws" if section.certificate is None else "wss"
        print(f"Serving {section.policy} at {scheme}://{section.host}:{port} (Ctrl-C stops)", flush=True)

    settings = vars(narrowed(ServerConfig, section)) | {"api_key": key, "seed": config.run.seed, "device": device}
    default = loaded.pop("")
    with _console(section.console, key, default.policy):
        serve(default, ServerSettings(**settings), announce, others=loaded, load=load, paths=paths)
    return 0


def detectors(config: Config, path: Path, policy: Policy, first: bool, device: torch.device) -> Watcher:
    """Return the failure detectors in serve.detect; of a later checkpoint those that are stored next to it."""
    folder = config.serve.detect if first else checkpoint_in(path).parent / "detectors"
    assert folder is not None
    about = fitted_for(config.inference, path, policy)
    return load_watcher(folder, policy, load_policy(path, device), about, config.serve.detectors)


def require_accepted(folder: Path, version: str) -> None:
    """Raise ConfigError unless the gate of this run folder accepted the candidate with these weights."""
    path = folder / RESULT
    result = read_object(path) if path.is_file() else {}
    if result.get("candidate_weights") != version:
        raise ConfigError(f"{folder} is no verdict on this checkpoint: run robopolicy gate with it as the candidate.")
    if not result["gate"]["accepted"]:
        raise ConfigError(f"The gate in {folder} rejected this checkpoint: {'; '.join(result['gate']['reasons'])}")


@contextmanager
def _console(settings: ConsoleConfig, key: str, policy: Policy) -> Iterator[None]:
    """Run the console of the robots that report to it while the body runs, if its port is set."""
    if settings.port is None:
        yield
        return
    begin, spec = time.monotonic(), policy.spec
    team = Team(0, {}, lambda: time.monotonic() - begin)
    fleet = Fleet(team, Site(spec.action, float(spec.fps or FPS), 1), [])
    with Console(fleet, replace(settings, api_key=settings.api_key or key)) as console:
        print(f"Console: {console.address}", flush=True)
        yield
