"""Weights of safetensors files: of every rank its part, in every layout of files, or one error that names all."""

import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import jobs
import pretrained_jobs
from compare import assert_same_bits, differing
from construction_jobs import Wide
from lightning_zero import export_safetensors
from lightning_zero.checkpoint import CheckpointError
from lightning_zero.run import pretrained_files
from lightning_zero.run.construction import constructing
from lightning_zero.run.engine import Engine, Options
from lightning_zero.run.pretrained import load_pretrained
from lightning_zero.run.pretrained_files import PretrainedTensor
from lightning_zero.shards.early import class_of
from lightning_zero.views.lazy import LazyTensor
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import Assorted, assorted, seeded
from ranks import RankPool, run_alone
from thread_world import ThreadWorld


class Kinds(nn.Module):
    """Buffers of either sort, several dtypes, a scalar, an empty and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Assorted()
        self.norm = nn.BatchNorm1d(7)
        self.narrow = nn.Linear(9, 5, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)


def kinds(seed: int) -> Kinds:
    def make() -> Kinds:
        model = Kinds()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.normal_()
        model.norm.num_batches_tracked.fill_(seed)
        model.unsaved.fill_(1)
        return model

    return seeded(make, seed)


def on_meta() -> Kinds:
    """But for what no file has."""
    with torch.device("meta"):
        model = Kinds()
    model.inner.frozen.requires_grad_(False)
    model.unsaved = torch.ones(3)
    return model


def saved(model: nn.Module, path: Path, **changes: Tensor | None) -> Path:
    """The state of a model in a file, a tied tensor once."""
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "inner.head.weight"}
    state |= changes
    save_file({name: value for name, value in state.items() if value is not None}, path)
    return path


@pytest.fixture(scope="module")
def source() -> Kinds:
    return kinds(seed=5)


@pytest.fixture(scope="module")
def file(source: Kinds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(source, tmp_path_factory.mktemp("pretrained") / "model.safetensors")


def on_ranks(world: int, rank_main: Callable[[Comm], Any]) -> list[Any]:
    return [rank_main(LocalComm())] if world == 1 else ThreadWorld(world).run(rank_main)


def errors_on_ranks(world: int, act: Callable[[Comm], Any]) -> list[str]:
    def rank_main(comm: Comm) -> str:
        try:
            act(comm)
        except RuntimeError as error:
            return str(error)
        return ""

    return on_ranks(world, rank_main)


# -- values


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("when", ["on meta", "whole", "in the engine"])
def test_a_model_takes_the_values_of_a_file(
    when: str, world: int, stage: int, trains: bool, file: Path, source: Kinds
) -> None:
    def rank_main(comm: Comm) -> dict[str, Tensor]:
        model = on_meta() if when == "on meta" else kinds(seed=comm.rank)
        if when != "in the engine":
            with constructing(stage=stage, comm=comm) as construction:
                load_pretrained(model, file, comm=comm, construction=construction)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizers = [torch.optim.SGD(trainable, lr=0.1)] if trains else []
        engine = Engine(model, optimizers, stage=stage, comm=comm)
        if when == "in the engine":
            load_pretrained(model, file, comm=comm, engine=engine)
        assert model.inner.head.weight is model.inner.embedding.weight
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in source.parameters()]
        engine.close()
        return model.state_dict()

    for found in on_ranks(world, rank_main):
        assert_same_bits(found, source.state_dict())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_of_two_byte_weights_take_all_bits(stage: int, file: Path, source: Kinds) -> None:
    def rank_main(comm: Comm) -> dict[str, Tensor]:
        model = kinds(seed=0)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        engine = Engine(model, [optimizer], stage=stage, comm=comm, options=Options(autocast_dtype=torch.bfloat16))
        load_pretrained(model, file, comm=comm, engine=engine)
        return engine.states.full_model()

    for found in on_ranks(2, rank_main):
        assert differing(found, source.state_dict()) == []


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_values_are_cast_to_the_dtype_that_the_model_has(stored: torch.dtype, own: torch.dtype, tmp_path: Path) -> None:
    state = {name: value.to(stored) for name, value in assorted(3).state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")

    def rank_main(comm: Comm) -> dict[str, Tensor]:
        with constructing(stage=3, comm=comm) as construction:
            with torch.device("meta"):
                model = Assorted().to(own)
            load_pretrained(model, tmp_path, comm=comm, construction=construction)
        return Engine(model, [], stage=3, comm=comm).states.full_model()

    for found in on_ranks(2, rank_main):
        found.pop("head.weight")
        assert_same_bits(found, {name: value.to(own) for name, value in state.items()})


def test_a_tied_weight_that_a_file_has_twice_is_the_last_as_for_load_state_dict(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in assorted(3).state_dict().items()}
    state["head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    found, expected = assorted(0), assorted(0)
    load_pretrained(found, tmp_path, comm=LocalComm())
    expected.load_state_dict(state)
    assert_same_bits(found.state_dict(), expected.state_dict())


def test_a_weight_in_another_memory_format_keeps_it(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    weight = torch.arange(48.0).view(4, 3, 2, 2)
    save_file({"weight": weight, "bias": torch.ones(4)}, tmp_path / "model.safetensors")
    load_pretrained(model, tmp_path, comm=LocalComm())
    assert model.weight.equal(weight)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


# -- files


def save_gpt2(folder: Path, size: str) -> nn.Module:
    model = seeded(lambda: transformers.GPT2LMHeadModel(GPT2))
    model.save_pretrained(folder, max_shard_size=size)
    return model


GPT2 = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16)


@pytest.mark.parametrize("layout", ["one file", "a folder", "an index", "several files"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_transformers_save_is_what_it_was(stage: int, layout: str, tmp_path: Path) -> None:
    expected = save_gpt2(tmp_path, "1GB" if layout in ("one file", "a folder") else "5KB").state_dict()
    index = tmp_path / "model.safetensors.index.json"
    assert index.is_file() == (layout in ("an index", "several files"))
    if layout == "several files":
        index.unlink()

    def rank_main(comm: Comm) -> dict[str, Tensor]:
        with constructing(stage=stage, comm=comm) as construction:
            with torch.device("meta"):
                model = transformers.GPT2LMHeadModel(GPT2)
            path = tmp_path / "model.safetensors" if layout == "one file" else tmp_path
            load_pretrained(model, path, comm=comm, construction=construction)
        return Engine(model, [], stage=stage, comm=comm).states.full_model()

    for found in on_ranks(2, rank_main):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_rotary_frequencies_that_no_file_has_are_those_of_from_pretrained(stage: int, tmp_path: Path) -> None:
    seeded(lambda: transformers.LlamaForCausalLM(LLAMA)).save_pretrained(tmp_path)
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path)

    def rank_main(comm: Comm) -> tuple[dict[str, Tensor], ...]:
        with constructing(stage=stage, comm=comm) as construction, torch.device("meta"):
            model = transformers.LlamaForCausalLM(LLAMA)
            load_pretrained(model, tmp_path, comm=comm, construction=construction)
        return dict(model.named_buffers()), Engine(model, [], stage=stage, comm=comm).states.full_model()

    for buffers, state in on_ranks(2, rank_main):
        assert_same_bits(buffers, dict(expected.named_buffers()))
        assert_same_bits(state, expected.state_dict())


LLAMA = transformers.LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
)


class Angles(nn.Linear):
    """Has numbers that no file has, and can compute some of them."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("known", torch.ones(2), persistent=False)
        self.register_buffer("unknown", torch.ones(2), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        nn.init.ones_(module.known)
        nn.init.zeros_(module.weight)


class Around(nn.Sequential):
    """Computes the rest for what it holds, as transformers' Falcon-H1 does."""

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.ones_(module[0].unknown)


def test_numbers_that_the_module_around_computes_are_found_there(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Around(Angles())
    save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    load_pretrained(model, tmp_path, comm=LocalComm())
    assert_same_bits(dict(model.named_buffers()), {"0.known": torch.ones(2), "0.unknown": torch.ones(2)})


def test_numbers_that_no_file_has_and_no_model_computes_are_named_at_set_up(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Angles())
    save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    load_pretrained(model, tmp_path, comm=LocalComm())
    assert model[0].known.equal(torch.ones(2))
    assert model[0].weight.equal(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"0\.unknown are on the meta device"):
        Engine(model, [], stage=1, comm=LocalComm())


def test_what_has_values_and_is_not_loaded_keeps_them_where_numbers_are_computed(tmp_path: Path) -> None:
    model = Angles()
    model.known = model.known.to("meta")
    before = model.weight.detach().clone()
    save_file({"bias": torch.ones(2)}, tmp_path / "model.safetensors")
    load_pretrained(model, tmp_path, comm=LocalComm(), strict=False)
    assert model.weight.equal(before)


def test_a_base_model_is_loaded_into_the_module_that_holds_it(tmp_path: Path) -> None:
    whole = save_gpt2(tmp_path, "1GB")
    with torch.device("meta"):
        model = nn.ModuleDict({"trunk": transformers.GPT2Model(GPT2)})
    names = {"lm_head.weight": None}

    def base_name(name: str) -> str | None:
        return names.get(name, name.removeprefix("transformer."))

    load_pretrained(model["trunk"], tmp_path, comm=LocalComm(), rename=base_name)
    assert_same_bits(model["trunk"].state_dict(), whole.transformer.state_dict())
    model["trunk"].wte.weight.data.zero_()
    load_pretrained(model, tmp_path, comm=LocalComm(), rename=lambda name: f"trunk.{base_name(name)}")
    assert_same_bits(model["trunk"].state_dict(), whole.transformer.state_dict())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPool) -> Path:
    """Of a run."""
    path = tmp_path_factory.mktemp("run") / "run.ckpt"
    two_ranks.run(pretrained_jobs.fit_and_save, path)
    return path


def test_an_export_of_a_checkpoint_goes_in_again(checkpoint: Path, tmp_path: Path) -> None:
    export_safetensors(checkpoint, tmp_path / "exported")
    expected = jobs.Classifier.load_from_checkpoint(checkpoint)
    found = jobs.Classifier()
    load_pretrained(found, tmp_path / "exported", comm=LocalComm())
    assert_same_bits(found.state_dict(), expected.state_dict())


def test_r36_every_rank_reads_its_part_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    read = pretrained_jobs.bytes_read(monkeypatch)

    def build(comm: Comm) -> None:
        with constructing(stage=3, comm=comm) as construction:
            with torch.device("meta"):
                model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
            load_pretrained(model, tmp_path, comm=comm, construction=construction)

    on_ranks(4, build)
    assert list(read.values()) == [nbytes // 4] * 4
    read.clear()

    def load(comm: Comm) -> None:
        model = seeded(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]))
        engine = Engine(model, [], stage=3, comm=comm)
        load_pretrained(model, tmp_path, comm=comm, engine=engine)

    on_ranks(4, load)
    assert sum(read.values()) == nbytes
    assert max(read.values()) < 1.1 * nbytes / 4


class Marked(nn.Parameter):
    pass


def test_a_parameter_that_is_built_of_a_file_keeps_its_class_and_attributes(tmp_path: Path) -> None:
    """And what is copied with another shape is spread as ever."""
    save_file({"weight": torch.ones(8, 8)}, tmp_path / "model.safetensors")
    row = torch.arange(8.0)
    stored = PretrainedTensor("row", (8,), row.dtype, ("row", 0), io.BytesIO(row.numpy().tobytes()))

    def build(comm: Comm) -> tuple[Any, ...]:
        with constructing(stage=3, comm=comm) as construction, torch.no_grad():
            model = nn.Module()
            model.weight = Marked(torch.empty(8, 8, device="meta"), requires_grad=False)
            model.weight.decays = False
            load_pretrained(model, tmp_path, comm=comm, construction=construction)
            weight = model.weight
            found = class_of(weight), weight.decays, weight.requires_grad, bool(weight.eq(1).all())
            weight.copy_(LazyTensor(stored))
            return (*found, bool(weight.eq(row).all()))

    assert on_ranks(2, build) == [(Marked, False, False, True, True)] * 2


def test_a_parameter_without_memory_keeps_its_class_and_attributes_where_it_is_not_sharded_too(tmp_path: Path) -> None:
    """Optimizers are given parameter groups by such attributes."""
    save_file({"weight": torch.ones(8, 8)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.weight = Marked(torch.empty(8, 8, device="meta"), requires_grad=False)
    model.weight.decays = False
    load_pretrained(model, tmp_path, comm=LocalComm())
    weight = model.weight
    assert (type(weight), weight.decays, weight.requires_grad) == (Marked, False, False)
    assert weight.eq(1).all()


def test_what_is_cast_is_in_memory_a_megabyte_at_a_time() -> None:
    read: list[int] = []

    class File(io.BytesIO):
        def readinto(self, into: Any) -> int:
            read.append(len(into))
            return super().readinto(into)

    values = torch.arange(3 * 2**18 + 5.0)
    file = File(values.numpy().tobytes())
    tensor = PretrainedTensor("weight", tuple(values.shape), values.dtype, ("model.safetensors", 0), file)
    assert tensor.for_loading(torch.empty_like(values, dtype=torch.bfloat16)).equal(values.bfloat16())
    assert read == [2**20] * 3 + [20]


@pytest.mark.parametrize("world", [2, 4])
def test_r36_a_rank_never_holds_more_than_its_share_and_the_largest_unit(world: int, tmp_path: Path) -> None:
    save_file(
        {name: value for name, value in seeded(Wide).state_dict().items() if name != "head.weight"},
        tmp_path / "model.safetensors",
    )
    ranks, errors = run_alone(world, pretrained_jobs.resident_bytes, tmp_path)  # others keep what earlier tests left
    assert errors == [None] * world
    for rank in ranks:
        assert rank["peak"] <= 1.1 * (rank["model"] / world + rank["unit"])


# -- what does not fit


@pytest.mark.parametrize("world", [1, 2])
def test_all_that_does_not_fit_is_named_in_one_error_on_every_rank(world: int, source: Kinds, tmp_path: Path) -> None:
    changes = {"norm.weight": torch.ones(8), "narrow.bias": None, "narrow.weight": None, "more": torch.ones(1)}
    changes |= {"inner.scale": torch.tensor(1j)}
    saved(source, tmp_path / "model.safetensors", **changes)
    for told in errors_on_ranks(world, lambda comm: load_pretrained(kinds(0), tmp_path, comm=comm)):
        assert "'norm.weight' is (8,) in the files and (7,) in the module" in told
        assert "'inner.scale' is torch.complex64 in the files and torch.float32 in the module" in told
        assert "missing in the files: narrow.weight, narrow.bias" in told
        assert "in the files, and not in the module: more" in told
        assert "rename=" in told
        assert "strict=False" in told


def test_all_names_of_a_tied_weight_must_fit(source: Kinds, tmp_path: Path) -> None:
    for name, other in (
        ("inner.head.weight", "inner.embedding.weight"),
        ("inner.embedding.weight", "inner.head.weight"),
    ):
        whole = source.state_dict()[other].clone()
        saved(source, tmp_path / "model.safetensors", **{other: whole, name: torch.ones(2, 2)})
        with pytest.raises(RuntimeError, match=rf"'{name}' is \(2, 2\) in the files"):
            load_pretrained(kinds(0), tmp_path, comm=LocalComm())


def test_names_of_compiled_modules_are_as_written(file: Path, source: Kinds) -> None:
    model = kinds(0)
    model.narrow = torch.compile(model.narrow, backend="eager")
    load_pretrained(model, file, comm=LocalComm())
    assert model.narrow.weight.equal(source.narrow.weight)


def test_any_number_of_tensors_may_be_left_out(file: Path, source: Kinds) -> None:
    model, before = kinds(0), kinds(0)
    left = load_pretrained(
        model, file, comm=LocalComm(), rename=lambda name: None if name.startswith("norm.") else name, strict=False
    )
    assert left == ([f"norm.{name}" for name in source.norm.state_dict()], [])
    assert_same_bits(model.norm.state_dict(), before.norm.state_dict())


def test_nothing_is_loaded_where_not_all_fits(source: Kinds, tmp_path: Path) -> None:
    saved(source, tmp_path / "model.safetensors", more=torch.ones(1))
    model, before = kinds(0), kinds(0)
    with suppress(RuntimeError):
        load_pretrained(model, tmp_path, comm=LocalComm())
    assert_same_bits(model.state_dict(), before.state_dict())


def test_without_strict_the_rest_stays_as_it_is(source: Kinds, tmp_path: Path) -> None:
    saved(source, tmp_path / "model.safetensors", **{"narrow.bias": None, "more": torch.ones(1)})
    model, before = kinds(0), kinds(0)
    left = load_pretrained(model, tmp_path, comm=LocalComm(), strict=False)
    assert left == (["narrow.bias"], ["more"])
    assert model.narrow.bias.equal(before.narrow.bias)
    assert model.narrow.weight.equal(source.narrow.weight)
    saved(source, tmp_path / "model.safetensors", **{"narrow.bias": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"'narrow.bias' is \(2,\) in the files"):
        load_pretrained(model, tmp_path, comm=LocalComm(), strict=False)


def test_two_names_that_become_one_are_refused(file: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"'norm\.running_mean' and 'norm\.running_var' would both be 'norm\.running'"
    ):
        load_pretrained(
            kinds(0), file, comm=LocalComm(), rename=lambda name: name.replace("_mean", "").replace("_var", "")
        )


def refusal(path: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        load_pretrained(kinds(0), path, comm=LocalComm())
    assert isinstance(caught.value.__cause__, CheckpointError)
    return str(caught.value)


def test_pickles_are_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    torch.save(kinds(0).state_dict(), tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        assert "['pytorch_model.bin']" in refusal(path)
        assert "safetensors.torch.save_file(torch.load(FILE, weights_only=True)" in refusal(path)


def test_a_place_without_safetensors_is_refused(tmp_path: Path) -> None:
    assert "has no safetensors" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "gpt2")
    assert "snapshot_download" in refusal(Path("gpt2"))


def test_a_checkpoint_of_a_run_is_refused_with_what_to_write_instead(checkpoint: Path) -> None:
    assert "--safetensors" in refusal(checkpoint)


def test_damaged_files_are_named(file: Path, tmp_path: Path) -> None:
    whole, path = file.read_bytes(), tmp_path / "model.safetensors"
    path.write_bytes(whole[:-4])
    assert f"{path} is damaged, or was not written to its end" in refusal(path)
    for part in (whole[:100], b""):
        path.write_bytes(part)
        assert f"{path} is not a safetensors file, or was not written to its end" in refusal(path)
    length = int.from_bytes(whole[:8], "little")
    for entry, told in (
        ({"dtype": "F4"}, "is not a safetensors file: KeyError: 'F4'"),
        ({"shape": [6]}, "is damaged, or was not written to its end: 'norm.weight' ends at"),
    ):
        header = json.loads(whole[8 : 8 + length])
        header["norm.weight"] |= entry
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        assert f"{path} {told}" in refusal(path)


def test_a_header_that_is_longer_than_the_format_allows_is_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = int.from_bytes(file.read_bytes()[:8], "little")
    monkeypatch.setattr(pretrained_files, "LONGEST_HEADER", length)
    load_pretrained(kinds(0), file, comm=LocalComm())
    monkeypatch.setattr(pretrained_files, "LONGEST_HEADER", length - 1)
    assert f"{file} is not a safetensors file" in refusal(file)


def test_an_index_that_promises_more_is_refused(tmp_path: Path) -> None:
    save_gpt2(tmp_path, "5KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    more = {**listed, "weight_map": {**listed["weight_map"], "lm_head.bias": first.name}}
    index.write_text(json.dumps(more))
    assert "lm_head.bias are in the index, and not in the files" in refusal(tmp_path)
    index.write_text(json.dumps(listed))
    first.unlink()
    assert f"{first}, which the index names, is missing" in refusal(tmp_path)
    index.write_text("[]")
    assert "is no index" in refusal(tmp_path)


def test_of_a_tensor_in_two_files_the_one_that_the_index_names_is_read(
    file: Path, source: Kinds, tmp_path: Path
) -> None:
    values = load_file(file)
    one, *others = values
    save_file({one: values[one]}, tmp_path / "first.safetensors")
    save_file(values | {one: torch.zeros(2)}, tmp_path / "second.safetensors")
    listed = {one: "first.safetensors"} | dict.fromkeys(others, "second.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    model = kinds(0)
    load_pretrained(model, tmp_path, comm=LocalComm())
    assert_same_bits(model.state_dict(), source.state_dict())


def test_of_two_indices_the_one_that_transformers_write_is_read(file: Path, source: Kinds, tmp_path: Path) -> None:
    for index, name in (("consolidated", "absent"), ("model", "here")):
        listed = dict.fromkeys(load_file(file), f"{name}.safetensors")
        (tmp_path / f"{index}.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    (tmp_path / "here.safetensors").write_bytes(file.read_bytes())
    model = kinds(0)
    load_pretrained(model, tmp_path, comm=LocalComm())
    assert_same_bits(model.state_dict(), source.state_dict())


def test_model_safetensors_is_all_of_a_model(file: Path, source: Kinds, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file.read_bytes())
    save_file({"layers.0.wq.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    model = kinds(0)
    load_pretrained(model, tmp_path, comm=LocalComm())
    assert_same_bits(model.state_dict(), source.state_dict())


def test_files_of_another_file_system_are_read(file: Path, source: Kinds) -> None:
    fsspec.filesystem("memory").pipe("/pretrained/model.safetensors", file.read_bytes())
    for path in ("memory://pretrained", "memory://pretrained/model.safetensors"):
        model = kinds(0)
        load_pretrained(model, path, comm=LocalComm())
        assert_same_bits(model.state_dict(), source.state_dict())


def test_a_tensor_in_two_files_is_refused(file: Path, tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).write_bytes(file.read_bytes())
    assert "is in two files" in refusal(tmp_path)


def test_what_one_rank_cannot_read_fails_on_all(file: Path, tmp_path: Path) -> None:
    def load(comm: Comm) -> None:
        with constructing(stage=3, comm=comm) as construction:
            load_pretrained(on_meta(), file if comm.rank else tmp_path, comm=comm, construction=construction)

    told = errors_on_ranks(3, load)
    assert all("rank 0, loading weights: " in each and "has no safetensors" in each for each in told)


# -- under Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    state = seeded(jobs.Classifier, 9).state_dict()
    save_file(
        {name: value.clone() for name, value in state.items() if name != "again.weight"}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["OnMeta", "LoadedLater"])
def test_training_goes_on_from_the_file(
    kind: str, stage: int, precision: str, two_ranks: RankPool, folder: Path
) -> None:
    found = two_ranks.run(pretrained_jobs.fit, kind, {"stage": stage}, folder, precision)
    expected = two_ranks.once(pretrained_jobs.fit, "LoadedBefore", {"stage": 1}, folder, precision)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_same_bits(mine["weights"], theirs["weights"])


@pytest.mark.parametrize("kind", ["OnMeta", "LoadedLater"])
def test_one_rank_trains_on_from_the_file(kind: str, pool_of: Callable[[int], RankPool], folder: Path) -> None:
    (found,) = pool_of(1).run(pretrained_jobs.fit, kind, {"stage": 3}, folder)
    (expected,) = pool_of(1).run(pretrained_jobs.fit, "LoadedBefore", "auto", folder)
    assert found["losses"] == expected["losses"]
    assert_same_bits(found["weights"], expected["weights"])
