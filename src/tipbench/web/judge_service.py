"""Sheets over HTTP: export, apply, accept drift, drift charts, and uploads.

Admins have the options of the command line. Judges work blind and under their own name. An uploaded file is kept in
memory from its preview until its confirmation, and is lost on a restart.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from tipbench.charts import THEMES, to_svg
from tipbench.judge.apply import SheetApplier
from tipbench.judge.charts import drift_chart, drift_points
from tipbench.judge.check import Problem, normalize_name, refusal, shown
from tipbench.judge.drift import MIN_CONTROLS
from tipbench.judge.export import ExportRequest
from tipbench.judge.sheet import sheet_json
from tipbench.judge.sheet_store import SheetStatus, StoredSheet, find_sheet
from tipbench.record.store import RunStore
from tipbench.web.api.models import SheetOptions
from tipbench.web.auth import Identity
from tipbench.web.board_query import ThemeName, drawing_lock
from tipbench.web.errors import Forbidden, Invalid, NotFound, attachment, convert_option_errors, validate_part
from tipbench.web.forms import JSON_TYPE
from tipbench.web.options import OperatorPermissions
from tipbench.web.queries import Queries, get_experiment, revision
from tipbench.workflows.board import judge_name
from tipbench.workflows.judging import SheetRequest, apply_file, parse_drift_reason, requested_sheet, sheet_file

CSV_TYPE = "text/csv"
MIN_ANSWERS = MIN_CONTROLS  # of a judge's sheet: for so many answers, the export adds MIN_CONTROLS control tips or more
MAX_REVISIONS = 5  # of one sheet by its judge
_FIELDS_FOR_JUDGES = frozenset({"judge", "limit", "all", "sheet", "filled", "format"})


def parse_sheet_request(raw: Mapping[str, Any], who: Identity, permissions: OperatorPermissions) -> SheetRequest:
    """Validate an export request. Raises Invalid, which names the field that is wrong.

    Raises Forbidden for a field that judges may not set: with `seed`, `focus` or `suite`, they could find the controls.
    """
    if who.is_judge and (forbidden := sorted(raw.keys() - _FIELDS_FOR_JUDGES)):
        field = forbidden[0][:40]
        raise Forbidden(
            f"A judge's token may set {', '.join(sorted(_FIELDS_FOR_JUDGES))} (got {field!r}).", path=f"body.{field}"
        )
    options = validate_part(SheetOptions, raw, "body")
    if options.suite is not None:
        permissions.check_suite(options.suite)
    if who.is_judge and options.limit is not None and options.limit < MIN_ANSWERS:
        raise Invalid(
            f"limit must be {MIN_ANSWERS} or more for a judge: smaller sheets have too few control tips "
            f"(got {options.limit}).",
            path="body.limit",
        )
    request = ExportRequest(
        judge=_judge_name(options.judge, who, part="body"),
        limit=options.limit,
        overlap=options.overlap,
        everything=options.all,
        rejudge=options.rejudge,
        seed=options.seed,
        suite=options.suite,
    )
    with convert_option_errors("body"):
        return SheetRequest(
            request,
            sheet=options.sheet,
            filled=options.filled,
            focus=options.focus,
            format=options.format,
            by_judge=who.is_judge,
        )


def get_or_export_sheet(store: RunStore, name: str, request: SheetRequest) -> StoredSheet:
    """Return the requested existing sheet, or export a new one. Raises NotFound."""
    experiment = get_experiment(store, name)
    result = requested_sheet(store, experiment, request)
    if result is None:
        raise NotFound(
            f"{experiment.name} has no sheet {(request.sheet or '')[:64]!r} that belongs to you.", path="body.sheet"
        )
    return result.stored


def sheet_response(stored: StoredSheet, request: SheetRequest, status: int = 200) -> Response:
    """Return the sheet as a download."""
    return Response(
        sheet_file(stored, request).encode("utf-8", "backslashreplace"),  # UTF-8 cannot encode lone surrogates
        status,
        media_type=CSV_TYPE if request.format == "csv" else JSON_TYPE,
        headers=attachment(f"sheet-{stored.sheet.id}{'-filled' if request.filled else ''}", request.format),
    )


@dataclass(frozen=True)
class ApplyOptions:
    """Options for applying a filled sheet."""

    who: Identity
    judge: str | None = None  # used if the sheet names no judge
    accept: str | None = None  # reason to accept the drift
    dry_run: bool = False
    final: bool = False  # check the drift even if items are unscored

    @classmethod
    def of(
        cls, who: Identity, *, judge: str | None, accept: str | None, dry_run: bool, final: bool = False
    ) -> ApplyOptions:
        """Validate the options. Judges must use their own name and cannot accept drift; raises Forbidden."""
        if accept is not None and who.is_judge:
            raise Forbidden("Only an admin can accept drift. Revise the sheet and apply it again.")
        with convert_option_errors("query"):
            reason = parse_drift_reason(accept) if accept is not None else None
        name = _judge_name(judge, who, part="query")
        return cls(who, judge=name, accept=reason, dry_run=dry_run, final=final)


def apply_sheet(store: RunStore, name: str, raw: Mapping[str, Any], options: ApplyOptions) -> dict[str, Any]:
    """Apply a sheet and return the output of `judge apply --json`, without `alpha` for judges. Raises SheetRefused."""
    get_experiment(store, name)  # raises NotFound
    if raw.get("experiment") != name:
        seen, expected = shown(raw.get("experiment")), f"{name!r}, as in the URL"
        raise refusal([Problem(item=None, tip=None, field="experiment", seen=seen, expected=expected)])

    def check_revisions(applier: SheetApplier) -> None:
        # With more revisions, a judge could change one item at a time and find the controls by the drift.
        stored = applier.stored
        is_limited = options.who.is_judge and not options.dry_run
        if is_limited and stored.revisions >= MAX_REVISIONS and applier.changes_scores:
            raise Forbidden(
                f"Sheet {stored.sheet.id} was revised {stored.revisions} times; a judge may revise it "
                f"{MAX_REVISIONS} times. Ask an admin to accept it, or to apply further changes.",
                code="too_many_revisions",
                path="body.sheet",
            )

    with convert_option_errors("query"):
        applied = apply_file(
            store,
            raw,
            judge=options.judge,
            accept=options.accept,
            final=options.final,
            dry_run=options.dry_run,
            check=check_revisions,
        )
    result = applied.to_json()
    if options.who.is_judge:
        result.pop("alpha", None)  # would reveal other judges' scores
    return result


def _judge_name(name: str | None, who: Identity, part: str) -> str | None:
    """Return the normalised name, or the token's own name for a judge. Raises Forbidden if a judge gives another.

    `part` is the part of the request that has the name, for errors.
    """
    if who.is_judge:
        if name is not None and normalize_name(name) != who.name:
            raise Forbidden(f"This token judges as {who.name} (got {name[:60]!r}).", path=f"{part}.judge")
        return who.name
    with convert_option_errors(part):
        return judge_name(name)


@dataclass(frozen=True)
class DriftChartQuery:
    """A drift chart of one judge on one scale."""

    judge: str
    scale: str
    provisional: bool = False
    theme: ThemeName = "light"


def get_sheet(store: RunStore, name: str, sheet: str) -> StoredSheet:
    """Return a sheet of an experiment. Raises NotFound."""
    experiment = get_experiment(store, name)
    stored = find_sheet(store, experiment, sheet)
    if stored is None:
        raise NotFound(
            f"{name[:200]} has no sheet {sheet[:64]!r}. The judges page lists the sheets.", path="path.sheet"
        )
    return stored


def accept_drift(store: RunStore, name: str, sheet: str, reason: str, who: Identity) -> dict[str, Any]:
    """Accept the drift of a held sheet and save the reason. Raises Invalid if the sheet is not held."""
    options = ApplyOptions.of(who, judge=None, accept=reason, dry_run=False)
    stored = get_sheet(store, name, sheet)
    if stored.status is not SheetStatus.HELD:
        raise Invalid(
            f"Sheet {sheet[:64]} is {stored.status}, not held: there is no drift to accept.", path="body.sheet"
        )
    filled = sheet_json(replace(stored.sheet, judge=stored.owner), stored.scores)
    return apply_sheet(store, name, filled, options)


def drift_svg(queries: Queries, store: RunStore, name: str, query: DriftChartQuery) -> str:
    """Return a drift chart as SVG, cached per revision. Raises NotFound if there is no data for it."""
    experiment = get_experiment(store, name)
    judging = queries.judging(store, experiment)
    points = drift_points(judging.history, query.judge, query.scale, provisional=query.provisional)
    if not points:
        raise NotFound("No sheet of this judge has a known bias on this scale.", path="query.judge")

    def draw() -> str:
        with drawing_lock:
            return to_svg(drift_chart(points, THEMES[query.theme]), THEMES[query.theme])

    return queries.charts.get(("drift", experiment.experiment_id, query), revision(experiment), draw)


UPLOAD_LIFE_S = 3600.0
MAX_UPLOADS = 32  # of all owners together
MAX_UPLOAD_BYTES = 128_000_000  # of all owners together


@dataclass(frozen=True)
class UploadQuota:
    """Storage limit of one owner, or of all together. Above it, the oldest uploads are dropped."""

    max_files: int
    max_bytes: int


JUDGES_QUOTA = UploadQuota(max_files=4, max_bytes=16_000_000)
ADMINS_QUOTA = UploadQuota(max_files=16, max_bytes=96_000_000)


@dataclass(frozen=True)
class Upload:
    """A file uploaded for an experiment."""

    id: str
    owner: str  # id of the token
    experiment: str
    name: str  # file name given by the client
    content: bytes
    sha256: str
    uploaded_at: float
    judge: str | None = None  # used if the sheet names no judge
    outcome: Mapping[str, Any] | None = None  # set once applied; the content is then empty


class UploadStore:
    """Uploads awaiting confirmation. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._uploads: OrderedDict[str, Upload] = OrderedDict()

    def add(
        self,
        owner: str,
        experiment: str,
        name: str,
        content: bytes,
        judge: str | None = None,
        *,
        quota: UploadQuota = JUDGES_QUOTA,
    ) -> Upload:
        """Store a file. Above a limit, drops the oldest uploads, first of this owner and then of all owners."""
        upload = Upload(
            id=secrets.token_hex(16),
            owner=owner,
            experiment=experiment,
            name=name[:200],
            content=content,
            sha256=hashlib.sha256(content).hexdigest(),
            uploaded_at=self._clock(),
            judge=judge,
        )
        with self._lock:
            self._uploads[upload.id] = upload
            self._drop_oldest(quota, owner=owner)
            self._enforce_limits()
        return upload

    def find(self, id_: str, owner: str, experiment: str) -> Upload | None:
        """Return an upload of this owner and experiment, or None if it is unknown or expired."""
        with self._lock:
            self._enforce_limits()
            upload = self._uploads.get(id_)
        if upload is None or (upload.owner, upload.experiment) != (owner, experiment):
            return None
        return upload

    def save_outcome(self, upload: Upload, outcome: Mapping[str, Any]) -> None:
        """Save the result of applying an upload, and drop its content."""
        with self._lock:
            if upload.id in self._uploads:
                self._uploads[upload.id] = replace(upload, content=b"", outcome=outcome)

    def __len__(self) -> int:
        return len(self._uploads)

    def _enforce_limits(self) -> None:
        """Drop expired uploads, then the oldest above the limits of all owners together."""
        expired_before = self._clock() - UPLOAD_LIFE_S
        for expired in [upload for upload in self._uploads.values() if upload.uploaded_at < expired_before]:
            del self._uploads[expired.id]
        self._drop_oldest(UploadQuota(max_files=MAX_UPLOADS, max_bytes=MAX_UPLOAD_BYTES))

    def _drop_oldest(self, quota: UploadQuota, owner: str | None = None) -> None:
        """Drop the oldest uploads above the quota, of one owner or of all. Always keeps the newest."""
        uploads = [upload for upload in self._uploads.values() if owner is None or upload.owner == owner]
        size = sum(len(upload.content) for upload in uploads)
        while len(uploads) > quota.max_files or (len(uploads) > 1 and size > quota.max_bytes):
            oldest = uploads.pop(0)
            size -= len(oldest.content)
            del self._uploads[oldest.id]


def quota_of(who: Identity) -> UploadQuota:
    """Return the storage limit of a client."""
    return JUDGES_QUOTA if who.is_judge else ADMINS_QUOTA


def uploads_of(app: FastAPI) -> UploadStore:
    """Return the application's uploads."""
    uploads: UploadStore = app.state.uploads
    return uploads
