"""What a policy is told to do, row by row."""

from collections.abc import Sequence

from robopolicy.core.errors import SpecError
from robopolicy.core.finite_values import listed
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import TASK

_NAMED = 8
"""Instructions that an error lists at most."""


def given_instructions(observation: TensorObservation, rows: int, known: Sequence[str]) -> list[str]:
    """Return the instruction of each of `rows` observations; what is missing or empty is the only one of `known`.

    Raises SpecError where one is missing and several are known, or where there is another number of them than of rows.
    """
    given = observation.get(TASK)
    texts = [""] * rows if given is None else [str(text) for text in given]
    if len(texts) != rows:
        raise SpecError(f"'{TASK}' has {len(texts)} texts for {rows} rows.")
    if all(texts):
        return texts
    if len(known) != 1 and "" not in known:
        names = listed([f"'{text}'" for text in known], _NAMED)
        state = f"has no '{TASK}'" if given is None else f"has an empty '{TASK}' in row {texts.index('')}"
        raise SpecError(
            f"The observation {state}, and the policy was trained on {len(known)} instructions: {names}. Say which."
        )
    return [text or ("" if "" in known else known[0]) for text in texts]
