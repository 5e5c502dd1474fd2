"""Token policies that read each instruction once: its keys and values are kept from decision to decision.

The instruction comes first and sees nothing of what follows, so what a language model makes of it is the same in every
decision. The tokens that are said afterwards are those of the policy itself.
"""

import torch

from robopolicy.core.policy import Decision, TensorObservation
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.nn.language import Reading
from robopolicy.policies.token.decoding import Prompt
from robopolicy.policies.token.policy import TokenPolicy

READINGS = 64
"""Sets of instructions whose reading is kept."""


class LeanTokens:
    """A `core.policy.Policy` that decides as a token policy does; its readings follow the policy's weights."""

    def __init__(self, policy: TokenPolicy):
        self.policy = policy
        self._weights = list(policy.parameters())
        self._known = -1
        self._readings: dict[tuple[str, ...], Reading] = {}

    @property
    def spec(self) -> PolicySpec:
        """As the policy's own."""
        return self.policy.spec

    @property
    def reads_instructions(self) -> bool:
        """As the policy's own."""
        return self.policy.reads_instructions

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered of any rows [R]."""

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide for every row; actions [B, C, A] alone. Raises as the policy does."""
        version = sum(weight._version for weight in self._weights)
        if version != self._known:
            self._readings.clear()
            self._known = version
        policy = self.policy
        embedded, texts = policy.embed(observation), policy.texts(observation)
        prompt = Prompt(self._reading(texts, embedded.device), embedded)
        return Decision(policy.say(prompt, generator, deterministic=deterministic).actions)

    def _reading(self, texts: list[str], device: torch.device) -> Reading:
        """Return what N rows have read of their instructions, for one decision to go on from."""
        distinct = tuple(sorted(set(texts)))
        if distinct not in self._readings:
            if len(self._readings) >= READINGS:
                self._readings.pop(next(iter(self._readings)))
            self._readings[distinct] = self.policy.read(list(distinct), torch.arange(len(distinct)).to(device))
        kept = self._readings[distinct]
        number = {text: place for place, text in enumerate(distinct)}
        rows = torch.tensor([number[text] for text in texts], device=device)
        return kept.copied(rows)
