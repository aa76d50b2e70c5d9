"""Every guard that is tested by removing it: lines of the sources, and guards that other tests switch off at run time."""

from __future__ import annotations

from tests.mutants.artifacts import ARTIFACTS
from tests.mutants.bulk import BULK
from tests.mutants.cli import CLI
from tests.mutants.core import CORE
from tests.mutants.evolving import EVOLVING
from tests.mutants.fork import FORK
from tests.mutants.incidents import INCIDENTS
from tests.mutants.joined import JOINED
from tests.mutants.known import known
from tests.mutants.mutant import Known, Mutant
from tests.mutants.outside import OUTSIDE
from tests.mutants.schedules import SCHEDULES
from tests.mutants.secrets import OF_SECRETS
from tests.mutants.seeing import SEEING
from tests.mutants.store import STORE
from tests.mutants.tracing import TRACING
from tests.mutants.worker import WORKER

SOURCE: tuple[Mutant, ...] = (
    *ARTIFACTS,
    *BULK,
    *CLI,
    *CORE,
    *EVOLVING,
    *FORK,
    *STORE,
    *INCIDENTS,
    *JOINED,
    *WORKER,
    *OUTSIDE,
    *SCHEDULES,
    *SEEING,
    *TRACING,
    *OF_SECRETS,
)
KNOWN: tuple[Known, ...] = tuple(known())
BY_NAME = {mutant.name: mutant for mutant in SOURCE}
ALL: tuple[Mutant | Known, ...] = (*SOURCE, *KNOWN)
