"""End the process groups of workers when this process is gone, whatever ended it.

A worker itself dies with its parent (``worker._die_with_parent``), but what it has started, such
as ptxas, would live on. One small process waits at the end of a pipe that only this process holds
open; when it closes, all groups that were not taken off the list are killed.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress

SCRIPT = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    number = int(line)
    groups.add(number) if number > 0 else groups.discard(-number)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
"""


class Reaper:
    """The list of groups, kept by another process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        """Have a process group killed when this process is gone."""
        self._write(group)

    def forget(self, group: int) -> None:
        """Take a group that has ended off the list: its number may come to mean another."""
        self._write(-group)

    def _write(self, number: int) -> None:
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # none, or a fork's parent's
                self._owner = os.getpid()
                atexit.register(self._close, self._owner)
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(f"{number}\n".encode())
                self._process.stdin.flush()

    def _close(self, owner: int) -> None:
        """End the process at this one's regular end."""
        if self._process is not None and self._process.stdin is not None and owner == os.getpid():
            self._process.stdin.close()
            self._process.wait()
            self._process = None


reaper = Reaper()
"""This process's only one."""
