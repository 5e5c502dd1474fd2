"""Failure detectors: notice while a policy acts that its episode is going to fail."""

from robopolicy.core.registry import Registry

DETECTORS = Registry(
    "failure detector",
    "robopolicy.failure_detectors",
    {
        "float": "robopolicy.failures.float:FloatDetector",
        "nearest": "robopolicy.failures.nearest:NearestDetector",
        "nearest_max": "robopolicy.failures.nearest:FarthestDetector",
        "fiper": "robopolicy.failures.fiper:FiperDetector",
        "value": "robopolicy.failures.value:ValueDetector",
        "progress": "robopolicy.failures.nearest:ProgressDetector",
        "clock": "robopolicy.failures.nearest:ClockDetector",
    },
)
"""Registry for detect.detectors: a class, called without arguments."""
