"""The habits of the code, as tests: each names the file, the line and what to write instead."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tidy.source import ROOT, SOURCE, calls, deciding_modules, dotted, modules, name, tree

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

# Values that normalise their own fields in helpers of ``__post_init__``.
NORMALISES_ITSELF = (SOURCE / "core" / "params.py",)

# The reader of the wall clock; everything that decides gets a clock handed in.
CLOCK = SOURCE / "core" / "clock.py"


def _report(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def test_every_module_says_what_it_is_for() -> None:
    _report([name(path) for path in modules() if not ast.get_docstring(tree(path))])


def test_files_are_short_enough_to_read() -> None:
    found = []
    for path in modules():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES_MAX:
            found.append(f"{name(path)}: {lines} lines, at most {FILE_LINES_MAX}")
    _report(found)


def test_functions_are_short_enough_to_read() -> None:
    found = []
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    found.append(f"{name(path)}:{node.lineno} {node.name}: {lines} lines")
    _report(found)


def test_no_state_by_side_door() -> None:
    """No ``global``; frozen values stay frozen, but for the checks of a value being made."""
    found = []
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Global):
                found.append(f"{name(path)}:{node.lineno} global: pass the value instead")
        allowed = _lines_of(path, "__post_init__")
        for call, target in calls(path):
            if path in NORMALISES_ITSELF or call.lineno in allowed:
                continue
            if target == "object.__setattr__":
                found.append(f"{name(path)}:{call.lineno} {target}: make a new value instead")
    _report(found)


def _lines_of(path: Path, function: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


BANNED_WHERE_IT_IS_DECIDED = {
    "hash": "hash() differs between processes: use hashlib or an explicit key",
    "id": "id() is an address: use the request's number",
    "time.time": "take a Clock",
    "time.monotonic": "take a Clock",
    "time.perf_counter": "take a Clock",
    "time.sleep": "take a Clock",
    "datetime.now": "take a Clock",
    "datetime.datetime.now": "take a Clock",
    "random.random": "use drumline.core.random, keyed",
    "random.choice": "use drumline.core.random, keyed",
    "random.shuffle": "use drumline.core.random, keyed",
    "random.randint": "use drumline.core.random, keyed",
    "os.urandom": "entropy comes in from the engine",
    "uuid.uuid4": "ids come in from the engine",
}


def test_decisions_depend_on_their_inputs_alone() -> None:
    found = []
    for path in deciding_modules():
        if path == CLOCK:
            continue
        hash_methods = _lines_of(path, "__hash__")
        for call, target in calls(path):
            instead = BANNED_WHERE_IT_IS_DECIDED.get(target)
            if instead and not (target == "hash" and call.lineno in hash_methods):
                found.append(f"{name(path)}:{call.lineno} {target}: {instead}")
    _report(found)


def test_no_order_is_taken_from_a_set() -> None:
    """A set's order is chance: iterate over a list, a dict or ``sorted(...)``."""
    found = []
    for path in modules():
        for node in ast.walk(tree(path)):
            sources: list[ast.expr] = []
            if isinstance(node, ast.For | ast.comprehension):
                sources = [node.iter]
            elif isinstance(node, ast.Call) and dotted(node.func) in ("list", "tuple", "enumerate"):
                sources = node.args[:1]
            for source in sources:
                if _is_set(source):
                    found.append(f"{name(path)}:{source.lineno} order of a set: sort it")
    _report(found)


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return isinstance(node, ast.Call) and dotted(node.func) in ("set", "frozenset")


# Methods that wait, with the number of positional arguments that includes a deadline.
WAITS = {"join": 1, "wait": 1, "acquire": 2, "communicate": 2, "result": 1, "recv": 1}


def test_no_wait_without_a_deadline() -> None:
    """Threads, processes, events, queues and sockets: each wait names its limit."""
    found = []
    for path in modules():
        for call, target in calls(path):
            method = target.rpartition(".")[2]
            keywords = {keyword.arg for keyword in call.keywords}
            limited = {"timeout", "deadline", "flags", "blocking", None} & keywords
            if "." not in target or limited or len(call.args) >= WAITS.get(method, 99):
                continue
            waits = method in WAITS
            # A queue's get() has no arguments where a mapping's has one.
            waits = waits or (method == "get" and not call.args and not call.keywords)
            if waits and not _awaited(path, call):
                found.append(f"{name(path)}:{call.lineno} {target}(): give it a timeout")
    _report(found)


def _awaited(path: Path, call: ast.Call) -> bool:
    """Whether a coroutine's wait, which the owner of the loop can cancel, or a finished task's
    ``result()``: nothing directly inside an ``async def`` stops a thread."""
    return any(
        isinstance(node, ast.AsyncFunctionDef)
        and node.lineno <= call.lineno <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree(path))
    )


def test_subprocesses_have_a_deadline() -> None:
    found = []
    for path in modules():
        for call, target in calls(path):
            if target in ("subprocess.run", "subprocess.check_output", "subprocess.check_call"):
                keywords = {keyword.arg for keyword in call.keywords}
                if "timeout" not in keywords:
                    found.append(f"{name(path)}:{call.lineno} {target}: give it a timeout")
    _report(found)


def test_nothing_from_a_checkpoint_is_executed() -> None:
    banned = ("eval", "exec", "pickle.load", "pickle.loads", "torch.load", "yaml.load")
    found = []
    for path in modules():
        for call, target in calls(path):
            if target in banned:
                found.append(f"{name(path)}:{call.lineno} {target}")
    _report(found)


def test_no_bare_except() -> None:
    found = []
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{name(path)}:{node.lineno} except: name what is expected")
    _report(found)


TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cpp", ".hpp", ".pyi", ".html"}
# Pieces, so that this file does not contain what it looks for.
PRIVATE = ("/" + "work/", "/" + "home/", "/" + "root/", "/" + "Users/")


def _texts() -> list[Path]:
    tops = ["src", "tests", "docs", "native", ".ci"]
    files = [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(
        path
        for path in files
        if (path.suffix in TEXT_SUFFIXES or path.name in ("Makefile", "run"))
        and "__pycache__" not in path.parts
    )


def test_no_path_of_anyones_machine() -> None:
    found = []
    for path in _texts():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if any(private in line for private in PRIVATE):
                found.append(f"{name(path)}:{number} {line.strip()[:80]}")
    _report(found)


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_nothing_is_left_for_later_in_the_text(mark: str) -> None:
    found = [name(path) for path in _texts() if mark in path.read_text(encoding="utf-8")]
    _report(found)
