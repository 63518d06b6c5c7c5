"""What the checks of a run say: the best point, and its confirmation on other samples."""

import pytest

from bilevax.certificates import StationarityCertificate
from bilevax.driver.judging import Verdicts


class FakeJudge:
    """Says what it is told; its samples are not all, so that certificates are confirmed."""

    exact, cost = False, 5

    def __init__(self, *confirmed):
        self.left = list(confirmed)

    def __call__(self, point, attempt):
        return StationarityCertificate(objective=0.0, x=point, y=0.0)

    def sufficient(self, point, certificate, attempt, most):
        return most if certificate.epsilon < 1 else 0

    def confirmed(self, point, attempt, count=0, late=lambda: False):
        if late():
            return None
        found = self.left.pop(0)
        if found is None:
            raise KeyboardInterrupt
        return StationarityCertificate(objective=0.0, x=found, y=0.0)

    def holds(self, certificate):
        return certificate.certified(0.1)

    def excess(self, certificate):
        return certificate.epsilon


def test_the_best_point_is_kept_and_what_was_seen_recorded():
    verdicts = Verdicts(FakeJudge(), 3.0)
    for count, point in enumerate((2.0, 5.0, 2.0)):
        verdicts.add(point, count, 0.0)
    assert verdicts.best == 2.0
    assert verdicts.history["epsilon"] == [2.0, 5.0, 2.0]
    assert verdicts.gradients == 15
    assert not verdicts.confirm()  # nothing to confirm: it does not hold
    assert verdicts.confirmations == 0


def test_a_certificate_from_samples_is_confirmed_once_on_others():
    verdicts = Verdicts(FakeJudge(0.08), 0.05)
    assert verdicts.confirm()
    assert verdicts.certificate.epsilon == 0.08
    assert verdicts.confirm()  # the judge has no second answer: it must not be asked again
    assert (verdicts.confirmations, verdicts.gradients) == (1, 5)


def test_other_samples_may_disagree_and_another_point_is_asked_about_anew():
    verdicts = Verdicts(FakeJudge(0.3, 0.09), 0.05)
    assert not verdicts.confirm()
    verdicts.add(0.04, 1, 0.0)
    assert verdicts.confirm()
    assert verdicts.confirmations == 2


def test_an_interrupted_confirmation_is_none():
    """Ctrl-C in it must not leave a certificate that nobody has confirmed."""
    verdicts = Verdicts(FakeJudge(None, 0.3), 0.05)
    with pytest.raises(KeyboardInterrupt):
        verdicts.confirm()
    assert not verdicts.confirmed
    assert (verdicts.confirmations, verdicts.gradients) == (0, 0)
    assert not verdicts.confirm()  # asked again, the other samples say no


def test_more_samples_are_asked_where_they_would_be_enough():
    verdicts = Verdicts(FakeJudge(0.09), 3.0)
    assert not verdicts.confirm(2048)  # they would not be
    assert verdicts.confirmations == 0
    verdicts.add(0.5, 1, 0.0)
    assert not verdicts.confirm()  # nobody may look so long
    assert not verdicts.confirm(2048, lambda: True)  # it is too late
    assert (verdicts.confirmations, verdicts.confirmed) == (0, False)
    assert verdicts.confirm(2048)
    assert (verdicts.looked_at, verdicts.gradients) == (2048, 5 + 2048)
    assert verdicts.certificate.epsilon == 0.09


def test_of_points_that_samples_do_not_tell_apart_the_last_one_counts():
    verdicts = Verdicts(FakeJudge(), 1.0)
    verdicts.add(1.1, 1, 0.0)
    assert verdicts.best == 1.1
    verdicts.add(1.3, 2, 0.0)  # it is alike to the last one, but not to the least one
    assert verdicts.best == 1.1
