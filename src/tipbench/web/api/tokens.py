"""Token endpoints: list, create, revoke. The settings page uses the same functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, Field

from tipbench.settings import DEFAULT_TOKEN_LIFETIME
from tipbench.web.api.models import COMMON_ERRORS, RequestBody, Shape, error_responses
from tipbench.web.auth import ADMINS_ONLY, Role, create_token, normalize_token_name, parse_lifetime
from tipbench.web.deps import Admin, PanelState
from tipbench.web.errors import NotFound, convert_usage_errors, validate_part
from tipbench.web.forms import body_schema, read_json

router = APIRouter(prefix="/api/bench/tokens", tags=["tokens"], dependencies=[ADMINS_ONLY], responses=COMMON_ERRORS)


class TokenRequest(RequestBody):
    """Options of a new token."""

    role: Literal["admin", "judge", "app"] = Field(
        description="admin: full access; judge: only its own sheets and batches; app: only the policy server."
    )
    name: str = Field(max_length=200, description="Name of the holder; a judge's scores are stored under it.")
    expires: str = Field(DEFAULT_TOKEN_LIFETIME, max_length=40, description="Lifetime: 12h, 30d, 8w or never.")


class TokenShape(Shape):
    """A stored token, without its secret."""

    id: str = Field(examples=["3f9a1c0b7e52"])
    role: Literal["admin", "judge", "app"]
    name: str = Field(examples=["reviewer-1"])
    state: Literal["active", "expired", "revoked"]
    created: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    expires: str | None
    revoked: str | None
    last_used: str | None


class NewToken(TokenShape):
    """A new token with its secret, which cannot be retrieved later."""

    token: str = Field(examples=["tipbench_3f9a1c0b7e52_…"])
    same_judge: list[str] = Field(
        description="Ids of other active judge tokens with this name; their scores are stored as one judge's."
    )


class TokenList(BaseModel):
    """All tokens, including revoked and expired ones."""

    items: list[TokenShape]
    next: str | None = Field(description="Always null: the list is complete.")


_BODY = body_schema(TokenRequest, {"role": "judge", "name": "reviewer-1", "expires": "30d"})
TokenId = Annotated[str, Path(pattern="^[0-9a-f]{12}$", description="The token's id.", examples=["3f9a1c0b7e52"])]


async def read_request(request: Request, _admin: Admin) -> TokenRequest:
    """Parse and validate the body. FastAPI resolves `_admin` first, so only the bodies of admins are read."""
    return validate_token_request(await read_json(request))


@router.get("", summary="List the tokens")
def tokens(panel: PanelState) -> TokenList:
    """Return all tokens with their states, oldest first, including revoked and expired ones."""
    store = panel.authenticator.tokens
    items = [TokenShape.model_validate(token.to_json(store.clock())) for token in store.all()]
    return TokenList(items=items, next=None)


@router.post("", summary="Create a token", status_code=201, openapi_extra=_BODY)
def create(token_request: Annotated[TokenRequest, Depends(read_request)], panel: PanelState) -> NewToken:
    """Return a new token with its secret. Only this response contains the secret; the server stores its hash."""
    created = create_token(panel.authenticator.tokens, token_request.role, token_request.name, token_request.expires)
    return NewToken.model_validate(created)


@router.delete("/{token_id}", summary="Revoke a token", responses=error_responses(404))
def revoke(token_id: TokenId, panel: PanelState) -> TokenShape:
    """Revoke a token and end all sessions created with it. Revoking a revoked token has no effect."""
    store = panel.authenticator.tokens
    store.revoke(token_id)  # has no effect on an unknown id
    token = store.get(token_id)
    if token is None:
        raise NotFound(f"There is no token {token_id}. GET /api/bench/tokens lists all.", path="path.token_id")
    return TokenShape.model_validate(token.to_json(store.clock()))


def validate_token_request(raw: Mapping[str, Any]) -> TokenRequest:
    """Validate the options of a new token. Raises Invalid with the field's path."""
    token_request = validate_part(TokenRequest, raw, "body")
    # Only the errors matter here: `create_token` computes the values again.
    with convert_usage_errors("body.name"):
        normalize_token_name(token_request.name, Role(token_request.role))
    with convert_usage_errors("body.expires"):
        parse_lifetime(token_request.expires)
    return token_request
