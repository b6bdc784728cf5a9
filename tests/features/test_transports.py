"""One contract, every transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.harness import run_ranks
from tests.support.transport_cases import CASES
from tests.support.transports import SPECS, Spec


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_transport_keeps_the_contract(case: Callable[..., None], spec: Spec) -> None:
    run_ranks(spec.world_size, case, spec, timeout=30)
