"""Reading of the control steps that a robot reports to a server that records. Axes: n step, A action dimension."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from robopolicy.client.executed import NUMBERS
from robopolicy.client.images import pixels
from robopolicy.client.protocol import EXECUTED, Limits
from robopolicy.core.errors import NonFiniteError, SpecError
from robopolicy.core.spec import QUEUE, PolicySpec


def pop_executed(request: dict[Any, Any], spec: PolicySpec, limits: Limits) -> list[dict[str, Any]]:
    """Remove the reported steps from a request and return them, oldest first, with the entries of `executed_report`.

    Raises SpecError unless the report contains all fields of the policy, the actions and who acted, of equal length,
    and NonFiniteError on NaN or infinity.
    """
    report = request.pop(EXECUTED)
    if not isinstance(report, Mapping):
        raise SpecError(f"'{EXECUTED}' must be a mapping, not {type(report).__name__}.")
    if not report:
        return []
    fields = {key: field.shape for key, field in spec.observation.items() if key != QUEUE}
    actions = _numbers(report, "action", spec.action.shape)
    count = len(actions)
    observation = {key: _frames(report, key, shape, limits) for key, shape in fields.items()}
    columns = {name: _numbers(report, name, ()).astype(kind) for name, kind in NUMBERS.items()}
    operators = report.get("operator")
    if not isinstance(operators, list) or not all(
        isinstance(each, str) and len(each) < limits.name for each in operators
    ):
        raise SpecError(f"'{EXECUTED}' has no list of short texts under 'operator'.")
    for name, values in {**observation, **columns, "operator": operators}.items():
        if len(values) != count:
            raise SpecError(f"'{EXECUTED}' has {len(values)} entries of '{name}' and {count} actions.")
    return [
        {
            "observation": {key: values[place] for key, values in observation.items()},
            "action": actions[place],
            "operator": operators[place],
            **{name: values[place].item() for name, values in columns.items()},
        }
        for place in range(count)
    ]


def _numbers(report: Mapping[Any, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the entry `name` as finite numbers [n, *shape]."""
    values = report.get(name)
    if not isinstance(values, np.ndarray) or values.shape[1:] != shape or not values.ndim:
        raise SpecError(f"'{EXECUTED}' needs an array [n, {str(list(shape))[1:-1]}] under '{name}'.")
    if not np.isfinite(values).all():
        raise NonFiniteError(f"'{EXECUTED}' contains NaN or infinity under '{name}'.")
    return values


def _frames(report: Mapping[Any, Any], key: str, shape: tuple[int, ...], limits: Limits) -> np.ndarray:
    """Return the frames [n, *shape] of a field; images may have any size."""
    values = report.get(key)
    if isinstance(values, np.ndarray) and values.ndim == 4 and len(shape) == 3:
        images = pixels(values)
        if images is not None and images.ndim == 4 and images[:1].size <= limits.image:
            return images
    return _numbers(report, key, shape)
