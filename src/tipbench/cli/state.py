"""`tipbench state export / import / rebuild`: what the policies learned, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tipbench.cli.console import print_json
from tipbench.cli.options import JsonOption, StateOption, command_group
from tipbench.files import writable_home
from tipbench.settings import load_settings
from tipbench.text import plural

app = command_group("Export, import and rebuild what the policies learned.")

FolderOption = Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="The folder of the exported files.")]


@app.command("export")
def export(folder: FolderOption, state: StateOption = "sqlite", json_: JsonOption = False) -> None:
    """Write the state of all users to a new folder.

    There is one file per user and policy. The files are named after the keyed hash of the user id, as in
    4f0c…_egreedy_v2.json. The server may be running.

    Examples:

      tipbench state export --dir backup/
    """
    from tipbench.serve.state_store import export_state

    n_files = export_state(writable_home(load_settings().home), folder, store_kind=state)
    if json_:
        print_json({"files": n_files})
    else:
        print(f"{plural(n_files, 'file')} written to {folder}")


@app.command("import")
def import_(folder: FolderOption, state: StateOption = "sqlite", json_: JsonOption = False) -> None:
    """Load exported state. It replaces the present state of its users.

    The server must be stopped. All files are checked before anything is changed. The import is written to the
    event log, so a rebuild keeps it. User ids are hashed with the key in `serve.secret`, which must be the
    same as at the export.

    Examples:

      tipbench state import --dir backup/
    """
    from tipbench.serve.state_store import import_state

    n_files = import_state(writable_home(load_settings().home), folder, store_kind=state)
    if json_:
        print_json({"files": n_files})
    else:
        print(f"{plural(n_files, 'file')} imported from {folder}")


@app.command("rebuild")
def rebuild(state: StateOption = "sqlite", json_: JsonOption = False) -> None:
    """Compute all state again from the event log.

    The server must be stopped.

    Examples:

      tipbench state rebuild
    """
    from tipbench.serve.state_store import rebuild_state

    n_users = rebuild_state(writable_home(load_settings().home), store_kind=state)
    if json_:
        print_json({"users": n_users})
    else:
        print(f"state of {plural(n_users, 'user')} rebuilt from the event log")
