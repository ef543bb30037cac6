"""What pyproject.toml cannot say: an editable install is the path of the clone."""

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel


class OnePath(editable_wheel):
    """With a `package-dir` setuptools would install an import hook, and type checkers follow only paths. The path does
    not lead to `lightning_zero.conf`: `lightning_zero/clone.py` finds that one."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.package_dir = {"": "."}


setup(cmdclass={"editable_wheel": OnePath})
