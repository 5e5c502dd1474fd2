"""Serving a policy to robots over openpi's websocket protocol, a client for it, and a simulated robot that uses it."""
