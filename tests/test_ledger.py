import gc

import torch

from lightning_zero.ledger import Category, Ledger

HOST = torch.device("cpu")


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
    ledger.adopt(Category.OPTIMIZER_STATE, tensor[:4])
    ledger.adopt(Category.OPTIMIZER_STATE, tensor)
    assert ledger.live[Category.OPTIMIZER_STATE] == 32


def test_an_emptied_storage_costs_nothing_and_comes_back() -> None:
    ledger = Ledger()
    tensor = ledger.allocate(Category.GATHERED, 10, torch.float64, HOST)
    view = tensor[2:4]
    ledger.resize(tensor, 0)
    assert ledger.live[Category.GATHERED] == 0
    ledger.resize(tensor, 80)
    tensor.fill_(3.0)
    assert view.tolist() == [3.0, 3.0]
    assert ledger.live[Category.GATHERED] == 80


def test_what_is_allocated_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        tensor = Ledger().allocate(Category.BUCKET, 4, torch.float32, HOST)
    assert not tensor.is_inference()
