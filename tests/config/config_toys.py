"""Config files for tests."""

from pathlib import Path


def write(folder: Path, **files: str) -> Path:
    """Write config files; two underscores in a name are a folder. Gives the folder."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
