"""Two distributions install an import package named `flash_qla`: this one and the TileLang one. Both at once is a mix
of their files, and nothing good comes of it."""

from __future__ import annotations

import os

_THEIRS = "flash-qla"
_OURS = "flash-qla-cpp"


def refuse_conflicting_package() -> None:
    """ImportError when the TileLang package is installed beside this one."""
    # NOTE: looked for by its files and not by its metadata: reading the metadata of an environment takes milliseconds
    # in every import. Their package has a folder `ops`, ours has none.
    here = os.path.dirname(os.path.abspath(__file__))
    if os.path.isdir(os.path.join(here, "ops")) or _installed_elsewhere(here):
        raise ImportError(
            f"flash_qla: the distributions {_OURS} (this one) and {_THEIRS} (TileLang) are both installed, and both "
            f"are imported as flash_qla. Uninstall both and install the one that you want: "
            f"pip uninstall {_THEIRS} {_OURS} && pip install {_OURS}"
        )


def _installed_elsewhere(here: str) -> bool:
    """Whether another folder of the path holds their package, for example when ours is an editable installation."""
    import sys

    for folder in sys.path:
        package = os.path.join(folder or os.curdir, "flash_qla")
        if os.path.isdir(os.path.join(package, "ops")) and not os.path.samefile(package, here):
            return True
    return False
