"""A PostgreSQL server of the tests' own, which may be killed and started again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

REQUIRED = "KTUNE_REQUIRE_POSTGRES"
USER, PASSWORD = "ktune", "s3cret-word"


def find(program: str) -> Path | None:
    """Return the path of one of PostgreSQL's programs; Debian keeps them off PATH."""
    if found := shutil.which(program):
        return Path(found)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    return places[-1] if places else None


def have_or_skip() -> None:
    """Skip where there is no PostgreSQL or no driver for it; fail where they are required."""
    missing = [name for name in ("initdb", "postgres") if find(name) is None]
    try:
        import psycopg  # noqa: F401
    except ImportError:
        missing.append("psycopg")
    if missing and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{', '.join(missing)} not found, and {REQUIRED}=1")
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install postgresql")


class Server:
    """A server with a password, on a free port, in a temporary folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ktune-pg-"))
        self._user = "nobody" if os.geteuid() == 0 else None  # postgres refuses to be root
        if self._user:
            shutil.chown(self.folder, self._user)
        self.folder.chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen | None = None
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        self._run(
            "initdb", "-D", "data", "-U", USER, "--auth=scram-sha-256", "--no-sync",
            "--no-locale", "-E", "UTF8", "--pwfile", "password",
        )  # fmt: skip
        self.start()

    def url(self, database: str, password: str = PASSWORD) -> str:
        return f"postgresql+psycopg://{USER}:{password}@127.0.0.1:{self.port}/{database}"

    def create(self, name: str) -> str:
        """Make an empty schema, which costs less than a database, and return a URL into it."""
        import psycopg

        with self._connect(autocommit=True) as connection:
            command = psycopg.sql.SQL("create schema {}").format(psycopg.sql.Identifier(name))
            connection.execute(command)
        return self.url(f'postgres?options=-c%20search_path%3D"{name}"')

    def start(self) -> None:
        """Start the server and wait until it answers; what was killed may need a moment to end."""
        self._launch()
        deadline = time.monotonic() + 30
        while True:
            try:
                self._connect().close()
            except Exception:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                time.sleep(0.1)
                if self._process is not None and self._process.poll() is not None:
                    self._launch()
            else:
                return

    def _launch(self) -> None:
        options = [
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "fsync=off",
            "-c",
            "max_connections=40",
        ]
        words = ["-D", "data", "-p", str(self.port), "-k", str(self.folder), *options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(find("postgres")), *words], cwd=self.folder, user=self._user,
                stdout=log, stderr=log, env=self._environment(),
            )  # fmt: skip

    def kill(self) -> None:
        """Kill the server: its processes end as soon as they see it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def close(self) -> None:
        """End the server and remove its folder."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self, **options):
        import psycopg

        words = f"host=127.0.0.1 port={self.port} user={USER} dbname=postgres"
        return psycopg.connect(f"{words} password={PASSWORD} connect_timeout=3", **options)

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [str(find(program)), *words], cwd=self.folder, user=self._user, check=True,
            capture_output=True, env=self._environment(),
        )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "LC_ALL": "C", "HOME": str(self.folder)}
