"""Physics worlds: a native batched MuJoCo engine, our manipulation tasks, and adapters to outside suites."""
