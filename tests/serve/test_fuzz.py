"""No request makes the server fail, and every answer has the protocol's form."""

import pytest

from tests.serve.fuzzing import fuzzed


@pytest.mark.long
def test_drawn_requests() -> None:
    counts, faults = fuzzed(0, 300)
    assert not faults, "\n".join(faults)
    assert {200, 400, 401, 404, 405, 415} <= counts.keys()
