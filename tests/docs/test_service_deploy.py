"""The files that deploy examples/service.

They can be parsed, agree with each other, and name only things that exist.
"""

from __future__ import annotations

import configparser
import fnmatch
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import uvicorn
import yaml

from perdure.cli import VERBS
from perdure.metrics import READY_S
from perdure.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "examples" / "service"
MANIFESTS = sorted((SERVICE / "kubernetes").glob("*.yaml"))
UNITS = sorted((SERVICE / "systemd").glob("*.service"))
DOCKERFILE = (SERVICE / "Dockerfile").read_text()
# The time that a worker needs after its drain time-out: tools get cancel_grace_s to stop, and the releases are
# committed (docs/operating.md).
AFTER_DRAIN_S = Settings().cancel_grace_s + 10


def documents() -> list[dict[str, Any]]:
    return [one for file in MANIFESTS for one in yaml.safe_load_all(file.read_text())]


def pods() -> dict[str, dict[str, Any]]:
    """The pod of each Deployment and Job, by the name of its container."""
    found = [one["spec"]["template"]["spec"] for one in documents() if one["kind"] in ("Deployment", "Job")]
    return {pod["containers"][0]["name"]: pod for pod in found}


def container(name: str) -> dict[str, Any]:
    found: dict[str, Any] = pods()[name]["containers"][0]
    return found


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(SERVICE / "systemd" / name)
    return parser["Service"]


def instructions() -> list[list[str]]:
    """The Dockerfile as words, one list for each instruction."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M))
    return [shlex.split(line) for line in joined.splitlines() if line.strip()]


def exec_form(name: str) -> list[str]:
    """The command of an instruction such as CMD ["…", "…"]."""
    [line] = re.findall(rf"{name}[^\n]*?(\[.*\])$", DOCKERFILE, re.M)
    words: list[str] = yaml.safe_load(line)
    return words


class Copy(NamedTuple):
    sources: list[str]
    target: str


def copies() -> list[Copy]:
    """What is copied from the repository."""
    return [Copy(words[1:-1], words[-1]) for words in instructions() if words[0] == "COPY" and not words[1].startswith("--from")]


def commands() -> list[list[str]]:
    """Every command of every file, without the folder of its program."""
    kubernetes = [container(name)["command"] for name in pods()]
    probes = [
        probe["exec"]["command"]
        for name in pods()
        for kind in ("readinessProbe", "livenessProbe")
        if (probe := container(name).get(kind, {})).get("exec")
    ]
    systemd = [shlex.split(unit(file.name)["ExecStart"]) for file in UNITS]
    docker = [exec_form("^CMD"), exec_form("^HEALTHCHECK")]
    return [[Path(words[0]).name, *words[1:]] for words in (*kubernetes, *probes, *systemd, *docker)]


def parse(words: list[str]) -> dict[str, Any]:
    """The options of a command as its own parser reads them; an error if it would refuse them."""
    program, *rest = words
    if program == "perdure":
        command: click.Command = importlib.import_module(VERBS[rest[0]][0]).command
        return command.make_context(rest[0], rest[1:]).params
    assert program == "uvicorn"
    return uvicorn.main.make_context("uvicorn", rest).params


# -- commands -----------------------------------------------------------------------------------------------------------------
def test_every_command_is_one_that_its_program_accepts():
    found = commands()
    assert {words[0] for words in found} == {"perdure", "uvicorn", "python"}
    for words in found:
        if words[0] == "python":
            assert words[1:] in (["health.py", "web"], ["health.py", "worker"], ["health.py", "worker", "--live"])
            continue
        options = parse(words)
        if words[0] == "uvicorn":
            assert options["app"] == "web:app"
            assert options["port"] == 8000
        elif words[1] == "worker":
            assert options["targets"] == ("agents.py",)


def test_a_wrong_command_is_noticed():
    with pytest.raises(click.NoSuchOption):
        parse(["perdure", "worker", "agents.py", "--drain", "60"])
    with pytest.raises(click.BadParameter):
        parse(["perdure", "worker", "agents.py", "--drain-timeout", "a minute"])
    with pytest.raises(click.NoSuchOption):
        parse(["uvicorn", "web:app", "--graceful", "10"])


# -- time-outs ----------------------------------------------------------------------------------------------------------------
def drain_timeout_s(words: list[str]) -> float:
    stated = parse(["perdure", *words[words.index("worker") :]])["drain_timeout_s"]
    assert stated is not None, "state it beside the time-out that has to be longer"
    return float(stated)


def test_no_worker_is_killed_before_its_drain_is_over():
    worker = unit("perdure-worker@.service")
    assert float(worker["TimeoutStopSec"]) >= drain_timeout_s(shlex.split(worker["ExecStart"])) + AFTER_DRAIN_S
    assert (worker["KillSignal"], worker["KillMode"], worker["Restart"]) == ("SIGTERM", "mixed", "always")
    assert pods()["worker"]["terminationGracePeriodSeconds"] >= drain_timeout_s(container("worker")["command"]) + AFTER_DRAIN_S


def test_the_web_process_ends_its_streams_before_it_is_killed():
    web = unit("perdure-web.service")
    graceful = [parse(words)["timeout_graceful_shutdown"] for words in commands() if words[0] == "uvicorn"]
    assert len(graceful) == 3  # the unit, the manifest and the image
    assert len(set(graceful)) == 1
    assert float(web["TimeoutStopSec"]) >= graceful[0] + 5
    pause = container("web")["lifecycle"]["preStop"]["exec"]["command"]
    assert pods()["web"]["terminationGracePeriodSeconds"] >= float(pause[1]) + graceful[0] + 5


def test_a_probe_gives_up_before_its_own_time_out():
    [own] = re.findall(r"^TIMEOUT_S = (\d+)", (SERVICE / "health.py").read_text(), re.M)
    for kind in ("readinessProbe", "livenessProbe"):
        assert container("worker")[kind]["timeoutSeconds"] > READY_S
    [docker] = re.findall(r"HEALTHCHECK.*--timeout=(\d+)s", DOCKERFILE)
    assert int(docker) > int(own)


# -- Kubernetes ---------------------------------------------------------------------------------------------------------------
def test_the_manifests_are_a_migration_the_workers_the_web_process_and_its_service():
    assert sorted((one["kind"], one["apiVersion"]) for one in documents()) == [
        ("Deployment", "apps/v1"),
        ("Deployment", "apps/v1"),
        ("Job", "batch/v1"),
        ("Service", "v1"),
    ]
    assert sorted(pods()) == ["migrate", "web", "worker"]
    for one in documents():
        if one["kind"] == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    [front] = [one for one in documents() if one["kind"] == "Service"]
    [web] = [one for one in documents() if one["metadata"].get("name") == "perdure-web" and one["kind"] == "Deployment"]
    assert front["spec"]["selector"] == web["spec"]["template"]["metadata"]["labels"]
    assert front["spec"]["ports"][0]["targetPort"] == container("web")["ports"][0]["name"]


def test_all_pods_run_the_same_image_as_the_same_user_without_rights():
    assert len({container(name)["image"] for name in pods()}) == 1
    assert f"-t {container('web')['image']} ." in DOCKERFILE
    [user] = [words[1] for words in instructions() if words[0] == "USER"]
    for name, pod in pods().items():
        context = pod["securityContext"]
        assert context["runAsNonRoot"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert container(name)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_probes_of_the_web_process_are_paths_that_it_has():
    routes = re.findall(r'^@app\.get\("(/health/\w+)"\)', (SERVICE / "web.py").read_text(), re.M)
    assert [container("web")[kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe")] == routes
    assert re.findall(r'^@app\.get\("(/health/\w+)"\)', (SERVICE / "web_sync.py").read_text(), re.M) == routes
    for kind in ("livenessProbe", "readinessProbe"):
        assert container("web")[kind]["httpGet"]["port"] == container("web")["ports"][0]["name"]


def test_the_probes_of_a_worker_are_paths_that_it_serves_on_a_port_that_it_opens():
    [port] = container("worker")["ports"]
    options = parse(container("worker")["command"])
    assert options["http"] == f"0.0.0.0:{port['containerPort']}"
    assert [container("worker")[kind]["httpGet"] for kind in ("livenessProbe", "readinessProbe")] == [
        {"path": "/livez", "port": port["name"]},
        {"path": "/readyz", "port": port["name"]},
    ]
    [workers] = [one for one in documents() if one["metadata"].get("name") == "perdure-worker"]
    annotations = workers["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port["containerPort"]),
        "prometheus.io/path": "/metrics",
    }
    # The loop may stand still for a lease, and then for the time of the probes, before the worker is killed.
    probe = container("worker")["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= Settings().lease_s


def test_every_secret_of_the_manifests_is_one_that_the_readme_creates():
    readme = (SERVICE / "README.md").read_text()
    for name in pods():
        for variable in container(name)["env"]:
            if "valueFrom" in variable:
                secret = variable["valueFrom"]["secretKeyRef"]
                assert f"secret generic {secret['name']} " in readme
                assert f"--from-literal={secret['key']}=" in readme
    [people] = [one["secret"]["secretName"] for one in pods()["web"]["volumes"]]
    assert f"secret generic {people} --from-file=people.json" in readme
    assert container("migrate")["env"][0]["valueFrom"]["secretKeyRef"]["key"] == "owner-url"


# -- systemd ------------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: it reads the units as systemd does")
def test_systemd_accepts_the_units(tmp_path):
    for file in UNITS:
        # It wants the programs to exist, so they are those of this interpreter.
        (tmp_path / file.name).write_text(file.read_text().replace("/srv/service/.venv/bin", str(Path(sys.executable).parent)))
    command = ["systemd-analyze", "verify", *(str(tmp_path / file.name) for file in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "perdure" in line]  # not of the machine's own units
    assert (done.returncode, said) == (0, []), done.stderr


def test_the_units_agree_with_each_other():
    worker, web = unit("perdure-worker@.service"), unit("perdure-web.service")
    for name in ("User", "WorkingDirectory", "StateDirectory", "ProtectSystem"):
        assert worker[name] == web[name]
    assert web["User"] != "root"


# -- the image ----------------------------------------------------------------------------------------------------------------
def is_sent(path: str) -> bool:
    """Whether Dockerfile.dockerignore lets this path of the repository into the build: the last rule that matches counts."""
    sent = True
    for rule in (SERVICE / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = rule.lstrip("!")
        if rule and not rule.startswith("#") and any(fnmatch.fnmatch(some, pattern) for some in (path, *map(str, Path(path).parents))):
            sent = rule.startswith("!")
    return sent


def test_everything_that_the_dockerfile_copies_exists_and_is_sent():
    sources = [source for copy in copies() for source in copy.sources]
    assert len(sources) > 8
    assert [source for source in sources if not (ROOT / source).exists() or not is_sent(source)] == []
    assert not is_sent("examples/service/people.demo.json")
    assert not is_sent(".venv/bin/python")
    assert not is_sent("perdure.db")


def test_the_image_has_every_file_that_its_programs_import_and_no_demo_login():
    copied = {Path(source).name for copy in copies() for source in copy.sources if source.startswith("examples/service/")}
    named = {"health.py", "agents.py", "web.py", "web_sync.py"}
    imported = {
        f"{name}.py"
        for file in named
        for name in re.findall(r"^from (\w+) import", (SERVICE / file).read_text(), re.M)
        if (SERVICE / f"{name}.py").exists()
    }
    assert named | imported | {"requirements.lock"} == copied
    assert imported == {"agents.py", "login.py", "wire.py"}


@pytest.mark.full
def test_the_copied_files_are_enough_to_build_perdure(tmp_path):
    for copy in copies():
        for source in copy.sources:
            if source == "src":
                shutil.copytree(ROOT / source, tmp_path / source, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            elif copy.target != "./service.lock" and not source.startswith("examples/service"):
                target = tmp_path / copy.target if copy.target.endswith(".py") else tmp_path / copy.target / Path(source).name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, target)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "wheels"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "wheels").glob("perdure-*.whl"))) == 1


def test_the_image_is_pinned_installs_from_locks_with_hashes_and_runs_without_rights():
    bases = [words[1] for words in instructions() if words[0] == "FROM"]
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases[0])
    installs = re.findall(r"pip install ([^\n&\\]*)", DOCKERFILE)
    assert all(("--require-hashes" in line and ".lock" in line) or "--no-index" in line for line in installs)
    assert len(installs) == 3
    [user] = [words[1] for words in instructions() if words[0] == "USER"]
    assert user.partition(":")[0].isdigit()
    assert int(user.partition(":")[0]) >= 1000


def pins(lock: Path) -> dict[str, str]:
    found = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", lock.read_text(), re.M))
    assert len(re.findall(r"^    --hash=sha256:[0-9a-f]{64}", lock.read_text(), re.M)) >= len(found)
    assert "://" not in lock.read_text(), "no registry in a lock file"
    return found


def test_the_lock_of_the_image_has_the_versions_that_the_tests_use():
    ours, tested = pins(SERVICE / "requirements.lock"), pins(ROOT / "requirements-dev.lock")
    assert {"fastapi", "uvicorn", "psycopg", "psycopg-binary", "apsw"} <= set(ours)
    assert {"pytest", "mypy", "hatchling"}.isdisjoint(ours)
    assert {name: version for name, version in ours.items() if tested.get(name) != version} == {}
