"""How much memory is free: the one answer for loading models and for measuring them."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free(device: str = "cpu") -> int | None:
    """Bytes that can still be used: of a GPU, or of this machine and its container; None where the
    system does not report it."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if device != "cpu":
        return None
    known = [size for size in (_machine(), _container()) if size is not None]
    return min(known, default=None)


def _machine() -> int | None:
    """What the kernel can give to programs, the page cache included."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _container() -> int | None:
    """What a control group leaves; the kernel can release inactive files."""
    try:
        most = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        if most == "max":
            return None
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = (CGROUP / "memory.stat").read_text(encoding="ascii").split()
        files = dict(zip(stat[::2], stat[1::2], strict=False))
        return int(most) - used + int(files.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
