"""MLflow's own system metrics, into the journal: the use of processor, memory, disk, network and GPU.

MLflow's monitor asks the store for the run at each sample and sends its values there; here its samplers alone
are used. As all metrics, these are logged at the training's step.
"""

import threading
from collections.abc import Callable

from pipeline.tracking.journal import Journal
from pipeline.tracking.store import import_mlflow

EVERY_SECONDS = 5.0


class SystemMetrics:
    """Samples from `start` to `stop`; step: tells where the training stands."""

    def __init__(self, journal: Journal, step: Callable[[], int]) -> None:
        import_mlflow()
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        class Samplers(SystemMetricsMonitor):
            """Its samplers, without the store that it opens, which may not be there."""

            def __init__(self) -> None:
                self.monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
                if gpu := self._initialize_gpu_monitor():
                    self.monitors.append(gpu)

        self._monitor = Samplers()
        self._journal = journal
        self._step = step
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="system metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=EVERY_SECONDS)

    def _sample(self) -> None:
        while not self._ended.is_set():
            self._monitor.collect_metrics()
            self._ended.wait(EVERY_SECONDS)
            values = self._monitor.aggregate_metrics()
            for sampler in self._monitor.monitors:
                sampler.clear_metrics()
            self._journal.metrics({f"system/{name}": value for name, value in values.items()}, self._step())
