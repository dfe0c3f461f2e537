"""Downloads from several mirrors, resumed after interruptions. One process downloads at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import lock_folder
from pipeline.data.copies.checksums import RemoteFile, compute_checksum
from pipeline.data.file_errors import name_file


class DownloadError(DataError):
    """Data is missing, and no mirror delivered it."""


def fetch_all(
    dataset: str, files: Sequence[RemoteFile], mirrors: Sequence[str], directory: Path
) -> None:
    """Download the `files` that `directory` lacks, each from the first mirror that delivers it.

    `mirrors` are base addresses, http or https. The next mirror, or the next call, continues an
    interrupted download. Of several processes one downloads and the others wait for it. Raises
    DownloadError with each mirror's reason, and other ways to get the data.
    """
    try:
        for file in files:
            path = directory / file.name
            with lock_data_folder(directory):
                if not path.exists():
                    # Importing https takes a while, and most runs find their files in the cache.
                    from pipeline.data.copies.mirror_transfer import transfer

                    transfer(file, mirrors, path)
    except DataError as error:
        names = ", ".join(file.name for file in files)
        raise DownloadError(
            f"{dataset}: {error}\n"
            f"Put {names} into {directory}, or name the folder that has them: dataset.root=DIR. "
            f"Without the data, its synthetic twin has the same sizes: "
            f"dataset.name=synthetic +dataset.like={dataset}"
        ) from error


def require_published(path: Path, file: RemoteFile) -> None:
    """Raise DataError if a file in the cache doesn't have its published checksum."""
    with name_file(path):
        md5 = compute_checksum(path, "md5")
        if md5 != file.md5:
            raise ValueError(
                f"isn't the published file: md5 {md5} instead of {file.md5}; remove it "
                "to download it again, or set dataset.root to use other data"
            )


@contextmanager
def lock_data_folder(directory: Path) -> Iterator[None]:
    """Create `directory` if it is missing, and lock it. Raises DataError if it can't be written."""
    with ExitStack() as stack:
        # Only errors of the lock are converted, not errors of the block.
        try:
            stack.enter_context(lock_folder(directory))
        except OSError as error:
            raise DataError(
                f"{directory}: can't be written ({error.strerror}); "
                "set another cache folder with cache.root=DIR"
            ) from error
        yield
