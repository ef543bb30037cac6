"""``lightning-zero``: what is done with checkpoints of `ZeroStrategy` outside of training, and what a stage will take.

    lightning-zero inspect DIR [--json]                  what is inside; of shards reads the manifest only
    lightning-zero verify DIR [DIR ...]                  names every file that is missing, short or altered
    lightning-zero consolidate DIR OUT.ckpt              one ordinary Lightning file, optimizer and all
    lightning-zero consolidate DIR OUT --safetensors     the model as Hugging Face writes it
    lightning-zero import DCP DIR                        from a torch.distributed.checkpoint folder, FSDP's too
    lightning-zero export DIR DCP                        to one
    lightning-zero plan --parameters 7e9 --ranks 8       bytes per rank at each stage, beside DDP's
    lightning-zero plan MODEL --batch B --ranks 8        the fastest strategies that fit on a device
    lightning-zero rehearse MODEL --batch B --ranks 8    what a step takes on one rank: bytes, peaks, messages

MODEL is an import path (``package.module:Model``) of what makes a LightningModule, or a config of Hydra.

DIR is a path or a URL (``s3://...``): of a sharded checkpoint, or but for export of a single file. The exit status is 0
when all is well, 1 when something is wrong with a checkpoint or a device has too little memory, and 2 when the command
line cannot be understood.
"""

import argparse
import io
import json
import math
import os
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lightning_zero import __version__
from lightning_zero.rehearsal.commands import Training, add_plan, add_rehearse, positive, run_plan, run_rehearse

# Each command imports what it needs, so that --help does not wait for torch.
if TYPE_CHECKING:
    from torch import Tensor

    from lightning_zero.checkpoint.folder import Folder
    from lightning_zero.checkpoint.load import StoredCheckpoint
    from lightning_zero.checkpoint.manifest import Entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status; `arguments` are those of the command line by default."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of names and paths
        sys.stdout.reconfigure(errors="backslashreplace")
    from lightning_zero.checkpoint import CheckpointError

    try:
        status = int(options.run(options) or 0)
        sys.stdout.flush()  # raises BrokenPipeError here instead of when Python exits
        return status
    except BrokenPipeError:  # the reader has closed the pipe: `lightning-zero inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
    except (CheckpointError, OSError) as error:
        reason, file = getattr(error, "strerror", None) or error, getattr(error, "filename", None)
        print(f"error: {reason}" + (f": {file}" if file else ""), file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        usage="lightning-zero [-h] COMMAND ...",
        description=_about(shutil.get_terminal_size().columns),
        epilog="What a command takes besides: lightning-zero COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="lightning-zero")

    def command(name: str, run: Callable[..., bool | None], about: str, **places: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, description=about)
        one.set_defaults(run=run, refuse=one.error)
        for place, told in places.items():
            one.add_argument(place, type=_place, metavar=place.upper(), help=told)
        return one

    folder = "the checkpoint's folder, or a single file"
    about = "Tells what is inside; of shards reads the manifest only."
    one = command("inspect", _inspect, about, dir=f"{folder}, a path or URL")
    one.add_argument("--json", action="store_true", help="as one object of JSON, for programs: sizes in bytes")

    one = command("verify", _verify, "Reads everything, and names every file that is missing, short or altered.")
    one.add_argument("dirs", type=_place, nargs="+", metavar="DIR", help="the checkpoints' folders or files")

    about = "Writes one ordinary Lightning file, or the model as safetensors."
    out = "the file to write; with --safetensors the folder"
    one = command("consolidate", _consolidate, about, dir=folder, out=out)
    one.add_argument("--objects", action="store_true", help="unpickle objects of your own, and include them")
    one.add_argument("--safetensors", action="store_true", help="the model only, as Hugging Face writes it")
    one.add_argument("--prefix", default=None, help="write only what is named so, without it (often 'model.')")
    one.add_argument("--shard-gb", type=positive, default=None, help="most that one of its files holds (default 5)")

    about, dcp = "Makes a checkpoint of a torch.distributed.checkpoint folder (FSDP's).", "the folder with .metadata"
    command("import", _import, about, dcp=f"{dcp}, which is unpickled", dir="the checkpoint's folder to write")

    about = "Makes a torch.distributed.checkpoint folder, laid out as FSDPStrategy does."
    command("export", _export, about, dir="the checkpoint's folder", dcp="the folder to write; new, or empty")

    about = "Of a model: the fastest strategies that fit. Of a number of parameters: bytes per rank at each stage."
    add_plan(command("plan", run_plan, about), _composed)
    about = "Takes a step of one rank without computing: bytes, peaks, messages."
    add_rehearse(command("rehearse", run_rehearse, about), _composed)
    return parser


def _about(width: int) -> str:
    """Returns the module's docstring in lines of at most `width`."""
    paragraphs = []
    for text in (__doc__ or "").replace("``", "").split("\n\n"):
        if not text.startswith(" "):
            paragraphs.append(fill(text, width))
        elif max(map(len, text.splitlines())) <= width:
            paragraphs.append(text)
        else:  # the list of commands: what each does goes on a line below it
            paragraphs.append(re.sub(r"(?<=\S) {3,}", "\n" + " " * 6, text))
    return "\n\n".join(paragraphs)


def _composed(path: str, overrides: Sequence[str]) -> Training:
    from lightning_zero.sweeps.composed import composed

    return composed(path, overrides)


def _place(text: str) -> str:
    """Returns `text` if fsspec understands it as a path or URL."""
    from lightning_zero.checkpoint import Folder

    try:
        Folder(text)
    except (ValueError, ImportError) as error:  # the protocol is unknown, or its package is not installed
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return text


def _inspect(options: argparse.Namespace) -> None:
    from lightning_zero.checkpoint import Folder, StoredCheckpoint
    from lightning_zero.checkpoint.single import is_single_file

    place = Folder(options.dir)
    contents, lines = _told_of_file(place) if is_single_file(place) else _told_of_shards(StoredCheckpoint(options.dir))
    if options.json:
        print(json.dumps(contents, indent=2))
        return
    print(contents["path"], *lines, sep="\n  ")
    if "parts" in contents:
        rows: list[tuple[str, ...]] = [
            (part["part"], part["dtype"], f"{part['tensors']:,}", f"{part['elements']:,}", _size(part["bytes"]))
            for part in contents["parts"]
        ]
        _print_table("part", "dtype", "tensors", "elements", "size", rows=rows)
    rows = [
        (name, entry["dtype"], "x".join(map(str, entry["shape"])) or "scalar", _size(entry["bytes"]))
        for name, entry in contents["model"].items()
    ]
    _print_table("parameter or buffer", "dtype", "shape", "size", rows=rows)


def _told_of_file(file: "Folder") -> tuple[dict[str, Any], list[str]]:
    """Returns what `inspect --json` prints of a checkpoint that is one file, and the lines above the tables."""
    from lightning_zero.checkpoint.single import model_in, read_plain

    found, nbytes = read_plain(file), file.fs.size(file.path)
    about = {"step": found.get("global_step"), "epoch": found.get("epoch")}
    told = [f"{key} {value}" for key, value in about.items() if value is not None]
    size = "" if nbytes is None else f"{_size(nbytes)} "  # of a zero:// file it is not known
    told.append(f"{size}in one file, as Lightning writes it: torch.load reads it")
    model = _described(model_in(found))
    contents = {"path": str(file), "about": about, "shards": [], "bytes": nbytes, "model": model}
    return contents, [", ".join(told)]


def _told_of_shards(checkpoint: "StoredCheckpoint") -> tuple[dict[str, Any], list[str]]:
    """Returns the same of a checkpoint of shards."""
    from lightning_zero.views.lazy import LazyTensor

    manifest = checkpoint.manifest
    parts = defaultdict[tuple[str, str], list["Entry"]](list)
    for entry in manifest.tensors.values():
        parts[_part_of(entry.name), _short(entry)].append(entry)
    lazy = {name: value for name, value in checkpoint.model().items() if isinstance(value, LazyTensor)}
    contents = {
        "path": str(checkpoint.folder),
        "about": manifest.about,  # step, epoch, stage, world; saved_at in seconds since 1970
        "shards": [file.name for file in manifest.files],
        "bytes": manifest.nbytes,
        "pickled": manifest.objects.classes if manifest.objects else [],
        "parts": [
            {
                "part": part,
                "dtype": dtype,
                "tensors": len(entries),
                "elements": sum(math.prod(entry.shape) for entry in entries),
                "bytes": sum(entry.nbytes for entry in entries),
            }
            for (part, dtype), entries in parts.items()
        ],
        "model": _described({name: manifest.tensors[value.source.name] for name, value in lazy.items()}),
    }
    about = dict(manifest.about)
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.pop("saved_at", 0.0)))
    lines = [
        ", ".join([*(f"{key} {value}" for key, value in about.items()), f"saved {saved_at}"]),
        f"{_count(manifest.files, 'shard')}, {_count(manifest.tensors, 'tensor')}, {_size(manifest.nbytes)}",
    ]
    if manifest.objects:
        lines.append(f"pickled objects, left out unless asked for: {', '.join(manifest.objects.classes)}")
    return contents, lines


def _described(model: Mapping[str, "Entry | Tensor"]) -> dict[str, Any]:
    return {name: {"dtype": _short(one), "shape": list(one.shape), "bytes": one.nbytes} for name, one in model.items()}


def _part_of(name: str) -> str:
    """Returns the part of a checkpoint that the tensor called `name` belongs to."""
    from lightning_zero.checkpoint.spread import WHOLE

    if name.startswith(("model:", "state_dict/")):
        return "model"
    if name.startswith("average:"):
        return "average"
    if name.startswith("optimizer "):
        return f"{name.partition(':')[0]}, {name.rpartition(':')[2].removesuffix(WHOLE)}"
    if name.startswith("optimizer_states/"):  # in an imported checkpoint
        return f"optimizer {name.split('/')[1]}, {name.rpartition('/')[2]}"
    return "random state" if name.startswith("rank ") else name.partition("/")[0]


def _short(entry: "Entry | Tensor") -> str:
    return str(entry.dtype).removeprefix("torch.")


def _count(items: Sized, noun: str) -> str:
    return f"{len(items):,} {noun}" + "s" * (len(items) != 1)


def _size(nbytes: int) -> str:
    power = min(len(str(nbytes)) - 1, 12) // 3
    return f"{nbytes / 1000**power:.1f} {' kMGT'[power]}B" if power else f"{nbytes} B"


def _print_table(*header: str, rows: Sequence[tuple[str, ...]]) -> None:
    first, *others = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    # In a terminal that is too narrow, the cells follow on a line below the name. A pipe has no width.
    is_narrow = 2 + first + sum(2 + width for width in others) > shutil.get_terminal_size((sys.maxsize, 0)).columns
    print()
    for name, *cells in (header, *rows):
        lead = f"{name}\n    " if is_narrow else name.ljust(first)
        print("  " + "  ".join([lead, *map(str.rjust, cells, others)]).rstrip())


def _verify(options: argparse.Namespace) -> bool:
    from lightning_zero.checkpoint import verify

    has_failed = False
    for path in options.dirs:
        problems = verify(path)
        print(*(problems or [f"{path}: complete, every checksum matches"]), sep="\n")
        has_failed |= bool(problems)
    return has_failed


def _consolidate(options: argparse.Namespace) -> None:
    if options.safetensors and options.objects:
        options.refuse("--objects has nothing to do with --safetensors, which holds tensors only")
    if not options.safetensors and (options.prefix is not None or options.shard_gb is not None):
        options.refuse("--prefix and --shard-gb go with --safetensors")
    from lightning_zero.checkpoint.export import consolidate, export_safetensors

    if options.safetensors:
        shard_bytes = int((options.shard_gb or 5) * 10**9)
        names = export_safetensors(options.dir, options.out, prefix=options.prefix or "", shard_bytes=shard_bytes)
        print(f"wrote {', '.join(names)} to {options.out}")
    else:
        left_out = consolidate(options.dir, options.out, objects=options.objects)
        _tell_written(options.out, left_out, "--objects includes them, by running whatever code they name")


def _import(options: argparse.Namespace) -> None:
    from lightning_zero.checkpoint.dcp import import_dcp

    import_dcp(options.dcp, options.dir)
    print(f"wrote {options.dir}")


def _export(options: argparse.Namespace) -> None:
    from lightning_zero.checkpoint.dcp import export_dcp

    _tell_written(options.dcp, export_dcp(options.dir, options.dcp), "consolidate --objects has them")


def _tell_written(out: str, left_out: Sequence[str], hint: str) -> None:
    print(f"wrote {out}")
    if left_out:
        print(f"left out what had been pickled ({', '.join(sorted(set(left_out)))}); {hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
