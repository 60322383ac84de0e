"""`tipbench token create / list / revoke`: manage access tokens of the panel and the policy server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.options import JsonOption, command_group
from tipbench.errors import UsageError
from tipbench.files import writable_home
from tipbench.settings import DEFAULT_TOKEN_LIFETIME, load_settings

if TYPE_CHECKING:
    from tipbench.web.auth import TokenStore

app = command_group("Manage access tokens for the panel and the policy server.")

_COLUMNS = ("id", "role", "name", "state", "created", "expires", "last used")
Role = Literal["admin", "judge", "app"]


@app.command("create")
def create(
    role: Annotated[
        Role,
        typer.Option(
            metavar="admin|judge|app",
            help="admin: everything; judge: its own sheets only; app: the policy server only.",
        ),
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the holder; a judge's scores are stored under it.")
    ],
    expires: Annotated[
        str, typer.Option(metavar="12h|30d|8w|never", help="Lifetime of the token.", show_default=True)
    ] = DEFAULT_TOKEN_LIFETIME,
    json_: JsonOption = False,
) -> None:
    """Create a token and print it once; only its hash is stored.

    Examples:

      tipbench token create --role judge --name reviewer-1 --expires 30d

      tipbench token create --role app --name ios-app --expires never

      tipbench token create --role admin --name ci --json
    """
    from tipbench.web.auth import create_token

    with _open_tokens() as tokens:
        created = create_token(tokens, role, name, expires)
    if json_:
        print_json(created)
        return
    if other_ids := created["same_judge"]:
        print_message(
            f"warning: {created['name']} already has another active judge token ({', '.join(other_ids)}). Scores are "
            "stored by name, so both judge as one person. For another person use another name; otherwise revoke the "
            f"old one: `tipbench token revoke {other_ids[0]}`."
        )
    validity = f"until {created['expires']}" if created["expires"] else "without limit"
    print_message(
        f"token {created['id']} for {created['name']} ({role}), valid {validity}. Store it; it is not shown again:"
    )
    print(created["token"])


@app.command("list")
def list_tokens(json_: JsonOption = False) -> None:
    """List tokens with name, role and last use.

    Examples:

      tipbench token list

      tipbench token list --json
    """
    with _open_tokens() as tokens:
        rows = [token.to_json(tokens.clock()) for token in tokens.all()]
    if json_:
        print_json(rows)
    elif rows:
        for row in rows:  # times are shortened to fit into 80 columns; --json has them in full
            row["created"] = str(row["created"])[:10]
            row["expires"] = str(row["expires"] or "never")[:10]
            row["last used"] = str(row["last_used"])[:16].replace("T", " ") if row["last_used"] else None
        print_table(_COLUMNS, [[row[column] for column in _COLUMNS] for row in rows], text_columns=_COLUMNS)
    else:
        print_message("no tokens yet; create one with `tipbench token create --role judge --name NAME`")


@app.command("revoke")
def revoke(
    token_id: Annotated[str | None, typer.Argument(metavar="ID", help="Token id, as in `token list`.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Revoke all tokens of this name.")] = None,
    role: Annotated[
        Role | None, typer.Option(metavar="admin|judge|app", help="With --name: only tokens of this role.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Revoke tokens immediately, and end their sessions.

    Examples:

      tipbench token revoke 3f9a1c0b7e52

      tipbench token revoke --name reviewer-1
    """
    if (token_id is None) == (name is None):  # neither or both
        raise UsageError("Give either the token's ID or --name; `tipbench token list` shows both.")
    with _open_tokens() as tokens:
        if token_id is not None:
            matching = [token for token in tokens.all() if token.id == token_id]
        else:
            same_name = [token for token in tokens.all() if token.name == (name or "").strip()]
            matching = [token for token in same_name if role is None or token.role == role]
        if not matching:
            raise UsageError(
                f"There is no token {(token_id or name or '')[:80]!r}; `tipbench token list` shows the tokens."
            )
        revoked = [token.id for token in matching if tokens.revoke(token.id)]
    if json_:
        print_json({"revoked": revoked})
    else:
        print(f"revoked: {', '.join(revoked)}" if revoked else "already revoked")


@contextmanager
def _open_tokens() -> Iterator[TokenStore]:
    from tipbench.web.auth import TokenStore
    from tipbench.web.database import panel_database

    with closing(panel_database(writable_home(load_settings().home))) as database:
        yield TokenStore(database)
