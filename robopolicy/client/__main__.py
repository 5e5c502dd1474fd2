"""`python -m robopolicy_client HOST[:PORT]` prints what a server says of its policy, before a robot is connected."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Iterator

import numpy as np

from .element_kinds import Kind
from .errors import RobopolicyError
from .policy_client import PolicyClient
from .policy_description import DescribedPolicy, described_policy

HOLD = {Kind.POSITION: "keeps its value", Kind.UNKNOWN: "undefined: pass `hold` to Driver"}
"""What elements of a kind do while the robot holds still; others go to zero."""


def description(policy: DescribedPolicy) -> Iterator[str]:
    """Yield the lines that describe a policy: rate, fields, and the bounds and hold action of each action element."""
    yield f"{policy.fps:g} control steps per second, chunks of {policy.chunk}, history of {policy.history}"
    for key, shape in policy.fields.items():
        yield f"reads {key} {list(shape)} {', '.join(policy.elements.get(key, ()))}".rstrip()
    rows = zip(policy.kinds, np.ravel(policy.low), np.ravel(policy.high))
    for place, (kind, low, high) in enumerate(rows):
        name = policy.names[place] if policy.names else f"element {place}"
        bounds = f"{low:g} to {high:g}" if np.isfinite([low, high]).all() else "no bounds: pass `limits` to Driver"
        yield f"gives {name}: {bounds}; when held still: {HOLD.get(kind, 'goes to 0')}"


def main() -> int:
    """Connect, print the description, return the exit status."""
    parser = argparse.ArgumentParser(description="Print what a policy server says of its policy.")
    parser.add_argument("server", help="HOST, HOST:PORT, or a ws:// or wss:// address")
    parser.add_argument("--certificate", help="PEM file of a certificate to trust")
    arguments = parser.parse_args()
    key = os.environ.get("ROBOPOLICY_API_KEY")
    try:
        with PolicyClient(arguments.server, api_key=key, certificate=arguments.certificate) as client:
            print("\n".join(description(described_policy(client.metadata))))
    except RobopolicyError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
