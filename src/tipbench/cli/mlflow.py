"""`tipbench mlflow up / down / status`: the local MLflow server."""

from __future__ import annotations

import typer

from tipbench.cli.console import print_json, say
from tipbench.cli.options import JsonOption
from tipbench.settings import load_settings

app = typer.Typer(help="The local MLflow server.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def up() -> None:
    """Start the local MLflow server, or find it running.

    Its address is printed. Its database lives under TIPBENCH_HOME.
    Commands start it by themselves when there is no other MLflow.
    """
    from tipbench.cli.session import writable_home
    from tipbench.record.local_mlflow import LocalMlflow

    print(LocalMlflow(writable_home(load_settings())).up(report=say))


@app.command()
def down() -> None:
    """Stop the local MLflow server; what is recorded stays."""
    from tipbench.record.local_mlflow import LocalMlflow

    local = LocalMlflow(load_settings().home)
    if not local.status().running:
        say("the local MLflow is not running")
        return
    local.down()
    say("the local MLflow is stopped")


@app.command()
def status(json_: JsonOption = False) -> None:
    """Tell whether the local MLflow server runs, and where."""
    from tipbench.record.local_mlflow import LocalMlflow

    home = load_settings().home
    now = LocalMlflow(home).status()
    if json_:
        print_json(vars(now) | {"home": str(home)})
    elif now.running:
        print(f"running at {now.url}{'' if now.healthy else ' (not answering yet)'}")
    else:
        print(f"not running; its data are in {home / 'mlflow'}")
