"""A file system without folders or renames, as object stores are, that processes share: its objects are files below
the folder that the variable BUCKETS names."""

import os
from pathlib import Path
from typing import Any

import fsspec


class BucketFileSystem(fsspec.AbstractFileSystem):
    """``bucket://name/key``."""

    protocol = "bucket"
    cachable = False

    @property
    def _root(self) -> Path:
        return Path(os.environ["BUCKETS"])

    def _file(self, path: str) -> Path:
        return self._root / self._strip_protocol(path).replace("/", "|")  # a key is a name, not a path

    def _keys(self) -> dict[str, Path]:
        return {file.name.replace("|", "/"): file for file in self._root.iterdir()}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        prefix = self._strip_protocol(path).rstrip("/") + "/"
        found: dict[str, dict[str, Any]] = {}
        for key, file in self._keys().items():
            if key.startswith(prefix):
                name, _, below = key.removeprefix(prefix).partition("/")
                kind = "directory" if below else "file"
                found[prefix + name] = {"name": prefix + name, "type": kind, "size": file.stat().st_size}
            elif key == prefix.rstrip("/"):
                return [{"name": key, "type": "file", "size": file.stat().st_size}] if detail else [key]
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path).rstrip("/")
        file = self._file(path)
        if file.exists():
            return {"name": path, "type": "file", "size": file.stat().st_size}
        self.ls(path)
        return {"name": path, "type": "directory", "size": 0}

    def modified(self, path: str) -> Any:
        return self._file(path).stat().st_mtime  # raises for what is no object, as S3 does

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return self._file(path).open(mode)

    def _rm(self, path: str) -> None:
        self._file(path).unlink()

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass


fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
