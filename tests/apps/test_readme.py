"""What the docs show is run, and their links lead somewhere. (test_compilation.py runs README.)"""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_examples_of_robust_classifiers_and_of_tasks_run(capsys):
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs/learn.md").read_text(), re.DOTALL)
    classifiers, tasks = found
    for example, fitted in ((classifiers, "model"), (tasks, "learner")):
        names = {}
        exec(compile(example, "docs/learn.md", "exec"), names)
        assert names[fitted].converged_
        assert "stationarity" in capsys.readouterr().out


def test_the_example_of_embeddings_helps_the_worst_group(capsys):
    found = runpy.run_path(str(ROOT / "examples" / "embeddings.py"))["main"]()
    assert found["after"] > found["before"]
    assert found["epsilon"] <= 1e-3


def test_the_example_of_tail_tuning_is_certified_and_agrees_with_a_search(capsys):
    found = runpy.run_path(str(ROOT / "examples" / "tail_tuning.py"))["main"]()
    assert found["risk"] == pytest.approx(found["known"], abs=1e-5)
    assert "Certified" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["meta_learning", "moved_groups"])
def test_the_examples_assert_what_they_show(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]()
    assert "stationarity" in capsys.readouterr().out


def test_the_readme_is_as_long_as_a_readme_should_be():
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert 150 <= len(prose.split()) <= 450


def test_the_commands_are_targets_of_the_makefile():
    targets = re.findall(r"^make (\S+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
