"""LeRobot features of robopolicy's fields, with the names of their elements: LeRobot compares only shapes."""

from collections.abc import Mapping

from lerobot.configs import FeatureType, PolicyFeature

from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, Field, require_consistent_fields

ACTION = "action"


class NamedFeature(PolicyFeature):
    """A feature with the declaration of its field, which LeRobot passes on and never writes to a file."""

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
    """Raise SpecError if a feature's element names or unit differ from those of the policy's field with the same key;
    see `spec.require_consistent_fields`. LeRobot compares the shapes.
    """
    declared = {key: each.field for key, each in features.items() if isinstance(each, NamedFeature)}
    pairs = {
        f"'{key}'": (field, declared[key])
        for key, field in fields.items()
        if key in declared and declared[key].shape == field.shape
    }
    require_consistent_fields(pairs, ("for the policy", "in the environment"))
