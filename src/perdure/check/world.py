"""What an agent must not use, by dotted name, as data.

A name in NAMES is wrong wherever an agent uses the name. A name in CALLS is wrong where an agent calls the name. A
module in MODULES is wrong if an agent calls something in the module, or a method of an object that the module made. A
name in FEW_ARGUMENTS is wrong if an agent calls it with fewer arguments than the number that is listed there: without
the argument, the function uses the clock or randomness.
"""

from __future__ import annotations

from typing import NamedTuple

from perdure.check.finding import Severity


class Fact(NamedTuple):
    """Why a name is wrong in an agent. The message is the name and then `what`: "time.time() reads the wall clock"."""

    rule: str
    what: str
    way_out: str
    severity: Severity = "error"


_TOOL = "do it in a tool, and use its recorded result"
CLOCK = Fact("clock", "reads the wall clock, and a replay comes later", "use run.now(), the recorded time of what woke the agent")
SLEEP = Fact("clock", "stops the whole worker, and is no durable timer", "use await asyncio.sleep(…)")
CHANCE = Fact("random", "comes out differently on replay", "use run.random, which replays")
UNIQUE = Fact("random", "gives another id on replay", "use run.uuid()")
HASH = Fact("random", "gives another number for the same text in every process", "use hashlib, or compare the values themselves")
IDENTITY = Fact("random", "is an address, another one in every process", "number the things yourself")
FILES = Fact("io", "uses the file system, which differs on replay", _TOOL)
NETWORK = Fact("io", "uses the network, unrecorded and again on every replay", _TOOL)
DATABASE = Fact("io", "uses a database, unrecorded and again on every replay", _TOOL)
MODEL = Fact("io", "asks a model, unrecorded and again on every replay", "use perdure.models, or ask it in a tool")
PROCESS = Fact("io", "uses a process of the system, unrecorded and again on every replay", _TOOL)
MACHINE = Fact(
    "io", "depends on the process or machine that the run happens to be on", "give it to the run as an argument, or ask for it in a tool"
)
PERSON = Fact("io", "waits for a person at this terminal, and again on every replay", "use await run.receive(…) or run.request_approval(…)")
THREADS = Fact(
    "thread",
    "works beside the agent's loop, where nothing is recorded or ordered",
    "use asyncio.gather or a TaskGroup; blocking work goes into a tool",
)
LOOPS = Fact(
    "thread", "needs its own loop, and an agent has only the loop that it runs on", "await it, or start it with asyncio.create_task"
)
APP = Fact(
    "io",
    "uses the app, which is refused in an agent: each replay would do it again",
    "call an agent to start another run, await other(…); everything else belongs in a tool",
)
PRINT = Fact("print", "prints it again on every replay", "use run.note(…) or run.status(…); what a tool prints is printed once", "note")


def _table(*rows: tuple[Fact, str]) -> dict[str, Fact]:
    return {name: fact for fact, names in rows for name in names.split()}


NAMES = _table(
    (
        CLOCK,
        (
            "time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter time.perf_counter_ns time.process_time "
            "time.process_time_ns time.thread_time time.clock_gettime time.clock_gettime_ns datetime.datetime.now datetime.datetime.utcnow "
            "datetime.datetime.today datetime.date.today os.times timeit.default_timer arrow.now arrow.utcnow pendulum.now "
            "pandas.Timestamp.now pandas.Timestamp.utcnow pandas.Timestamp.today django.utils.timezone.now"
        ),
    ),
    (SLEEP, "time.sleep"),
    (
        CHANCE,
        (
            "random.random random.randint random.randrange random.choice random.choices random.sample random.shuffle random.uniform "
            "random.gauss random.normalvariate random.betavariate random.expovariate random.triangular random.getrandbits random.randbytes "
            "random.seed random.SystemRandom os.urandom os.getrandom secrets.choice secrets.randbelow secrets.randbits secrets.token_bytes "
            "secrets.token_hex secrets.token_urlsafe secrets.SystemRandom numpy.random.rand numpy.random.randn numpy.random.randint "
            "numpy.random.random numpy.random.choice numpy.random.shuffle numpy.random.permutation numpy.random.normal numpy.random.uniform "
            "numpy.random.seed torch.rand torch.randn torch.randint torch.randperm"
        ),
    ),
    (UNIQUE, "uuid.uuid1 uuid.uuid4 uuid.uuid6 uuid.uuid7 uuid.getnode"),
    (
        FILES,
        (
            "builtins.open io.open os.open os.listdir os.scandir os.walk os.stat os.lstat os.read os.write os.remove os.unlink os.rename "
            "os.replace os.mkdir os.makedirs os.rmdir os.removedirs os.chmod os.chown os.link os.symlink os.readlink os.access os.utime "
            "os.truncate os.path.exists os.path.lexists os.path.isfile os.path.isdir os.path.islink os.path.getsize os.path.getmtime "
            "os.path.getctime os.path.realpath os.path.abspath pathlib.Path.cwd pathlib.Path.home anyio.open_file"
        ),
    ),
    (NETWORK, "asyncio.open_connection asyncio.start_server asyncio.open_unix_connection asyncio.start_unix_server"),
    (DATABASE, "sqlalchemy.create_engine sqlalchemy.ext.asyncio.create_async_engine"),
    (PROCESS, "os.system os.popen os.fork os.forkpty os.kill os.posix_spawn os.startfile os._exit"),
    (
        MACHINE,
        (
            "os.environ os.environb os.getenv os.getenvb os.putenv os.getpid os.getppid os.getcwd os.chdir os.getlogin os.getuid "
            "os.cpu_count os.uname os.getloadavg sys.argv"
        ),
    ),
    (PERSON, "builtins.input sys.stdin getpass.getpass"),
    (
        THREADS,
        (
            "asyncio.to_thread asyncio.create_subprocess_exec asyncio.create_subprocess_shell asyncio.run_coroutine_threadsafe "
            "anyio.to_thread.run_sync anyio.from_thread.run anyio.run_process"
        ),
    ),
    (LOOPS, "asyncio.run asyncio.Runner asyncio.new_event_loop asyncio.set_event_loop anyio.run trio.run"),
)

CALLS = _table((PRINT, "builtins.print"), (HASH, "builtins.hash"), (IDENTITY, "builtins.id"))

FEW_ARGUMENTS: dict[str, tuple[int, Fact]] = {
    **dict.fromkeys(("time.gmtime", "time.localtime", "time.ctime", "time.asctime"), (1, CLOCK)),
    "time.strftime": (2, CLOCK),
    **dict.fromkeys(("random.Random", "numpy.random.default_rng", "numpy.random.RandomState"), (1, CHANCE)),
}

MODULES = _table(
    (
        NETWORK,
        (
            "requests httpx httpx2 aiohttp urllib3 urllib.request http.client ftplib smtplib aiosmtplib imaplib poplib socket websockets "
            "websocket paramiko grpc boto3 botocore aioboto3 aiobotocore google.cloud azure.storage azure.identity slack_sdk stripe twilio "
            "kafka aiokafka confluent_kafka pika aio_pika nats elasticsearch opensearchpy"
        ),
    ),
    (
        DATABASE,
        (
            "sqlite3 apsw psycopg psycopg2 asyncpg pymysql MySQLdb aiomysql mysql.connector aiosqlite duckdb pymongo motor redis valkey "
            "pymemcache dbm shelve"
        ),
    ),
    (MODEL, "anthropic openai litellm groq mistralai cohere ollama google.genai google.generativeai replicate"),
    (PROCESS, "subprocess pexpect multiprocessing.shared_memory"),
    (FILES, "shutil tempfile glob fileinput aiofiles"),
    (MACHINE, "platform psutil"),
    (APP, "perdure.Perdure perdure.app.Perdure perdure.sync.Perdure"),
    (THREADS, "threading _thread concurrent.futures multiprocessing"),
)

# Names in MODULES that only compute and do no I/O.
HARMLESS = frozenset(
    "httpx.URL httpx.Timeout httpx.Limits httpx.QueryParams httpx.Headers httpx2.URL httpx2.Timeout httpx2.Limits aiohttp.ClientTimeout "
    "urllib3.Retry urllib3.Timeout socket.inet_aton socket.inet_ntoa socket.inet_pton socket.inet_ntop socket.htons socket.ntohs "
    "subprocess.list2cmdline anthropic.types openai.types google.genai.types psycopg.sql requests.structures requests.compat "
    "botocore.config".split()
)

# The methods of a path that do I/O. Code that only builds a path is harmless.
PATH = "pathlib.Path"
PATH_IO = frozenset(
    "read_text read_bytes write_text write_bytes open exists is_file is_dir is_symlink iterdir glob rglob walk stat lstat touch mkdir "
    "rmdir unlink rename replace chmod symlink_to hardlink_to readlink resolve absolute samefile owner group expanduser".split()
)

# Functions and classes that make an object with state. If runs share one such object, the state of one run reaches the
# next run.
LOOP_BOUND = frozenset(
    f"asyncio.{name}" for name in "Lock Semaphore BoundedSemaphore Event Condition Queue LifoQueue PriorityQueue Barrier".split()
)
RUNNING_ON = frozenset(("itertools.count", "itertools.cycle", "builtins.iter", "builtins.enumerate"))
GENERATORS = frozenset(
    ("random.Random", "random.SystemRandom", "numpy.random.default_rng", "numpy.random.RandomState", "numpy.random.Generator")
)

LOOP_MAKERS = frozenset(("asyncio.get_running_loop", "asyncio.get_event_loop", "asyncio.new_event_loop"))
LOOP_REFUSED = _table(
    (THREADS, "run_in_executor set_default_executor call_soon_threadsafe shutdown_default_executor"),
    (
        NETWORK,
        (
            "getaddrinfo getnameinfo create_connection create_server create_unix_connection create_unix_server create_datagram_endpoint "
            "connect_accepted_socket start_tls sendfile sock_accept sock_connect sock_recv sock_recv_into sock_recvfrom sock_recvfrom_into "
            "sock_sendall sock_sendfile sock_sendto add_reader remove_reader add_writer remove_writer"
        ),
    ),
    (PROCESS, "subprocess_exec subprocess_shell connect_read_pipe connect_write_pipe add_signal_handler remove_signal_handler"),
    (LOOPS, "run_forever run_until_complete stop close shutdown_asyncgens set_task_factory"),
)


def fact_of(name: str) -> Fact | None:
    """Why this dotted name is wrong wherever an agent uses the name; None if NAMES does not have the name."""
    return _longest(name, NAMES)


def fact_of_call(name: str, arguments: int) -> Fact | None:
    """Why a call of this dotted name with this number of arguments is wrong; None if the call is not wrong."""
    if name in CALLS:
        return CALLS[name]
    if name in FEW_ARGUMENTS:
        enough, fact = FEW_ARGUMENTS[name]
        return fact if arguments < enough else None
    return fact_of_made(name)


def fact_of_made(name: str) -> Fact | None:
    """Why an agent must not use an object that this dotted name makes; None if the object is harmless."""
    if any(name == harmless or name.startswith(f"{harmless}.") for harmless in HARMLESS):
        return None
    last = name.rpartition(".")[2]
    if last.endswith(("Error", "Exception", "Warning")):  # an exception class, which code only raises or catches
        return None
    return _longest(name, MODULES) if "." in name else None


def _longest(name: str, table: dict[str, Fact]) -> Fact | None:
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None
