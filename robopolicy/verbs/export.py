"""Exports a policy as one program, ONNX or TorchScript, that runs without robopolicy.

The program contains everything from observation to action: normalisation, all denoising steps (initial noise is an
input) or tokens, and action bounds. It is compared with the policy before it counts. Next to it are a description for
programs (.json: inputs, shapes, units, rate) and a page that shows how to call it (.md).
"""

from robopolicy.building.policies import load_policy
from robopolicy.configuration import Config
from robopolicy.core.storage import require_writable
from robopolicy.inference.configuration import ExportFormat
from robopolicy.inference.export import export
from robopolicy.policies.loading import checkpoint_in
from robopolicy.runs import default_path, output, publish
from robopolicy.verbs.verb import Verb

VERB = Verb(
    summary="Export a policy to ONNX or TorchScript, to run it without robopolicy",
    sections=("run", "export"),
    example="robopolicy export runs/finetune/push_t/0/checkpoint format=onnx",
    targets=("export.policy",),
    short={"format": "export.format", "instruction": "export.instruction"},
)

SUFFIX = {ExportFormat.ONNX: ".onnx", ExportFormat.TORCHSCRIPT: ".pt"}


def run(config: Config) -> int:
    """Load the policy, write its program, print where it is and how exact."""
    section = config.export
    path = checkpoint_in(default_path(config, "finetune", "checkpoint", section.policy, "export.policy"))
    target = section.output or path.with_name(path.name + SUFFIX[section.format])
    target.parent.mkdir(parents=True, exist_ok=True)
    require_writable(target)
    description = export(load_policy(path), target, section.format, section.instruction, section.batch_size)
    inputs = ", ".join(
        f"{name} {field['shape']}".replace("None", "rows") for name, field in description["inputs"].items()
    )
    output.print(f"Wrote {target}: {inputs} -> actions", markup=False, soft_wrap=True)
    output.print(
        f"Actions equal the policy's to {description['largest_difference']:.1g}; how to call it: "
        f"{target.with_suffix('.md')}",
        markup=False,
        soft_wrap=True,
    )
    publish(config, description)
    return 0
