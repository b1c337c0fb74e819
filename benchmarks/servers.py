"""Real MLflow servers on loopback, and a PostgreSQL to put one upon."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from clones import wait_for

POSTGRES_USER = "postgres"  # whom root becomes for it: PostgreSQL refuses to run as root


def start_server(folder: Path, port: int, store: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--artifacts-destination", str(folder / "artifacts"), "--workers", "1"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: answers(port), 120)
    return process


def stop_server(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def missing_for_postgres() -> str:
    """What has to be installed first; "" where nothing has."""
    missing = [] if _postgres_programs() else ["PostgreSQL's initdb and postgres"]
    return " and ".join(missing + ([] if find_spec("psycopg2") else ["psycopg2"]))


@contextmanager
def postgres() -> Iterator[str]:
    """The URI of an empty database, in a PostgreSQL server of its own in a temporary folder."""
    programs, port = _postgres_programs(), free_port()
    assert programs is not None, missing_for_postgres()
    user = POSTGRES_USER if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp())
    if user:
        shutil.chown(folder, user)
    data = folder / "data"

    def run(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [programs / name, "-D", data, *arguments],
            cwd=folder,
            user=user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    assert run("initdb", "--auth=trust", "--username=mlflow").wait(timeout=120) == 0
    process = run("postgres", "-h", "127.0.0.1", "-p", str(port), "-k", str(folder))
    try:
        wait_for(lambda: _listens(port), 60)
        yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGINT)  # it ends its clients' sessions and itself
        process.wait(timeout=60)
        shutil.rmtree(folder)


def _postgres_programs() -> Path | None:
    """The folder; Debian keeps it off PATH."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    there = Path("/usr/lib/postgresql").glob("*/bin")
    return max(there, key=lambda path: int(path.parent.name), default=None)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
