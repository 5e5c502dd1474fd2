"""Serving: a policy server with openpi's websocket protocol, a client for it, and a simulated robot that uses it."""
