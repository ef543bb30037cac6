"""A file system without folders or renames, as object stores are, that processes share: its objects are files below
the folder that the variable BUCKETS names. As theirs do, it remembers what it has listed until it writes there or is
told to forget it."""

import datetime
import io
import os
from pathlib import Path
from typing import Any, ClassVar

import fsspec


class BucketFileSystem(fsspec.AbstractFileSystem):
    """``bucket://name/key``."""

    protocol = "bucket"
    cachable = False
    listed: ClassVar[dict[str, list[dict[str, Any]]]] = {}

    @property
    def _root(self) -> Path:
        return Path(os.environ["BUCKETS"])

    def _file(self, path: str) -> Path:
        return self._root / self._strip_protocol(path).replace("/", "|")  # a key is a name, not a path

    def _keys(self) -> dict[str, Path]:
        return {file.name.replace("|", "/"): file for file in self._root.iterdir() if file.suffix != ".part"}

    def invalidate_cache(self, path: str | None = None) -> None:
        if path is None:
            self.listed.clear()
            return
        path = self._strip_protocol(path).rstrip("/")
        while path:
            self.listed.pop(path, None)
            path = path.rpartition("/")[0]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        if path not in self.listed:
            self.listed[path] = self._list(path)
        return self.listed[path] if detail else [found["name"] for found in self.listed[path]]

    def _list(self, path: str) -> list[dict[str, Any]]:
        prefix = path + "/"
        found: dict[str, dict[str, Any]] = {}
        for key, file in self._keys().items():
            if key.startswith(prefix):
                name, _, below = key.removeprefix(prefix).partition("/")
                kind = "directory" if below else "file"
                found[prefix + name] = {"name": prefix + name, "type": kind, "size": file.stat().st_size}
            elif key == prefix.rstrip("/"):
                return [{"name": key, "type": "file", "size": file.stat().st_size}]
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path).rstrip("/")
        if (known := self.listed.get(path.rpartition("/")[0])) is not None:
            for found in known:
                if found["name"] == path:
                    return found
            raise FileNotFoundError(path)
        file = self._file(path)
        if file.exists():
            return {"name": path, "type": "file", "size": file.stat().st_size}
        self.ls(path)
        return {"name": path, "type": "directory", "size": 0}

    def modified(self, path: str) -> Any:
        when = self._file(path).stat().st_mtime  # raises for what is no object, as S3 does
        return datetime.datetime.fromtimestamp(when, tz=datetime.UTC)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Any:
        if mode == "rb":
            self.info(path)
            return self._file(path).open(mode)
        return _Upload(self, path, autocommit)

    def _rm(self, path: str) -> None:
        self._file(path).unlink()
        self.invalidate_cache(path)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass


class _Upload(io.FileIO):
    """To an object that comes to be when this is closed, or in a transaction when that ends."""

    def __init__(self, store: BucketFileSystem, path: str, autocommit: bool) -> None:
        self._store, self._path, self._autocommit = store, path, autocommit
        self._object = store._file(path)
        super().__init__(self._object.with_name(f"{self._object.name}.{id(self)}.part"), "w")

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._autocommit:
                self.commit()

    def commit(self) -> None:
        Path(self.name).replace(self._object)
        self._store.invalidate_cache(self._path)

    def discard(self) -> None:
        Path(self.name).unlink()


fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
