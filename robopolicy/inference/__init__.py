"""Fast and smooth inference of trained policies: engines, few-step samplers, block caches and action chunking."""
