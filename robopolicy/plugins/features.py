"""LeRobot's features of our fields, which remember what the elements are called: LeRobot compares shapes alone."""

from collections.abc import Mapping

from lerobot.configs import FeatureType, PolicyFeature

from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, Field, require_alike

ACTION = "action"


class NamedFeature(PolicyFeature):
    """A feature with what its field declares, which LeRobot hands on and never writes to a file."""

    def __init__(self, kind: FeatureType, field: Field):
        super().__init__(kind, field.shape)
        self.field = field


def feature(key: str, field: Field) -> NamedFeature:
    """Return the feature `key`, or ACTION, as LeRobot's environments describe it: images are [height, width, 3]."""
    if key.startswith(IMAGE_PREFIX):
        return NamedFeature(FeatureType.VISUAL, field)
    kinds = {ACTION: FeatureType.ACTION, ENVIRONMENT_STATE: FeatureType.ENV}
    return NamedFeature(kinds.get(key, FeatureType.STATE), field)


def require_names(fields: Mapping[str, Field], features: Mapping[str, PolicyFeature]) -> None:
    """Raise SpecError where a feature of ours calls an element otherwise than the policy's field of its key, or has
    another unit; see `spec.require_alike`. Shapes are LeRobot's to compare.
    """
    declared = {key: each.field for key, each in features.items() if isinstance(each, NamedFeature)}
    pairs = {
        f"'{key}'": (field, declared[key])
        for key, field in fields.items()
        if key in declared and declared[key].shape == field.shape
    }
    require_alike(pairs, ("for the policy", "in the environment"))
