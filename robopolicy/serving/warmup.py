"""The first decisions of a server, before anybody waits for them."""

import asyncio

import numpy as np

from robopolicy.core.policy import Policy, innermost
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation
from robopolicy.inference.engine import CompilesForRows
from robopolicy.serving.batching import InferenceQueue
from robopolicy.serving.log import Log
from robopolicy.serving.underway import Left


async def warmed_up(queue: InferenceQueue, log: Log, stop: asyncio.Event) -> bool:
    """Let the policy decide before anybody asks, and return whether it was not stopped meanwhile.

    Where code is made for numbers of rows, by the policy or by what it decides by means of, it is made for all that may
    ask together, however long that takes; plans that follow on from others are made too, where the server offers them.
    Raises what the policy raises, and BusyError where a decision takes longer than a request may.
    """
    deciding, stopping = asyncio.ensure_future(_decide(queue, log)), asyncio.ensure_future(stop.wait())
    await asyncio.wait([deciding, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop.is_set():
        deciding.cancel()
        return False
    await deciding
    return True


async def _decide(queue: InferenceQueue, log: Log) -> None:
    policy = queue.policy
    seen, deciding = blank_observation(policy), innermost(policy)
    if isinstance(deciding, CompilesForRows):
        # Who asks several times for each row asks so for more of these sizes, which are powers of one number: all of
        # them have been asked for once each of the first has.
        for rows in deciding.sizes(queue.maximum_batch):
            log("compiling", rows=rows)
            await queue.first(seen, rows)
    if queue.plans is not None:  # guided plans load code that nothing else does, for ten seconds on a busy machine
        spec = policy.spec
        for steps in (0, spec.prediction - spec.chunk):
            await queue.first(seen, 1, Left(np.zeros((steps, *spec.action.shape), np.float32), 0, 1))
    await queue.infer(seen)


def blank_observation(policy: Policy) -> Observation:
    """Return a zero observation [1, H, ...] that fits the policy."""
    spec = policy.spec
    observation: Observation = {
        key: np.zeros((1, spec.history, *field.shape), np.uint8 if key.startswith(IMAGE_PREFIX) else np.float32)
        for key, field in spec.observation.items()
    }
    observation[TASK] = np.array([spec.instructions[0] if spec.instructions else ""])
    return observation
