"""Who is calling: a bearer token names a person, and nothing else does.

This stands for your own login (OIDC, sessions). The rest of the service needs only `Person`: the name, the tenant and
the roles, as the login knows them. perdure records these names and believes them, so they must never come from the body
of a request.

The file SERVICE_PEOPLE has the SHA-256 of each token, and never a token itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request, status
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

_bearer = HTTPBearer(auto_error=False, description="the token of a person")


@dataclass(frozen=True)
class Person:
    name: str
    tenant: str  # this person sees the runs of this tenant, and no other runs
    roles: tuple[str, ...]


def load_people() -> dict[str, Person]:
    """The people of SERVICE_PEOPLE, by the digest of their token. There is no default: a service without a login must not start."""
    file = os.environ.get("SERVICE_PEOPLE")
    if not file:
        raise SystemExit("SERVICE_PEOPLE is not set: it names the JSON file with the people who may log in (README.md)")
    try:
        entries: dict[str, dict[str, Any]] = json.loads(Path(file).read_text())
        people = {digest: Person(one["name"], one["tenant"], tuple(one["roles"])) for digest, one in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f'SERVICE_PEOPLE: {file}: {error!r}; an entry is "SHA-256": {{"name": …, "tenant": …, "roles": […]}}') from None
    wrong = next((digest for digest in people if len(digest) != 64 or set(digest) - set("0123456789abcdef")), None)
    if wrong is not None:
        raise SystemExit(f"SERVICE_PEOPLE: {file}: {wrong[:8]}… is not the SHA-256 of a token: 64 of 0-9 and a-f (README.md)")
    return people


def logged_in(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Person:
    """The person of this request, or 401."""
    # The look-up is by digest, so its duration says nothing about a token.
    digest = "" if given is None else hashlib.sha256(given.credentials.encode()).hexdigest()
    people: dict[str, Person] = request.app.state.people
    if digest not in people:
        raise HTTPException(status.HTTP_401_UNAUTHORIZED, "log in: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
    return people[digest]


Caller = Annotated[Person, Depends(logged_in)]
