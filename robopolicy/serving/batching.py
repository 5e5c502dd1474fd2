"""Batched inference in one thread, off the event loop: requests that wait at the same time form one batch.

Addresses are served round-robin, and so are the connections of one address, so a client with many requests does not
delay others. Waiting requests are limited in number and time. A forward pass that hangs, or an invalid policy output,
is an error of the affected requests only, is reported in `trouble`, and never prevents the process from exiting.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import NonFiniteError, ServingError
from robopolicy.core.former_names import accept_former_arguments, keep_former_names
from robopolicy.core.policy import Policy, TensorObservation, to_tensors
from robopolicy.core.spec import TASK, Observation, all_finite
from robopolicy.inference.chunking import Plans, PredictsAhead
from robopolicy.serving.sessions import Answer, Failure, RemainingActions, RobotSession, batch_remaining_actions


class BusyError(ServingError):
    """The server is overloaded: retry later."""


Asker = tuple[str, int]
"""Sender of a request: its address and connection number."""

NOBODY: Asker = ("", 0)

type Watch = Callable[[TensorObservation, Sequence[RobotSession | None]], Sequence[Failure | None]]
"""Observations [B, H, ...] and their sessions [B] -> what failure detectors say."""

REMEMBERED_TURNS = 4096
"""Number of addresses and connections for which the last service is remembered."""


@dataclass(frozen=True, eq=False)
class PendingRequest:
    """A waiting request: the observation [1, H, ...], the future for its answer, its own noise generator, the robot's
    remaining actions if sent, its sender, and its session for failure detectors.
    """

    observation: Observation
    answer: asyncio.Future[Answer]
    generator: torch.Generator | None = None
    left: RemainingActions | None = None
    asker: Asker = NOBODY
    session: RobotSession | None = None

    def goes_with(self, other: "PendingRequest") -> bool:
        """Whether both requests can be answered in one batch."""
        if self.generator is not None or other.generator is not None:
            return self is other
        own_plan, other_plan = self.left, other.left
        return own_plan is other_plan if own_plan is None or other_plan is None else own_plan.shape == other_plan.shape


class RoundRobin:
    """Round-robin order of requests: the least recently served address is next, and within it the least recently served
    connection.
    """

    def __init__(self) -> None:
        self._served: dict[str | Asker, int] = {}
        self._count = itertools.count(1)

    def take(self, waiting: Sequence[PendingRequest], most: int) -> list[PendingRequest]:
        """Select the next request, and up to `most` requests in all that can share its batch, each connection's in
        order.
        """
        rows = _rows(waiting)
        address, asker = self._next(rows)
        first = rows[address][asker][0]
        rows = _rows([request for request in waiting if request.goes_with(first)])
        batch: list[PendingRequest] = []
        while rows and len(batch) < most:
            address, asker = self._next(rows)
            self._served[address] = self._served[asker] = next(self._count)
            batch.append(rows[address][asker].popleft())
            if not rows[address][asker]:
                del rows[address][asker]
            if not rows[address]:
                del rows[address]
        if len(self._served) > REMEMBERED_TURNS:  # who is forgotten was served longest ago, and stays the next
            newest = sorted(self._served, key=self._served.__getitem__)[-REMEMBERED_TURNS // 2 :]
            self._served = {client: self._served[client] for client in newest}
        return batch

    def _next(self, rows: Mapping[str, Mapping[Asker, deque[PendingRequest]]]) -> tuple[str, Asker]:
        address = min(rows, key=lambda each: self._served.get(each, 0))
        return address, min(rows[address], key=lambda each: self._served.get(each, 0))


def _rows(waiting: Sequence[PendingRequest]) -> dict[str, dict[Asker, deque[PendingRequest]]]:
    """Return waiting requests by address and connection, in order of arrival."""
    rows: dict[str, dict[Asker, deque[PendingRequest]]] = {}
    for request in waiting:
        rows.setdefault(request.asker[0], {}).setdefault(request.asker, deque()).append(request)
    return rows


def request_to_drop(waiting: Sequence[PendingRequest], asker: Asker) -> PendingRequest | None:
    """Return the request to drop when the queue is full and `asker` sends one; None to drop the new one.

    It is the newest request of the address with the most requests, if that address has more than the asker's would
    have. Otherwise the same rule applies to the connections of the asker's own address.
    """
    rows = _rows(waiting)
    count = {address: sum(map(len, askers.values())) for address, askers in rows.items()}
    address, own_address = max(count, key=count.__getitem__), asker[0]
    if count[address] <= count.get(own_address, 0) + 1:
        address = own_address
    askers = rows.get(address, {})
    heaviest = max(reversed(askers.values()), key=len, default=deque())  # of equal ones the one that came last
    return heaviest[-1] if address != own_address or len(heaviest) > len(askers.get(asker, ())) + 1 else None


class InferenceQueue:
    """Answers observations [1, H, ...] with action chunks; `start` it on the event loop that calls `infer`.

    max_batch_size: maximum requests in one forward pass; max_queue_size: maximum waiting requests, further ones are
    refused; deadline: seconds after which a request is dropped; stall: seconds after which a forward pass counts as
    hanging; deterministic: no exploration noise; on_batch: called with the number of requests in every pass; plans:
    computes predictions that continue a robot's remaining actions; watch: observations [B, H, ...] and sessions [B] ->
    what failure detectors say, [B].
    """

    @accept_former_arguments({"maximum_batch": "max_batch_size", "maximum_waiting": "max_queue_size"})
    def __init__(
        self,
        policy: Policy,
        generator: torch.Generator,
        *,
        max_batch_size: int = 16,
        max_queue_size: int = 256,
        deadline: float = 10.0,
        stall: float = 10.0,
        deterministic: bool = True,
        on_batch: Callable[[int], None] = lambda size: None,
        plans: Plans | None = None,
        watch: Watch | None = None,
    ):
        self.policy, self.watch = policy, watch
        self.generator = generator
        self.plans = plans
        self.max_batch_size, self.max_queue_size = max_batch_size, max_queue_size
        self.deadline, self.stall = deadline, stall
        self.deterministic, self.on_batch = deterministic, on_batch
        self.pass_began: float | None = None
        self._waiting: list[PendingRequest] = []
        self._turns = RoundRobin()
        self._wake = asyncio.Event()
        self._thread = _Thread()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start answering requests."""
        self._task = asyncio.create_task(self._run())

    async def stop(self, patience: float = 5.0) -> None:
        """Stop after the forward pass in progress, or after `patience` seconds; waiting requests are cancelled."""
        for request in self._waiting:
            request.answer.cancel()
        self._waiting.clear()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=patience if self.pass_began is not None else 0)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.stop()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def pass_age(self) -> float:
        """Seconds since the forward pass in progress started, 0 if there is none."""
        return 0.0 if self.pass_began is None else time.monotonic() - self.pass_began

    @property
    def trouble(self) -> str | None:
        """Reason why this queue cannot answer, in one sentence; None if it can."""
        if self._task is None or self._task.done():
            return "Inference has stopped: restart the server."
        if self.pass_age > self.stall:
            return f"The policy has been computing for {self.pass_age:.0f} s: restart the server if it does not end."
        return None

    async def first(self, observation: Observation, rows: int, left: RemainingActions | None = None) -> None:
        """Answer one observation [1, H, ...] in a batch of this many rows, without a deadline; raises as `infer`."""
        nobody: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        batch = [PendingRequest(observation, nobody, None, left)] * rows
        await self._thread.call(lambda: self._act(batch))

    async def infer(
        self,
        observation: Observation,
        generator: torch.Generator | None = None,
        left: RemainingActions | None = None,
        asker: Asker = NOBODY,
        session: RobotSession | None = None,
    ) -> Answer:
        """Return the answer to one observation; with a `generator` it is computed alone, using that generator.

        left: the robot's remaining actions [n, A], which the answer then continues; asker: sender, for the round-robin
        order. Raises the policy's errors for this request, and BusyError when too many requests wait or the deadline
        passes.
        """
        if self.trouble is not None:
            raise BusyError(self.trouble)
        if len(self._waiting) >= self.max_queue_size:
            busy = BusyError(
                f"{self.max_queue_size} requests are waiting already: try again later, or send requests less often."
            )
            other = request_to_drop(self._waiting, asker)
            if other is None:
                raise busy
            self._waiting.remove(other)
            if not other.answer.done():
                other.answer.set_exception(busy)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        request = PendingRequest(observation, future, generator, left, asker, session)
        self._waiting.append(request)
        self._wake.set()
        try:
            return await asyncio.wait_for(future, self.deadline)
        except TimeoutError as error:
            busy = f"; the policy has been computing for {self.pass_age:.1f} s" if self.pass_began else ""
            raise BusyError(f"No answer within {self.deadline:g} s{busy}.") from error
        finally:
            if request in self._waiting:
                self._waiting.remove(request)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._next_batch()
            if not batch:
                self._wake.clear()
                continue
            self.pass_began = time.monotonic()
            try:
                answers = await self._thread.call(lambda batch=batch: self._answer(batch))
            finally:
                self.pass_began = None
            self.on_batch(len(batch))
            for request, answer in zip(batch, answers, strict=True):
                if request.answer.done():
                    continue
                if isinstance(answer, Answer):
                    request.answer.set_result(answer)
                else:
                    request.answer.set_exception(answer)

    def _next_batch(self) -> list[PendingRequest]:
        """Take the next batch from the requests that are still waiting."""
        self._waiting = [request for request in self._waiting if not request.answer.done()]
        if not self._waiting:
            return []
        batch = self._turns.take(self._waiting, self.max_batch_size)
        batch_set = set(batch)
        self._waiting = [request for request in self._waiting if request not in batch_set]
        return batch

    def _answer(self, batch: list[PendingRequest]) -> list[Answer | Exception]:
        """Answer a batch; if it fails, answer one by one, so that only the faulty request fails."""
        try:
            return list(self._act(batch))
        except Exception as error:  # the policy is foreign code: its error belongs to the client that caused it
            if len(batch) == 1:
                return [error]
            return [self._answer([request])[0] for request in batch]

    def _act(self, batch: list[PendingRequest]) -> list[Answer]:
        start = time.perf_counter()
        observations, generator = [request.observation for request in batch], batch[0].generator or self.generator
        batch_observation = {key: np.concatenate([item[key] for item in observations]) for key in observations[0]}
        batch_observation[TASK] = np.array([str(item[TASK][0]) for item in observations])
        try:
            with torch.no_grad():
                tensors = to_tensors(batch_observation, generator.device)
                actions = self._decided(tensors, generator, [item.left for item in batch])
                failures: Sequence[Failure | None] = [None] * len(batch)
                if self.watch is not None and len(actions) == len(batch):
                    failures = self.watch(tensors, [item.session for item in batch])
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # SystemExit and its like end a program, and StopIteration the task that waits for it: neither is a policy's
            raise RuntimeError(f"The policy raised {type(error).__name__} ({error}).") from error
        if len(actions) != len(batch):
            raise ServingError(f"The policy answered {len(actions)} action chunk(s) to {len(batch)} observation(s).")
        if not all_finite(actions):
            raise NonFiniteError("The policy answered with NaN or infinity; no action was sent.")
        values = actions.float().cpu().numpy()
        seconds = time.perf_counter() - start
        return [Answer(row, seconds, failure) for row, failure in zip(values, failures, strict=True)]

    def _decided(
        self, observation: TensorObservation, generator: torch.Generator, left: Sequence[RemainingActions | None]
    ) -> Tensor:
        """Return the chunks [B, C, A], or predictions [B, P, A] that continue the remaining actions."""
        plans = [each for each in left if each is not None]
        if not plans:
            return self.policy.act(observation, generator, deterministic=self.deterministic).actions
        assert self.plans is not None and isinstance(self.policy, PredictsAhead)
        now = batch_remaining_actions(plans, self.policy.spec.chunk, generator.device)
        return self.plans(self.policy, observation, generator, now, deterministic=self.deterministic)


class _Thread:
    """A thread that runs calls in order and ends with the process, even if a call hangs.

    An executor's threads are joined when the process exits, so a hanging one would prevent the exit.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="inference", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def stop(self) -> None:
        """End after the call in progress."""
        self._calls.put(None)

    async def call[Result](self, function: Callable[[], Result]) -> Result:
        """Return the result of `function`, or raise its error."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return await asyncio.wrap_future(future)


keep_former_names(__name__, {"Turns": "RoundRobin", "gives_way": "request_to_drop", "Waiting": "PendingRequest"})
