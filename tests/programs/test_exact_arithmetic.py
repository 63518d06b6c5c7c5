"""No line of a certificate is smaller than it truly is: by 80-bit arithmetic of the same numbers.

A few problems of those that benchmarks/exact_arithmetic.py measures by the thousand.
"""

import ast
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
exact = pytest.importorskip("exact_arithmetic")
laws = pytest.importorskip("exact_laws")
ref = pytest.importorskip("exact_reference")

pytestmark = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="numpy.longdouble is no longer than a double here"
)

# Law, loss, shape, precision, whether badly scaled; and problems, by their numbers. They are some
# that were understated once, for the reason that is named, and some others.
CASES = {
    "values that cancel": ("box", "expanded", 0, np.float64, False, (15, 47, 48, 106, 158)),
    "values that cancel, badly scaled": ("box", "expanded", 0, np.float64, True, (16, 32, 136)),
    "conjugates far from the origin": ("box", "centred", 0, np.float64, False, (37, 67, 225)),
    "losses that saturate": ("box", "pseudo-Huber", 2, np.float64, False, (122, 235)),
    "weighed constraints": ("constrained", "centred", 0, np.float64, False, (6, 68, 204, 208)),
    "simplices in float32": ("simplex", "residuals", 2, np.float32, False, ()),
}


# Long: what test_attacks.py and test_terms.py have in single cases.
LONG = ("conjugates far from the origin", "losses that saturate")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in CASES]
)
def test_no_line_is_understated(name):
    law, loss, shape, dtype, scaled, once_wrong = CASES[name]
    for number in (*once_wrong, *range(8)):
        rng = np.random.default_rng([1, number])
        draw = laws.Draw(law, loss, laws.SHAPES[law][shape], dtype, rng, scaled)
        for row in exact.compared(draw.problem(number), by_vectors=False):
            assert not row["understated"], row
            assert not row.get("beneath"), row


def test_the_reference_is_independent():
    """It imports neither bilevax nor JAX, so that nothing here compares the library with itself."""
    nodes = list(ast.walk(ast.parse(Path(ref.__file__).read_text())))
    found = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    found |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in found} == {
        *("__future__", "collections", "dataclasses", "decimal", "numpy", "typing")
    }


def test_the_two_arithmetics_agree():
    for number, law in enumerate(("box", "simplex", "ball", "constrained")):
        drawn = exact.draw(law, 2 * number + 1, 7)
        short, long = (drawn.lines(kind, sums=True) for kind in (np.longdouble, Decimal))
        for line, value in long.items():
            assert float(short[line]) == pytest.approx(float(value), rel=1e-9, abs=1e-9), line


def test_gradients_of_the_reference_are_those_of_its_values():
    """By differences in 60 digits, for every loss."""
    step = Decimal("1e-20")
    for number, loss in enumerate(ref.LOSSES):
        rng = np.random.default_rng(number)
        draw = laws.Draw("simplex", loss, laws.SHAPES["simplex"][0], np.float64, rng, False)
        drawn = draw.problem(1)
        p, d = ref.exact(drawn.numbers, Decimal), ref.exact(drawn.data, Decimal)
        blocks = {name: p[name] for name in ("x1", "y1", "y2")}
        value, slopes = ref.lower(loss, *blocks.values(), d)
        for name, slope in slopes.items():
            for i in range(len(slope)):
                moved = {n: v.copy() for n, v in blocks.items()}
                moved[name][i] += step
                rise = (ref.lower(loss, *moved.values(), d)[0] - value) / step
                assert float(rise) == pytest.approx(float(slope[i]), rel=1e-9, abs=1e-9), name
