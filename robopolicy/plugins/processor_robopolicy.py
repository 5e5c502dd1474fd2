"""LeRobot's pre- and postprocessors for robopolicy's policies: names, a batch axis, devices; the policy normalises
itself.
"""

from collections.abc import Mapping
from typing import Any

from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME

from robopolicy.plugins.configuration_robopolicy import RobopolicyConfig


def make_robopolicy_pre_post_processors(
    config: RobopolicyConfig, dataset_stats: Mapping[str, Any] | None = None
) -> tuple[PolicyProcessorPipeline[Any, Any], PolicyProcessorPipeline[Any, Any]]:
    """Return both pipelines; dataset_stats are ignored, because the checkpoint contains its normalisers."""
    before = PolicyProcessorPipeline(
        [
            RenameObservationsProcessorStep(rename_map={}),
            AddBatchDimensionProcessorStep(),
            DeviceProcessorStep(device=str(config.device)),
        ],
        name=POLICY_PREPROCESSOR_DEFAULT_NAME,
    )
    after = PolicyProcessorPipeline(
        [DeviceProcessorStep(device="cpu")],
        name=POLICY_POSTPROCESSOR_DEFAULT_NAME,
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    return before, after
