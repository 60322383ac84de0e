"""Who carries jobs out: this machine, and Airflow where it is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tipbench.addresses import without_login
from tipbench.errors import MlflowAway, NotEnoughData, UsageError
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.airflow_rest import AirflowAccess, AirflowRest
from tipbench.jobs.job import Job, Runner
from tipbench.jobs.local import LocalRunner
from tipbench.plan.config import CollectConfig, make_config
from tipbench.record.asked import asked_cells, counted
from tipbench.record.store import Experiment
from tipbench.settings import Settings
from tipbench.web.cache import Cache
from tipbench.web.opening import Opened, Tracker
from tipbench.web.snapshots import revision

DEFAULT_DAG = "bench_collect"
_WAITING_JOBS = 64  # whose counts are kept


@dataclass(frozen=True)
class PanelRecords:
    """What an Airflow run is told of MLflow, and what is seen there of its cells."""

    tracker: Tracker
    counts: Cache = field(default_factory=lambda: Cache(_WAITING_JOBS))

    def address(self, job: Job) -> str:
        """The MLflow server that the workers use too. NotEnoughData when the panel has none."""
        named = job.arguments.get("mlflow_url")
        return str(named) if named else without_login(self.tracker.open().place)

    def pending(self, job: Job) -> int:
        """How many of the job's cells wait for a judge, whoever has scored the others. NotEnoughData when none is seen:

        what cannot be seen is not taken for judged. They are counted when somebody has written to the experiment, and
        now and then all the same.
        """
        config = make_config({key: value for key, value in job.arguments.items() if key in CollectConfig.model_fields})
        try:
            with self.tracker.named(job.private.get("TIPBENCH_MLFLOW_URL") or config.mlflow_url) as opened:
                experiment = opened.store.experiment(config.experiment)
                key, version = (opened.identity, job.id), None if experiment is None else revision(experiment)
                return self.counts.get(key, version, lambda: _count(opened, experiment, config))
        except MlflowAway:
            self.tracker.doubt()
            raise


def _count(opened: Opened, experiment: Experiment | None, config: CollectConfig) -> int:
    found = [] if experiment is None else asked_cells(opened.store, experiment.experiment_id, config)
    if not found:
        raise NotEnoughData(f"No cell of the run is in {config.experiment} on MLflow at {opened.place}.")
    return counted(found).pending


def airflow_access(settings: Settings) -> AirflowAccess | None:
    """Where Airflow is; None when it is not configured. UsageError names the setting that is wrong."""
    url = settings.get("airflow_url")
    if not url:
        return None
    get = settings.get
    access = AirflowAccess(
        url.rstrip("/"),
        username=get("airflow_username"),
        password=get("airflow_password"),
        token=get("airflow_token"),
        dag_id=get("airflow_dag") or DEFAULT_DAG,
        public_url=get("airflow_public_url") or None,
    )
    access.check()
    return access


def make_runners(settings: Settings, tracker: Tracker) -> dict[str, Runner]:
    """The runners of the settings, by name."""
    runners: dict[str, Runner] = {LocalRunner.name: LocalRunner(settings.home)}
    access = airflow_access(settings)
    if access is not None:
        runners[AirflowRunner.name] = AirflowRunner(settings.home, AirflowRest(access), PanelRecords(tracker))
    return runners


def usual_runner(settings: Settings, runners: Mapping[str, Runner]) -> str:
    """Who runs what names nobody: as the setting says, else Airflow where there is one."""
    wanted = settings.get("runner")
    if not wanted:
        return AirflowRunner.name if AirflowRunner.name in runners else next(iter(runners))
    if wanted not in (LocalRunner.name, AirflowRunner.name):
        raise UsageError(f"runner is local or airflow (got {wanted[:40]!r}).")
    if wanted not in runners:
        raise UsageError(
            "runner is airflow, and nothing says where that is. Set TIPBENCH_AIRFLOW_URL, or runner=local."
        )
    return wanted
