"""First calls of a policy before requests arrive, which compile and load what later ones need."""

import asyncio

import numpy as np

from robopolicy.core.policy import Policy, innermost
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation
from robopolicy.inference.engine import CompilesForRows
from robopolicy.serving.batching import InferenceQueue
from robopolicy.serving.sessions import RemainingActions
from robopolicy.serving.telemetry import Log


async def warmed_up(queue: InferenceQueue, log: Log, stop: asyncio.Event) -> bool:
    """Run the policy once before requests arrive; return False if the server was stopped meanwhile.

    If the policy, or one that it wraps, compiles for specific batch sizes, all batch sizes that may occur are compiled,
    however long that takes. Predictions that continue remaining actions are computed too, if the server offers them.
    Raises the policy's errors, and BusyError when a policy call exceeds the request deadline.
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
    observation, deciding = blank_observation(policy), innermost(policy)
    if isinstance(deciding, CompilesForRows):
        # Who asks several times for each row asks so for more of these sizes, which are powers of one number: all of
        # them have been asked for once each of the first has.
        for rows in deciding.sizes(queue.max_batch_size):
            log("compiling", rows=rows)
            await queue.first(observation, rows)
    if queue.plans is not None:  # guided plans load code that nothing else does, for ten seconds on a busy machine
        spec = policy.spec
        for steps in (0, spec.prediction - spec.chunk):
            await queue.first(observation, 1, RemainingActions(np.zeros((steps, *spec.action.shape), np.float32), 0, 1))
    await queue.infer(observation)


def blank_observation(policy: Policy) -> Observation:
    """Return an all-zero observation [1, H, ...] that fits the policy."""
    spec = policy.spec
    observation: Observation = {
        key: np.zeros((1, spec.history, *field.shape), np.uint8 if key.startswith(IMAGE_PREFIX) else np.float32)
        for key, field in spec.observation.items()
    }
    observation[TASK] = np.array([spec.instructions[0] if spec.instructions else ""])
    return observation
