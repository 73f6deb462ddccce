"""Opens a token store of any format, recognized by what is at a path, and writes one in other projects' formats."""

import os

from trellis.data.arguments import flag, path, whole
from trellis.data.storage import LocalFolder, RemoteFolder, is_remote, open_folder
from trellis.data.store.bin_files import BinStore, MegatronStore, write_bin
from trellis.data.store.levanter import LevanterStore, write_levanter
from trellis.data.store.seqax import FlatTokens, write_flat_tokens
from trellis.data.store.store import Store
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError


def open_store(
    url: str | os.PathLike, *, growing: bool = False, check: bool | None = None, keep: int = 0
) -> TokenStore:
    """Opens a token store: Trellis's own, or one in a format that it reads (seqax, nanoGPT, Megatron, Levanter).

    Args:
        url: where it is, local or remote.
        growing: accept a store that is still being written.
        check: compare the checksum of each chunk when it is first read; None does so for local stores up to 1 GiB.
        keep: read whole chunks, and keep this many of them in memory. For stores on a server: with
            `Shuffle(block=rows of a chunk, window=w)` keep two times w, and every chunk is fetched once an epoch.

    Raises:
        UserError: nothing there, damaged metadata, another version, or incomplete without `growing`.
    """
    url, keep = path(url, "url", "open_store"), whole(keep, "keep", "open_store")
    growing = flag(growing, "growing", "open_store")
    check = check if check is None else flag(check, "check", "open_store")
    return _foreign(url) or Store(url, growing=growing, check=check, keep=keep)


def _foreign(url: str) -> TokenStore | None:
    """The store at a path if it is in another project's format, else None."""
    if url.endswith(".bin"):
        with_index = not is_remote(url) and os.path.exists(url[:-4] + ".idx")
        return MegatronStore(url) if with_index else BinStore(url)
    folder = open_folder(url)
    if is_own(folder):
        return None
    if folder.exists("encoded_tokens/.zarray") or folder.exists("encoded_tokens/zarr.json"):
        return FlatTokens(url)
    if folder.exists("input_ids/offsets/zarr.json"):
        return LevanterStore(url)
    for split in ("train", "validation"):
        if folder.exists(f"{split}/zarr.json") or folder.exists(f"{split}/.zgroup"):
            raise UserError(
                "The path must lead to one split of a dataset.",
                seen=f"a folder with a {split} in it",
                where=url,
                fix=f"give {url.rstrip('/')}/{split}",
            )
    return None


def is_own(folder: LocalFolder | RemoteFolder) -> bool:
    """Whether a folder is a store in Trellis's own format, of any version, finished or not."""
    return folder.exists("zarr.json") and b'"trellis"' in folder.read("zarr.json")


def convert(store: TokenStore, out: str, *, to: str, split: str = "train") -> None:
    """Writes a store in another project's format.

    Args:
        store: what to write.
        out: the folder ("seqax", "levanter"), or the .bin file ("nanogpt", "megatron"; the latter writes the .idx
            beside it).
        to: one of these formats.
        split: the group inside `out`, for seqax only.

    Raises:
        UserError: the store says which tokens count in the loss, which no other format does; or something is at `out`.
    """
    if store.has_loss_mask:
        raise UserError(
            "Only a store whose tokens all count in the loss can be converted: other formats have no place for a mask.",
            seen="a store of conversations",
            where="STORE",
            fix="train on it as it is, or convert a store that was tokenized without --chat",
        )
    if not out.endswith(".bin") and is_own(open_folder(out)):
        raise UserError(
            "A converted store must be written to a place of its own.",
            seen="a token store of Trellis",
            where=out,
            fix="write to another folder",
        )
    match to:
        case "seqax":
            write_flat_tokens(store, out, split=split)
        case "nanogpt" | "megatron":
            write_bin(store, out, index=to == "megatron")
        case "levanter":
            write_levanter(store, out)
        case _:
            raise UserError(
                "A store can be converted only to a format that Trellis writes.",
                seen=to,
                where="--to",
                fix="use seqax, nanogpt, megatron or levanter",
            )
