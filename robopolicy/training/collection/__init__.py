"""Where an iteration's rollouts come from: one protocol, and a collector for each way of taking turns with learning."""

from robopolicy.training.collection.build import make_collector
from robopolicy.training.collection.episodes import EpisodeCollector, start_pool
from robopolicy.training.collection.protocol import BatchCollector, Collector
from robopolicy.training.collection.streams import StreamCollector

__all__ = ["BatchCollector", "Collector", "EpisodeCollector", "StreamCollector", "make_collector", "start_pool"]
