"""What the checks of a run saw: columns, and their picture."""

import numpy as np
import pytest

from bilevax.driver.solution import History

HISTORY = History(
    {
        "gradients": np.asarray([0, 64, 128]),
        "epsilon": np.asarray([2.0, 0.5, 0.1]),
        "gap": np.asarray([2.0, 0.5, 1e-9]),
        "stationarity": np.asarray([0.0, 0.4, 0.1]),
        "response_x2": np.zeros(3),
        "objective": np.asarray([3.0, 2.0, 1.0]),
    }
)


def test_columns_are_found_by_name():
    assert len(HISTORY) == 3
    assert HISTORY.names[:2] == ("gradients", "epsilon")
    assert repr(HISTORY).startswith("History(3 checks of gradients, epsilon")
    with pytest.raises(KeyError, match="no 'such column'; it has gradients, epsilon"):
        HISTORY["such column"]
    assert len(History({})) == 0


def test_it_is_plotted(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    path = tmp_path / "history.png"
    ax = HISTORY.plot(path)
    assert path.stat().st_size > 5000
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert shown == ["ε, the largest", "gap", "stationarity"]  # of what is above zero somewhere
    assert ax.get_ylim()[0] >= 1e-5  # what is nothing but rounding is left out
    assert HISTORY.plot(ax=ax) is ax
