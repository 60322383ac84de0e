"""The panel's SQLite database in the home folder: tokens, ended sessions, batches, webhook deliveries."""

from __future__ import annotations

from pathlib import Path

from tipbench.files import make_folder
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
_HOOK = """
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
_MIGRATIONS = (_TOKENS, _BATCHES, _HOOK)
VERSION = len(_MIGRATIONS)


def panel_folder(home: Path) -> Path:
    """Return the folder of the panel's secrets, accessible to its owner only; created if missing."""
    return make_folder(home / FOLDER, private=True)


def panel_database(home: Path) -> Database:
    """Open the panel's database, created and migrated as needed."""
    return Database(home / FOLDER / FILE, _MIGRATIONS, "The panel's database of tokens and drafts")
