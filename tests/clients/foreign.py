"""What comes before any package of others is imported: the server that ranks are forked from has it, and the tests.

Some packages import Lightning by its old name. And torchvision, as PyPI has it, is built for the torch of CUDA: beside
a torch for CPUs it cannot load its operators, and its import fails where it describes two of them, and with it that of
everything that looks whether torchvision is installed, such as torchmetrics. Nothing here calls an operator, so it is
enough that these two have names.
"""

import torch


def name_operators() -> "torch.library.Library | None":
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        named = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            named.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return named
    return None


NAMED = name_operators()  # kept, as the names are gone when this is

import lightning_zero  # noqa: E402

lightning_zero.serve_pytorch_lightning()
