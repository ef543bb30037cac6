"""Files of published models whose tensors transformers names, stacks or cuts otherwise by now: what its own
`from_pretrained` makes of them, and of every rank its part."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pretrained_jobs
from compare import assert_same_bits
from lightning_zero.run import conversion
from lightning_zero.run.construction import constructing
from lightning_zero.run.conversion import Joined
from lightning_zero.run.engine import Engine
from lightning_zero.run.pretrained import Left, load_pretrained
from lightning_zero.run.pretrained_files import PretrainedTensor
from lightning_zero.shards.extents import Extent
from lightning_zero.wire.comm import Comm
from lightning_zero.wire.local import LocalComm
from models import seeded
from thread_world import ThreadWorld

FILE = "model.safetensors"
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
SEES = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "intermediate_size": 12, "out_hidden_size": 16,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
TALKS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ROTATES = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}


def mixtral(experts: int = 3) -> nn.Module:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def vision() -> nn.Module:
    config = transformers.Qwen3VLMoeConfig(text_config={**SIZES, **TALKS, **ROTATES}, vision_config=SEES)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def dino() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes))


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts are stacked": mixtral,
    "more experts than digits sort": lambda: mixtral(11),
    "one is cut in three": lambda: transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES)),
    "layers are renamed": dino,
    "experts are turned": vision,
}


def load(
    make: Callable[[], nn.Module], path: Path, *, stage: int = 3, world: int = 1, **options: Any
) -> list[dict[str, Tensor]]:
    """What each rank has, of a model that is built without memory."""

    def rank_main(comm: Comm) -> dict[str, Tensor]:
        with constructing(stage=stage, comm=comm) as construction:
            with torch.device("meta"):
                model = make()
            load_pretrained(model, path, comm=comm, construction=construction, **options)
        return Engine(model, [], stage=stage, comm=comm).states.full_model()

    return [rank_main(LocalComm())] if world == 1 else ThreadWorld(world).run(rank_main)


def published(make: Callable[[], nn.Module], folder: Path, **changes: Tensor | None) -> dict[str, Tensor]:
    """Writes a model's file as transformers does, with `changes`. Returns the tensors in it."""
    seeded(make).save_pretrained(folder)  # type: ignore[operator]
    tensors: dict[str, Tensor | None] = {**load_file(folder / FILE)}
    if make is vision:  # as the hub has it
        turned = {name: it.transpose(1, 2) for name, it in tensors.items() if it is not None and "experts" in name}
        tensors |= {name: it.contiguous() for name, it in turned.items()}
    tensors |= changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / FILE, {"format": "pt"})
    return kept


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_published_model_is_what_from_pretrained_makes_of_its_file(kind: str, stage: int, tmp_path: Path) -> None:
    files = published(MODELS[kind], tmp_path)
    expected = type(MODELS[kind]()).from_pretrained(tmp_path).state_dict()  # type: ignore[attr-defined]
    assert {(name, it.shape) for name, it in expected.items()} - {(name, it.shape) for name, it in files.items()}
    for found in load(MODELS[kind], tmp_path, stage=stage, world=2):
        assert_same_bits(found, expected)


def test_of_stacked_experts_every_rank_reads_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(mixtral, tmp_path)
    nbytes = sum(parameter.nbytes for parameter in mixtral().parameters())
    read = pretrained_jobs.bytes_read(monkeypatch)
    load(mixtral, tmp_path, world=2)
    assert sum(read.values()) == pytest.approx(nbytes, rel=0.01)  # a row more where one is cut
    assert max(read.values()) < 0.51 * nbytes


def test_of_what_is_converted_whole_one_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(vision, tmp_path)
    converted = list[str]()
    convert = conversion._Converter.convert

    def watch(self: Any) -> dict[str, Tensor]:
        is_new = self._target not in self._latest
        made = convert(self)
        assert list(self._latest) == [self._target]
        converted.extend([self._target] * is_new)
        return made

    monkeypatch.setattr(conversion._Converter, "convert", watch)
    load(vision, tmp_path)
    assert len(converted) == len({*converted}) == 4


def test_a_range_of_a_joined_tensor_is_read_from_those_that_it_lies_in() -> None:
    values = [torch.arange(6.0).view(2, 3), 10 + torch.arange(9.0).view(3, 3), 20 + torch.arange(6.0).view(2, 3)]
    files = [
        PretrainedTensor(str(at), tuple(it.shape), it.dtype, ("file", 0), io.BytesIO(it.numpy().tobytes()))
        for at, it in enumerate(values)
    ]
    joined = conversion._concatenated([Joined.of(file) for file in files], 0)
    assert joined is not None
    whole = torch.cat(values)
    assert joined.whole().equal(whole)
    for start in range(21):
        for stop in range(start, 22):
            into = torch.full((stop - start,), -1.0)
            joined.read(Extent.of_whole("it", joined.shape, start, stop), into)
            assert into.equal(whole.view(-1)[start:stop])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stacks_that_are_concatenated_take_turns(dim: int) -> None:
    values = [torch.randn(2, 3, 4) for _ in range(2)]
    stacks = []
    for stack in values:
        parts = [Joined.of(PretrainedTensor("x", (3, 4), it.dtype, ("file", 0), io.BytesIO(it.numpy().tobytes())))
                 for it in stack]  # fmt: skip
        stacks.append(conversion._stacked(parts))
    joined = conversion._concatenated([stack for stack in stacks if stack is not None], dim)
    if dim == 2:  # rows take turns there, which are no tensors of the files
        assert joined is None
    else:
        assert joined is not None
        assert joined.whole().equal(torch.cat(values, dim))


def test_files_without_the_head_are_loaded_into_a_model_with_one(tmp_path: Path) -> None:
    seeded(lambda: bert().bert).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"missing in the files: classifier\.weight, classifier\.bias\. "):
        load(bert, tmp_path)
    model = bert()
    left = load_pretrained(model, tmp_path, comm=LocalComm(), strict=False)
    assert left == Left(["classifier.weight", "classifier.bias"], [])
    assert_same_bits(model.bert.state_dict(), load_file(tmp_path / FILE))


def test_files_with_a_head_are_loaded_into_a_model_without(tmp_path: Path) -> None:
    files = published(bert, tmp_path)
    model = bert().bert
    left = load_pretrained(model, tmp_path, comm=LocalComm(), strict=False)
    assert left == Left([], ["classifier.bias", "classifier.weight"])
    assert_same_bits({f"bert.{name}": it for name, it in model.state_dict().items()},
                     {name: it for name, it in files.items() if "classifier" not in name})  # fmt: skip


def test_what_older_files_have_and_no_model_needs_is_passed_over(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    files = published(lambda: transformers.LlamaForCausalLM(config), tmp_path, **old)
    (found,) = load(lambda: transformers.LlamaForCausalLM(config), tmp_path)
    assert_same_bits(found, {name: it for name, it in files.items() if name not in old})
    published(lambda: transformers.LlamaForCausalLM(config), tmp_path, unknown=torch.ones(4))
    with pytest.raises(RuntimeError, match=r"in the files, and not in the module: unknown\. "):
        load(lambda: transformers.LlamaForCausalLM(config), tmp_path)


def test_names_are_converted_once_users_have_renamed_them(tmp_path: Path) -> None:
    files = published(mixtral, tmp_path)
    expected = transformers.MixtralForCausalLM.from_pretrained(tmp_path).state_dict()
    save_file({f"teacher.{name}": it for name, it in files.items()}, tmp_path / FILE)
    (found,) = load(mixtral, tmp_path, rename=lambda name: name.removeprefix("teacher."))
    assert_same_bits(found, expected)


@pytest.mark.parametrize("world", [1, 2])
def test_an_expert_that_is_missing_is_told_before_anything_is_loaded(world: int, tmp_path: Path) -> None:
    name = next(name for name in published(mixtral, tmp_path) if re.search(r"experts\.1\.w2", name))
    published(mixtral, tmp_path, **{name: None})
    with pytest.raises(RuntimeError, match=r"experts\.down_proj' is \(2, 16, 12\) in the files and \(3, 16, 12\)"):
        load(mixtral, tmp_path, world=world)


@pytest.mark.parametrize("world", [1, 2])
def test_what_becomes_of_another_shape_in_the_making_is_told(world: int, tmp_path: Path) -> None:
    files = published(vision, tmp_path)
    name = next(name for name in files if name.endswith("experts.down_proj"))
    published(vision, tmp_path, **{name: torch.ones(3, 5, 7)})
    with pytest.raises(
        RuntimeError, match=r"experts\.down_proj' is \(3, 16, 6\) in the module, and transformers makes"
    ):
        load(vision, tmp_path, world=world)
