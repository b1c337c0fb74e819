"""A training goes on, and loses nothing, whatever the store does meanwhile."""

import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from project import environment
from stored import EXPERIMENT, Store

from pipeline.errors import Stopped, UserError
from pipeline.tracking import Journal, Run, deliver_all, training_run, waiting_events
from pipeline.tracking.courier import Courier
from pipeline.tracking.delivery import Delivery
from pipeline.tracking.store import UnreachableError, connect


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`mlflow server` on a store of its own; it may be started again after a kill."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Starts it where it does not run, and does not wait for it."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", self.store.uri, "--workers", "1"]
        command += ["--artifacts-destination", str(self.store.folder / "artifacts")]
        with (self.store.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.store.folder,
                env=environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def up(self) -> None:
        self.launch()
        wait_until(self._answers, 100)

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        with suppress(OSError):
            urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
            return True
        return False


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory, fresh_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copyfile(fresh_database, folder / "mlflow.db")
    server = Server(folder)
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: Server, store: Store, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Set as the tracking store; it may be up or down."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_server.url)
    return shared_server


@pytest.fixture
def journal(store: Store) -> Journal:
    return Journal.create(store.folder / "journals" / "a", name="vit 1", experiment=EXPERIMENT)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivers, and tries again, at once."""
    monkeypatch.setattr("pipeline.tracking.courier.EVERY_SECONDS", 0.1)
    monkeypatch.setattr("pipeline.tracking.courier.AT_MOST_SECONDS", 0.5)


def train(store: Store, **more: Any) -> Any:
    given = {"resumed": False, "run_id": None, "step": lambda: 1} | more
    return training_run(EXPERIMENT, "vit 1", store.folder / "journals" / "t", **given)


# A server's faults


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("impatient")
def test_what_waited_for_a_server_is_sent_when_it_comes_up(
    server: Server, journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.kill()
    courier = Courier(journal)
    courier.start(3)
    Run(journal).text("as text", "notes/a.txt")
    for step in range(100):
        journal.metrics({"loss": 1.0}, step)
    assert waiting_events(journal.folder) == 102
    server.launch()
    wait_until(lambda: waiting_events(journal.folder) == 0, 100)
    journal.append("status", status="FINISHED")
    courier.finish(30)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MLflow")]
    assert [line.partition(" (")[0] for line in said] == [
        "MLflow does not answer",
        "MLflow is back: 102 events delivered",
    ]
    run = server.store.client.get_run(journal.run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.0})
    assert server.store.rows(run.info.run_id) == 100
    (artifact,) = (server.store.folder / "artifacts").rglob(f"{run.info.run_id}/artifacts/notes/a.txt")
    assert artifact.read_text() == "as text"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_costs_a_training_no_time(
    server: Server, journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    server.up()
    courier = Courier(journal)
    courier.start(30)
    assert journal.run_id
    server.signal(signal.SIGSTOP)
    try:
        journal.metrics({"loss": 1.0}, 0)
        time.sleep(0.5)  # now the courier hangs in a call
        seconds = []
        for step in range(1, 201):
            begun = time.perf_counter()
            journal.metrics({f"key.{key}": 1.0 for key in range(10)}, step)
            seconds.append(time.perf_counter() - begun)
        begun = time.monotonic()
        courier.finish(2)
        assert time.monotonic() - begun < 4
    finally:
        server.signal(signal.SIGCONT)
    assert statistics.median(seconds) < 0.001
    assert f"201 events of this run wait in {journal.folder}: " in capsys.readouterr().out
    wait_until(lambda: all(left == 0 for _, _, left, _ in deliver_all(journal.folder.parent)))
    assert server.store.rows(journal.run_id) == 2001


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("impatient")
def test_a_server_killed_in_the_middle_and_started_again_has_each_row_once(
    server: Server, journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    server.up()
    for step in range(20_000):
        journal.metrics({"loss": 1.0}, step)
    courier = Courier(journal)
    courier.start(0)
    wait_until(lambda: waiting_events(journal.folder) < 19_000)
    server.kill()
    assert waiting_events(journal.folder) > 1000
    for step in range(20_000, 20_100):
        journal.metrics({"loss": 1.0}, step)
    wait_until(lambda: "MLflow does not answer" in capsys.readouterr().out, 30)
    server.up()
    courier.finish(30)
    assert waiting_events(journal.folder) == 0
    assert "MLflow is back" in capsys.readouterr().out
    assert journal.run_id
    assert server.store.rows(journal.run_id) == 20_100


class Ill(BaseHTTPRequestHandler):
    """Answers 500 to everything."""

    asked = 0

    def do_GET(self) -> None:
        Ill.asked += 1
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("impatient")
def test_of_a_server_that_is_ill_is_told_once(
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ill = ThreadingHTTPServer(("127.0.0.1", 0), Ill)
    threading.Thread(target=ill.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{ill.server_port}")
    try:
        courier = Courier(journal)
        courier.start(0)
        wait_until(lambda: Ill.asked >= 6, 30)  # each attempt asks twice
        courier.finish(0.5)
    finally:
        ill.shutdown()
        ill.server_close()
    warning, waiting = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"MLflow does not answer (http://127.0.0.1:{ill.server_port}")
    assert waiting.startswith("1 events of this run wait in")
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_locked_database_does_not_answer_and_later_has_all(store: Store, journal: Journal) -> None:
    """Of two journals: one whose delivery is under way, and one that is at its first call."""
    other = Journal.create(store.folder / "journals" / "b", name="vit 2", experiment=EXPERIMENT)
    deliveries = [Delivery(journal.folder), Delivery(other.folder)]
    deliveries[0].run()
    for one in (journal, other):
        one.metrics({"loss": 2.0}, 1)
    holder = sqlite3.connect(store.database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with ThreadPoolExecutor() as pool:
            attempts = [pool.submit(delivery.run) for delivery in deliveries]
            for attempt in attempts:
                with pytest.raises(UnreachableError, match="database is locked"):
                    attempt.result()
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    assert [delivery.run() for delivery in deliveries] == [1, 2]
    assert [store.rows(str(one.run_id)) for one in (journal, other)] == [1, 1]


# A training's run


def test_a_training_that_ends_is_finished_and_all_of_it_is_there(store: Store) -> None:
    with train(store) as run:
        assert store.run().info.status == "RUNNING"
        assert run.id == store.run().info.run_id  # known from the start, on a local store
        run.params({"rate": 1})
        run.row({"loss": 2.0}, 1)
    found = store.run()
    assert found.info.status == "FINISHED"
    assert found.data.params == {"rate": "1"}
    assert found.data.metrics["loss"] == 2.0
    assert any(name.startswith("system/") for name in found.data.metrics)
    assert found.data.tags["mlflow.user"]
    assert waiting_events(run.journal.folder) == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), "FAILED"),
        (UserError("x"), "FAILED"),
        (Stopped(15), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(1), "KILLED"),
    ],
)
def test_a_training_that_breaks_off_says_how(store: Store, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)) as caught, train(store) as run:
        run.row({"loss": 2.0}, 1)
        raise error
    assert caught.value is error
    assert store.run().info.status == status
    assert store.run().data.metrics["loss"] == 2.0


def test_a_training_that_is_resumed_is_the_same_run(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stopped), train(store) as first:
        first.row({"loss": 2.0}, 1)
        raise Stopped(15)
    with train(store, resumed=True) as run:
        assert run.id == first.id
        assert run.rows == [{"step": 1, "loss": 2.0}]
        assert store.run().info.status == "RUNNING"
        run.row({"loss": 9.0}, 1)  # the step is taken again
        run.row({"loss": 1.0}, 2)
    assert capsys.readouterr().out == ""
    assert store.run().info.status == "FINISHED"
    history = store.client.get_metric_history(run.id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.0), (2, 1.0)]


def test_a_run_that_a_killed_process_left_running_goes_on(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with train(store) as first:
        first.row({"loss": 2.0}, 1)
    first.journal.append("status", status="RUNNING")  # as the killed one's last
    with train(store, resumed=True) as run:
        pass
    said = capsys.readouterr().out
    assert said == f"MLflow run {first.id} was left RUNNING by a killed process: it goes on\n"
    assert run.id == first.id
    assert store.run().info.status == "FINISHED"


def test_a_resumed_training_whose_journal_is_gone_continues_the_run_that_is_named(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with train(store) as first:
        first.row({"loss": 2.0}, 1)
    run_id = first.id
    shutil.rmtree(first.journal.folder)
    with train(store, resumed=True, run_id=run_id) as run:
        run.row({"loss": 1.0}, 2)
    assert f"{first.journal.folder} is gone" in capsys.readouterr().out
    assert store.run().info.run_id == run_id == run.id
    assert len(store.client.get_metric_history(run.id, "loss")) == 2


@pytest.mark.parametrize(("error", "status"), [(None, "RUNNING"), (ValueError("x"), "FAILED")])
def test_the_run_of_mlflow_run_is_adopted_and_left_for_it_to_end(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception | None, status: str
) -> None:
    opened = connect(EXPERIMENT)
    given = opened.client.create_run(opened.experiment_id, run_name="of mlflow run").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    with suppress(ValueError), train(store) as run:
        assert run.id == given
        run.row({"loss": 2.0}, 1)
        if error:
            raise error
    found = store.run()
    assert (found.info.run_id, found.info.run_name, found.info.status) == (given, "vit 1", status)
    assert found.data.metrics["loss"] == 2.0


def test_a_row_of_mlflow_run_that_is_not_in_the_store_is_not_adopted(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with train(store) as run:
        pass
    assert "the training gets a run of its own" in capsys.readouterr().out
    assert store.run().info.run_id == run.id != "0" * 32
    assert store.run().info.status == "FINISHED"


def test_the_fresh_row_of_a_resumed_training_says_which_run_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with train(store) as first:
        pass
    opened = connect(EXPERIMENT)
    fresh = opened.client.create_run(opened.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", fresh)
    with train(store, resumed=True) as run:
        assert run.id == first.id
    assert store.client.get_run(fresh).data.tags["continues"] == first.id
    assert store.client.get_run(str(first.id)).info.status == "FINISHED"


def test_a_store_that_cannot_be_used_is_told_before_the_training(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = False
    for uri in ("htp://nowhere:1", "sqlite:////proc/x.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(UserError, match=r"MLflow store .* cannot be used"), train(store):
            entered = True
    assert not entered


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_training_without_a_server_is_whole_and_is_delivered_elsewhere(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.tracking.run.END_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    begun = time.monotonic()
    with train(store) as run:
        assert time.monotonic() - begun < 8
        assert run.id is None
        run.row({"loss": 2.0}, 1)
        ended = time.monotonic()
    assert time.monotonic() - ended < 8
    assert run.rows == [{"step": 1, "loss": 2.0}]
    said = capsys.readouterr().out
    assert said.count("MLflow does not answer") == 1
    assert "`python -m pipeline deliver-metrics` sends them when MLflow answers" in said
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    wait_until(lambda: all(left == 0 for _, _, left, _ in deliver_all(store.folder / "journals")))
    assert store.run().info.status == "FINISHED"
    assert store.run().data.metrics["loss"] == 2.0
