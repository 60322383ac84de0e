"""The panel's database of tokens, batches and webhook deliveries, and the private folder that contains it."""

from __future__ import annotations

from pathlib import Path

from tipbench.files import check_ownership, make_folder
from tipbench.sqlite import Database

FOLDER = "panel"
FILE = "panel.sqlite"

_TOKENS = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, sha256 TEXT NOT NULL, role TEXT NOT NULL, name TEXT NOT NULL,
    created INTEGER NOT NULL, expires INTEGER, revoked INTEGER, last_used INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS ended_sessions (id TEXT PRIMARY KEY, expires INTEGER NOT NULL) STRICT;
"""
# Here and in _WEBHOOK, a column `place` has the identity of an MLflow server, see `MlflowConnection.identity`.
# `batch_items` has the current version of each item. `batch_history` has all versions; beyond its limits the oldest
# are deleted. `parent` is the version that undo restores. `batch_keys` has the idempotency keys of the requests that
# opened a batch.
_BATCHES = """
CREATE TABLE IF NOT EXISTS batches (
    sheet TEXT PRIMARY KEY, place TEXT NOT NULL, experiment TEXT NOT NULL, judge TEXT NOT NULL, kind TEXT NOT NULL,
    content TEXT NOT NULL, size INTEGER NOT NULL, status TEXT NOT NULL, revision INTEGER NOT NULL DEFAULT 0,
    opened REAL NOT NULL, updated REAL NOT NULL, closed REAL, note TEXT, accepted TEXT, outcome TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS batches_by_judge ON batches (experiment, judge, updated);
CREATE TABLE IF NOT EXISTS batch_items (
    sheet TEXT NOT NULL, item TEXT NOT NULL, version INTEGER NOT NULL, parent INTEGER, cause TEXT NOT NULL,
    state TEXT NOT NULL, content TEXT NOT NULL, reason TEXT NOT NULL, seconds REAL NOT NULL, updated REAL NOT NULL,
    PRIMARY KEY (sheet, item)
) STRICT;
CREATE TABLE IF NOT EXISTS batch_history (
    sheet TEXT NOT NULL, item TEXT NOT NULL, version INTEGER NOT NULL, parent INTEGER, cause TEXT NOT NULL,
    state TEXT NOT NULL, content TEXT NOT NULL, reason TEXT NOT NULL, seconds REAL NOT NULL, updated REAL NOT NULL,
    PRIMARY KEY (sheet, item, version)
) STRICT;
CREATE TABLE IF NOT EXISTS batch_keys (
    judge TEXT NOT NULL, key TEXT NOT NULL, sheet TEXT NOT NULL, used REAL NOT NULL, PRIMARY KEY (judge, key)
) STRICT;
"""
# `hook_seen` has the revision of an experiment at its last check. `hook_told` has the pending runs that were reported
# to the receiver. They are reported again only if the delivery fails, or if they are judged and then pending again.
_WEBHOOK = """
CREATE TABLE IF NOT EXISTS hook_deliveries (
    id TEXT PRIMARY KEY, receiver TEXT NOT NULL, event TEXT NOT NULL, place TEXT NOT NULL, experiment_id TEXT NOT NULL,
    experiment TEXT, body TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, next_try REAL
) STRICT;
CREATE TABLE IF NOT EXISTS hook_attempts (
    delivery TEXT NOT NULL, number INTEGER NOT NULL, time REAL NOT NULL, took_s REAL NOT NULL, status INTEGER,
    reason TEXT NOT NULL, PRIMARY KEY (delivery, number)
) STRICT;
CREATE TABLE IF NOT EXISTS hook_seen (
    receiver TEXT NOT NULL, place TEXT NOT NULL, experiment_id TEXT NOT NULL, revision TEXT NOT NULL,
    PRIMARY KEY (receiver, place, experiment_id)
) STRICT;
CREATE TABLE IF NOT EXISTS hook_told (
    receiver TEXT NOT NULL, place TEXT NOT NULL, experiment_id TEXT NOT NULL, run_id TEXT NOT NULL,
    PRIMARY KEY (receiver, place, experiment_id, run_id)
) STRICT, WITHOUT ROWID;
"""
_MIGRATIONS = (_TOKENS, _BATCHES, _WEBHOOK)  # append only: the position is the version
VERSION = len(_MIGRATIONS)


def panel_folder(home: Path) -> Path:
    """Return the panel's private folder; creates it if missing."""
    folder = make_folder(home / FOLDER, private=True)
    check_ownership(folder, "Set TIPBENCH_HOME to a folder of your own.")
    return folder


def panel_database(home: Path) -> Database:
    """Open the panel's database; creates and migrates it as needed."""
    return Database(panel_folder(home) / FILE, _MIGRATIONS, purpose="The panel's database of tokens and batches")
