"""Makes json_schema_test_suite.json of the JSON Schema Test Suite, which the source distribution of `jsonschema` contains.

First `pip download --no-deps --no-binary :all: jsonschema==4.26.0`, then this script with the archive that it fetched.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path, PurePosixPath

FOLDERS = {"draft 2020-12": "draft2020-12", "draft 7": "draft7", "formats": "draft2020-12/optional/format"}


def pack(archive: tarfile.TarFile) -> dict[str, object]:
    """Per part: the cases of its files, by file."""
    files: dict[PurePosixPath, str] = {}
    for member in archive.getmembers():
        path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
        if member.isfile() and path.is_relative_to("json"):
            content = archive.extractfile(member)
            assert content is not None
            files[path] = content.read().decode()
    parts = {
        name: {path.stem: json.loads(files[path]) for path in sorted(files) if path.parent == PurePosixPath("json/tests", folder)}
        for name, folder in FOLDERS.items()
    }
    return {"license": files[PurePosixPath("json/LICENSE")].split("\n\n"), **parts}


if __name__ == "__main__":
    with tarfile.open(sys.argv[1]) as source:
        packed = pack(source)
    Path(__file__).with_name("json_schema_test_suite.json").write_text(json.dumps(packed, separators=(",", ":")) + "\n")
