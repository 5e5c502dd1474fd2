"""How much memory there is, and bytes in words."""

from pathlib import Path

import torch

GIGABYTE = 1e9
MEMORY = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, None where the system does not say."""
    if device.type == "cuda":
        # What torch keeps for the next tensor is free as well.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if not MEMORY.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def in_bytes(count: int) -> str:
    """Return a number of bytes in MB or GB."""
    if count < GIGABYTE:
        return f"{count / 1e6:.3g} MB"
    return f"{count / GIGABYTE:.2g} GB" if count < 10 * GIGABYTE else f"{count / GIGABYTE:.0f} GB"
