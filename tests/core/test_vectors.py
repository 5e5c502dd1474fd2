"""One order of the state vector, whatever the spec lists first."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robopolicy.core.errors import SpecError
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field, WorldSpec
from robopolicy.core.vectors import StateVector

FORCE = "observation.force"
FIELDS = {
    "observation.images.top": Field((8, 8, 3), "uint8"),
    FORCE: Field((2, 2)),
    ENVIRONMENT_STATE: Field((3,), names=("a", "b", "c")),
    STATE: Field((2,), names=("x", "y")),
}


def test_state_comes_first_then_the_environment_then_the_rest_and_no_images():
    vector = StateVector.of(FIELDS)
    assert vector.keys == (STATE, ENVIRONMENT_STATE, FORCE)
    assert vector.size == 9 and vector.sizes == [2, 3, 4]
    assert vector.slices == {STATE: slice(0, 2), ENVIRONMENT_STATE: slice(2, 5), FORCE: slice(5, 9)}
    assert vector.names == ("x", "y", "a", "b", "c", "", "", "", "")
    assert StateVector.of(WorldSpec("w", FIELDS, Field((1,)), 10, 5)) == vector


@given(order=st.permutations(list(FIELDS)), lead=st.lists(st.integers(1, 3), max_size=3))
def test_what_is_packed_comes_out_again_whatever_the_order_and_the_leading_axes(order, lead):
    vector = StateVector.of({key: FIELDS[key] for key in order})
    generator = np.random.default_rng(0)
    arrays = {key: generator.normal(size=(*lead, *FIELDS[key].shape)).astype(np.float32) for key in order}
    packed = vector.pack(arrays)
    assert packed.shape == (*lead, 9) and packed.dtype == np.float32
    for key, value in vector.unpack(packed).items():
        assert np.array_equal(value, arrays[key]) and np.array_equal(
            value.reshape(*lead, -1), packed[..., vector.slices[key]]
        )
    tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
    assert torch.equal(vector.pack(tensors), torch.from_numpy(packed))
    assert all(torch.equal(value, tensors[key]) for key, value in vector.unpack(vector.pack(tensors)).items())


def test_vectors_of_images_alone_have_no_elements_but_keep_their_rows():
    images = {key: field for key, field in FIELDS.items() if "images" in key}
    vector = StateVector.of(images)
    assert vector.pack({"observation.images.top": torch.zeros(4, 2, 8, 8, 3)}).shape == (4, 2, 0)
    assert vector.pack({"observation.images.top": np.zeros((4, 8, 8, 3))}).shape == (4, 0)
    assert vector.unpack(torch.zeros(4, 0)) == {}


def test_what_does_not_fit_is_refused_by_name():
    vector = StateVector.of(FIELDS)
    shown = {key: torch.zeros(5, *FIELDS[key].shape) for key in vector.keys}
    with pytest.raises(SpecError, match=r"no 'observation\.force'"):
        vector.pack({key: value for key, value in shown.items() if key != FORCE})
    with pytest.raises(SpecError, match=r"observation\.state.*does not end in \[2\]"):
        vector.pack({**shown, STATE: torch.zeros(5, 3)})
    with pytest.raises(SpecError, match="9 elements, not 8"):
        vector.unpack(torch.zeros(5, 8))
