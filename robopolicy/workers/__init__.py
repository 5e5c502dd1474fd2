"""Pools of workers: processes on this machine. Each is found through `robopolicy.core.pools.POOLS`."""
