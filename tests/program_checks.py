"""What must hold of any program, and random models to make programs of: integers alone."""

from collections import Counter
from typing import Any

from hypothesis import strategies as st

from lightning_zero.run.program import (
    Cause,
    Facts,
    GroupFacts,
    Kind,
    OptimizerFacts,
    Program,
    UnitFacts,
    Use,
    WindowFacts,
)


def check(program: Program) -> None:
    """Raises AssertionError if a program would read values that are not there, hold more than it has room for, lose or
    repeat a gradient or a step, or wait for what comes after."""
    _check_order(program)
    _check_units(program)
    _check_reductions(program)
    _check_steps(program)


def _check_order(program: Program) -> None:
    for number, op in enumerate(program.ops):
        assert all(earlier < number for earlier in op.after), f"{op} begins before what it comes after"
        assert op.by is None or 0 <= op.by < len(program.uses), f"nobody waits for {op}"
    assert [op.at for op in program.ops] == sorted(op.at for op in program.ops)


def _check_units(program: Program) -> None:
    facts, here = program.facts, dict[int, int | None]()  # unit -> the use that waits for it
    room = 1 + facts.prefetch
    for at, use in enumerate(program.uses):
        for op in program.at(at):
            if op.kind is Kind.UNSHARD:
                assert op.target not in here, f"{op}: it is there"
                assert op.by == program.uses.index(Use(Cause.UNIT, op.target), at), f"{op}: another use waits for it"
                here[op.target] = op.by
            elif op.kind is Kind.RESHARD:
                del here[op.target]
            elif op.kind is Kind.STEP and op.lag == 0 and not facts.steps_in_backward:
                assert not here, f"{op}: its values are gathered"
            assert sum(facts.units[unit].is_leaf for unit in here) <= room, f"{op}: there is no room"
        if use.cause is Cause.UNIT:
            by = here.get(use.number, -1)
            assert by in range(at + 1), f"use {at}: unit {use.number} is not there"


def _check_reductions(program: Program) -> None:
    facts, flying = program.facts, dict[tuple[int, int], int]()
    reduced, summed, stored = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    backwards = sum(use.cause is Cause.END for use in program.uses)
    for op in program.ops:
        what = op.target, op.part
        if op.kind is Kind.REDUCE:
            assert what not in flying, f"{op}: it is under way"
            flying[what] = facts.groups[op.target].pool
            most = Counter(flying.values())
            assert all(count <= facts.buckets[pool] for pool, count in most.items()), f"{op}: no bucket is free"
            reduced[what] += 1
        elif op.kind is Kind.SUM:
            assert what in flying, f"{op}: it is not reduced"
            summed[what] += 1
        elif op.kind is Kind.STORE:
            del flying[what]
            stored[what] += 1
    assert not flying, "a reduction that nobody waits for"
    wanted = {(group, part): backwards for group in facts.order for part in range(len(facts.groups[group].chunks))}
    assert reduced == Counter(wanted)
    assert stored == Counter(wanted)
    assert summed == Counter(wanted if facts.replicas > 1 else {})


def _check_steps(program: Program) -> None:
    facts, ops = program.facts, program.ops
    optimizers = [facts.optimizers[use.number] for use in program.uses if use.cause is Cause.STEPPED]
    stepped = [group for one in optimizers for group in one.groups]
    steps, seen, moved, exchanged = Counter[tuple[int, int]](), Counter[int](), Counter[tuple[int, int]](), 0
    for window in (window for one in optimizers for window in one.windows):
        parts = [(group, seen[group]) for group in window.groups]
        steps.update(parts)
        moved.update(parts if window.is_staged else ())
        exchanged += window.is_whole
        seen.update(window.groups)
    steps.update((group, 0) for group in stepped if not seen[group])
    assert Counter((op.target, op.part) for op in ops if op.kind is Kind.STEP) == steps
    for kind in (Kind.FETCH, Kind.PUT):
        assert Counter((op.target, op.part) for op in ops if op.kind is kind) == moved, kind
    for kind in (Kind.COLLECT, Kind.RETURN):
        assert sum(op.kind is kind for op in ops) == exchanged, kind
    last_store: dict[int, int] = {}  # what averages a group last
    for number, op in enumerate(ops):
        if op.kind in (Kind.STORE, Kind.GATHER):
            last_store[op.target] = number
        elif op.kind is Kind.STEP and not op.lag:
            assert op.part or op.target not in last_store or last_store[op.target] in op.after, f"{op}: not averaged"
        elif op.kind in (Kind.NORM, Kind.VERDICT):
            assert set(last_store.values()) <= set(op.after), f"{op}: not all are averaged"
    published = Counter(op.target for op in ops if op.kind is Kind.PUBLISH)
    assert published == Counter(g for g in stepped if facts.groups[g].is_full and facts.groups[g].is_published)


# -- random models


@st.composite
def models(draw: Any) -> tuple[Facts, list[Use]]:
    """Facts of a random model, and the uses of a step: units in any order, used again, around other units, frozen, in
    no optimizer, groups that never have all gradients, any tier, micro-batches, clipping."""
    layers = draw(st.integers(1, 6))
    shards_parameters = draw(st.booleans())
    steps_in_backward = draw(st.booleans())
    postpones = draw(st.booleans()) and not steps_in_backward
    replicas, tensor_ranks = draw(st.sampled_from([1, 1, 1, 2, 8])), draw(st.sampled_from([1, 1, 1, 2]))
    groups = []
    for layer in range(layers):
        groups.append(
            GroupFacts(
                name=f"g{layer}",
                shard=draw(st.integers(1, 100)),
                chunks=tuple(draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))),
                pool=draw(st.integers(0, 1)),
                is_full=not shards_parameters,
            )
        )
    trained = [number for number in range(layers) if number == 0 or draw(st.integers(0, 3))]
    stepped = [number for number in trained if number == 0 or draw(st.integers(0, 5))]  # the others no optimizer has
    inner = shards_parameters and draw(st.booleans())
    units = [UnitFacts(name=f"u{n}", groups=(n,), is_leaf=n > 0 or not inner) for n in range(layers)]
    windows = [
        window
        for number in stepped
        for window in draw(st.lists(windows_of(number, postpones), max_size=3))
        if not steps_in_backward
    ]
    postponed = [group for window in windows if window.is_postponed for group in window.groups]
    called = [n for n in stepped if groups[n].is_full and n in postponed]
    facts = Facts(
        groups=tuple(groups),
        units=tuple(units) if shards_parameters else (),
        order=tuple(draw(st.permutations(trained))),
        optimizers=(OptimizerFacts(groups=tuple(draw(st.permutations(stepped))), windows=tuple(windows)),),
        buckets=(draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        calls=("buffers", *(f"publish g{n}" for n in called)),
        of_all=(0,),
        publishes={1 + place: n for place, n in enumerate(called)},
        ranks=draw(st.sampled_from([2, 8, 1024])),
        replicas=replicas,
        tensor_ranks=tensor_ranks,
        prefetch=draw(st.integers(0, 3)),
        overlaps=draw(st.booleans()),
        in_order=draw(st.booleans()),
        learns_late=draw(st.booleans()),
        spans=draw(st.booleans()),
        marks_reductions=not shards_parameters and draw(st.booleans()),
        steps_in_backward=steps_in_backward,
        publishes_late=not shards_parameters and not postpones and draw(st.booleans()),
    )
    return facts, _uses_of(draw, facts, trained)


def windows_of(group: int, postpones: bool) -> st.SearchStrategy[WindowFacts]:
    return st.builds(
        WindowFacts,
        groups=st.just((group,)),
        is_postponed=st.just(postpones),
        is_staged=st.booleans(),
        is_whole=st.booleans(),
    )


def _uses_of(draw: Any, facts: Facts, trained: list[int]) -> list[Use]:
    layers, uses = range(len(facts.groups)), list[Use]()
    micros = 1 if facts.steps_in_backward else draw(st.integers(1, 3))
    for micro in range(micros):
        uses.append(Use(Cause.FORWARD))
        if draw(st.booleans()):
            uses.append(Use(Cause.CALL, 0))
        order = [*draw(st.permutations(layers)), *draw(st.lists(st.sampled_from(layers), max_size=4))]
        read = dict.fromkeys(order) if micro == 0 else {}
        if facts.units:
            uses += [Use(Cause.UNIT, unit) for unit in order]
        elif facts.publishes_late:
            uses += [Use(Cause.READ, group) for group in read if group in trained]
        by_group = {group: call for call, group in facts.publishes.items()}
        uses += [Use(Cause.CALL, by_group[group]) for group in read if group in by_group]
        uses.append(Use(Cause.BACKWARD))
        for layer in reversed(order):
            if facts.units:
                uses.append(Use(Cause.UNIT, layer))
            complete = Use(Cause.GRADIENT, layer)
            if layer in trained and complete not in uses[uses.index(Use(Cause.BACKWARD)) :] and draw(st.integers(0, 4)):
                uses.append(complete)
        is_last = micro == micros - 1
        reduces = is_last or draw(st.booleans())
        uses.append(Use(Cause.END if reduces else Cause.KEPT))
        if reduces and not facts.steps_in_backward:
            looks = st.sampled_from([Cause.READ_GRADIENT, Cause.MEASURE, Cause.LOOK])
            uses += [Use(cause) for cause in draw(st.lists(looks, max_size=1))]
    clips = not facts.steps_in_backward and draw(st.booleans())
    at_once = clips and draw(st.booleans())
    uses += [Use(Cause.UNSCALE)] if clips and draw(st.booleans()) else []
    uses += [Use(Cause.CLIP)] if clips else []
    return [*uses, Use(Cause.STEP_AFTER_CLIP if at_once else Cause.STEP), Use(Cause.STEPPED)]
