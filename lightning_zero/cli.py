"""``lightning-zero``: what is to be done with checkpoints outside of training.

    lightning-zero inspect DIR                           what is inside; reads the manifest only
    lightning-zero verify DIR [DIR ...]                  names every file that is missing, short or altered
    lightning-zero consolidate DIR OUT.ckpt              one ordinary Lightning file, optimizer and all
    lightning-zero consolidate DIR OUT --safetensors     the model as Hugging Face writes it
    lightning-zero import DCP DIR                        from a torch.distributed.checkpoint folder, FSDP's too
    lightning-zero export DIR DCP                        to one

The exit status is 0 when all is well and 1 otherwise.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence

from lightning_zero.checkpoint import CheckpointError, StoredCheckpoint
from lightning_zero.checkpoint.dcp import export_dcp, import_dcp
from lightning_zero.checkpoint.export import consolidate, export_safetensors
from lightning_zero.checkpoint.manifest import Entry
from lightning_zero.lazy import LazyTensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` are those of the command line by default."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-zero", description="Checkpoints of ZeroStrategy, outside of training."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="tell what is inside, by the manifest alone")
    inspect.add_argument("dir")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="read everything; name what is missing, short or altered")
    verify.add_argument("dirs", nargs="+", metavar="dir")
    verify.set_defaults(run=_verify)

    one = commands.add_parser("consolidate", help="write one ordinary Lightning file, or safetensors")
    one.add_argument("dir")
    one.add_argument("out", help="the file to write; with --safetensors the folder")
    one.add_argument("--safetensors", action="store_true", help="the model only, as Hugging Face writes it")
    one.add_argument("--prefix", default="", help="of the names to write; it is cut off (try 'model.')")
    one.add_argument("--shard-gb", type=float, default=5.0, help="most that one safetensors file holds (default 5)")
    one.add_argument("--objects", action="store_true", help="unpickle and include objects of your own")
    one.set_defaults(run=_consolidate)

    bring = commands.add_parser("import", help="make a checkpoint of a torch.distributed.checkpoint folder")
    bring.add_argument("dcp")
    bring.add_argument("dir")
    bring.set_defaults(run=lambda options: import_dcp(options.dcp, options.dir))

    take = commands.add_parser("export", help="write a torch.distributed.checkpoint folder")
    take.add_argument("dir")
    take.add_argument("dcp")
    take.set_defaults(run=lambda options: export_dcp(options.dir, options.dcp))
    return parser


def _inspect(options: argparse.Namespace) -> None:
    checkpoint = StoredCheckpoint(options.dir)
    manifest = checkpoint.manifest
    about = {key: value for key, value in manifest.about.items() if key != "saved_at"}
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.about.get("saved_at", 0.0)))
    print(checkpoint.folder)
    print("  " + ", ".join(f"{key} {value}" for key, value in about.items()) + f", saved {saved_at}")
    print(f"  {len(manifest.files)} shards, {len(manifest.tensors)} tensors, {_size(manifest.nbytes)}")
    if manifest.objects:
        print(f"  pickled objects (read on opt-in only): {', '.join(manifest.objects.classes)}")
    _print_table(_rows(manifest.tensors.values()))
    model = checkpoint.tree().get("state_dict", {})
    rows = [("parameter or buffer", "dtype", "shape", "size")]
    for name, value in model.items():
        if isinstance(value, LazyTensor):
            entry = manifest.tensors[value.source.name]
            rows.append((name, _short(entry), "x".join(map(str, entry.shape)) or "scalar", _size(entry.nbytes)))
    _print_table(rows)


def _rows(entries: Iterable[Entry]) -> list[tuple[str, ...]]:
    """Elements and bytes of each part of a checkpoint, by dtype."""
    totals: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        held = totals.setdefault((_part_of(entry.name), _short(entry)), [0, 0, 0])
        for at, value in enumerate((1, math.prod(entry.shape), entry.nbytes)):
            held[at] += value
    rows: list[tuple[str, ...]] = [("part", "dtype", "tensors", "elements", "size")]
    rows += [(*key, f"{count:,}", f"{numel:,}", _size(nbytes)) for key, (count, numel, nbytes) in totals.items()]
    return rows


def _part_of(name: str) -> str:
    if name.startswith(("model:", "state_dict/")):
        return "model"
    if name.startswith("optimizer "):
        return f"{name.partition(':')[0]}, {name.rpartition(':')[2]}"
    return "random state" if name.startswith("rank ") else name.partition("/")[0]


def _short(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), 0
    while size >= 1000 and unit < 4:
        size, unit = size / 1000, unit + 1
    return f"{nbytes} B" if not unit else f"{size:.1f} {' kMGT'[unit]}B"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())


def _verify(options: argparse.Namespace) -> int:
    status = 0
    for path in options.dirs:
        try:
            problems = StoredCheckpoint(path).verify()
        except CheckpointError as error:
            problems = [str(error)]
        for problem in problems:
            print(problem)
            status = 1
        if not problems:
            print(f"{path}: complete, every checksum matches")
    return status


def _consolidate(options: argparse.Namespace) -> None:
    if options.safetensors:
        shard_bytes = int(options.shard_gb * 10**9)
        names = export_safetensors(options.dir, options.out, prefix=options.prefix, shard_bytes=shard_bytes)
        print(f"wrote {', '.join(names)} to {options.out}")
    else:
        consolidate(options.dir, options.out, objects=options.objects)
        print(f"wrote {options.out}")


if __name__ == "__main__":
    sys.exit(main())
