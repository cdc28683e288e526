"""The command line in a process of its own, quick to start: a fork of one that has torch loaded.

A replay answers after a pause, and every answer is a line of a log.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


PRELOAD = "KTUNE_TEST_PRELOAD"

if os.environ.get(PRELOAD):  # in the fork server, once, for all processes
    import ktune.cli.session
    import ktune.cli.work  # noqa: F401


def body(words, environment, pause_s, name, folder) -> None:
    """Run ``ktune`` with these words; output goes to files."""
    os.environ.update(environment)
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    from ktune.cli import main
    from ktune.target.replay import ReplayTarget

    answer, log = ReplayTarget.next, os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def slow(self):
        time.sleep(pause_s)
        problem, variant, outcome = answer(self)
        os.write(log, f"{self.device.name}\t{problem.text}\t{variant.text}\t{name}\n".encode())
        return problem, variant, outcome

    ReplayTarget.next = slow
    sys.argv = ["ktune", *map(str, words)]
    main()


class Ktune:
    """A running ``ktune``."""

    def __init__(
        self, folder: Path, name: str, words, pause_s: float = 0.05, **environment
    ) -> None:
        self.folder, self.name = folder, name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fleet_process"])
        given = {
            "KTUNE_HEARTBEAT_S": "1",
            "KTUNE_CACHE_DIR": str(folder / "cache"),
            "KTUNE_TABLE_PATH": str(folder / "table.json"),
            **environment,
        }
        self.process = context.Process(
            target=body, args=(list(words), given, pause_s, name, folder), daemon=True
        )
        with pytest.MonkeyPatch.context() as patch:  # the fork server's own
            patch.setenv(PRELOAD, "1")
            patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent)]))
            self.process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()

    @property
    def out(self) -> str:
        return (self.folder / f"{self.name}.out").read_text()

    @property
    def err(self) -> str:
        path = self.folder / f"{self.name}.err"
        return path.read_text() if path.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()

    def wait(self, limit_s: float = 60) -> int:
        """Return the exit code."""
        self.process.join(limit_s)
        assert self.process.exitcode is not None, f"{self.name} still runs:\n{self.err}"
        return self.process.exitcode

    def wait_for(self, text: str, limit_s: float = 30) -> None:
        """Wait until standard error holds a text."""
        deadline = time.monotonic() + limit_s
        while text not in self.err:
            assert self.process.is_alive() or text in self.err, f"{self.name} ended:\n{self.err}"
            assert time.monotonic() < deadline, f"no {text!r} from {self.name}:\n{self.err}"
            time.sleep(0.02)


def lines(folder: Path) -> list[tuple[str, ...]]:
    """Return what was measured so far: device, problem, variant, and by whom."""
    path = folder / "log"
    text = path.read_text() if path.exists() else ""
    return [tuple(line.split("\t")) for line in text.splitlines()]


def wait_for_lines(folder: Path, count: int, by: str = "", limit_s: float = 40) -> None:
    """Wait until so much was measured, in all or by one process."""
    deadline = time.monotonic() + limit_s
    while sum(not by or line[3] == by for line in lines(folder)) < count:
        assert time.monotonic() < deadline, lines(folder)
        time.sleep(0.02)
