"""Private interfaces of `torch.distributed`, as `torch_private` has those of torch. No other module names any."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from lightning_zero.torch_private import find

# -- ranks


def in_one_launch(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Inside, asynchronous collectives of a group go to the device together. `batch_isend_irecv` does so for messages.
    Without it ranks would tell each other what they gather in a launch of its own. Private: `_coalescing_manager`."""
    return dist._coalescing_manager(group, async_ops=True)


default_store: Callable[[], dist.Store] = find(dist.distributed_c10d, "_get_default_store")
"""Returns the store through which the processes have met. The public `get_group_store` of a group has none where its
backend is of Python, and another store would need an address. Without it ranks could not tell who is lost, nor agree
without a collective. Private: `_get_default_store`."""

local_tensor: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
"""Returns this rank's part of a DTensor: the tensor that it holds. `to_local` makes a node of a graph or, of a
parameter, another tensor. Without it optimizers would step a copy. Private: `_local_tensor`."""


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Has a DTensor hold another tensor. Only `from_local` makes them, and anew. Without it a tensor-parallel parameter
    could not be released. Private: `_local_tensor`."""
    tensor._local_tensor = local


layout_of: Callable[[DTensor], Any] = attrgetter("_spec")
"""Returns how a DTensor is divided, from which another one can be made: ``DTensor(local, layout, requires_grad=...)``.
The public `from_local` reads the values, and would gather a gradient in shards. Without it neither gradients nor saved
values of tensor-parallel parameters could be DTensors. Private: `_spec`."""


def awaited(tensor: Tensor) -> Tensor:
    """Waits for the collective of torch that makes `tensor`, if there is one, and returns the plain tensor. The public
    `wait` of DTensors is for those alone. Without it a checkpoint of activations would hold a tensor that is not there
    yet. Private: `torch.distributed._functional_collectives.AsyncCollectiveTensor`."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


COLLECTIVES = "_c10d_functional"
"""Namespace of the collectives that DTensor calls, among torch's operations. The public ones are other operations.
Without it a rehearsal would know neither what they send nor whose memory they return. Private: `_c10d_functional`."""


def leave_imagined_world() -> None:
    """Ends torch's process group of a world in which nobody else is. What DTensor keeps of its meshes goes, too.
    Without it a mesh of the next world, equal to one of these, would be given the groups of this one. Private:
    `_clear_sharding_prop_cache`."""
    from torch.distributed.tensor import debug

    dist.destroy_process_group()
    debug._clear_sharding_prop_cache()


# -- checkpoints


def plan_of_all() -> Any:
    """Returns what has `torch.distributed.checkpoint.load` read all of a checkpoint into its `original_state_dict`. The
    public `dcp_to_torch_save` reads so, too, but local folders alone, and into a file. Without it only what is known of
    a checkpoint beforehand could be imported. Private: `_EmptyStateDictLoadPlanner`."""
    module = importlib.import_module("torch.distributed.checkpoint.default_planner")
    return find(module, "_EmptyStateDictLoadPlanner")()


def remote_reader(url: str) -> Any:
    """Returns what reads a checkpoint of `torch.distributed.checkpoint` in any file system of fsspec. Torch 2.15 makes
    it public, and warns of the private one. Without it checkpoints in an object store could not be imported. Private:
    `torch.distributed.checkpoint._fsspec_filesystem.FsspecReader`."""
    return _remote_files().FsspecReader(url)


def remote_writer(url: str) -> Any:
    """Returns what writes one there; see `remote_reader`. Without it none could be exported there. Private:
    `torch.distributed.checkpoint._fsspec_filesystem.FsspecWriter`."""
    return _remote_files().FsspecWriter(url)


def _remote_files() -> Any:
    try:
        return importlib.import_module("torch.distributed.checkpoint.fsspec_filesystem")
    except ModuleNotFoundError:
        return importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
