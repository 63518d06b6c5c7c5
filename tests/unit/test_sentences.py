"""What a run says about its end: what happened, how good the answer is, what to do."""

import dataclasses

import pytest

import bilevax as bx
from bilevax.driver import sentences
from bilevax.driver.sentences import Summary
from bilevax.driver.solution import SolveError, Status

LINES = ("stationarity", "response_x2", "response_z1", "response_z2", "gap")
FIELDS = [f.name for f in dataclasses.fields(bx.KKTCertificate) if f.name != "sizes"]


def certificate(**lines):
    return bx.KKTCertificate(**(dict.fromkeys(FIELDS, 0.0) | lines))


def sampled(estimate, radii, share=0.1):
    return bx.SampledCertificate(
        objective=0.0,
        estimate=estimate,
        radii=radii,
        confidence=0.95,
        batches=64,
        largest_share=share,
    )


def summary(**changes):
    usual = {
        "certificate": certificate(stationarity=0.0512),
        "tolerance": 0.01,
        "relative": 0.0,
        "gradients": 12_345,
        "method": bx.Adaptive(),
        "first_method": bx.Adaptive(),
    }
    return Summary(**(usual | changes))


def test_certified():
    status = sentences.certified(summary(tolerance=0.1))
    assert status == "certified"
    assert str(status) == "Certified: ε = 0.0512 ≤ 0.1 after 12,345 gradients."


def test_a_relative_tolerance_is_told_as_it_was_asked_for():
    status = sentences.certified(summary(tolerance=0.0, relative=1e-3))
    assert "ε = 0.0512 within 0 + 0.001·size on every line after" in str(status)
    ended = sentences.budget_spent(summary(relative=1e-3), "max_gradients=5")
    assert "only, not within 0.01 + 0.001·size on every line, after" in str(ended)


def test_a_certificate_from_samples_says_how_sure_it_is():
    found = sampled(certificate(gap=0.02), radii=dict.fromkeys(LINES, 0.01))
    assert found.epsilon == pytest.approx(0.03)  # what is on top of the estimate counts
    assert found.advice("gap") == found.estimate.advice("gap")
    status = sentences.certified(summary(certificate=found, tolerance=0.1))
    assert "≤ 0.1, with probability 0.95 over the samples looked at, after" in str(status)


def test_heavy_tails_are_told():
    told = "one of 64 minibatches makes 50 % of the squared deviations"
    for share, heavy in ((0.1, False), (0.5, True)):
        found = sampled(certificate(), dict.fromkeys(LINES, 0.01), share)
        assert found.heavy_tailed is heavy
        assert found.as_dict()["largest_share"] == share
        status = sentences.certified(summary(certificate=found, tolerance=0.1))
        for text in (str(found), str(status)):
            assert (told in text) is heavy
            assert ("confidence 0.95 is not to be trusted" in text) is heavy


@pytest.mark.parametrize("budget", ["max_gradients=300", "max_seconds=2.5"])
def test_a_spent_budget_is_named_and_how_to_go_on(budget):
    status = sentences.budget_spent(summary(), budget)
    assert status == "budget spent"
    assert str(status) == (
        f"The budget {budget} is spent. The best point is certified at ε = 0.0512 only, not at "
        "0.01, after 12,345 gradients. Give a larger one; resume=solution.state goes on from here."
    )


@pytest.mark.parametrize("line", LINES)
def test_the_hint_names_the_largest_line(line):
    run = summary(certificate=certificate(stationarity=0.01) if line != "stationarity" else
                  certificate(stationarity=1.0))  # fmt: skip
    run = dataclasses.replace(run, certificate=dataclasses.replace(run.certificate, **{line: 1.0}))
    said = run.hint
    if line == "gap":
        assert "the lower-level gap" in said
        assert said.endswith("or a larger rho.")
    else:
        assert f"The largest line is {line};" in said
        assert "problem.check(start)" in said
    assert run.method.advice() in said


def test_a_method_that_stops_by_itself_is_named_with_why_none_follows():
    refused = sentences.cannot_follow(ValueError("x1 is unbounded"))
    assert refused == " No other method can take over: x1 is unbounded."
    status = sentences.stopped_itself(summary(refused=refused))
    assert status == "stalled"
    assert str(status).startswith("The stopping test of Adaptive holds. The best point is")
    assert str(status).endswith(refused)


def test_stalled_says_since_when():
    status = sentences.stalled(summary(gradients=80_000))
    assert status == "stalled"
    assert str(status).startswith("Stalled: ε has not fallen since gradient 10,000. ")


def test_one_method_after_another_is_told():
    run = summary(method=bx.PenaltyMethod(), fell_back_at=1024, tolerance=0.1)
    told = (
        " Adaptive stopped making progress after 1,024 of them; since then PenaltyMethod went on."
    )
    assert str(sentences.certified(run)).endswith(told)
    assert told in str(sentences.interrupted(run, "Interrupted."))
    assert "since then" not in str(sentences.certified(summary()))


def test_interrupted_and_not_finite():
    status = sentences.interrupted(summary(), "Stopped by the callback.")
    assert status == "interrupted"
    assert str(status).startswith("Stopped by the callback. The best point is")
    status = sentences.not_finite(summary(), "upper is nan after 7 gradients")
    assert status == "not finite"
    assert str(status).startswith("Not finite: upper is nan after 7 gradients. The best point is")


def test_statuses_are_of_a_known_kind():
    with pytest.raises(ValueError, match="solved"):
        Status("solved", "…")
    assert Status("stalled", "a") == "stalled"
    assert Status("stalled", "a") != "certified"
    assert Status("stalled", "a") != Status("stalled", "b")
    assert len({Status("stalled", "a"), Status("stalled", "a")}) == 1


def test_a_solve_error_holds_its_solution_and_can_be_rebuilt():
    class Held:
        status = Status("stalled", "Stalled: …")

    error = SolveError(Held())
    assert str(error) == "Stalled: …"
    kind, arguments = error.__reduce__()
    assert kind(*arguments).solution is error.solution
