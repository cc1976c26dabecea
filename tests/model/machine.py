"""The walk: random steps on a table, and after each of them the table is held against a dict.

Users 0 and 1 are handles in this process, user 2 one in a second process, where a walk has it.
After each step the user that made it answers everything, strongly and eventually. One that has
just come, and those that have done nothing for long, take turns at a part of it, so that what
users remember is put to the test, and what they would remember wrongly. Versions of the past are
asked for again, and the table is read in parts, as many tasks would. Now and then everything is
flushed and Lance's own readers are asked too. When a walk is over the table is maintained once
more, and plain Lance has to see exactly the dict.

A job can die: the handle that does it is cut off from the store at some call. Sometimes the job is
done again at once, sometimes things are left as they are.

All steps are one rule, because Hypothesis leaves whole rules out of a walk, and one without
upserts shows little; their frequencies are ours.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from tests.model import plain_lance, split_reads
from tests.model.handle import (
    ChildProcess,
    RemoteHandle,
    User,
    fast_directory,
    shrink,
    usual_sizes,
)
from tests.model.jobs import Cells, deaths, drawn_jobs
from tests.model.mortal import Death
from tests.model.questions import EVERY, FURTHER, HALVES, Question, Variant, questions
from tests.model.world import INDEXES, World

WALK_STEPS = 50
MAX_RESPECS = 2
VISITOR_EVERY = 4
OTHERS_EVERY = 5
PAST_EVERY = 3
SPLIT_EVERY = 16
PHASES = [Phase.generate]
"""A walk that fails is printed as it was; with `Phase.shrink` it is made smaller, for minutes."""

Step = tuple[str, tuple[Any, ...]]

_USERS = st.integers(0, 2)
_SMALL = st.integers(0, 5)
_ROWS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 63)), min_size=1, max_size=6)
_KEYS = st.lists(st.integers(0, 15), min_size=1, max_size=4)
_BOOL = st.booleans()

STEPS: dict[str, tuple[int, st.SearchStrategy[tuple[Any, ...]]]] = {
    "upsert": (6, st.tuples(_USERS, _ROWS, _BOOL)),
    "generation": (6, st.tuples(_USERS, _ROWS)),
    "delete": (5, st.tuples(_USERS, _KEYS, _BOOL)),
    "freeze": (3, st.tuples(_USERS)),
    "restart": (3, st.tuples(_USERS, _BOOL)),
    "open_writer": (2, st.tuples(_USERS, _BOOL)),
    "close_writer": (2, st.tuples(_USERS)),
    "remember": (3, st.tuples(_USERS, _BOOL)),
    "set_regions": (2, st.tuples(_USERS, _SMALL)),
    "start": (6, st.tuples(_USERS, st.sampled_from(["compact", "merge", "build_indexes"]))),
    "merge_by_lance": (2, st.tuples(_USERS, _SMALL, st.integers(1, 3))),
    "settle": (2, st.tuples(_USERS, _ROWS)),
    "edit_base": (2, st.tuples(_USERS, _ROWS)),
    "clean_up": (2, st.tuples(_USERS, _BOOL)),
    "ask_lance": (2, st.tuples(_USERS)),
}
"""How often each step comes, and what it draws; the simplest ones first."""
CRASHES = 14
"""How often a job dies."""


def _steps(variant: Variant) -> tuple[set[str], st.SearchStrategy[Step]]:
    """The steps that this kind of table knows: their names, and how they are drawn."""
    jobs = drawn_jobs(variant)
    unknown = () if variant.keyed else ("delete", "ask_lance")
    known = {name: step for name, step in STEPS.items() if name not in unknown}
    known |= {name: (often, st.tuples(_USERS, drawn)) for name, (often, drawn) in jobs.items()}
    mortal = st.sampled_from([name for name, (often, _) in jobs.items() for _ in range(often)])
    dying = mortal.flatmap(lambda name: st.tuples(st.just(name), jobs[name][1], deaths(name)))
    known["crash"] = (CRASHES, st.tuples(_USERS, dying, _BOOL, _BOOL))
    weighted = [name for name, (often, _) in known.items() for _ in range(often)]
    steps = st.sampled_from(weighted)
    drawn = steps.flatmap(lambda name: st.tuples(st.just(name), known[name][1]))
    return {*known}, drawn


class Walk(RuleBasedStateMachine):
    """Made for one kind of table by `walk`, which fills in the rest."""

    variant: Variant
    lake: Path
    child: ChildProcess
    made: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.turn = 0
        self.respecs = 0
        self.last: Question | None = None
        self.sound = True
        """Whether nothing has failed so far."""

    def begin(self, regions: int, second_process: int, indexes: int, written_rows: int) -> None:
        shrink(written_rows)
        self.world = World(self.variant, self.lake, regions, indexes)
        if second_process == 2:
            world = self.world
            world.users.append(RemoteHandle(self.child, world.uri, world.name, written_rows))

    def step(self, step: Step, question: Question) -> None:
        assert self.world is not None
        world = self.world
        name, (who, *arguments) = step
        user = world.users[who % len(world.users)]
        self.last, self.sound = question, False
        if hasattr(self, name):
            getattr(self, name)(world, user, question, *arguments)
        else:
            world.work(user, name, arguments[0], question)
        self.turn += 1
        turn = self.turn
        world.ask(user, question, (*EVERY, *FURTHER[turn % len(FURTHER)]))
        world.ask_eventually(user, question, EVERY)
        if turn % VISITOR_EVERY == 0:
            visitor = world.enter()
            half = HALVES[turn // VISITOR_EVERY % 2]
            world.ask(visitor, question, half)
            world.ask_eventually(visitor, question, half)
            visitor.leave()
        if turn % OTHERS_EVERY == 0:
            others = [other for other in world.users if other is not user]
            other = others[turn // OTHERS_EVERY % len(others)]
            half = HALVES[turn // OTHERS_EVERY % 2]
            world.ask(other, question, half)
            world.ask_eventually(other, question, half)
        if turn % PAST_EVERY == 0:
            world.ask_of_the_past(user, question, EVERY, turn // PAST_EVERY)
        if turn % SPLIT_EVERY == 0:
            split_reads.ask(world, question, turn // SPLIT_EVERY)
        self.made[name] += 1
        self.sound = True

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if self.sound and self.last is not None:
                self.world.finish(self.last)
        finally:
            self.world.leave()

    # --- steps ---------------------------------------------------------------------------------

    def upsert(self, world: World, user: User, question: Question, rows: Cells, own: bool) -> None:
        world.upsert(user, world.rows(rows), question, own=own)

    def generation(self, world: World, user: User, question: Question, rows: Cells) -> None:
        world.upsert(user, world.rows(rows), question, own=False)
        user.flush(False)

    def delete(
        self, world: World, user: User, question: Question, keys: list[int], own: bool
    ) -> None:
        known = self.variant.keys
        world.delete(user, [known[key % len(known)] for key in keys], question, own=own)

    def freeze(self, world: World, user: User, question: Question) -> None:
        user.freeze()

    def restart(self, world: World, user: User, question: Question, crash: bool) -> None:
        user.reopen(crash)

    def open_writer(self, world: World, user: User, question: Question, durable: bool) -> None:
        user.open_writer(durable)

    def close_writer(self, world: World, user: User, question: Question) -> None:
        user.close_writer()

    def remember(self, world: World, user: User, question: Question, pin: bool) -> None:
        world.remember(pin=pin)

    def crash(
        self,
        world: World,
        user: User,
        question: Question,
        dying: tuple[str, tuple[Any, ...], Death],
        busy: bool,
        again: bool,
    ) -> None:
        name, drawn, death = dying
        if busy:
            world.give_work(user, name, question)
        world.work(user, name, drawn, question, death)
        if again:
            world.ask(user, question, HALVES[self.turn % 2])
            world.work(user, name, drawn, question)

    def start(self, world: World, user: User, question: Question, job: str) -> None:
        world.give_work(user, job, question)
        world.start(user, job)

    def set_regions(self, world: World, user: User, question: Question, regions: int) -> None:
        if self.respecs < MAX_RESPECS:
            self.respecs += 1
            known = self.variant.regions
            user.set_regions(*known[regions % len(known)])

    # --- steps of plain Lance ------------------------------------------------------------------

    def merge_by_lance(
        self, world: World, user: User, question: Question, pick: int, generations: int
    ) -> None:
        plain_lance.merge(world, pick, generations)

    def settle(self, world: World, user: User, question: Question, rows: Cells) -> None:
        plain_lance.settle(world, user)
        plain_lance.edit_base(world, world.rows(rows))

    def edit_base(self, world: World, user: User, question: Question, rows: Cells) -> None:
        plain_lance.edit_base(world, world.rows(rows))

    def clean_up(self, world: World, user: User, question: Question, spare: bool) -> None:
        plain_lance.clean_up(world, user, question, spare=spare)

    def ask_lance(self, world: World, user: User, question: Question) -> None:
        plain_lance.ask_lance(world, user, question)


def walk(variant: Variant, directory: Path, *, steps: int, reproducible: bool = True) -> None:
    """Walk over tables of one kind, at least so many steps and some of each sort.

    What the second process has to say goes into the directory.
    """
    made: Counter[str] = Counter()
    with fast_directory(directory) as lake, usual_sizes():
        child = ChildProcess(directory / "errors.txt")
        try:
            # Hypothesis makes a few walks without a step: go out again for what they leave.
            for outing in itertools.count(1):
                walks = math.ceil((steps - made.total()) / WALK_STEPS)
                machine = _machine(variant, lake, child, made)
                _walk(seed(f"{variant.name} {outing}")(machine) if reproducible else machine, walks)
                if made.total() >= steps:
                    break
        finally:
            child.stop()
    missing = _steps(variant)[0] - {*made}
    assert not missing, f"no walk came by {missing}"


def _machine(
    variant: Variant, lake: Path, child: ChildProcess, made: Counter[str]
) -> type[RuleBasedStateMachine]:
    parts = {
        "variant": variant,
        "lake": lake,
        "child": child,
        "made": made,
        "begin": initialize(
            regions=_SMALL,
            second_process=st.integers(0, 2),
            indexes=st.integers(0, len(INDEXES) - 1),
            written_rows=st.sampled_from([10_000, 1]),
        )(Walk.begin),
        "step": rule(step=_steps(variant)[1], question=questions(variant))(Walk.step),
    }
    return type(f"Walk_{variant.name}", (Walk,), parts)


def _walk(machine: type[RuleBasedStateMachine], walks: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=walks,
            stateful_step_count=WALK_STEPS + 1,  # the first one begins
            deadline=None,
            database=None,
            phases=PHASES,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
