"""What a stranger brings: each module is one thing that robopolicy finds by dotted path or entry point."""
