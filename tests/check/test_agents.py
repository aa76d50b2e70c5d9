"""Which code runs inside an agent, what is reported there, and what is not reported."""

from __future__ import annotations

import pytest
from tests.check.snippets import HEADER, alone

from perdure.check import Finding, look


def found_in(source: str) -> list[Finding]:
    return look("app.py", source.encode()).findings


def rules_in(source: str) -> list[str]:
    return [finding.rule for finding in found_in(source)]


GUILTY = "    await echo(str(time.time()))\n"


@pytest.mark.parametrize(
    "declaration",
    [
        "import perdure\n@perdure.agent\nasync def one(run):\n",
        "import perdure as p\n@p.agent(version='1')\nasync def one(run):\n",
        "from perdure import agent as durable\n@durable(version='1')\nasync def one(run):\n",
        "from perdure.agent import agent\n@agent\nasync def one(run):\n",
        "from perdure import *\n@agent\nasync def one(run):\n",
        "from perdure import agent\nmade = agent(version='1')\n@made\nasync def one(run):\n",
        "from perdure import agent\nimport functools\nmade = functools.partial(agent, version='1')\n@made()\nasync def one(run):\n",
        "from perdure import agent\nother = agent\n@other\nasync def one(run):\n",
    ],
)
def test_an_agent_is_found_by_whatever_name_it_is_declared(declaration):
    [finding] = found_in(f"import time\n{declaration}{GUILTY}")
    assert (finding.rule, finding.where) == ("clock", "agent one")


def test_an_agent_that_is_made_of_a_plain_function_is_one():
    source = f"import time\nfrom perdure import agent\nasync def plain(run):\n{GUILTY}made = agent(version='1', name='maker')(plain)\n"
    assert [finding.where for finding in found_in(source)] == ["agent maker"]


def test_somebody_elses_decorator_of_the_same_name_makes_no_agent():
    assert found_in(f"import time\nfrom other import agent\n@agent\nasync def one(run):\n{GUILTY}") == []


@pytest.mark.parametrize(
    ("above", "body", "where"),
    [
        ("def stamp():\n    return time.time()", "stamp()", "stamp"),
        ("def stamp():\n    return deeper()\ndef deeper():\n    return time.time()", "stamp()", "stamp → deeper"),
        ("def stamp(x):\n    return time.time()", "sorted([1], key=stamp)", "stamp"),
        ("async def stamp():\n    return time.time()", "await asyncio.create_task(stamp())", "stamp"),
        ("", "def inner():\n    return time.time()\ninner()", "inner"),
        ("class Thing:\n    def __init__(self):\n        self.at = time.time()", "Thing()", "Thing.__init__"),
        ("class Thing:\n    def at(self):\n        return self.really()\n    def really(self):\n        return time.time()", "Thing().at()", "Thing.at → Thing.really"),
        ("class Base:\n    def at(self):\n        return time.time()\nclass Thing(Base): ...", "thing = Thing()\nthing.at()", "Base.at"),
        ("class Thing:\n    @staticmethod\n    def at():\n        return time.time()", "Thing.at()", "Thing.at"),
        ("class Thing:\n    async def __aenter__(self):\n        return time.time()", "async with Thing():\n    pass", "Thing.__aenter__"),
        ("@functools.cache\ndef stamp():\n    return time.time()", "stamp()", "stamp"),
        ("@contextlib.contextmanager\ndef timed():\n    yield time.time()", "with timed():\n    pass", "timed"),
        ("def stamp(thing: Thing):\n    return thing.at()\nclass Thing:\n    def at(self):\n        return time.time()", "stamp(run)", "stamp → Thing.at"),
        ("def stamp():\n    return time.time()\nclass Thing:\n    stamp = None\n    def at(self):\n        return stamp()", "Thing().at()", "Thing.at → stamp"),
        ("also = lambda: stamp()\ndef stamp():\n    return time.time()", "(lambda: stamp())()", "stamp"),
        ("", "[time.time() for _ in 'ab']", ""),
        ("", "__import__('time').time()", ""),
        ("", "__import__('importlib').import_module('time').time()", ""),
        ("import importlib\nclocks = importlib.import_module('time')", "clocks.time()", ""),
        ("", "clocks = __import__('time')\nclocks.time()", ""),
    ],
)  # fmt: skip
def test_what_an_agent_reaches_is_looked_at_and_the_way_to_it_is_named(above, body, where):
    [finding] = found_in(alone(body, above))
    assert (finding.rule, finding.where) == ("clock", f"agent one → {where}".removesuffix(" → "))


@pytest.mark.parametrize(
    ("above", "body"),
    [
        ("@tool(effect='read')\ndef now():\n    return helper()\ndef helper():\n    return time.time()", "await now()"),
        ("read = functools.partial(tool, effect='read')\n@read\ndef now():\n    return time.time()", "await now()"),
        ("reading = tool(effect='read')\n@reading\ndef now():\n    return time.time()", "await now()"),
        ("@agent(version='1')\nasync def child(run):\n    await echo('x')", "await child()"),
        # It is unknown what this decorator does.
        ("import somebody\n@somebody.durable\ndef now():\n    return time.time()", "now()"),
        ("def never_called():\n    return time.time()", "await echo('x')"),
        ("async def main():\n    print(time.time(), os.environ)", "await echo('x')"),
        ("def now_of(time):\n    return time.time()", "now_of(run)"),
        ("def typed(at: time.struct_time = None) -> time.time: ...", "typed()"),
        ("@tool(effect='once')\ndef pay(call: Call):\n    ...\n@pay.reconcile\ndef _(call: Call):\n    return time.time()", "await pay()"),
    ],
)
def test_what_no_agent_runs_is_left_alone(above, body):
    assert [finding for finding in found_in(alone(body, above)) if finding.severity == "error"] == []


@pytest.mark.parametrize(
    ("rule", "body", "above"),
    [
        ("clock", "datetime.datetime.utcnow()", ""),
        ("clock", "datetime.date.today()", ""),
        ("clock", "time.strftime('%H')", ""),
        ("clock", "time.gmtime()", ""),
        ("random", "random.shuffle([1])", ""),
        ("random", "id(run)", ""),
        ("random", "os.urandom(3)", ""),
        ("io", "await client.get('x')", "import httpx\nclient = httpx.AsyncClient()"),
        ("io", "await client.messages.create()", "from anthropic import AsyncAnthropic\nclient = AsyncAnthropic()"),
        ("io", "await ask(run)", "import openai\nasync def ask(client: openai.AsyncOpenAI | None):\n    await client.responses.create()"),
        ("io", "import requests\nrequests.get('x')", ""),
        ("io", "client = httpx.Client()\nclient.get('x')\nclient.close()", "import httpx"),
        ("io", "os.getenv('X')", ""),
        ("io", "os.getpid()", ""),
        ("io", "input()", ""),
        ("io", "(Path('a') / 'b').parent.exists()", ""),
        ("io", "await asyncio.open_connection('x', 1)", ""),
        ("global", "CONFIG['x'] = 1", "CONFIG = load()"),
        ("global", "settings.DEBUG = True", "import settings"),
        ("global", "del KNOWN['x']", "KNOWN = {}"),
        ("global", "Counter.bump()", "class Counter:\n    n = 0\n    @classmethod\n    def bump(cls):\n        cls.n += 1"),
        ("global", "async with LOCK:\n    pass", "LOCK = asyncio.Lock()"),
        ("global", "STATE.items.append(1)", "class State:\n    items = []\nSTATE = State()"),
        ("global", "KEPT.append('x')\nlen(KEPT)", "KEPT = []\n@tool(effect='read')\ndef put():\n    KEPT.append('y')"),
        ("thread", "threading.Thread(target=echo).start()", ""),
        ("thread", "asyncio.run(echo('x'))", ""),
        ("thread", "loop.run_in_executor(None, echo)", "loop = make_loop()"),
        ("order", "list({'a', 'b'})", ""),
        ("order", "','.join({'a', 'b'})", ""),
        ("order", "[*frozenset(('a', 'b'))]", ""),
        ("order", "seen = set()\nseen.add('x')\nfor one in seen:\n    await echo(one)", ""),
        ("order", "seen = {'x'}\nseen |= {'y'}\nfor one in seen:\n    await echo(one)", ""),
        ("order", "seen = set()\nseen ^= load()\nfor one in seen:\n    await echo(one)", ""),
        ("order", "for one in SOME:\n    await echo(one)", "SOME: set[str] = load()"),
        ("order", "NAMES_OF = {'a', 'b'}\nNAMES_OF.pop()", ""),
        ("order", "a, b = {'a', 'b'}", ""),
        ("order", "asyncio.as_completed(echo(x) for x in 'ab')", ""),
        ("order", "await asyncio.wait([asyncio.gather(echo('a'))])", ""),
        ("swallow", "with contextlib.suppress(BaseException):\n    await echo('x')", ""),
    ],
)
def test_what_breaks_replay_is_reported_once(rule, body, above):
    assert [(finding.rule, finding.severity) for finding in found_in(alone(body, above))] == [(rule, "error")]


@pytest.mark.parametrize(
    ("body", "above"),
    [
        ("await asyncio.sleep(3)\nrun.now(), run.uuid(), run.random.choice([1])\nasyncio.get_running_loop().time()", ""),
        ("datetime.datetime.fromtimestamp(0, datetime.UTC)\ntime.gmtime(0)\ntime.strftime('%H', time.gmtime(0))", ""),
        ("async with asyncio.timeout(3), asyncio.TaskGroup() as group:\n    group.create_task(echo('x'))", ""),
        ("for word in sorted({'a', 'b'}):\n    await echo(word)", ""),
        ("len({'a', 'b'}), max({'a', 'b'}), 'a' in {'a', 'b'}, sum(len(x) for x in {'a', 'b'})", ""),
        ("names = list({'a', 'b'})\nnames.sort()", ""),
        ("for number in {1, 2, 3}:\n    await echo(str(number))", ""),
        ("tasks = {asyncio.create_task(echo(x)) for x in 'ab'}\nfor task in tasks:\n    await task", ""),
        ("tasks = [asyncio.create_task(echo(x)) for x in 'ab']\nwaiting = set(tasks)\nwhile waiting:\n    done, waiting = await asyncio.wait(waiting)\n    for one in done:\n        await one", ""),
        ("total = 0\nseen = {'a', 'b'}\nfor word in {'a', 'b'}:\n    if word:\n        total += 1\n        seen.add(word)", ""),
        ("seen = set()\nseen |= {1, 2}\nseen.update([3], range(4))\nfor one in seen:\n    await echo(str(one))", ""),
        ("seen = {'a'}\nseen |= {'b'}\nfor one in sorted(seen):\n    await echo(one)", ""),
        ("flags = 1\nflags |= 2\nwhole = {}\nwhole |= {'a': 1, 'b': 2}\nfor key in whole:\n    await echo(key)", ""),
        ("for key in {'a': 1}:\n    await echo(key)", ""),
        ("seen = []\ndef put(x):\n    nonlocal total\n    total += 1\n    seen.append(x)\ntotal = 0\nput('x')", ""),
        ("await echo(LIMITS['x'] + NAME)", "LIMITS = {'x': 'y'}\nNAME = 'z'\nLIMITS.update(z='w')"),
        ("await echo(HANDLERS['x'])", "HANDLERS = {}\ndef register(name):\n    HANDLERS[name] = name\nregister('x')"),
        ("LOG.info('x')\nlogging.warning('y')", "import logging\nLOG = logging.getLogger(__name__)"),
        ("WHERE.set('x')", "import contextvars\nWHERE = contextvars.ContextVar('WHERE')"),
        ("task = asyncio.create_task(echo('x'))\ntask.cancel()\ntry:\n    await task\nexcept asyncio.CancelledError:\n    pass", ""),
        ("try:\n    int('x')\nexcept BaseException:\n    pass", ""),
        ("try:\n    await echo('x')\nexcept Exception:\n    pass", ""),
        ("try:\n    await echo('x')\nexcept BaseException:\n    await echo('undone')\n    raise", ""),
        ("try:\n    await echo('x')\nexcept httpx.TimeoutException:\n    pass\nhttpx.URL('x')\nraise httpx.HTTPError('x')", "import httpx"),
        ("CLIENT.update('x')\nCLIENT.pop()", "CLIENT = make_client()"),
        ("open = run.open\nopen('x')\ninput = 3\nid = 4\nawait echo(str(id) + str(input))", ""),
        ("Path('a') / 'b', Path('a').name, Path('a').parent.suffix, os.path.join('a', 'b')", ""),
        ("from perdure.models import OpenAI\nOpenAI('x')", ""),
        ("import urllib.parse\nurllib.parse.quote('x')", ""),
    ],
)  # fmt: skip
def test_what_is_harmless_deserves_no_word(body, above):
    assert found_in(alone(body, above)) == []


def test_what_a_factory_of_agents_keeps_is_shared_by_their_runs():
    factory = "def make():\n    runs = 0\n    @agent\n    async def one(run):\n        nonlocal runs\n        runs += 1\n        await echo(str(runs))\n    return one\n"
    [finding] = found_in(HEADER + factory)
    assert (finding.rule, finding.where) == ("global", "agent one")


def test_printing_is_a_note_and_catching_a_cancellation_on_purpose_is_one():
    found = found_in(alone("print('x')\ntry:\n    await echo('x')\nexcept asyncio.CancelledError:\n    return 'stopped'"))
    assert [(finding.rule, finding.severity) for finding in found] == [("print", "note"), ("swallow", "note")]


def test_a_finding_names_the_place_in_characters_and_the_way_out():
    source = alone("é = '→→'; time.time()")
    [finding] = found_in(source)
    line = source.splitlines()[finding.line - 1]
    assert line[finding.column - 1 :].startswith("time.time()")
    assert finding.message == "time.time() reads the wall clock, and a replay comes later"
    assert finding.way_out == "use run.now(), the recorded time of what woke the agent"


def test_line_ends_that_python_does_not_count_do_not_move_the_column():
    [finding] = found_in(f"{HEADER}\nX = 'a\u2028b'\n@agent\nasync def one(run):\n    'ü'; time.time()\n")
    assert finding.column == 10


# -- checkpoints
FOR_EVER = "while True:\n    await echo('x')\n    await asyncio.sleep(60)\n"


@pytest.mark.parametrize(
    "body",
    [
        FOR_EVER,
        "while 1:\n    await run.receive('go')\n",
        # The inner loop has a way out, and the outer one has none.
        "while True:\n    for n in range(3):\n        if await echo('x'):\n            break\n",
        "while True:\n    def leave():\n        return 1\n    await echo('x')\n",
        "try:\n    while True:\n        await echo('x')\nfinally:\n    await echo('end')\n",
        "state = run.restored\n" + FOR_EVER,
        "await helper(run)\n" + FOR_EVER,
    ],
)
def test_a_loop_that_never_ends_without_a_checkpoint_is_noted(body):
    [finding] = [one for one in found_in(alone(body, "async def helper(run):\n    await echo('y')")) if one.rule != "print"]
    assert (finding.rule, finding.severity, finding.where) == ("checkpoint", "note", "agent one")
    assert finding.message.startswith("this loop never ends, and a resume replays all of its rounds")


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    if await echo('x'):\n        break\n",
        "while True:\n    if await echo('x'):\n        return 1\n",
        "while True:\n    if await echo('x'):\n        raise ValueError\n",
        "while True:\n    for n in range(3):\n        await echo('x')\n    else:\n        break\n",
        "while await echo('x'):\n    pass\n",
        "for n in range(9):\n    await echo('x')\n",
        "while True:\n    pass\n",
        "async with asyncio.timeout(9):\n    while True:\n        await echo('x')\n",
        "try:\n    while True:\n        await echo('x')\nexcept ValueError:\n    pass\n",
        "async def poll():\n    while True:\n        await echo('x')\ntask = asyncio.create_task(poll())\ntask.cancel()\n",
        "last = run.restored or 0\nwhile True:\n    await echo('x')\n    await run.checkpoint(last)\n",
        "while True:\n    await round_of(run)\n",
        # What other code does with the Run is not known.
        "while True:\n    await elsewhere.round_of(run)\n",
        "worker = elsewhere.Worker(run)\n" + FOR_EVER,
    ],
)
def test_a_loop_that_ends_or_takes_checkpoints_is_not(body):
    above = "import elsewhere\nasync def round_of(run):\n    await echo(run.restored)\n    await run.checkpoint(1)\n"
    assert "checkpoint" not in rules_in(alone(body, above))


@pytest.mark.parametrize(
    ("above", "body", "where"),
    [
        ("", "await echo('x')\nawait run.checkpoint(1)", "agent one"),
        ("", FOR_EVER + "    await run.checkpoint(1)", "agent one"),
        ("async def save(context: Run, n):\n    await context.checkpoint(n)", "await echo('x')\nawait save(run, 1)", "agent one → save"),
    ],
)
def test_a_checkpoint_whose_state_is_never_read_is_noted(above, body, where):
    [finding] = found_in(alone(body, above))
    assert (finding.rule, finding.severity, finding.where) == ("checkpoint", "note", where)
    assert finding.message.startswith("run.restored is never read")


@pytest.mark.parametrize(
    ("above", "body"),
    [
        ("", "last = run.restored or 0\nawait echo('x')\nawait run.checkpoint(last)"),
        ("def begin(run):\n    return run.restored", "last = begin(run)\nawait echo('x')\nawait run.checkpoint(last)"),
        # Another object has a method of this name, and a Run goes to code that is not in the file.
        ("import store", "await store.checkpoint(1)"),
        ("import elsewhere", "last = elsewhere.begin(run)\nawait echo('x')\nawait run.checkpoint(last)"),
        ("", "await echo('x')\nawait run.checkpoint(1)  # perdure: ignore[checkpoint] each day is a new one"),
    ],
)
def test_a_checkpoint_whose_state_is_read_or_may_be_read_is_not(above, body):
    assert "checkpoint" not in rules_in(alone(body, above))
