"""LeRobot's features of our fields, which remember what the elements are called: LeRobot compares shapes alone."""

from collections.abc import Mapping

from lerobot.configs import FeatureType, PolicyFeature

from robopolicy.core.errors import SpecError
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, Field

ACTION = "action"


class NamedFeature(PolicyFeature):
    """A feature with the names of its elements, which LeRobot hands on and never writes to a file."""

    def __init__(self, kind: FeatureType, shape: tuple[int, ...], names: tuple[str, ...]):
        super().__init__(kind, shape)
        self.names = names


def feature(key: str, field: Field) -> NamedFeature:
    """Return what is under `key`, or ACTION, as LeRobot's environments describe it: images are [height, width, 3]."""
    if key.startswith(IMAGE_PREFIX):
        return NamedFeature(FeatureType.VISUAL, field.shape, ())
    kinds = {ACTION: FeatureType.ACTION, ENVIRONMENT_STATE: FeatureType.ENV}
    return NamedFeature(kinds.get(key, FeatureType.STATE), field.shape, field.names)


def require_names(fields: Mapping[str, Field], features: Mapping[str, PolicyFeature]) -> None:
    """Raise SpecError where a feature that has names calls an element otherwise than the policy's field of its key."""
    for key, field in fields.items():
        known = features.get(key)
        theirs = known.names if isinstance(known, NamedFeature) else ()
        for place, (mine, other) in enumerate(zip(field.names, theirs, strict=False)):
            if mine != other:
                raise SpecError(
                    f"Element {place} of '{key}' is '{mine}' to the policy, but '{other}' in the environment. Is this "
                    "the environment it was trained for?"
                )
