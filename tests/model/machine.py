"""The walk: random steps on a table, and after each of them the table is held against a dict.

Users 0 and 1 are handles in this process, user 2 one in a second process, where a walk has it.
After each step the user that made it answers everything, and one that has just come half of it;
the others take turns, so that what they remember from long ago is put to the test. Now and then
everything is flushed and Lance's own readers are asked too.

All steps are one rule, because Hypothesis leaves whole rules out of a walk, and one without
upserts shows little; their frequencies are ours.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from tests.model.handle import ChildProcess, RemoteHandle, User
from tests.model.questions import Question, Variant, questions
from tests.model.world import World

WALK_STEPS = 50
MAX_RESPECS = 2
OTHERS_EVERY = 4

Step = tuple[str, tuple[Any, ...]]
Cells = list[tuple[int, int]]

_USERS = st.integers(0, 2)
_SMALL = st.integers(0, 5)
_ROWS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 63)), min_size=1, max_size=6)
_KEYS = st.lists(st.integers(0, 15), min_size=1, max_size=4)
_BOOL = st.booleans()

STEPS: dict[str, tuple[int, st.SearchStrategy[tuple[Any, ...]]]] = {
    "upsert": (12, st.tuples(_USERS, _ROWS, _BOOL)),
    "delete": (6, st.tuples(_USERS, _KEYS, _BOOL)),
    "flush": (4, st.tuples(_USERS, _BOOL)),
    "freeze": (3, st.tuples(_USERS)),
    "merge": (4, st.tuples(_USERS, _SMALL, st.integers(1, 3))),
    "restart": (3, st.tuples(_USERS, _BOOL)),
    "open_writer": (2, st.tuples(_USERS, _BOOL)),
    "close_writer": (1, st.tuples(_USERS)),
    "settle": (2, st.tuples(_USERS, _ROWS)),
    "edit_base": (2, st.tuples(_USERS, _ROWS)),
    "clean_up": (2, st.tuples(_USERS)),
    "set_regions": (1, st.tuples(_USERS, _SMALL)),
    "ask_lance": (1, st.tuples(_USERS)),
}
"""How often each step comes, and what it draws; the simplest ones first."""


def steps(variant: Variant) -> st.SearchStrategy[Step]:
    possible = [name for name in STEPS if variant.keyed or name not in ("delete", "ask_lance")]
    weighted = [name for name in possible for _ in range(STEPS[name][0])]
    return st.sampled_from(weighted).flatmap(lambda name: st.tuples(st.just(name), STEPS[name][1]))


class Walk(RuleBasedStateMachine):
    """Made for one kind of table by `walk`, which fills in the rest."""

    variant: Variant
    lake: Path
    child: ChildProcess | None
    made: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.turn = 0
        self.respecs = 0

    def begin(self, regions: int, second_process: int) -> None:
        self.world = World(self.variant, self.lake, regions)
        if self.child is not None and second_process == 2:
            self.world.users.append(RemoteHandle(self.child, self.world.uri, self.world.name))

    def step(self, step: Step, question: Question) -> None:
        assert self.world is not None
        world = self.world
        name, (who, *arguments) = step
        user = world.users[who % len(world.users)]
        getattr(self, name)(world, user, question, *arguments)
        world.ask(user, question)
        self.turn += 1
        world.ask(world.enter(), question, self.turn % 2)
        if self.turn % OTHERS_EVERY == 0:
            others = [other for other in world.users if other is not user]
            world.ask(others[self.turn // OTHERS_EVERY % len(others)], question, self.turn % 8 // 4)
        self.made[name] += 1

    def teardown(self) -> None:
        if self.world is not None:
            self.world.leave()

    # --- steps ---------------------------------------------------------------------------------

    def upsert(self, world: World, user: User, question: Question, rows: Cells, own: bool) -> None:
        world.upsert(user, world.rows(rows), question, own=own)

    def delete(
        self, world: World, user: User, question: Question, keys: list[int], own: bool
    ) -> None:
        known = self.variant.keys
        world.delete(user, [known[key % len(known)] for key in keys], question, own=own)

    def flush(self, world: World, user: User, question: Question, recover: bool) -> None:
        user.flush(recover)

    def freeze(self, world: World, user: User, question: Question) -> None:
        user.freeze()

    def merge(
        self, world: World, user: User, question: Question, pick: int, generations: int
    ) -> None:
        world.merge(pick, generations)

    def restart(self, world: World, user: User, question: Question, crash: bool) -> None:
        user.reopen(crash)

    def open_writer(self, world: World, user: User, question: Question, durable: bool) -> None:
        user.open_writer(durable)

    def close_writer(self, world: World, user: User, question: Question) -> None:
        user.close_writer()

    def settle(self, world: World, user: User, question: Question, rows: Cells) -> None:
        world.settle(user)
        world.edit_base(world.rows(rows))

    def edit_base(self, world: World, user: User, question: Question, rows: Cells) -> None:
        world.edit_base(world.rows(rows))

    def clean_up(self, world: World, user: User, question: Question) -> None:
        world.clean_up()

    def set_regions(self, world: World, user: User, question: Question, regions: int) -> None:
        if self.respecs < MAX_RESPECS:
            self.respecs += 1
            known = self.variant.regions
            user.set_regions(*known[regions % len(known)])

    def ask_lance(self, world: World, user: User, question: Question) -> None:
        world.ask_lance(user, question.keys)


def walk(
    variant: Variant,
    lake: Path,
    child: ChildProcess | None,
    *,
    walks: int,
    reproducible: bool = True,
) -> Counter[str]:
    """Walk over tables of one kind; returns how many steps of each sort were made."""
    made: Counter[str] = Counter()
    rules = {
        "variant": variant,
        "lake": lake,
        "child": child,
        "made": made,
        "begin": initialize(regions=_SMALL, second_process=st.integers(0, 2))(Walk.begin),
        "step": rule(step=steps(variant), question=questions(variant))(Walk.step),
    }
    machine = type(f"Walk_{variant.name}", (Walk,), rules)
    phases = [Phase.generate, Phase.shrink]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=walks,
            stateful_step_count=WALK_STEPS + 1,  # the first one begins
            deadline=None,
            derandomize=reproducible,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    return made
