"""One inference thread: requests that wait at the same time are answered in one batch, off the event loop."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import NonFiniteError
from robopolicy.core.policy import Policy, to_tensors
from robopolicy.core.spec import TASK, Observation


@dataclass(frozen=True)
class Answer:
    """actions: [C, A]; seconds: the inference itself, shared by the batch."""

    actions: np.ndarray
    seconds: float


class InferenceQueue:
    """Answers observations [1, H, ...] with action chunks; `start` it on the event loop that calls `infer`.

    maximum_batch: most requests in one forward pass; deterministic: no exploration noise; on_batch: called per pass.
    """

    def __init__(
        self,
        policy: Policy,
        generator: torch.Generator,
        *,
        maximum_batch: int = 16,
        deterministic: bool = True,
        on_batch: Callable[[], None] = lambda: None,
    ):
        self.policy, self.generator = policy, generator
        self.maximum_batch, self.deterministic, self.on_batch = maximum_batch, deterministic, on_batch
        self._waiting: asyncio.Queue[tuple[Observation, asyncio.Future[Answer]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop after the pass in progress; requests still waiting are cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while not self._waiting.empty():
            self._waiting.get_nowait()[1].cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def infer(self, observation: Observation) -> Answer:
        """Return the answer to one observation; raises what the policy raises for it."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        await self._waiting.put((observation, future))
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.maximum_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            live = [item for item in batch if not item[1].cancelled()]
            if not live:
                continue
            answers = await loop.run_in_executor(self._thread, self._answer, [item[0] for item in live])
            self.on_batch()
            for (_, future), answer in zip(live, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Answer):
                    future.set_result(answer)
                else:
                    future.set_exception(answer)

    def _answer(self, observations: list[Observation]) -> list[Answer | Exception]:
        """Answer a batch; if it fails, answer one by one, so that only the request at fault fails."""
        try:
            return list(self._act(observations))
        except Exception as error:  # the policy is foreign code: its error belongs to the client that caused it
            if len(observations) == 1:
                return [error]
            return [self._answer([observation])[0] for observation in observations]

    def _act(self, observations: list[Observation]) -> list[Answer]:
        started = time.perf_counter()
        joined = {key: np.concatenate([item[key] for item in observations]) for key in observations[0]}
        joined[TASK] = np.array([str(item[TASK][0]) for item in observations])
        with torch.no_grad():
            decision = self.policy.act(
                to_tensors(joined, self.generator.device), self.generator, deterministic=self.deterministic
            )
        actions: Tensor = decision.actions
        if not bool(actions.isfinite().all()):
            raise NonFiniteError("The policy answered with NaN or infinity; no action was sent.")
        values = actions.float().cpu().numpy()
        seconds = time.perf_counter() - started
        return [Answer(row, seconds) for row in values]
