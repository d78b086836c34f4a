from __future__ import annotations

import numpy as np

from buffer.records import Lease, Produced, Prompt
from topology.wire import pack_lease, pack_produced, unpack_lease, unpack_produced


def test_a_lease_and_an_answer_come_out_as_they_went_in() -> None:
    fields = {"answer": 2**70, "choices": ("a", "b"), "array": np.float32(0.5)}
    for content in ("1 + 1 =", [{"role": "user", "content": "1 + 1 ="}]):
        lease = Lease(7, 3, "rollout", "maker/rollout/0", Prompt("p3", content, fields), 2, 99, 8, 300.0)
        assert unpack_lease(pack_lease(lease)) == lease
    for produced in (Produced(8, 800, 1000, 2, 3, 0.5, {"reward_mean": 0.25}), Produced(8, 0, 10)):
        assert unpack_produced(pack_produced(produced)) == produced


def test_what_goes_over_the_wire_is_lists_of_plain_values() -> None:
    lease = pack_lease(Lease(7, 3, "rollout", "maker/rollout/0", Prompt("p3", "?", {}), 2, 99, 8, 300.0))
    assert lease == [7, 3, "rollout", "maker/rollout/0", ["p3", "?", {}], 2, 99, 8, 300.0]
    assert {type(value) for value in pack_produced(Produced(8, 0, 10))} == {int, float, dict, type(None)}
