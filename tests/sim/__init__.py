"""`sim`: a simulated accelerator in pure Python, for the parts of the package that a CPU alone would never run.

Tensors of the device "sim" are plain tensors over host memory. A kernel does not run when it is launched: it waits in
the queue of its stream. What a real device does *sometimes* when a wait is missing, this one does *always*:

- streams run as late as a device may, or those beside the default stream at once (`streams.Policy`);
- memory that is freed is filled with NaN, and handed out again first; a copy to the host leaves NaN until it has run;
- two accesses that no wait orders are an error, whatever the order they ran in (`memory`: vector clocks);
- a collective runs when all ranks have launched it, and ranks that launch different ones are an error (`group`).

    streams     streams, events, and what the host has waited for
    memory      blocks, accesses, races; pinned memory
    kernels     torch's operators, run later
    autocast    casts, as torch makes them on the CPU
    device      makes all of it known to torch, as a PrivateUse1 device
    group       collectives as NCCL has them, for ranks that are threads

Import it in a process of its own (`run_on_sim`): torch keeps a device for good. The interface for devices in Python is
private and new, so `WHY_NOT` says where this has not been tried.
"""

import re

import torch

TRIED = ("2.13", "2.15")
WHY_NOT = (
    ""
    if re.match("|".join(TRIED), torch.__version__)
    else f"the simulated device was not tried on torch {torch.__version__}"
)
