"""Our manipulation tasks: one file each, which defines one `Task`."""
