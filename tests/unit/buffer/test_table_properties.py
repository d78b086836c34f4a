"""Random histories of the table keep the invariants of its docstring."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer.config import BufferConfig
from buffer.records import Lease, MakerInfo, Prompt, SampledRow
from buffer.rows import Row
from buffer.snapshot import restore, snapshot
from buffer.table import ExperienceTable
from tests.fakes import ManualClock, answer

STAGES = {"rollout": (), "reward": ("rollout",), "teacher": ("rollout",)}


class TableMachine(RuleBasedStateMachine):
    @initialize(
        order=st.sampled_from(["fifo", "window", "ready"]),
        window=st.integers(1, 6),
        max_staleness=st.integers(0, 2),
        groups=st.integers(1, 3),
        every=st.integers(1, 2),
        total=st.sampled_from([None, 6, 40]),
        max_bytes=st.sampled_from([2**31, 4000]),
    )
    def start(self, order, window, max_staleness, groups, every, total, max_bytes):
        self.config = BufferConfig(
            order=order, window=window, max_staleness=max_staleness, max_attempts=10**6, max_data_failures=10**6,
            max_bytes=max_bytes,
        )  # fmt: skip
        self.arguments = {"groups_per_step": groups, "every": every, "total_rows": total}
        self.sampled: list[SampledRow] = []
        self.step = 0
        self.prompts = 0
        self.ends: Counter[int] = Counter()
        self.granted: dict[int, Lease] = {}
        self.makers = 0
        self.table = self.new_table()
        self.table.published(0, 0)

    def new_table(self) -> ExperienceTable:
        table = ExperienceTable(
            self.config, stages=tuple(STAGES), samples=2, seed=1, clock=ManualClock(), **self.arguments
        )
        for stage in STAGES:
            self.attach_to(table, stage)
        return table

    def attach_to(self, table: ExperienceTable, stage: str) -> None:
        self.makers += 1
        table.attach(MakerInfo(f"{stage}/{self.makers}", stage, stage, STAGES[stage], 4))

    def ended(self, *leases: Lease) -> None:
        self.ends.update(lease.id for lease in leases)

    def admit(self) -> None:
        """As the buffer does it, whenever there is room."""
        while self.table.stalled_by() is None:
            self.table.admit(Prompt(f"p{self.prompts}", "x", {"answer": self.prompts}))
            self.prompts += 1

    @rule(chance=st.randoms(use_true_random=False), count=st.integers(1, 12))
    def grant(self, chance, count):
        self.admit()
        for _ in range(count):
            stages = [stage for stage in STAGES if self.table.ready(stage)] or list(STAGES)
            lease = self.table.lease(chance.choice(sorted(self.table.roster.names[chance.choice(stages)])))
            if lease is not None:
                assert lease.id not in self.granted
                self.granted[lease.id] = lease

    @rule(count=st.integers(1, 12))
    def make(self, count):
        """The common course, so that histories get far: so many leases of each stage are granted and committed."""
        self.admit()
        for stage in STAGES:
            for _ in range(count):
                lease = self.table.lease(min(self.table.roster.names[stage]))
                if lease is not None:
                    self.granted[lease.id] = lease
                    self.table.commit(lease.id, answer(lease), [lease.row_id, lease.stage])
                    self.ended(lease)

    def open_lease(self, chance) -> Lease:
        return self.table.leases[chance.choice(sorted(self.table.leases))].lease

    @precondition(lambda self: self.table.leases)
    @rule(chance=st.randoms(use_true_random=False), count=st.integers(1, 6))
    def commit(self, chance, count):
        for _ in range(min(count, len(self.table.leases))):
            lease = self.open_lease(chance)
            version = chance.randint(lease.min_version, self.table.versions.newest)
            self.table.commit(lease.id, answer(lease, version), [lease.row_id, lease.stage])
            self.ended(lease)

    @rule(
        chance=st.randoms(use_true_random=False),
        kinds=st.lists(st.sampled_from(["data", "infra", "timeout"]), min_size=1, max_size=4),
    )
    def fail(self, chance, kinds):
        for kind in kinds:
            self.grant(chance, 3)
            if self.table.leases:
                lease = self.open_lease(chance)
                self.ended(lease, *self.table.fail(lease.id, kind, "no"))

    @rule(stage=st.sampled_from(sorted(STAGES)))
    def attach(self, stage):
        self.attach_to(self.table, stage)

    @rule(chance=st.randoms(use_true_random=False), death=st.sampled_from([None, "killed"]))
    def detach(self, chance, death):
        name = chance.choice(sorted(self.table.roster.makers))
        stage = self.table.roster.makers[name].stage
        held = [held.lease for held in self.table.leases.values() if held.lease.maker == name]
        revoked = self.table.detach(name, death)
        assert sorted(revoked, key=lambda lease: lease.id) == sorted(held, key=lambda lease: lease.id)
        self.ended(*revoked)
        if not self.table.roster.names[stage]:
            self.attach_to(self.table, stage)

    @precondition(lambda self: not self.sampled)
    @rule()
    def sample(self):
        rows = self.table.select(self.table.groups_per_step)
        self.sampled = rows or []
        self.check_sampled()

    def check_sampled(self) -> None:
        for row in self.sampled:
            assert row.age <= self.table.max_age
            assert row.columns == {stage: [row.row_id, stage] for stage in STAGES}
            assert {produced.samples for produced in row.produced.values()} == {2}

    @precondition(lambda self: not self.sampled)
    @rule(count=st.integers(1, 4))
    def learn(self, count):
        """The common course of a trainer: so many steps, each with rows that are ready, and their versions."""
        for _ in range(count):
            self.make(2 * self.table.groups_per_step)
            self.sample()
            if self.sampled:
                self.train()
            self.publish()

    @precondition(lambda self: self.sampled)
    @rule()
    def train(self):
        self.step += 1
        self.table.trained([row.row_id for row in self.sampled], self.step)
        self.sampled = []

    @precondition(lambda self: self.sampled)
    @rule()
    def drop(self):
        self.table.dropped([row.row_id for row in self.sampled], "filtered")
        self.sampled = []

    @rule()
    def publish(self):
        self.table.published(self.step // self.table.versions.every, self.step)

    @rule()
    def snapshot_and_restore(self):
        state = json.loads(json.dumps(snapshot(self.table, lambda row, stage, reference: reference)))
        restored = self.new_table()
        restore(restored, state, lambda row, stage, encoded: encoded)
        assert json.loads(json.dumps(snapshot(restored, lambda row, stage, reference: reference))) == state
        assert {**restored.rows}.keys() == self.table.rows.keys()
        assert (restored.nbytes, restored.charged) == (self.table.nbytes, self.table.charged)
        self.ended(*(held.lease for held in self.table.leases.values()))
        self.table = restored
        self.granted = {}  # a restored table counts its leases anew
        self.ends.clear()
        self.sampled = []

    @invariant()
    def rows_in_flight_keep_the_staleness_bound(self):
        assert self.table.charged <= self.table.capacity
        if self.table.total_rows is not None:
            assert self.table.ledger.rows.trained + len(self.table.rows) <= self.table.total_rows

    @invariant()
    def the_ledger_closes(self):
        self.table.check()
        rows = self.table.rows.values()
        assert self.table.ledger.rows.admitted == self.prompts
        assert self.table.nbytes == sum(row.nbytes for row in rows)
        assert self.table.complete == sum(row.complete for row in self.table.unsampled.values())
        waiting = sum(row.id in queue for row in rows for queue in self.table.waiting.values())
        assert waiting == sum(len(queue) for queue in self.table.waiting.values())

    @invariant()
    def every_lease_is_open_or_has_ended_once(self):
        assert all(count == 1 for count in self.ends.values())
        assert self.granted.keys() == self.ends.keys() | self.table.leases.keys()
        assert not self.ends.keys() & self.table.leases.keys()
        for held in self.table.leases.values():
            assert held.lease.maker in self.table.roster.makers
            assert self.table.rows[held.lease.row_id].leases[held.lease.stage] == held.lease.id

    @invariant()
    def every_missing_stage_is_waiting_leased_or_blocked(self):
        for row in self.table.rows.values():
            for stage, needs in STAGES.items():
                assert self.places(row, stage) == 1, (row, stage, needs)

    def places(self, row: Row, stage: str) -> int:
        blocked = any(need not in row.columns for need in STAGES[stage])
        return (stage in row.columns) + (stage in row.leases) + (row.id in self.table.waiting[stage]) + blocked


TableMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_random_histories_keep_the_invariants = TableMachine.TestCase
