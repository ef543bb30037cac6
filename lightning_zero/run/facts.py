"""`facts_of`: what a program needs to know of an engine, as integers."""

from collections.abc import Mapping

from lightning_zero.run.latest import names_of
from lightning_zero.run.loans import Loans
from lightning_zero.run.program import Facts, GroupFacts, OptimizerFacts, UnitFacts, WindowFacts
from lightning_zero.run.reductions import Reductions
from lightning_zero.run.stepping import Stepping
from lightning_zero.shards.bucket import BucketPool
from lightning_zero.shards.gradient import GroupGradient
from lightning_zero.shards.group import ShardGroup
from lightning_zero.shards.optimizer import PieceStepper
from lightning_zero.shards.options import Options
from lightning_zero.shards.whole import WholeWindow
from lightning_zero.stage import Partition
from lightning_zero.wire.mesh import Mesh


def facts_of(
    loans: Loans, reductions: Reductions, stepping: Stepping, options: Options, partition: Partition, mesh: Mesh
) -> Facts:
    """Returns what rests where on this rank."""
    numbers = {group: number for number, group in enumerate(loans.groups)}
    steppers = list(stepping.steppers.values())
    gradients = {gradient.group: gradient for gradient in reductions.gradients}
    pools = {pool: number for number, pool in enumerate(reductions.pools)}
    units, rendezvous, comm = loans.cache.units, loans.runner.rendezvous, mesh.shard
    order = tuple(numbers[gradient.group] for gradient in reductions.gradients if not gradient.group.kind.is_idle)
    return Facts(
        groups=tuple(_group_facts(one, gradients.get(one), pools) for one in loans.groups),
        units=tuple(
            UnitFacts(name=unit.name, groups=tuple(numbers[group] for group in unit.groups), is_leaf=unit.is_leaf)
            for unit in units
        ),
        order=order,
        optimizers=tuple(_optimizer_facts(one, numbers) for one in steppers),
        buckets=tuple(pool.size for pool in reductions.pools),
        calls=rendezvous.serving.labels,
        of_all=rendezvous.serving.of_all,
        publishes={number - len(units): numbers[group] for number, group in loans.latest.published.items()},
        ranks=comm.size,
        replicas=mesh.replicate.size,
        tensor_ranks=mesh.tensor.size,
        prefetch=options.prefetch,
        overlaps=options.overlap,
        in_order=comm.keeps_order,
        learns_late=comm.learns_late,
        gathers_gradients=not partition.optimizer,
        steps_in_backward=options.step_in_backward,
        publishes_late=stepping.publishes_late,
        spans=bool(units) and rendezvous.spans,
        marks_reductions=rendezvous.readiness.marks_reductions,
        settles_alone=not units and reductions.may_settle_alone and len(order) == len(reductions.gradients),
    )


def _optimizer_facts(stepper: PieceStepper, numbers: Mapping[ShardGroup, int]) -> OptimizerFacts:
    return OptimizerFacts(
        groups=tuple(dict.fromkeys(numbers[slot.group] for slot in stepper.without_idle(stepper.slots))),
        windows=tuple(
            WindowFacts(
                groups=tuple(dict.fromkeys(numbers[slot.group] for slot in window.slots)),
                is_postponed=window.is_late,
                is_staged=bool(window.staged),
                is_whole=isinstance(window, WholeWindow),
            )
            for window in stepper.windows_apart()
        ),
    )


def _group_facts(group: ShardGroup, gradient: GroupGradient | None, pools: Mapping[BucketPool, int]) -> GroupFacts:
    travels = gradient is not None and gradient.travels
    return GroupFacts(
        name=group.name,
        holds=names_of(group),
        shard=group.layout.shard_numel,
        chunks=tuple(chunk.width for chunk in group.layout.chunks) if travels else (),
        itemsize=group.kind.resting.itemsize,
        reduced_itemsize=group.kind.declared.itemsize if gradient is None else gradient.dtype.itemsize,
        pool=pools[gradient.pool] if gradient is not None and travels else 0,
        is_full=group.stays_full,
        is_published=group.is_cut,
    )
