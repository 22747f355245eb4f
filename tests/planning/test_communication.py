"""What ranks send, how long that takes, and their joint rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from expert.planning.choose.communication import SLOW_LINK, joint_rate, traffic_of
from expert.planning.choose.rates import Range
from expert.planning.machine.links import LINKS
from expert.planning.memory.workload import Workload
from expert.planning.run_plan import ParallelPlan
from tests.each import each
from tests.planning.planning import shape_of

LLAMA = shape_of("Llama-3.1-8B")
LORA = Workload(shape=LLAMA, rows=1, row_tokens=2048, engine="replicated")
SHARDED = replace(LORA, engine="sharded", shards=4)
FULL = replace(SHARDED, adapter="full")
PCIE, ETHERNET = LINKS["pcie4"].bytes_per_second, LINKS["eth100"].bytes_per_second


def ranks(count: int = 4, **changes: Any) -> ParallelPlan:
    return ParallelPlan(ranks=count, link="pcie4", **changes)


def test_replicated_ranks_send_gradients_around_a_ring_once_a_step():
    one, ten = (traffic_of(LORA, ranks(), count) for count in (1, 10))
    assert one == ten
    assert one.sent_bytes == 2 * 3 / 4 * 4 * LORA.trainable_parameters
    assert one.hidden_seconds == 0
    assert one.seconds == pytest.approx(one.sent_bytes / PCIE)
    over = traffic_of(LORA, ranks(8, nodes=2, network="eth100"), 1)  # the slowest link decides
    assert over.seconds == pytest.approx(over.sent_bytes / ETHERNET)


def test_sharded_ranks_fetch_blocks_twice_for_each_micro_batch_and_the_rest_once():
    blocks = 2 * LLAMA.layers * LLAMA.block_parameters
    rest = 2 * LLAMA.rest_parameters
    found = traffic_of(SHARDED, ranks(), 3)
    assert found.gathered_bytes == pytest.approx(3 * 3 / 4 * (2 * blocks + rest))
    assert found.summed_bytes == traffic_of(LORA, ranks(), 1).summed_bytes
    assert found.hidden_seconds == pytest.approx(found.gathered_bytes / PCIE)
    quarter = traffic_of(replace(SHARDED, quantization="int4"), ranks(), 3)
    assert quarter.gathered_bytes < 0.4 * found.gathered_bytes


def test_full_fine_tuning_scatters_gradients_too_and_sums_shards_over_machines():
    scattered = 3 / 4 * 4 * LLAMA.parameters
    one = traffic_of(FULL, ranks(), 1)
    assert one.summed_bytes == 0
    assert one.gathered_bytes == pytest.approx(
        traffic_of(SHARDED, ranks(), 1).gathered_bytes + scattered
    )
    two = traffic_of(FULL, ranks(8, nodes=2, network="eth100"), 1)
    assert two.gathered_bytes == one.gathered_bytes
    assert two.summed_bytes == pytest.approx(4 * LLAMA.parameters / 4)
    # The four ranks of a machine divide its one network link.
    assert two.waiting_seconds == pytest.approx(4 * two.summed_bytes / ETHERNET)
    # Weights that are sharded over machines come over it too.
    all_eight = traffic_of(replace(FULL, shards=8), ranks(8, nodes=2, network="eth100"), 1)
    assert all_eight.summed_bytes == 0
    assert all_eight.hidden_seconds == pytest.approx(all_eight.gathered_bytes / ETHERNET)


def test_offloaded_weights_come_over_the_slot_twice_and_gradients_go_back():
    work = replace(FULL, shards=1, offload=True)
    alone = ParallelPlan(engine="sharded", host_link="pcie4", offload=True)
    found = traffic_of(work, alone, 2)
    assert found.host_bytes == 2 * 3 * 4 * LLAMA.parameters
    assert found.gathered_bytes == found.summed_bytes == 0
    assert found.hidden_seconds == pytest.approx(found.host_bytes / PCIE)
    assert found.optimizer_seconds > 0
    lora = traffic_of(replace(work, adapter="lora", shards=4), ranks(host_link="pcie4"), 1)
    assert lora.host_bytes == pytest.approx(2 * 2 * LLAMA.parameters / 4)
    assert lora.optimizer_seconds == 0


@each(
    ("work", "parallel"),
    [
        (LORA, ParallelPlan(ranks=4)),
        (LORA, ranks(8, nodes=2)),
        (FULL, ranks(8, nodes=2)),
        (SHARDED, ParallelPlan(ranks=4)),
        (replace(FULL, offload=True), ranks()),
    ],
)
def test_a_link_that_is_not_known_leaves_the_time_unknown_and_the_bytes_known(work, parallel):
    found = traffic_of(work, parallel, 1)
    assert found.sent_bytes > 0
    assert found.seconds is None
    assert found.step_seconds(1.0) is None
    assert joint_rate(found, (1.0, 2.0), None, tokens=10, sequences=4, ranks=4) is None


def test_a_step_lasts_as_long_as_the_longer_of_computing_and_fetching():
    found = traffic_of(SHARDED, ranks(), 1)
    slow, fast = 10 * found.hidden_seconds, found.hidden_seconds / 10
    assert found.step_seconds(slow) == pytest.approx(slow + found.waiting_seconds)
    assert found.step_seconds(fast) == pytest.approx(found.hidden_seconds + found.waiting_seconds)


def test_what_ranks_reach_together():
    def reached(rank: Range, alone: Range | None = None, sequences: int = 8, work: Any = LORA):
        traffic = traffic_of(work, ranks(), 1)
        return joint_rate(traffic, rank, alone, tokens=1e6, sequences=sequences, ranks=4)

    found = reached((1e3, 2e3), (1e3, 2e3))  # communication is negligible
    assert found.efficiency == pytest.approx((1.0, 1.0), rel=1e-3)
    assert found.tokens_per_second == pytest.approx((4e3, 8e3), rel=1e-3)
    idle = reached((1e3, 1e3), sequences=5)
    assert idle.balance == pytest.approx(5 / 8)
    assert idle.efficiency[1] == pytest.approx(5 / 8, rel=1e-3)
    faster_alone = reached((1e3, 1e3), (2e3, 2e3))
    assert faster_alone.efficiency == pytest.approx((0.5, 0.5), rel=1e-3)
    low, high = reached((1e9, 1e9), sequences=4, work=FULL).tokens_per_second
    assert low / high == pytest.approx(SLOW_LINK)  # the slow end assumes a part of the link speed
