"""Bytes on the wire of ranks on one host: those of the loopback interface, which the kernel counts.

In a network namespace of their own nobody else's bytes are among them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def loopback_bytes() -> int:
    """Sent through loopback since the namespace began, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("expected a loopback interface, found none in /proc/self/net/dev")


def enter_own_network() -> bool:
    """Moves this process, and what it starts from now on, to a network that has loopback only.
    False where the system does not allow that: others' bytes are counted too, then."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _CLONE_NEWNET | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)
    if libc.unshare(flags) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
    return True
