"""Compiles the native kernels when the package is built or installed; without a compiler the package has none."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """Adds the library to a wheel, which then belongs to this platform, but to no Python version."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path = Path(self.root, "sie", "native", "build.py")
        spec = importlib.util.spec_from_file_location("sie_native_build", path)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            native.build()
        except native.BuildError as error:
            self.app.display_warning(f"without compiled kernels, CPU inference is slower: {error}")
            return
        build_data["pure_python"] = False
        build_data["artifacts"].append(str(native.SHARED_LIBRARY.relative_to(self.root)))
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
