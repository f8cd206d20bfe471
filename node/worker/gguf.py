"""Models and tokenizers out of GGUF files, opened by transformers (with the packages `gguf` and `accelerate`)."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NEEDED = ("gguf", "accelerate")


def is_gguf(path: str) -> bool:
    """Whether a model's or tokenizer's path names a GGUF file."""
    return path.endswith(".gguf")


def missing_packages() -> list[str]:
    """The packages that opening GGUF needs and this Python lacks."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def open_model(path: str) -> Any:
    """The file's causal LM in fp32: a plain model, since transformers saves none that came from GGUF.

    Raises OSError, ValueError or ImportError.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder, name = _parts(path)
    disable_progress_bar()
    with _damage_named(name):
        opened = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, local_files_only=True)
    about = {key: value for key, value in opened.config.to_dict().items() if key != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(type(opened.config).from_dict(about))
    plain.load_state_dict(opened.state_dict())
    return plain


def open_tokenizer(path: str) -> Any:
    """The file's tokenizer; raises OSError, ValueError or ImportError."""
    from transformers import AutoTokenizer

    folder, name = _parts(path)
    with _damage_named(name):
        return AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """What transformers lets out of a file that ends early, as ValueError."""
    try:
        yield
    except (struct.error, IndexError) as error:
        raise ValueError(f"{name} is damaged or cut short ({error}); fetch it again") from error


def _parts(path: str) -> tuple[str, str]:
    """Folder and file name."""
    file = Path(path).expanduser()
    if lacking := missing_packages():
        raise ImportError(f'a GGUF file takes {" and ".join(lacking)}; install with: pip install "peerloom[gguf]"')
    if not file.is_file():
        raise OSError(f"there is no file {file}")
    return str(file.parent), file.name
