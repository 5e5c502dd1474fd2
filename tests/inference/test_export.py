"""Exported programs: ONNX by its runtime in a process without torch, and TorchScript, act as the policy itself does."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision
from robopolicy.core.randomness import normal
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec
from robopolicy.inference.configuration import ExportFormat
from robopolicy.inference.export import export, program_of
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import PolicyKind, TextEncoder
from robopolicy.policies.token.configuration import TokenDecoding, TokenPolicyConfig
from robopolicy.policies.token.policy import TokenPolicy

FRONT = "observation.images.front"
STATES = {STATE: Field((3,), unit="rad", names=("pan", "lift", "roll"))}
FIELDS = {**STATES, FRONT: Field((16, 16, 3), "uint8", 0, 255)}
ACTION = Field((2,), low=-0.6, high=0.5, unit="rad", names=("pan", "lift"))
BOTH = ("push the cube", "push the ball")

RUN = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
assert [each.name for each in session.get_inputs()] == list(np.load(sys.argv[2]))
(actions,) = session.run(None, dict(np.load(sys.argv[2])))
assert not {"torch", "robopolicy"} & set(sys.modules)
np.save(sys.argv[3], actions)
"""


def denoising(kind, fields=FIELDS, finetuned=0, **settings):
    """Return a policy whose weights and statistics are anything but neutral."""
    config = DenoisingPolicyConfig(
        kind=PolicyKind(kind), width=32, depth=1, denoising_steps=20, sampling_steps=5, chunk=3, prediction_steps=4,
        history=2, **settings,
    )  # fmt: skip
    draws = torch.Generator().manual_seed(3)
    values = {STATE: 5 + 3 * torch.randn(50, 3, generator=draws), "action": torch.randn(50, 2, generator=draws)}
    policy = DenoisingPolicy(config, fields, ACTION, fps=10.0, instructions=BOTH[:1], values=values)
    if finetuned:
        policy.prepare_finetuning(finetuned)
        with torch.no_grad():  # other weights than the frozen base's
            for weight in policy.network.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=draws)
    return policy


def tokens(decoding):
    config = TokenPolicyConfig(chunk=3)
    token = replace(config.token, decoding=TokenDecoding(decoding), decode_steps=3)
    return TokenPolicy(replace(config, token=token), FIELDS, ACTION, fps=10.0, instructions=BOTH)


def seen(policy, rows):
    draws = torch.Generator().manual_seed(rows)
    history = policy.spec.history
    vectors = {STATE: 5 + 3 * torch.randn(rows, history, 3, generator=draws)}
    image = torch.randint(0, 256, (rows, history, 16, 16, 3), dtype=torch.uint8, generator=draws)
    return {key: {**vectors, FRONT: image}[key] for key in policy.spec.observation}


def acted(policy, observation, rows, instruction=""):
    """Return the policy's own actions, and the noise that it draws for them."""
    task = {TASK: [instruction] * rows} if instruction else {}
    actions = policy.act({**observation, **task}, torch.Generator().manual_seed(7), deterministic=True).actions
    if isinstance(policy, DenoisingPolicy):
        observation["noise"] = normal((rows, *policy.noise_shape), torch.Generator().manual_seed(7))
    return actions


def without_torch(path, inputs, folder):
    """Return the actions that onnxruntime computes in a process of its own."""
    np.savez(folder / "inputs.npz", **{name: value.numpy() for name, value in inputs.items()})
    command = [sys.executable, "-c", RUN, path, folder / "inputs.npz", folder / "actions.npy"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.from_numpy(np.load(folder / "actions.npy"))


def require_onnx():
    for module in ("onnx", "onnxruntime"):
        pytest.importorskip(module, reason="extra export")


DENOISING = {
    "flow": {"kind": "flow"},
    "flow of states, fine-tuned": {"kind": "flow", "fields": STATES, "finetuned": 2},
    "diffusion, fine-tuned": {"kind": "diffusion", "finetuned": 2},
    "flow with an instruction": {"kind": "flow", "text_encoder": TextEncoder.FILM},
}


@pytest.mark.parametrize("settings", DENOISING.values(), ids=DENOISING)
def test_onnx_acts_as_the_denoising_policy(settings, tmp_path):
    require_onnx()
    policy = denoising(**settings)
    text = "text_encoder" in settings
    description = export(policy, tmp_path / "policy.onnx", ExportFormat.ONNX)
    rows = 1 if text else 3
    inputs = seen(policy, rows)
    expected = acted(policy, inputs, rows)
    torch.testing.assert_close(
        without_torch(tmp_path / "policy.onnx", inputs, tmp_path), expected, rtol=1e-5, atol=1e-5
    )
    assert ((expected == -0.6) | (expected == 0.5)).any() and expected.std() > 0.1, "bounds are part of it"
    assert description == json.loads((tmp_path / "policy.json").read_text())
    assert description["inputs"]["noise"]["shape"] == [1 if text else None, 4, 2]
    assert description["outputs"]["actions"]["names"] == ["pan", "lift"] and description["chunk"] == 3


@pytest.mark.parametrize("settings", [DENOISING["flow"], DENOISING["diffusion, fine-tuned"]], ids=["flow", "diffusion"])
@pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning")
def test_torchscript_acts_as_the_denoising_policy(settings, tmp_path):
    policy = denoising(**settings)
    export(policy, tmp_path / "policy.pt", ExportFormat.TORCHSCRIPT)
    inputs = seen(policy, 2)
    expected = acted(policy, inputs, 2)
    actions = torch.jit.load(str(tmp_path / "policy.pt"))(*inputs.values())
    torch.testing.assert_close(actions, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("decoding", TokenDecoding)
def test_tokens_are_exported_with_their_instruction(decoding, tmp_path):
    pytest.importorskip("transformers", reason="extra vla")
    require_onnx()
    policy = tokens(decoding)
    with pytest.raises(ConfigError, match=r"knows 2 instructions: set export\.instruction to one of"):
        export(policy, tmp_path / "policy.onnx", ExportFormat.ONNX)
    inputs = seen(policy, 2)
    choices = []
    for instruction in BOTH:
        export(policy, tmp_path / "policy.onnx", ExportFormat.ONNX, instruction, rows=2)
        choices.append(acted(policy, inputs, 2, instruction))
        actions = without_torch(tmp_path / "policy.onnx", inputs, tmp_path)
        torch.testing.assert_close(actions, choices[-1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(*choices)


def test_the_verb_writes_a_page_whose_program_runs(tmp_path, capsys):
    require_onnx()
    denoising("flow", STATES).save(tmp_path / "checkpoint")
    assert main(["export", str(tmp_path / "checkpoint"), "format=onnx", f"json={tmp_path / 'result.json'}"]) == 0
    output = capsys.readouterr().out
    assert (
        f"Wrote {tmp_path / 'checkpoint.onnx'}: observation.state [rows, 2, 3], noise [rows, 4, 2] -> actions" in output
    )
    page = (tmp_path / "checkpoint.md").read_text()
    assert "| `observation.state` | [rows, 2, 3] | float32 | rad | pan, lift, roll |" in page
    assert json.loads((tmp_path / "result.json").read_text())["fps"] == 10.0
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    setup = "import numpy\nstate, noise = numpy.ones((1, 2, 3), 'f'), numpy.zeros((1, 4, 2), 'f')\n"
    check = "assert actions.shape == (1, 3, 2)"
    done = subprocess.run([sys.executable, "-c", setup + code + check], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Drawing(torch.nn.Module):
    """Acts by noise that it draws itself."""

    spec = PolicySpec(STATES, ACTION, 1, 1, 1, 1, 10.0)

    def act(self, observation, generator, *, deterministic=False):
        return Decision(normal((len(observation[STATE]), 1, 2), generator))


class Hidden(Drawing):
    """Acts by noise of torch's own generator."""

    def act(self, observation, generator, *, deterministic=False):
        return Decision(observation[STATE][:, :, :2] + torch.randn(len(observation[STATE]), 1, 2))


def test_what_cannot_be_exported_says_why(tmp_path):
    path = tmp_path / "policy.pt"
    with pytest.raises(ConfigError, match="A Drawing cannot be exported: it draws noise that cannot be given to it"):
        export(Drawing(), path, ExportFormat.TORCHSCRIPT)
    with pytest.raises(ConfigError, match=r"differ from the policy's by .*: it was not written"):
        export(Hidden(), path, ExportFormat.TORCHSCRIPT)
    outside = SimpleNamespace(spec=Drawing.spec, act=None, reset=None)
    with pytest.raises(ConfigError, match="SimpleNamespace cannot be exported, because its pre- and postprocessing"):
        program_of(outside)  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())
