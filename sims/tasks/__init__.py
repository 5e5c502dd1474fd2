"""Built-in manipulation tasks: each file defines one `Task`."""
