"""``lightning-zero``: what is done with checkpoints of `ZeroStrategy` outside of training.

    lightning-zero inspect DIR                           what is inside; reads the manifest only
    lightning-zero verify DIR [DIR ...]                  names every file that is missing, short or altered
    lightning-zero consolidate DIR OUT.ckpt              one ordinary Lightning file, optimizer and all
    lightning-zero consolidate DIR OUT --safetensors     the model as Hugging Face writes it
    lightning-zero import DCP DIR                        from a torch.distributed.checkpoint folder, FSDP's too
    lightning-zero export DIR DCP                        to one

DIR is a path or a URL (``s3://...``). The exit status is 0 when all is well, 1 when something is wrong with a
checkpoint, and 2 when the command line cannot be understood.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence, Sized

from lightning_zero.checkpoint import CheckpointError, Folder, StoredCheckpoint, verify
from lightning_zero.checkpoint.dcp import export_dcp, import_dcp
from lightning_zero.checkpoint.export import consolidate, export_safetensors
from lightning_zero.checkpoint.manifest import Entry
from lightning_zero.run.spread import WHOLE
from lightning_zero.views.lazy import LazyTensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` are those of the command line by default."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads has seen enough: `lightning-zero inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it exits
        return 1
    except OSError as error:
        print(f"error: {error.strerror or error}" + (f": {error.filename}" * bool(error.filename)), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        usage="lightning-zero [-h] COMMAND ...",
        description=(__doc__ or "").replace("``", ""),
        epilog="What a command takes besides: lightning-zero COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="lightning-zero")

    def command(name: str, run: Callable[[argparse.Namespace], int | None], about: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, description=about)
        one.set_defaults(run=run, refuse=one.error)
        return one

    inspect = command("inspect", _inspect, "Tells what is inside, by the manifest only.")
    inspect.add_argument("dir", type=_place, metavar="DIR", help="the checkpoint's folder, a path or URL")

    verify = command("verify", _verify, "Reads everything, and names every file that is missing, short or altered.")
    verify.add_argument("dirs", type=_place, nargs="+", metavar="DIR", help="the checkpoints' folders")

    one = command("consolidate", _consolidate, "Writes one ordinary Lightning file, or the model as safetensors.")
    one.add_argument("dir", type=_place, metavar="DIR", help="the checkpoint's folder")
    one.add_argument("out", type=_place, metavar="OUT", help="the file to write; with --safetensors the folder")
    one.add_argument("--objects", action="store_true", help="unpickle objects of your own, and include them")
    one.add_argument("--safetensors", action="store_true", help="the model only, as Hugging Face writes it")
    one.add_argument("--prefix", default=None, help="write only what is named so, without it (often 'model.')")
    one.add_argument("--shard-gb", type=_positive, default=None, help="most that one of its files holds (default 5)")

    bring = command("import", _import, "Makes a checkpoint of a torch.distributed.checkpoint folder (FSDP's).")
    bring.add_argument("dcp", type=_place, metavar="DCP", help="the folder with .metadata, which is unpickled")
    bring.add_argument("dir", type=_place, metavar="DIR", help="the checkpoint's folder to write")

    take = command("export", _export, "Makes a torch.distributed.checkpoint folder, laid out as FSDPStrategy does.")
    take.add_argument("dir", type=_place, metavar="DIR", help="the checkpoint's folder")
    take.add_argument("dcp", type=_place, metavar="DCP", help="the folder to write; new, or empty")
    return parser


def _place(text: str) -> str:
    """A path or URL that fsspec understands."""
    try:
        Folder(text)
    except (ValueError, ImportError) as error:  # no such protocol; the package for it is not installed
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _inspect(options: argparse.Namespace) -> None:
    checkpoint = StoredCheckpoint(options.dir)
    manifest = checkpoint.manifest
    about = {key: value for key, value in manifest.about.items() if key != "saved_at"}
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.about.get("saved_at", 0.0)))
    print(checkpoint.folder)
    print("  " + ", ".join([*(f"{key} {value}" for key, value in about.items()), f"saved {saved_at}"]))
    print(f"  {_count(manifest.files, 'shard')}, {_count(manifest.tensors, 'tensor')}, {_size(manifest.nbytes)}")
    if manifest.objects:
        print(f"  pickled objects, left out unless asked for: {', '.join(manifest.objects.classes)}")
    _print_table(_rows(manifest.tensors.values()))
    model = checkpoint.model()
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
        return f"{name.partition(':')[0]}, {name.rpartition(':')[2].removesuffix(WHOLE)}"
    if name.startswith("optimizer_states/"):  # of a checkpoint that was imported
        return f"optimizer {name.split('/')[1]}, {name.rpartition('/')[2]}"
    return "random state" if name.startswith("rank ") else name.partition("/")[0]


def _short(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _count(items: Sized, noun: str) -> str:
    return f"{len(items):,} {noun}" + "s" * (len(items) != 1)


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
        problems = verify(path)
        for problem in problems:
            print(problem)
            status = 1
        if not problems:
            print(f"{path}: complete, every checksum matches")
    return status


def _consolidate(options: argparse.Namespace) -> None:
    if options.safetensors and options.objects:
        options.refuse("--objects has nothing to do with --safetensors, which holds tensors only")
    if not options.safetensors and (options.prefix is not None or options.shard_gb is not None):
        options.refuse("--prefix and --shard-gb go with --safetensors")
    if options.safetensors:
        shard_bytes = int((options.shard_gb or 5) * 10**9)
        names = export_safetensors(options.dir, options.out, prefix=options.prefix or "", shard_bytes=shard_bytes)
        print(f"wrote {', '.join(names)} to {options.out}")
    else:
        left_out = consolidate(options.dir, options.out, objects=options.objects)
        print(f"wrote {options.out}")
        _tell_left_out(left_out, "--objects includes them, by running whatever code they name")


def _import(options: argparse.Namespace) -> None:
    import_dcp(options.dcp, options.dir)
    print(f"wrote {options.dir}")


def _export(options: argparse.Namespace) -> None:
    left_out = export_dcp(options.dir, options.dcp)
    print(f"wrote {options.dcp}")
    _tell_left_out(left_out, "consolidate --objects has them")


def _tell_left_out(classes: Sequence[str], hint: str) -> None:
    if classes:
        print(f"left out what had been pickled ({', '.join(sorted(set(classes)))}); {hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
