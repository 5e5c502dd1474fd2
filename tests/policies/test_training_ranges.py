"""Between which values a policy's data lay, as its server says it to a robot."""

import numpy as np
import torch

from robopolicy.client.policy_description import described_policy
from robopolicy.core.spec import IMAGE_PREFIX, STATE, Field
from robopolicy.nn.normalizer import NormalizationMode
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind
from robopolicy.policies.training_ranges import DEVIATIONS, known_ranges
from robopolicy.serving.server import PolicyServer, ServerSettings

FIELDS = {STATE: Field((2,), names=("lift", "pan")), "observation.extra": Field((1,))}


def made(mode=NormalizationMode.MIN_MAX):
    config = DenoisingPolicyConfig(kind=PolicyKind.FLOW, width=16, depth=1, chunk=2, state_normalization=mode)
    policy = DenoisingPolicy(config, FIELDS, Field((2,), low=-1.0, high=1.0), fps=20.0)
    values = {
        STATE: torch.tensor([[0.0, -2.0], [1.0, 2.0]]),
        "observation.extra": torch.tensor([[3.0], [5.0]]),
        "action": torch.zeros(2, 2),
    }
    return policy, values


def test_a_fitted_policy_says_what_it_knows_and_a_robot_reads_it_from_its_server():
    policy, values = made()
    assert known_ranges(policy) == {}  # before it was fitted
    policy.fit_normalizers(values)
    known = known_ranges(policy)
    assert {key: [low.tolist(), high.tolist()] for key, (low, high) in known.items()} == {
        STATE: [[0.0, -2.0], [1.0, 2.0]],
        "observation.extra": [[3.0], [5.0]],
    }
    read = described_policy(PolicyServer(policy, ServerSettings(port=0)).metadata()).known
    assert {key: [each.tolist() for each in drawn_values] for key, drawn_values in read.items()} == {
        key: [each.tolist() for each in drawn_values] for key, drawn_values in known.items()
    }


def test_a_policy_that_remembers_mean_and_deviation_knows_some_deviations_around():
    policy, values = made(NormalizationMode.MEAN_STD)
    policy.fit_normalizers(values)
    low, high = known_ranges(policy)[STATE]
    np.testing.assert_allclose(
        [low, high], [[0.5 - DEVIATIONS / 2, -2 * DEVIATIONS], [0.5 + DEVIATIONS / 2, 2 * DEVIATIONS]]
    )


def test_of_a_policy_around_another_it_is_the_inner_ones():
    policy, values = made()
    policy.fit_normalizers(values)

    class Around:
        spec, inner = policy.spec, policy

    assert list(known_ranges(Around())) == list(known_ranges(policy))  # pyright: ignore[reportArgumentType]
    Around.inner = object()  # pyright: ignore[reportAttributeAccessIssue]
    assert known_ranges(Around()) == {}  # pyright: ignore[reportArgumentType]
    assert not any(key.startswith(IMAGE_PREFIX) for key in known_ranges(policy))
