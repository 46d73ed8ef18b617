"""The control block: what is put in arrives at its place, and a launch is spared only while there is nothing to do."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from guard.mia.control import OWNER_ATTRIBUTE, Control, spared

TAPS, ROOM = 3, 64
CPU = torch.device("cpu")

steps = st.lists(
    st.one_of(
        st.just("clear"),
        st.just("dummy"),
        st.just("serve"),
        st.dictionaries(st.integers(0, TAPS - 1), st.integers(0, 5), max_size=TAPS),
    ),
    max_size=12,
)


def entries(count: int, seed: int) -> np.ndarray:
    return np.arange(seed, seed + 2 * count, dtype=np.int32).reshape(count, 2)


@given(steps)
def test_a_tap_is_spared_while_requests_are_served_and_its_entries_are_none(steps: list) -> None:
    control = Control(TAPS, ROOM, CPU)
    counts = dict.fromkeys(range(TAPS), 0)
    for number, step in enumerate(steps):
        if step == "clear":
            control.clear()
            counts = dict.fromkeys(range(TAPS), 0)
        elif isinstance(step, str):
            control.serves = step == "serve"
        else:
            control.begin()
            for tap, count in step.items():
                control.put(tap, entries(count, 100 * number))
            control.upload()
            counts = {tap: step.get(tap, 0) for tap in range(TAPS)}
        words = control.tensor.numpy()
        for tap in range(TAPS):
            begin, count = words[2 * tap : 2 * tap + 2]
            assert count == counts[tap]
            if count:
                assert (words[begin : begin + 2 * count] == entries(count, 100 * number).reshape(-1)).all() or step in (
                    "dummy",
                    "serve",
                )
            assert control.spares(tap) == (control.serves and not counts[tap])


def test_before_anything_is_served_every_kernel_is_launched() -> None:
    control = Control(TAPS, ROOM, CPU)
    assert not any(map(control.spares, range(TAPS)))


def test_a_tensor_whose_block_nobody_knows_spares_nothing() -> None:
    assert not spared(torch.zeros(8, dtype=torch.int32), 0)
    control = Control(TAPS, ROOM, CPU)
    control.serves = True
    assert not hasattr(control.tensor, OWNER_ATTRIBUTE)
    assert not spared(control.tensor, 0)
