"""A pool of one's own: the standard library's executor."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed

from robopolicy.core.pools import context, perform, received


class Executor:
    """Runs items in a `ProcessPoolExecutor`."""

    def __init__(self, settings):
        self.workers = settings.count
        self._executor = ProcessPoolExecutor(settings.count, multiprocessing.get_context("spawn"))

    def put(self, value):
        return value

    def map(self, function, items):
        given = context()
        places = {self._executor.submit(perform, function, item, given): place for place, item in enumerate(items)}
        for future in as_completed(places):
            yield places[future], received(future.result())

    def close(self):
        self._executor.shutdown(cancel_futures=True)
