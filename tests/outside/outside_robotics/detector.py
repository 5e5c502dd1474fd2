"""A failure detector of one's own: how far the embedding is from the demonstrations' mean."""

import numpy as np


class FarDetector:
    """`FailureDetector` without memory."""

    reads_chunks = False
    learns_from_rollouts = False

    def fit(self, demonstrations, rollouts, decisions):
        self.mean = np.concatenate(demonstrations).mean(0)

    def start(self, batch_size):
        pass

    def reset(self, rows):
        pass

    def watch(self, seen, rows):
        return np.linalg.norm(seen.embedding - self.mean, axis=-1).astype(np.float64)

    def state(self):
        return {"mean": self.mean}

    def restore(self, state):
        self.mean = np.asarray(state["mean"])
