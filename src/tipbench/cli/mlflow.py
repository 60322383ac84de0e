"""`tipbench mlflow up / down / status`: manage the local MLflow server."""

from __future__ import annotations

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import JsonOption, command_group
from tipbench.files import writable_home
from tipbench.settings import load_settings

app = command_group("Start, stop and check the local MLflow server.")


@app.command()
def up() -> None:
    """Start the local MLflow server, unless it is already running.

    Prints its URL. The database is stored under TIPBENCH_HOME.
    Commands start it automatically if no other MLflow is available.

    Examples:

      tipbench mlflow up
    """
    from tipbench.record.local_mlflow import LocalMlflow

    home = writable_home(load_settings().home)
    print(LocalMlflow(home).up(report=print_message))


@app.command()
def down() -> None:
    """Stop the local MLflow server; recorded data is kept.

    Examples:

      tipbench mlflow down
    """
    from tipbench.record.local_mlflow import LocalMlflow

    was_running = LocalMlflow(load_settings().home).down()
    print_message(f"the local MLflow is {'stopped' if was_running else 'not running'}")


@app.command()
def status(json_: JsonOption = False) -> None:
    """Show whether the local MLflow server is running, and its URL.

    Examples:

      tipbench mlflow status --json
    """
    from tipbench.record.local_mlflow import LocalMlflow

    home = load_settings().home
    server = LocalMlflow(home).status()
    if json_:
        print_json(vars(server) | {"home": str(home)})
    elif server.running:
        warning = "" if server.healthy else " (not responding yet)"
        print(f"running at {server.url}{warning}")
    else:
        print(f"not running; its data is in {home / 'mlflow'}")
