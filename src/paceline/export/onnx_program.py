"""ONNX programs under onnxruntime, which read no file but the package's own; torch is not imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.core.errors import ConfigError, PackageError
from paceline.core.plugins import import_library
from paceline.runs.onnx_files import external_files


class OnnxProgram:
    """A loaded model.

    Args:
        read: returns the content of the package's file of this name, or raises; no other file is read.

    Raises:
        ConfigError: onnxruntime is missing.
        PackageError: onnxruntime cannot load the model, or ``read`` has no such file.
    """

    def __init__(self, model: bytes, read: Callable[[str], bytes], options: Any, providers: Any) -> None:
        contents = {name: read(name) for name in sorted(external_files(model))}
        if contents:
            sizes = [len(content) for content in contents.values()]
            options.add_external_initializers_from_files_in_memory(list(contents), list(contents.values()), sizes)
        # Bytes that are also a model of onnxruntime's own format would be read as that, past the check above.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        # Instead of the current directory: a place that holds no files.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
        try:
            self._session = require_onnxruntime().InferenceSession(model, options, providers=providers)
        except ConfigError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no common class
            reason = " ".join(str(error).split())
            raise PackageError(
                f"onnxruntime cannot load the ONNX program: {reason:.300}. Export the run again, or use another "
                "program."
            ) from error
        self._contents = contents  # which the session does not copy
        self.inputs = [node.name for node in self._session.get_inputs()]
        self.outputs = [node.name for node in self._session.get_outputs()]

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Any]) -> list[Any]:
        """Return arrays of the outputs, given arrays of all inputs."""
        answers: list[Any] = self._session.run(list(outputs), dict(inputs))
        return answers


def require_onnxruntime() -> Any:
    """Return the module, or raise a ConfigError if it is not installed."""
    return import_library("onnxruntime", "serving ONNX", "onnx")
