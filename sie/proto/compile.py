"""Compiles our `.proto` files to the JSON beside them: `python -m sie.proto.compile`, with grpcio-tools installed.

The files are JSON, so that people can read a change. They leave out names that protobuf derives itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, json_format

FOLDER = Path(__file__).parent


def compiled(name: str) -> str:
    """Return the descriptor of `NAME.proto` as JSON. Raises RuntimeError with protoc's status."""
    from grpc_tools import protoc  # pyright: ignore[reportMissingImports]  # who edits a .proto installs it

    with tempfile.NamedTemporaryFile() as out:
        arguments = ["protoc", f"-I{FOLDER}", f"--descriptor_set_out={out.name}", f"{name}.proto"]
        status = protoc.main(arguments)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if status:
            raise RuntimeError(f"protoc ended with status {status}")
        (described,) = descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes()).file
    _strip(described)
    return json_format.MessageToJson(described, indent=1) + "\n"


def _strip(message: Any) -> None:
    for field, value in message.ListFields():
        if field.name == "json_name":
            message.ClearField("json_name")
        elif field.message_type is not None:
            for part in value if isinstance(value, list) or hasattr(value, "add") else [value]:
                _strip(part)


def main() -> None:
    """Write the JSON of every `.proto`."""
    for path in sorted(FOLDER.glob("*.proto")):
        path.with_suffix(".json").write_text(compiled(path.stem))


if __name__ == "__main__":
    main()
