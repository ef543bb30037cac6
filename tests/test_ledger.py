import gc

import torch

from lightning_zero.tiers.ledger import Category, Ledger, Place, Tier

HOST = Place(torch.device("cpu"))


def test_bytes_are_live_until_the_last_view_is_gone() -> None:
    ledger = Ledger()
    tensor = ledger.allocate(Category.MASTER, 100, torch.float32, HOST)
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert ledger.live[Category.MASTER] == 400
    del view
    gc.collect()
    assert ledger.live[Category.MASTER] == 0
    assert ledger.peak[Category.MASTER] == 400


def test_views_of_one_storage_are_booked_once() -> None:
    ledger, tensor = Ledger(), torch.zeros(8)
    ledger.book_tensor(Category.OPTIMIZER_STATE, tensor[:4])
    ledger.book_tensor(Category.OPTIMIZER_STATE, tensor)
    assert ledger.live[Category.OPTIMIZER_STATE] == 32


def test_tiers_are_booked_apart() -> None:
    ledger = Ledger()
    held = [
        ledger.allocate(Category.MASTER, 10, torch.float32, Place(torch.device("cpu"), tier))
        for tier in (Tier.HOST, Tier.HOST, Tier.DEVICE)
    ]
    assert ledger.tiers == {Tier.DEVICE: 40, Tier.HOST: 80, Tier.DISK: 0}
    assert ledger.live[Category.MASTER] == sum(tensor.nbytes for tensor in held)
    held.clear()
    assert ledger.tiers == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: 0}
    assert ledger.tier_peak == {Tier.DEVICE: 40, Tier.HOST: 80, Tier.DISK: 0}
    assert ledger.peak_in == {(Category.MASTER, Tier.DEVICE): 40, (Category.MASTER, Tier.HOST): 80}


def test_what_is_allocated_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        tensor = Ledger().allocate(Category.BUCKET, 4, torch.float32, HOST)
    assert not tensor.is_inference()
