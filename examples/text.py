"""Text files as windows of bytes, split into training and validation by file."""

import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

END_OF_FILE = b"\0"
VALIDATION_SHARE = 20  # one file in twenty
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """`count` windows of `context` bytes, spread evenly over a text; each with the bytes that follow it."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        self.text = text  # (bytes,) uint8
        self.context = context
        self.count = count
        self.stride = (len(text) - context - 1) / max(1, count - 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        start = int(index * self.stride)
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Split(NamedTuple):
    train: bytes
    validation: bytes


class TextData(L.LightningDataModule):
    """Reads a text file, or every text file of a folder, in place.

    Args:
        path: the file or folder; None reads the Python standard library's own sources on this machine.
        context: bytes per window.
        batch_size: windows per rank and step.
        max_bytes: training text to read at most; validation reads a tenth of it at most.
        validation_windows: windows to validate on, the same each time.
        num_workers: processes per rank that load data.

    Raises:
        FileNotFoundError: at set-up, when `path` is no file or folder, or holds no text.
        ValueError: at set-up, when the text is shorter than one window.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        context: int = 256,
        batch_size: int = 16,
        max_bytes: int = 8_000_000,
        validation_windows: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.validation_windows = validation_windows
        self.num_workers = num_workers
        self.train: Windows | None = None
        self.validation: Windows | None = None

    def setup(self, stage: str) -> None:
        if self.train is not None:  # once, not again for each of validate, fit, validate
            return
        split = read_text(self.path, self.max_bytes)
        self.train = self._windows(split.train, count=len(split.train) // self.context)
        self.validation = self._windows(split.validation, count=self.validation_windows)

    def _windows(self, text: bytes, count: int) -> Windows:
        if len(text) <= self.context:
            raise ValueError(
                f"data.path={str(self.path)!r} gives {len(text)} bytes for training or validation, fewer than one "
                f"window of data.context={self.context}. Give more text, or a smaller data.context."
            )
        return Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8), self.context, count)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.validation, shuffle=False)

    def _loader(self, windows: Windows | None, *, shuffle: bool) -> DataLoader:
        assert windows is not None, "setup() comes first"
        return DataLoader(
            windows,
            self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )


def read_text(path: str | Path | None, max_bytes: int) -> Split:
    """Reads the text at `path`: a folder is split by file, a single file by position (its last tenth is held out)."""
    if path is None:
        return _read_folder(Path(sysconfig.get_paths()["stdlib"]), "*.py", max_bytes)
    root = Path(path).expanduser()
    if root.is_dir():
        return _read_folder(root, "*", max_bytes)
    if root.is_file():
        with root.open("rb") as file:
            text = file.read(max_bytes)
        cut = len(text) * 9 // 10
        return Split(text[:cut], text[cut:])
    raise FileNotFoundError(
        f"data.path={str(path)!r} is neither a file nor a folder. Give a text file, a folder of text files, "
        f"or data.path=null for the sources of Python's standard library."
    )


def _read_folder(root: Path, pattern: str, max_bytes: int) -> Split:
    files = sorted(_text_files(root, pattern), key=lambda file: _shuffle_key(file, root))
    held_out = [file for file in files if _shuffle_key(file, root) % VALIDATION_SHARE == 0] or files[-1:]
    trained = [file for file in files if file not in set(held_out)]
    if not trained:
        raise FileNotFoundError(
            f"{str(root)!r} holds {len(files)} text file(s); training and validation need one each. "
            f"Give a folder with more files, or data.path=FILE to split a single file."
        )
    return Split(_concatenate(trained, max_bytes), _concatenate(held_out, max_bytes // 10))


def _text_files(root: Path, pattern: str) -> Iterable[Path]:
    for file in root.rglob(pattern):
        inside = file.relative_to(root)
        if file.is_file() and not _SKIPPED_FOLDERS.intersection(inside.parts) and not file.name.startswith("."):
            yield file


def _shuffle_key(file: Path, root: Path) -> int:
    # By name, so that every rank, run and machine takes the same files; hashed, so that they are of all kinds.
    return zlib.crc32(file.relative_to(root).as_posix().encode())


def _concatenate(files: Iterable[Path], max_bytes: int) -> bytes:
    text = bytearray()
    for file in files:
        content = file.read_bytes()
        if END_OF_FILE in content:  # not text
            continue
        text += content + END_OF_FILE
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])
