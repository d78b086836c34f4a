"""Random histories of the table, with a trainer that is killed and rewound, and crashes, keep the invariants of its docstring."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer.config import BufferConfig, Route
from buffer.records import Lease, MakerInfo, SampledRow
from buffer.rows import Row
from buffer.snapshot import cut, restore, snapshot
from buffer.table import ExperienceTable
from tests.fakes import FakePrompts, ManualClock, answer

ROUTES = tuple(Route(column="part", values=(part,)) for part in (0, 1))  # of some teachers
STAGES = {"rollout": (), "reward": ("rollout",), "teacher": ("rollout",), "judge": ("reward",)}


class TableMachine(RuleBasedStateMachine):
    """Between the rules, `self.saved` is the last state that a crash leaves."""

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
        self.sampled: list[SampledRow] = []  # what the trainer has
        self.step = 0
        self.version = -1
        self.to_publish = True  # the trainer goes on when it has
        self.checkpoints = [0]  # steps
        self.trained: dict[int, list[SampledRow]] = {}  # by step
        self.rewound: list[SampledRow] = []
        self.charged_after_rewind = 0
        self.ends: Counter[int] = Counter()
        self.granted: dict[int, Lease] = {}
        self.makers = 0
        self.table, self.prompts = self.new_table(), FakePrompts()
        self.publish()

    def new_table(self) -> ExperienceTable:
        table = ExperienceTable(
            self.config,
            routes={"teacher": (None, *ROUTES)},
            stages=tuple(STAGES),
            samples=2,
            seed=1,
            clock=ManualClock(),
            **self.arguments,
        )
        for stage in STAGES:
            self.attach_to(table, stage)
        return table

    def attach_to(self, table: ExperienceTable, stage: str, routed: bool = False) -> None:
        self.makers += 1
        route = ROUTES[self.makers % 2] if stage == "teacher" and routed else None
        table.attach(MakerInfo(f"{stage}/{self.makers}", stage, stage, STAGES[stage], 4, route))

    def ended(self, *leases: Lease) -> None:
        self.ends.update(lease.id for lease in leases)

    def save(self) -> None:
        self.saved = json.dumps(snapshot(self.table))

    # Makers

    def admit(self) -> None:
        """As the buffer does it, whenever there is room."""
        while self.table.stalled_by() is None:
            self.table.admit(self.prompts.next())

    @rule(chance=st.randoms(use_true_random=False), count=st.integers(1, 12))
    def grant(self, chance, count):
        self.admit()
        for _ in range(count):
            stages = [stage for stage in STAGES if self.table.ready(stage)] or list(STAGES)
            self.lease(chance.choice(sorted(self.table.roster.names[chance.choice(stages)])))

    def lease(self, maker: str) -> Lease | None:
        lease = self.table.lease(maker)
        if lease is not None:
            assert lease.id not in self.granted
            self.granted[lease.id] = lease
        return lease

    @rule(count=st.integers(1, 12))
    def make(self, count):
        """The common course, so that histories get far: so many leases of each stage are granted and committed."""
        self.admit()
        for stage in STAGES:
            for _ in range(count):
                leases = (self.lease(maker) for maker in sorted(self.table.roster.names[stage]))
                if (lease := next(filter(None, leases), None)) is not None:
                    self.table.commit(lease.id, answer(lease), [lease.row_id, lease.stage])
                    self.ended(lease)

    def open_lease(self, chance) -> Lease:
        return self.table.work.leases[chance.choice(sorted(self.table.work.leases))].lease

    @precondition(lambda self: self.table.work.leases)
    @rule(chance=st.randoms(use_true_random=False), count=st.integers(1, 6))
    def commit(self, chance, count):
        for _ in range(min(count, len(self.table.work.leases))):
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
            if self.table.work.leases:
                lease = self.open_lease(chance)
                self.ended(lease, *self.table.fail(lease.id, kind, "no"))

    @rule(stage=st.sampled_from(sorted(STAGES)))
    def attach(self, stage):
        self.attach_to(self.table, stage, routed=True)

    @rule(chance=st.randoms(use_true_random=False), death=st.sampled_from([None, "killed"]))
    def detach(self, chance, death):
        name = chance.choice(sorted(self.table.roster.makers))
        stage = self.table.roster.makers[name].stage
        held = [held.lease for held in self.table.work.leases.values() if held.lease.maker == name]
        revoked = self.table.detach(name, death)
        assert sorted(revoked, key=lambda lease: lease.id) == sorted(held, key=lambda lease: lease.id)
        self.ended(*revoked)
        if not self.table.roster.names[stage]:
            self.attach_to(self.table, stage)

    @rule(chance=st.randoms(use_true_random=False), count=st.integers(1, 3))
    def lose(self, chance, count):
        """Columns of some rows are gone: an input of a maker, or what the trainer is about to fetch."""
        have = [(row.id, stage) for row in self.table.rows.values() for stage in row.columns]
        for row_id, stage in chance.sample(have, min(count, len(have))):
            self.ended(*self.table.lost(row_id, [stage], "the node died"))
            if any(row.row_id == row_id for row in self.sampled):
                self.sampled = []

    # The trainer

    @precondition(lambda self: not self.sampled and not self.to_publish)
    @rule()
    def sample(self):
        self.table.give_back()
        rows = self.table.select(self.table.groups_per_step)
        if rows is not None:
            self.sampled = rows
            self.save()
            self.check_sampled()

    def check_sampled(self) -> None:
        assert len({row.row_id for row in self.sampled}) == self.table.groups_per_step
        for row in self.sampled:
            oldest = row.produced["rollout"].min_version
            assert row.age == self.version - oldest <= self.table.max_age
            assert row.columns == {stage: [row.row_id, stage] for stage in STAGES}
            assert {produced.samples for produced in row.produced.values()} == {2}

    @precondition(lambda self: not self.sampled and not self.to_publish)
    @rule(count=st.integers(1, 4))
    def learn(self, count):
        """The common course of a trainer: so many steps, each with rows that are ready, and their versions."""
        for _ in range(count):
            self.make(2 * self.table.groups_per_step)
            self.sample()
            if self.sampled:
                self.train()
            if self.to_publish:
                self.publish()

    @precondition(lambda self: self.sampled)
    @rule(again=st.booleans())
    def train(self, again=False):
        self.step += 1
        for _ in range(1 + again):
            self.table.trained([row.row_id for row in self.sampled], self.step)
        self.save()
        self.trained[self.step] = self.sampled
        self.sampled = []
        self.to_publish = self.step % self.table.versions.every == 0

    @precondition(lambda self: self.sampled)
    @rule(again=st.booleans())
    def drop(self, again):
        for _ in range(1 + again):
            self.table.dropped([row.row_id for row in self.sampled], "filtered")
        self.save()
        self.sampled = []

    @precondition(lambda self: self.to_publish)
    @rule(again=st.booleans())
    def publish(self, again=False):
        self.version += 1
        for _ in range(1 + again):
            self.table.published(self.version, self.step)
        self.save()
        self.to_publish = False

    @rule()
    def hand_over_nothing(self):
        """The trainer lost what it had, or the answer that gave it rows."""
        self.sampled = []

    @precondition(lambda self: not self.sampled and not self.to_publish)
    @rule()
    def checkpoint(self):
        self.checkpoints.append(self.step)

    @rule(chance=st.randoms(use_true_random=False))
    def rewind(self, chance):
        """The trainer died, and goes on from a checkpoint under the next version number."""
        self.sampled = []
        self.step = chance.choice(self.checkpoints)
        self.checkpoints = [step for step in self.checkpoints if step <= self.step]
        self.table.rewind(self.step)
        self.save()
        for step in [step for step in self.trained if step > self.step]:
            self.rewound += self.trained.pop(step)
        self.to_publish = True
        self.charged_after_rewind = self.table.charged

    # The table's own end

    @rule()
    def crash(self):
        """The trainer keeps what it has; columns are gone, and so is all that happened since the last save."""
        self.begin_anew(json.loads(self.saved), None)
        assert self.table.live.sampled.keys() >= {row.row_id for row in self.sampled}
        assert json.loads(self.saved)["next_row"] == self.table.next_row

    @precondition(lambda self: not self.sampled)
    @rule()
    def resume_from_a_cut(self):
        before, taken = self.table, cut(self.table)
        self.begin_anew(json.loads(json.dumps(taken.state)), taken.references)
        again = cut(self.table)
        assert again.references == taken.references
        assert {**again.state, "lives": 0} == {**taken.state, "lives": 0} or before.live.sampled
        assert self.table.rows.keys() == before.rows.keys()
        assert (self.table.live.nbytes, self.table.charged) == (before.live.nbytes, before.charged)

    def begin_anew(self, state: dict[str, Any], columns: list[Any] | None) -> None:
        self.ended(*(held.lease for held in self.table.work.leases.values()))
        self.table, self.prompts = self.new_table(), FakePrompts()
        restore(self.table, state, self.prompts, columns)
        self.save()

    # What always holds

    @invariant()
    def rows_in_flight_keep_the_staleness_bound(self):
        assert self.table.charged <= max(self.table.capacity, self.charged_after_rewind)
        if self.table.total_rows is not None:
            assert self.step * self.table.groups_per_step + len(self.table.rows) <= self.table.total_rows

    @invariant()
    def the_ledger_closes(self):
        self.table.check()
        rows = self.table.rows.values()
        assert self.table.ledger.rows.admitted == self.table.next_row == self.prompts.cursor
        assert self.table.live.nbytes == sum(row.nbytes for row in rows)
        assert self.table.live.with_columns == sum(bool(row.columns) for row in rows)
        assert list(self.table.live.unsampled) == sorted(self.table.live.unsampled)
        assert self.table.live.unsampled.keys() | self.table.live.sampled.keys() == self.table.rows.keys()
        assert len(self.table.live.unsampled) + len(self.table.live.sampled) == len(self.table.rows)
        assert self.table.live.complete == sum(row.complete for row in self.table.live.unsampled.values())
        waiting = sum(row.id in queue for row in rows for queue in self.table.work.waiting.values())
        assert waiting == sum(len(queue) for queue in self.table.work.waiting.values())

    @invariant()
    def no_row_is_trained_twice_and_the_ledger_knows_those_that_were(self):
        trained = [row for rows in self.trained.values() for row in rows]
        ids = [row.row_id for row in trained + self.rewound]
        assert len(set(ids)) == len(ids)
        assert not self.table.rows.keys() & set(ids)
        ledger = self.table.ledger
        for rows, counted in ((trained, "trained"), (self.rewound, "rewound")):
            found = [
                getattr(account, counted, account.dropped.get(counted, 0)) for account in (ledger.rows, ledger.tokens)
            ]
            assert found == [len(rows), sum(made.tokens for row in rows for made in row.produced.values())]
        assert self.table.versions.step == self.step

    @invariant()
    def every_lease_is_open_or_has_ended_once(self):
        assert all(count == 1 for count in self.ends.values())
        assert self.granted.keys() == self.ends.keys() | self.table.work.leases.keys()
        assert not self.ends.keys() & self.table.work.leases.keys()
        for held in self.table.work.leases.values():
            assert held.lease.maker in self.table.roster.makers
            assert self.table.live.unsampled[held.lease.row_id].leases[held.lease.stage] == held.lease.id

    @invariant()
    def every_missing_stage_is_waiting_leased_or_blocked(self):
        for row in self.table.live.unsampled.values():
            assert row.produced.keys() == row.columns.keys() == row.makers.keys()
            for stage, needs in STAGES.items():
                assert self.places(row, stage) == 1, (row, stage, needs)

    def places(self, row: Row, stage: str) -> int:
        blocked = any(need not in row.columns for need in STAGES[stage])
        return (stage in row.columns) + (stage in row.leases) + (row.id in self.table.work.waiting[stage]) + blocked

    def teardown(self):
        """Whatever happened: with makers that answer, the trainer gets its next rows."""
        if not hasattr(self, "table"):
            return
        self.sampled = []
        if self.to_publish:
            self.publish()
        for maker in {held.lease.maker for held in self.table.work.leases.values()}:
            self.table.detach(maker)
        for stage in STAGES:
            self.attach_to(self.table, stage)
        begun = self.step
        for _ in range(4):
            self.learn(1)
        to_come = self.table.rows_to_come(prompts_finished=False)
        assert self.step > begun or self.table.failures.cause or (to_come or 0) < self.table.groups_per_step


TableMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_random_histories_keep_the_invariants = TableMachine.TestCase
