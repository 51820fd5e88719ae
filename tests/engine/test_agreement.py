"""What ranks agree on at an exchange."""

import logging

import pytest

from gloo import run_ranks
from hooktrain.engine.agreement import Agreement
from hooktrain.engine.clock import Clock
from hooktrain.utils import comm


def test_a_single_process_agrees_at_once_and_the_first_reason_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agreement = Agreement(Clock())
    assert agreement.stop_reason is None
    with caplog.at_level(logging.INFO):
        agreement.request_stop("first", 3)
        agreement.request_stop("second", 4)
        agreement.settle(agreement.proposals())  # by exchanges until the run ends
    assert agreement.stop_reason == "first"
    assert len(caplog.messages) == 1


def agree() -> list[object]:
    """Two exchanges, before which the second rank asks for a stop, and then the first too."""
    clock = Clock()
    agreement = Agreement(clock)
    rank = comm.get_rank()
    clock.own = 10.0 * (rank + 1)
    agreement.own_signal = 15 * rank
    seen: list[object] = []
    for round_ in (0, 1):
        if rank == 1 - round_:
            agreement.request_stop(f"rank {rank} is done", round_)
        seen.append(agreement.stop_reason)
        everywhere = comm.all_gather(agreement.proposals())
        maxima = {
            name: max(each[name] for each in everywhere) for name in everywhere[0]
        }
        agreement.settle(maxima)
        seen.append(agreement.stop_reason)
    return [*seen, agreement.signal, clock.agreed]


def test_ranks_know_of_a_stop_a_signal_and_the_most_seconds_after_an_exchange() -> None:
    reason = "rank 1 is done"
    expected = [None, reason, reason, reason, 15, 20.0]
    assert run_ranks(agree, 2) == [expected, expected]
