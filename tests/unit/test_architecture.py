"""The rooms of the package: who may import whom, and what nobody may know."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "bilevax"
FILES = sorted(SOURCE.rglob("*.py"))

# Each room may import those before it, and the tools.
TOOLS = ("arguments", "trees", "files", "progress", "functions", "readings", "programs", "cache")
ROOMS = ("terms", "data", "problems", "certificates", "solvers", "theory", "driver")
ABOVE = {
    **{room: {*TOOLS, *ROOMS[:place]} for place, room in enumerate(ROOMS)},
    "learn": {*TOOLS, *ROOMS},
    "deep": {*TOOLS, *ROOMS, "learn"},
    "bench": {*TOOLS, *ROOMS},
    "cli": {*TOOLS, *ROOMS, "learn", "deep", "bench"},
}
# What a problem form, or a solver, is called: nobody in the driver may know one.
FORMS = {"BilevelProblem", "ConstrainedBilevelProblem", "MinimaxProblem"}
GENERAL = {"base", "composite", "defaults"}  # of solvers/


def name_of(path):
    return path.relative_to(SOURCE).as_posix()


def room_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path):
    """The modules of the package that a file imports, with the names it takes from each."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative imports"
            found.append((node.module, [alias.name for alias in node.names]))
    return [(module, names) for module, names in found if module.split(".")[0] == "bilevax"]


def rooms_imported(path):
    rooms = set()
    for module, names in imported(path):
        parts = module.split(".")
        rooms |= {parts[1]} if len(parts) > 1 else set(names)
    return rooms - {"__version__"}


def test_every_file_has_its_room():
    known = {*ABOVE, *TOOLS, "__init__", "__main__"}
    assert {room_of(path) for path in FILES} <= known


@pytest.mark.parametrize("room", ABOVE)
def test_rooms_are_imported_one_way(room):
    for path in (path for path in FILES if room_of(path) == room):
        others = rooms_imported(path) - {room}
        assert others <= ABOVE[room], f"{name_of(path)} imports {others - ABOVE[room]}"


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_import_no_room(tool):
    others = rooms_imported(SOURCE / f"{tool}.py")
    assert others <= set(TOOLS), f"{tool} imports {others}"


def isinstance_kinds(tree):
    """The classes that a file asks isinstance and issubclass about."""
    for node in ast.walk(tree):
        asks = isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        )
        if asks and len(node.args) == 2:
            for part in ast.walk(node.args[1]):
                name = getattr(part, "id", getattr(part, "attr", ""))
                if name:
                    yield name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_ladder_of_problem_forms(path):
    if name_of(path) == "problems/validation.py":
        return
    asked = isinstance_kinds(ast.parse(path.read_text()))
    assert not [kind for kind in asked if kind.endswith("Problem")]
    matched = re.findall(r"case \w*Problem\b|type\(\w+\) (?:is|==) \w*Problem", path.read_text())
    assert not matched


def test_the_driver_knows_nobody():
    concrete = {
        path.stem for path in (SOURCE / "solvers").glob("*.py") if path.stem != "__init__"
    } - GENERAL
    assert {"adaptive", "penalty", "fop"} <= concrete
    for path in (SOURCE / "driver").glob("*.py"):
        if path.stem == "nearby":  # polishes with Adaptive, which is all it is for
            continue
        for module, names in imported(path):
            parts = module.split(".")
            if parts[1:2] == ["solvers"]:
                assert {*parts[2:3]} <= GENERAL, f"{name_of(path)}: {module} {names}"
                assert len(parts) > 2, f"{name_of(path)}: {module} {names}"
            assert not FORMS & set(names), f"{name_of(path)} imports {FORMS & set(names)}"
        words = set(re.findall(r"\w+", re.sub(r'""".*?"""', "", path.read_text(), flags=re.S)))
        assert not FORMS & words, name_of(path)


def test_the_loop_is_short():
    assert len((SOURCE / "driver" / "loop.py").read_text().splitlines()) <= 300


def test_certificates_import_no_solver():
    for path in (SOURCE / "certificates").glob("*.py"):
        assert "solvers" not in rooms_imported(path)


def test_import_brings_only_what_solving_needs():
    heavy = ("matplotlib", "tyro", "sklearn", "tqdm", "pandas", "orbax", "grain", "cvxpy")
    own = ("bilevax.bench", "bilevax.learn", "bilevax.deep", "bilevax.cli")
    code = f"import sys, bilevax; print([n for n in {heavy + own} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", found.stdout


def test_modules_beside_the_package_have_names_of_their_own():
    """Tests import from both folders by name: of two alike, the one found first would hide one."""
    root = SOURCE.parents[1]
    folders = [root / "benchmarks", root / "tests" / "references"]
    names = [path.name for folder in folders for path in folder.glob("*.py")]
    assert sorted(set(names)) == sorted(names)
