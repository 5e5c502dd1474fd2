"""Former modules: modules that were renamed can be imported by their former name for one more release.

`import robopolicy.nn.pieces` returns the module `robopolicy.nn.micro_batches`, with a DeprecationWarning that says the
new name. The table of one release is removed in the next.
"""

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from robopolicy.core.former_names import keep_former_names

FORMER_MODULES = {
    "robopolicy.evaluation.judges": "robopolicy.evaluation.evaluators",
    "robopolicy.building.judges": "robopolicy.building.evaluators",
    "robopolicy.evaluation.waves": "robopolicy.evaluation.episode_batches",
    "robopolicy.evaluation.two_worlds": "robopolicy.evaluation.sim_vs_imagined",
    "robopolicy.data.kept": "robopolicy.data.recording_cache",
    "robopolicy.data.foresight": "robopolicy.data.lookahead",
    "robopolicy.core.turns": "robopolicy.client.periodicity",
    "robopolicy.serving.wiring": "robopolicy.client.element_mapping",
    "robopolicy.serving.pictures": "robopolicy.client.images",
    "robopolicy.serving.described": "robopolicy.client.policy_description",
    "robopolicy.policies.known": "robopolicy.policies.training_ranges",
    "robopolicy.training.course": "robopolicy.training.stopping",
    "robopolicy.core.holding": "robopolicy.client.element_kinds",
    "robopolicy.core.periodicity": "robopolicy.client.periodicity",
    "robopolicy.serving.client": "robopolicy.client.policy_client",
    "robopolicy.serving.driver": "robopolicy.client.driver",
    "robopolicy.serving.element_mapping": "robopolicy.client.element_mapping",
    "robopolicy.serving.holding": "robopolicy.client.holding",
    "robopolicy.serving.images": "robopolicy.client.images",
    "robopolicy.serving.lerobot_robot": "robopolicy.client.lerobot_robot",
    "robopolicy.serving.notices": "robopolicy.client.notices",
    "robopolicy.serving.policy_description": "robopolicy.client.policy_description",
    "robopolicy.serving.protocol": "robopolicy.client.protocol",
    "robopolicy.nn.pieces": "robopolicy.nn.micro_batches",
    "robopolicy.rl.starts": "robopolicy.rl.initial_states",
    "robopolicy.rl.experimental.starts": "robopolicy.rl.experimental.initial_states",
    "worldmodels.starts": "worldmodels.initial_states",
    "sims.wording": "sims.instructions",
}
"""Former name of a module -> its present name."""

FORMER_NAMES: Mapping[str, Mapping[str, str]] = {
    "robopolicy.client.element_kinds": {
        "Standstill": "HoldBehaviour",
        "standstill": "hold_behaviour",
        "is_place_unit": "is_position_unit",
    },
    "robopolicy.client.element_mapping": {"Wiring": "ElementMapping", "wired": "map_elements"},
    "robopolicy.client.holding": {
        "unsaid": "unspecified_hold_message",
        "as_served": "with_served_hold",
        "Stillness": "HoldAction",
    },
    "robopolicy.client.images": {"smaller": "downscale", "resized": "resize_with_padding"},
    "robopolicy.client.lerobot_robot": {"blue_first": "bgr_cameras"},
    "robopolicy.client.notices": {"far_from_known": "far_from_training_data"},
    "robopolicy.client.periodicity": {"Turns": "Periodicity", "turns_of": "periodicity_of"},
    "robopolicy.client.policy_client": {
        "whole_address": "server_url",
        "trusting": "tls_context",
        "way_out": "connection_hint",
    },
    "robopolicy.client.policy_description": {"nothing_bounds": "unbounded_message"},
    "robopolicy.client.protocol": {
        "sealed": "pack_with_checksum",
        "unsealed": "unpack_with_checksum",
        "fingerprint": "checksum",
    },
}
"""Module that moved to the client -> former and present names in it, which worked under its former name."""


class _PresentModule(Loader):
    """Loads the module called `present` in place of one of its former names."""

    def __init__(self, present: str):
        self.present = present

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the present module itself, so that both names give the same classes."""
        module = importlib.import_module(self.present)
        if self.present in FORMER_NAMES:
            keep_former_names(self.present, FORMER_NAMES[self.present])
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced; the module has already run."""
        module.__spec__ = self.spec


class FormerModules(MetaPathFinder):
    """Finds the modules of `FORMER_MODULES`, after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a former module, None for other names."""
        if fullname not in FORMER_MODULES:
            return None
        present = FORMER_MODULES[fullname]
        text = f"The module {fullname} is now called {present}. The former name works until the next minor version."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, _PresentModule(present))


def keep_former_modules() -> None:
    """Let Python find the modules of `FORMER_MODULES` from now on; further calls do nothing."""
    if not any(isinstance(finder, FormerModules) for finder in sys.meta_path):
        sys.meta_path.append(FormerModules())
