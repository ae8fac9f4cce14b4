"""docs/cases.md is whole: every case is tested in both ways, and every switch is in use."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from drumline.lockstep.mutants import Mutant

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "cases.md"
FILES = ("test_cases.py", "test_faults.py", "test_case_faults.py")
NUMBERS = (1, 2, 4, 7, 9, 12, 13, 16, 17, 18, 19, 21, 22, 23, 25, 26, 31, 33, 37)


@dataclass(frozen=True)
class Line:
    """Names in a line of the table."""

    tests: frozenset[str]
    switches: frozenset[str]


def table() -> dict[str, Line]:
    found = {}
    for line in PAGE.read_text().splitlines():
        if re.match(r"\| \d\d ", line):
            case, _, tests, switches, _ = (cell.strip() for cell in line.split("|")[1:-1])
            found[case] = Line(quoted(tests), quoted(switches))
    return found


def quoted(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`(.+?)`", cell))


def functions(file: str) -> dict[str, str]:
    """Tests of a file by name, as text, what they are decorated with included."""
    text = (HERE / file).read_text()
    return {
        node.name: " ".join(
            ast.get_source_segment(text, part) or "" for part in (*node.decorator_list, node)
        )
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def switched_on(text: str) -> set[str]:
    return {Mutant[name].value for name in re.findall(r"Mutant\.([A-Z_]+)", text)}


def test_every_case_is_in_the_table() -> None:
    assert list(table()) == [f"{number:02}" for number in NUMBERS]


def test_every_test_of_a_case_is_in_the_table() -> None:
    told = {name for line in table().values() for name in line.tests}
    written = {name for file in FILES for name in functions(file) if name.startswith("test_case_")}
    assert told == written


def test_every_case_is_run_as_it_must_be_and_with_its_decision_switched_on() -> None:
    used = {name: switched_on(text) for file in FILES for name, text in functions(file).items()}
    for case, line in table().items():
        assert all(name.startswith(f"test_case_{case}_") for name in line.tests)
        assert any(not used[name] for name in line.tests), f"case {case} is not run as it must be"
        assert line.switches, f"case {case} has nothing to switch on"
        assert set().union(*(used[name] for name in line.tests)) == line.switches, f"case {case}"


def test_every_switch_is_in_use() -> None:
    in_table = {switch for line in table().values() for switch in line.switches}
    assert set(Mutant) - in_table == {Mutant.RETURN_ON_EMPTY_QUEUE, Mutant.SLEEP_ALONE}
    without_processes = (HERE.parent / "lockstep" / "test_mutants.py").read_text()
    assert switched_on(without_processes) >= {"return-on-empty-queue", "sleep-alone"}
