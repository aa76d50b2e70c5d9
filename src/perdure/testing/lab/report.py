"""`Report`, and its form as one self-contained HTML page: no script, no network, and all recorded text is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from perdure.core.invisible import escaped
from perdure.inspect.text import plural
from perdure.testing.lab.records import Findings, Problem, Trial
from perdure.testing.lab.table import about, called, name_of, outcome_of, repeated, summary, text, unsaid, when

_OUTCOMES = {
    "ok": ("as declared", "Killed there and resumed, everything was as declared."),
    "doubt": ("asks a person", "It was not known whether a call had happened, and the run waited for a person instead of guessing."),
    "wrong": ("wrong", "Something was not as declared: see the problems."),
    "not_reached": ("not reached", "The process never reached this point, so that nothing was tried."),
    "not_seen": ("effect not seen", "A tool was called again, and its effects show neither in the working folder nor in the ledger."),
    "not_compared": ("not compared", "The run went on, but its effects could not be compared with the undisturbed run."),
}
_EFFECTS = {
    "read": "changes nothing; may be repeated",
    "idempotent": "has the same end state when repeated; may be repeated",
    "keyed": "may be repeated with the same key, which the service drops: at most one effect",
    "transaction": "written in the journal's own commit: exactly one effect",
    "once": "never repeated unless it is known not to have happened: zero or one effect",
    "model": "asked again only when its answer was lost",
}
_VERDICTS = {"not as declared": "wrong", "not compared": "not_compared", "not tried": "not_reached", "not seen": "not_seen"}
_STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --ok: #d7f0dd; --doubt: #fff1c7; --wrong: #ffd9d6; --miss: #e6e8eb; }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1.5rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
code, .mono { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; } p { max-width: 62rem; }
.soft { color: var(--soft); } .verdict { display: inline-block; padding: .3rem .8rem; border-radius: .4rem; font-weight: 600; }
td span { white-space: nowrap; padding: 0 .3rem; border-radius: .2rem; } td span.soft { white-space: normal; padding: 0; }
.ok { background: var(--ok); } .doubt { background: var(--doubt); } .wrong { background: var(--wrong); } .not_reached, .not_compared, .not_seen, .untried { background: var(--miss); } .untried { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th { font-size: 13px; color: var(--soft); font-weight: 600; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: .8rem; } .figures div { border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .9rem; min-width: 7.5rem; } .figures b { display: block; font-size: 1.35rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(15.5rem, 1fr)); gap: 5px; list-style: none; padding: 0; }
.grid li { border-radius: .3rem; padding: .3rem .55rem; font-size: 12px; line-height: 1.35; overflow-wrap: anywhere; } .grid b { display: block; }
.problem { border-left: 4px solid #b42318; padding: .4rem .9rem; margin: .7rem 0; background: #fff6f5; } .note { border-left-color: #9a6700; background: #fffaeb; } .problem p { margin: .15rem 0; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } h2 { break-after: avoid; } tr, li, .problem { break-inside: avoid; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def page(report: Findings) -> str:
    """The whole document."""
    title = f"Crash test of {report.subject.agent}"
    body = "\n".join(
        part for section in (_head, _problems, _figures, _matrix, _tools, _trials, _promise, _subject) for part in section(report)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _safe(value: object) -> str:
    """Text for the page: markup is escaped, and invisible characters are shown as escapes."""
    return escape(escaped(str(value)))


def _code(value: object) -> str:
    return f"<code>{_safe(value)}</code>"


def _json(value: Any, most: int = 400) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return _code(text if len(text) <= most else f"{text[:most]}…")


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    heads = "".join(f"<th scope='col'>{header}</th>" for header in headers)
    yield f"<div class='wide'><table><thead><tr>{heads}</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
    yield "</tbody></table></div>"


def _head(report: Findings) -> Iterator[str]:
    subject, figures = report.subject, report.figures
    kind, words = _verdict(report)
    yield f"<h1>Crash test of {_safe(subject.agent)}</h1>"
    yield f'<p class="soft">{_safe(subject.target)}, version {_safe(subject.version)}, on {_safe(subject.started_at)}</p>'
    yield f'<p><span class="verdict {kind}">{words}</span></p>'
    yield (
        f"<p>The agent was run undisturbed to find its boundaries: the points before and after each commit and each effect. "
        f"Then it was run {figures.trials:,} times more, each time in a new process that was killed at a boundary by SIGKILL "
        f"({figures.kills:,} kills), and another process resumed the run from the journal. What its tools really did was counted outside of "
        f"perdure, in a ledger and in the files that each trial left behind.</p>"
    )
    if any(name_of(boundary) == "late_tool_effect" for boundary in report.baseline.boundaries):
        yield (
            "<p>At <code>late_tool_effect</code> the request had left its process, which was killed then. It took effect only after the next "
            "process had looked for it, or had made the call again with its key.</p>"
        )


def _verdict(report: Findings) -> tuple[str, str]:
    """The headline. It is green only if everything was tried and compared, and no problem was found."""
    wrong = [problem for problem in report.problems if problem.severity == "wrong"]
    gaps = list(unsaid(report))
    if wrong:
        return "wrong", "; ".join(map(_safe, [_wrong_words(wrong, report), *gaps]))
    if not report.trials:
        return "not_reached", "Nothing was tried"
    if not report.ok:
        tools = sorted({problem.tool for problem in report.problems})
        what = ", ".join(filter(None, tools)) or "the run itself"
        return "doubt", "; ".join(map(_safe, [f"Not shown to be as declared: {what}", *gaps]))
    figures = report.figures
    if report.untried:
        gaps[0] = f"{figures.tried:,} of {plural(figures.boundaries, 'boundary', 'boundaries')} tried: nothing wrong in these"
    else:
        gaps = gaps and ["Nothing wrong in what was seen and compared", *gaps]
    return ("not_compared", "; ".join(map(_safe, gaps))) if gaps else ("ok", "As declared")


def _wrong_words(wrong: Sequence[Problem], report: Findings) -> str:
    tools = {problem.tool for problem in wrong if problem.tool and problem.rule != "promise"}
    what = f"{plural(len(tools), 'tool')} declared wrongly" if tools else "Not as declared"
    return f"{what}, shown by {report.figures.wrong:,} of {plural(report.figures.trials, 'trial')}"


def _problems(report: Findings) -> Iterator[str]:
    for heading, severity in (("What is wrong", "wrong"), ("What could not be found out", "open")):
        shown = [problem for problem in report.problems if problem.severity == severity]
        if shown:
            yield f"<h2>{heading}</h2>"
            yield from (_problem(problem, "" if severity == "wrong" else " note") for problem in shown)
    if report.notes:
        yield "<h2>No fault, but could be better</h2>"
        yield from (_problem(problem, " note") for problem in report.notes)


def _problem(problem: Problem, kind: str) -> str:
    who = f"<b>{_safe(problem.tool)}</b>: " if problem.tool else ""
    return (
        f'<div class="problem{kind}"><p>{who}{_safe(problem.sentence)}</p><p><b>Way out:</b> {_safe(problem.way_out)}</p>'
        f'<p class="soft">first: {when(problem)} {_code(problem.boundary)}; shown by {plural(problem.trials, "trial")} ({_safe(problem.rule)})</p></div>'
    )


def _figures(report: Findings) -> Iterator[str]:
    figures = report.figures
    shown = [
        ("kills", f"{figures.kills:,}"),
        ("boundaries", f"{figures.boundaries:,}"),
        ("of these tried", f"{figures.tried:,}"),
        *((words, f"{getattr(figures, outcome):,}") for outcome, (words, _) in _OUTCOMES.items()),
        ("to resume, median", f"{figures.resume_median_ms:.0f} ms"),
        ("to resume, at most", f"{figures.resume_most_ms:.0f} ms"),
    ]
    yield '<h2>Figures</h2><div class="figures">'
    yield from (f"<div><b>{value}</b>{_safe(words)}</div>" for words, value in shown)
    yield "</div>"
    yield from (f'<p class="soft">{_safe(line)}</p>' for line in summary(report))


def _matrix(report: Findings) -> Iterator[str]:
    yield "<h2>Boundaries, in the order in which the run reaches them</h2>"
    yield "<p>" + " ".join(f'<span class="verdict {kind}">{words}</span>' for kind, (words, _) in _OUTCOMES.items()) + "</p>"
    yield '<ol class="grid">'
    tried = _by_first(report)
    for name in report.baseline.boundaries:
        if (trials := tried.get(name)) is None:
            yield f'<li class="untried"><b>{_safe(name_of(name))}</b>{_safe(about(name))}: not tried</li>'
            continue
        once, twice = trials[0].outcome, [trial for trial in trials if len(trial.boundaries) > 1]
        wrong = sum(trial.outcome == "wrong" for trial in twice)
        then = f"<br>killed once more: {plural(len(twice), 'trial')}, {wrong:,} wrong" if twice else ""
        yield f'<li class="{once}"><b>{_safe(name_of(name))}</b>{_safe(about(name))}: {_safe(outcome_of(trials[0]).lower())}{_shared(trials[0])}{then}</li>'
    yield "</ol>"


def _shared(trial: Trial) -> str:
    """The other names of the boundary: the other events of the same commit."""
    return f'<br><span class="soft">with {_safe(", ".join(trial.also))}</span>' if trial.also else ""


def _by_first(report: Findings) -> dict[str, list[Trial]]:
    found: dict[str, list[Trial]] = {}
    for trial in report.trials:
        found.setdefault(trial.boundaries[0], []).append(trial)
    return found


def _tools(report: Findings) -> Iterator[str]:
    yield "<h2>Tools: what they declare, and what was seen</h2>"
    yield from _table(
        ("tool", "declared", "which means", "calls undisturbed", "called again in", "of these compared", "asked a person in", "verdict"),
        (
            (
                _code(tool.name),
                _safe(tool.effect) + (", with a reconcile hook" if tool.reconcile else ""),
                _safe(_EFFECTS.get(tool.effect, "")),
                f"{tool.calls:,}",
                plural(tool.repeated, "trial"),
                f"{tool.compared:,}",
                plural(tool.doubts, "trial"),
                f'<span class="{_VERDICTS.get(tool.verdict, "ok")}">{_safe(tool.verdict)}</span>',
            )
            for tool in report.tools
        ),
    )


def _trials(report: Findings) -> Iterator[str]:
    output = {True: "equal", False: "differs", None: "not compared"}
    yield "<h2>Every trial</h2>"
    yield from _table(
        ("#", "killed at", "run", "called again", "function called", "output", "resumed in", "outcome"),
        (
            *_undisturbed(report),
            *(
                (
                    str(trial.number),
                    " and then ".join(map(_code, trial.boundaries))
                    + (' <span class="soft">(resumed by a fresh interpreter)</span>' if trial.fresh else ""),
                    _safe(trial.status.replace("_", " "))
                    + "".join(f'<br><span class="soft">settled: {_safe(one)}</span>' for one in trial.settled),
                    _safe(repeated(trial)),
                    _safe(called(trial)),
                    output[trial.output_equal],
                    f"{trial.resume_s * 1e3:.0f} ms",
                    f'<span class="{trial.outcome}">{_safe(outcome_of(trial).lower())}</span>',
                )
                for trial in report.trials
            ),
        ),
    )


def _undisturbed(report: Findings) -> Iterator[tuple[str, ...]]:
    """The rows of the two undisturbed runs, which have the numbers 0 and 1."""
    status = _safe(report.baseline.status.replace("_", " "))
    for number in (0, 1) if report.trials else (0,):
        yield (str(number), "nowhere: undisturbed", status, "–", "–", "–", "–", "–")


def _promise(report: Findings) -> Iterator[str]:
    yield "<h2>What was checked</h2>"
    yield (
        "<p>No call whose result is on record is made again. The intent of every call that is not a <code>read</code> is durable before its function is called. A call in doubt is treated "
        "by what its tool declares, and by nothing else: see the table of tools. The resumed run ends like the undisturbed run, with the same output "
        "if two undisturbed runs have the same output, and its journal verifies.</p>"
    )
    yield "<p>" + " ".join(f'<span class="verdict {kind}">{words}</span> {text}<br>' for kind, (words, text) in _OUTCOMES.items()) + "</p>"


def _subject(report: Findings) -> Iterator[str]:
    subject, base = report.subject, report.baseline
    facts = [
        ("agent", _code(subject.agent)),
        ("version", _code(subject.version)),
        ("code", _code(subject.target)),
        ("sha256 of that file", _code(subject.source_digest or "it is not in a file")),
        ("input", _json(subject.input)),
        ("undisturbed", f"{_safe(base.status)}, {base.calls:,} calls, {base.seconds:.2f} s"),
        ("its output", _json(base.output)),
        ("models asked", _json(base.models)),
        ("journal", _safe(subject.store)),
        ("perdure", _safe(subject.perdure)),
        ("Python", f"{_safe(subject.python)}, {_safe(subject.platform)}"),
        ("date", _safe(subject.started_at)),
    ]
    yield "<h2>What was tested</h2><dl>" + "".join(f"<dt>{words}</dt><dd>{value}</dd>" for words, value in facts) + "</dl>"
    if subject.command:
        yield f"<h2>To reproduce it</h2><p>{_code(subject.command)}</p>"


# -- The report as an object


class Report(Findings, frozen=True):
    """The findings that crash_matrix returns, with methods that show them as text and as a page."""

    def table(self) -> str:
        """The problems, the table of trials and the figures, as text."""
        return text(self)

    def as_html(self) -> str:
        """One self-contained HTML page, which can be given to others."""
        return page(self)
