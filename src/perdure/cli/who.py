"""The user of this process, and the roles in the settings. This module does no authentication."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence

from perdure.core.approval import may_decide, same_name
from perdure.settings import Settings

_ROLE = "role:"


def os_user() -> str:
    """The user of this process, by its effective uid. The environment is not used, because the user can change it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"  # a container may run under a uid that has no name


def is_among(deciders: Sequence[str], who: str, roles: Sequence[str], settings: Settings) -> bool:
    """May the person `who` decide, with the claimed `roles` and with the roles that the settings give to `who`?"""
    name = same_name(who) or who
    known = (role for role, members in settings.roles.items() if name in map(same_name, members))
    return may_decide(deciders, name, (*roles, *known))


def who_is_meant(deciders: Sequence[str], settings: Settings) -> str:
    """For a person who may not decide: who has the roles, and which options to type."""
    roles = [one.removeprefix(_ROLE) for one in deciders if one.startswith(_ROLE)]
    known = [f"{role} is {', '.join(settings.roles[role])} (the settings)" for role in roles if settings.roles.get(role)]
    unknown = [role for role in roles if not settings.roles.get(role)]
    if unknown:
        known.append(f"no role {', '.join(unknown)} is known here ([roles] in perdure.toml)")
    vouch = f", or vouch for the role: --role {roles[0]}" if roles else ""
    return "; ".join((*known, f"say who decides: --by NAME{vouch}"))
