"""`robopolicy serve` in a process of its own, with a token policy that reads images through a vision-language model."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from vision_language_models import tiny_smolvlm

from robopolicy.client.policy_client import PolicyClient
from robopolicy.core.errors import ServingError
from robopolicy.core.spec import STATE, TASK, Field
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.policies.token.configuration import TokenDecoding

pytestmark = pytest.mark.long

FRONT = "observation.images.front"
FIELDS = {STATE: Field((3,)), FRONT: Field((24, 40, 3), "uint8", 0, 255)}
TEXTS = ("push the red cube", "push the blue cube")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> TokenPolicy:
    """Deciding by what it sees and is told, with distributions so sharp that nothing is left to chance."""
    folder = tiny_smolvlm(tmp_path_factory.mktemp("hub") / "smolvlm")
    draws = torch.Generator().manual_seed(0)
    values = {STATE: torch.randn(20, 3, generator=draws), "action": torch.rand(20, 2, generator=draws) * 2 - 1}
    token = TokenConfig(model=str(folder), bins=7, decoding=TokenDecoding.PARALLEL)
    made = TokenPolicy(
        TokenPolicyConfig(chunk=4, token=token),
        FIELDS,
        Field((2,), low=-1.0, high=1.0),
        fps=10,
        instructions=TEXTS,
        values=values,
    )
    with torch.no_grad():
        made.head.weight.mul_(1e4)
    return made


@pytest.fixture(scope="module")
def port(policy: TokenPolicy, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("served")
    policy.save(folder / "policy")
    command = [sys.executable, "-m", "robopolicy", "serve", str(folder / "policy"), "serve.port=0", "run.threads=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        yield next(server_port for line in process.stderr if (server_port := _port(line)))
        os.kill(process.pid, signal.SIGTERM)
        process.stderr.read()
        assert process.wait(20) == 0


def _port(line: str) -> int:
    """Return the port that a line of the log names, 0 for none."""
    try:
        return int(json.loads(line).get("port", 0))
    except (ValueError, AttributeError):
        return 0


def seen(seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    image = draws.integers(0, 256, FIELDS[FRONT].shape, dtype=np.uint8)
    return {STATE: draws.normal(size=3).astype(np.float32), FRONT: image}


@pytest.mark.parametrize("text", TEXTS)
def test_its_answers_are_the_policys_own(policy: TokenPolicy, port: int, text: str):
    shown = seen(1)
    with PolicyClient(port=port) as client:
        assert client.metadata["observation"][FRONT]["shape"] == [24, 40, 3]
        answer = client.infer({**shown, "prompt": text})["actions"]
    observation = {key: torch.from_numpy(value)[None, None] for key, value in shown.items()}
    own = policy.act({**observation, TASK: [text]}, torch.Generator(), deterministic=True).actions[0]
    np.testing.assert_allclose(answer, own.numpy(), atol=1e-5)


def test_what_is_seen_decides_and_what_is_not_known_is_refused(port: int):
    shown = seen(1)
    dark = {**shown, FRONT: np.zeros_like(shown[FRONT])}
    with PolicyClient(port=port) as client:
        answers = [client.infer({**each, "prompt": TEXTS[0]})["actions"] for each in (shown, dark, shown)]
        assert np.array_equal(answers[0], answers[2]) and not np.array_equal(answers[0], answers[1])
        with pytest.raises(ServingError, match=FRONT):
            client.infer({STATE: shown[STATE], "prompt": TEXTS[0]})
        larger = {**shown, FRONT: np.repeat(np.repeat(shown[FRONT], 2, 0), 2, 1), "prompt": TEXTS[0]}
        assert client.infer(larger)["actions"].shape == (4, 2)
