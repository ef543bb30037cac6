"""Gathers of ranks that go different ways: uneven evaluation, `generate` of other lengths, a teacher's forward.

Outside training every rank says, before it gathers, what it wants; all serve all that is wanted, and each goes on. A
rank that has come to the end serves the others until they have too. The end of an evaluation is such an end, and so
is any other collective of ours.

    rank 0   block.0   block.1   block.0   done      done
    rank 1   block.0   block.1   done      done      done
    served   block.0   block.1   block.0   (nobody wants any: it is over)
"""

from collections.abc import Callable
from typing import final

import torch

from lightning_zero.comm import RankTimeoutError
from lightning_zero.mesh import Mesh

_DONE = -1


@final
class Rendezvous:
    """Agrees on what is gathered next, among the ranks that share shards.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._labels: list[str] = []
        self._serve: list[Callable[[bool], None]] = []
        self.is_open = False
        self.was_open = False  # since its user has last looked: ranks may have done different things

    def enroll(self, label: str, serve: Callable[[bool], None]) -> int:
        """Returns the number under which `want` asks for it.

        Args:
            label: for messages.
            serve: gathers, on every rank; told whether this rank wants to keep the result.
        """
        self._labels.append(label)
        self._serve.append(serve)
        return len(self._serve) - 1

    @property
    def applies(self) -> bool:
        """Whether ranks may be at different places now: no gradients are wanted, and none are computed."""
        computes_gradients = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        return self._mesh.shard.size > 1 and not computes_gradients

    def want(self, number: int) -> None:
        """Returns when this rank has been served."""
        self._set_open(False)  # what follows is the rendezvous itself
        self._serve_all(self._exchange(number), number)
        self._set_open(True)

    def close(self) -> None:
        """Serves the other ranks until all have come to the end. A collective, if the rendezvous is open."""
        if not self.is_open:
            return
        self._set_open(False)
        wants = self._exchange(_DONE)
        while any(want != _DONE for want in wants):
            self._serve_all(wants, _DONE)
            wants = self._exchange(_DONE)

    def _exchange(self, number: int) -> list[int]:
        comm = self._mesh.shard
        wants = torch.empty(comm.size, 1, dtype=torch.int64)
        try:
            comm.all_gather_host(wants, torch.tensor([number]), "rendezvous")
        except RankTimeoutError as error:
            mine = "had done" if number == _DONE else f"wanted {self._labels[number]}"
            raise RankTimeoutError(f"Rank {comm.rank} {mine}. {error}") from error
        return wants.flatten().tolist()

    def _serve_all(self, wants: list[int], mine: int) -> None:
        for want in sorted(set(wants) - {_DONE}):
            self._serve[want](want == mine)

    def _set_open(self, is_open: bool) -> None:
        self.is_open = is_open
        self.was_open |= is_open
        for comm in (self._mesh.world, self._mesh.shard, self._mesh.replicate):
            comm.before_next = self.close if is_open else None
