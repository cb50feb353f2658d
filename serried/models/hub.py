"""Models on the hub: from `owner/name` to a snapshot on this machine's disk, which huggingface_hub keeps in its cache.

That library is imported only where it is needed, and reads its own environment (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN).
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from serried.errors import InputError

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:/][^:]*\.gguf))?", re.ASCII)
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.ASCII)

CONFIG = ("config.json", "generation_config.json")
TEXT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Weights in other layouts lie in folders, or beside the others under this name.
NOT_WANTED = ("*/*", "consolidated*")
LISTED = 5  # files of a repository that an error names


class Fetched(NamedTuple):
    """The directory of a snapshot, or a GGUF file in it, and the commit that it is of."""

    path: Path
    commit: str


class HubModel(NamedTuple):
    """A model on the hub: its repository, and the GGUF file in it where one was named."""

    repo: str
    file: str | None

    @classmethod
    def parse(cls, name: str) -> HubModel | None:
        """`owner/name` or `owner/name:FILE.gguf`; None for anything else."""
        match = _ID.fullmatch(name)
        if match is None or ".." in Path(match["file"] or "").parts:
            return None
        return cls(match["repo"], match["file"])

    def fetch(self, revision: str | None, *, weights: bool = True) -> Fetched:
        """Download what is not in the cache yet.

        weights: False for the config and the text files alone. InputError says what to do where that fails.
        """
        if self.file is not None:
            # All files of a split model.
            pattern = _PART.sub(r"-[0-9][0-9][0-9][0-9][0-9]-of-\1.gguf", glob.escape(self.file))
            snapshot = self._snapshot(revision, [pattern], ())
            path = snapshot / self.file
            if not path.is_file():
                raise InputError(f"{self.repo}:{self.file}: no such file in it{self._files(revision, '.gguf')}")
            return Fetched(path, snapshot.name)
        wanted = [*CONFIG, *TEXT, *(WEIGHTS if weights else ())]
        path = self._snapshot(revision, wanted, NOT_WANTED)
        if not (path / "config.json").is_file():
            raise InputError(f"{self.repo}: has no config.json{self._files(revision, '.gguf')}")
        if weights and not any(path.glob("*.safetensors")):
            raise InputError(
                f"{self.repo}: has no weights in safetensors{self._files(revision, '.gguf', '.bin', '.pt', '.pth')}; "
                "pickles (.bin, .pt, .pth) are never read"
            )
        return Fetched(path, path.name)

    def _snapshot(self, revision: str | None, allow: Sequence[str], ignore: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        with self._explained(revision), _quiet_unless_watched():
            return Path(
                snapshot_download(
                    self.repo, revision=revision, allow_patterns=list(allow), ignore_patterns=list(ignore) or None
                )
            )

    def _files(self, revision: str | None, *endings: str) -> str:
        """Which files with these endings the repository has, as the end of an error; nothing where it cannot say."""
        from huggingface_hub import HfApi

        try:
            names = HfApi().list_repo_files(self.repo, revision=revision)
        except Exception:  # the hint is not worth a second error
            return ""
        found = sorted(name for name in names if name.endswith(endings))
        if not found:
            return ""
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        hint = f"; for a GGUF give {self.repo}:FILE.gguf" if any(name.endswith(".gguf") for name in found) else ""
        return f", but {', '.join(found[:LISTED])}{more}{hint}"

    @contextmanager
    def _explained(self, revision: str | None) -> Iterator[None]:
        """Turn what the library raises into an InputError that says what to do."""
        from huggingface_hub import constants, errors

        name = self.repo
        try:
            yield
        except errors.GatedRepoError:
            raise InputError(
                f"{name}: its owner gives access on request: ask for it on the model's page, then log in with "
                "`hf auth login` or set HF_TOKEN"
            ) from None
        except errors.RepositoryNotFoundError:
            raise InputError(
                f"{name}: no such directory here, and no such model on the hub (or a private one: log in with "
                "`hf auth login` or set HF_TOKEN)"
            ) from None
        except errors.RevisionNotFoundError:
            raise InputError(f"--revision {revision}: {name} has no such branch, tag or commit") from None
        except errors.LocalEntryNotFoundError as error:
            where = f"no such directory here, and not (or not all of it) in the cache {constants.HF_HUB_CACHE}"
            if constants.HF_HUB_OFFLINE:
                raise InputError(f"{name}: {where}; HF_HUB_OFFLINE forbids to download it: unset it") from None
            cause = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise InputError(
                f"{name}: {where}; the hub cannot be reached ({cause[0]}): try again with a connection, or give a "
                "directory"
            ) from None
        except Exception as error:  # its HTTP client, and so the errors, has changed with each major version
            lines = str(error).strip().splitlines() or [""]
            raise InputError(f"{name}: cannot be downloaded: {type(error).__name__}: {lines[0]}") from error


@contextmanager
def _quiet_unless_watched() -> Iterator[None]:
    """Progress bars are for a person at a terminal."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
