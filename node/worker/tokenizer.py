"""Text to token ids: plain bytes, or a Hugging Face tokenizer from a local folder or hub name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from peerloom.node.worker.gguf import is_gguf
from peerloom.node.worker.gguf import open_tokenizer as open_gguf
from peerloom.protocol.errors import DataError

BYTES_SEPARATOR = 0  # NUL occurs in no text


class Tokenizer(Protocol):
    """What tokenizing needs; `identity` stands for all that decides its output."""

    identity: str
    vocab_size: int
    dtype: type[np.unsignedinteger[Any]]

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        """The ids of a document and the separator after it."""
        ...


class ByteTokenizer:
    """Each byte is its own id; NUL ends a document."""

    identity = "bytes"
    vocab_size = 256
    dtype: type[np.unsignedinteger[Any]] = np.uint8

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        """The bytes and a NUL."""
        return np.frombuffer(text + bytes([BYTES_SEPARATOR]), dtype=np.uint8)


class HuggingFaceTokenizer:
    """A `transformers` tokenizer, its end-of-text token between documents where it has one. Raises DataError."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            if is_gguf(name):
                self.inner = open_gguf(name)
            else:
                self.inner = AutoTokenizer.from_pretrained(name, local_files_only=Path(name).is_dir())
        except (OSError, ValueError, ImportError) as error:
            raise DataError(f"the tokenizer {name} could not be loaded: {error}; correct data.tokenizer") from error
        self.vocab_size = len(self.inner)
        fitting = (kind for kind in (np.uint8, np.uint16, np.uint32) if self.vocab_size <= np.iinfo(kind).max + 1)
        self.dtype: type[np.unsignedinteger[Any]] = next(fitting)
        vocabulary = sorted(self.inner.get_vocab().items(), key=lambda item: item[1])
        self.identity = f"{name}:{hash_of(vocabulary)}"

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        """The ids, no special tokens but the end."""
        ids = list(self.inner.encode(text.decode("utf-8", "replace"), add_special_tokens=False))
        if self.inner.eos_token_id is not None:
            ids.append(self.inner.eos_token_id)
        return np.array(ids, dtype=self.dtype)


def hash_of(vocabulary: list[tuple[str, int]]) -> str:
    """A short digest of a vocabulary."""
    from blake3 import blake3

    return blake3(repr(vocabulary).encode()).hexdigest()[:16]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a spec's `data.tokenizer`."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def save_byte_tokenizer(folder: Path) -> None:
    """Writes the byte tokenizer as a Hugging Face tokenizer: ids are byte values, NUL the end of text."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = _byte_characters()
    fast = Fast(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    end = characters[BYTES_SEPARATOR]
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=end, bos_token=end).save_pretrained(folder)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
