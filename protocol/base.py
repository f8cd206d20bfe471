"""A base model handed over by a peer: whose word counts, and the bounds that hold before anything of it is used.

Two states are fetched. "base_files" is small: how the weights are encoded, the configuration and the tokenizer, all of
them JSON under names fixed here. "base" is the parameters in the order of the model's own, nothing between them; how
long they are follows from the configuration, and what they must be from the digest that trainers announce. Neither
carries code, or names where to get any.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from peerloom.protocol.errors import LimitExceeded, MalformedMessage
from peerloom.protocol.limits import CHUNK_BYTES, MAX_PIECES
from peerloom.protocol.types import PeerId

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
FILES = {  # by name: its most bytes; a tokenizer of 250,000 words takes some 30 MB
    CONFIG: 256 << 10,
    TOKENIZER: 64 << 20,
    "tokenizer_config.json": 4 << 20,
    "special_tokens_map.json": 256 << 10,
}
CLEANED = frozenset(FILES) - {TOKENIZER}  # read by Python; the tokenizer's words are read by its library alone
ENCODINGS = {"fp32": 4, "bf16": 2}  # bytes a parameter; bf16 where every one is a bf16 number
MAX_FILES_BYTES = sum(FILES.values()) + 1024
MAX_WEIGHT_BYTES = MAX_PIECES * CHUNK_BYTES
MAX_DEPTH, MAX_VALUES, MAX_TEXT = 16, 1 << 20, 1 << 16  # of JSON
MAX_INTEGER = 1 << 40
MAX_REPEATED = 1024  # layers or experts: modules are made one by one before anything could be weighed

_MAGIC = b"peerloom-base-1\0"
# what could name code, another place to load from, or a machine's own path
_LEFT_OUT = re.compile(
    r"^_|auto_map|implementation|quantization|use_kernels|kernel_config|remote_code|custom_|chat_template|name_or_path"
    r"|transformers_|_file$|dtype|^is_local$|local_files_only"
)
_REPEATED = re.compile(r"layer|expert|depth|(?:n|num)_block")
_UNLIMITED = "model_max_length"  # of a tokenizer that has no limit: 10^30, as a float had it


class Claim(NamedTuple):
    """What a trainer's record says."""

    peer: PeerId
    init_digest: str
    messages: int


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """What comes beside the weights."""

    encoding: str
    files: dict[str, bytes]


def choose_base(claims: Iterable[Claim]) -> tuple[str, tuple[PeerId, ...]]:
    """The base that most trainers have, of equals the one with most messages, and who has it; ("", ()) for none."""
    holders: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.init_digest:
            holders[claim.init_digest].append(claim)
    if not holders:
        return "", ()
    digest = min(
        holders, key=lambda one: (-len(holders[one]), -max(claim.messages for claim in holders[one]), one)
    )
    ordered = sorted(holders[digest], key=lambda claim: (-claim.messages, claim.peer))
    return digest, tuple(claim.peer for claim in ordered)


def weight_bytes(numel: int, encoding: str) -> int:
    """How long the weights are; raises LimitExceeded past what a manifest can list."""
    total = numel * ENCODINGS[encoding]
    if not 0 < total <= MAX_WEIGHT_BYTES:
        raise LimitExceeded(f"a base model of {total} bytes; {MAX_WEIGHT_BYTES} at most can be fetched")
    return total


def pack_files(found: BaseFiles) -> bytes:
    """As "base_files" carries it; equal files give equal bytes."""
    parts = [_MAGIC, bytes([list(ENCODINGS).index(found.encoding)])]
    for name in FILES:
        content = found.files.get(name, b"")
        parts += [len(content).to_bytes(4, "little"), content]
    return b"".join(parts)


def unpack_files(data: bytes) -> BaseFiles:
    """What pack_files was given, cleaned; raises MalformedMessage or LimitExceeded."""
    at = len(_MAGIC) + 1
    if len(data) > MAX_FILES_BYTES:
        raise LimitExceeded(f"the files of a base model have {len(data)} bytes, over {MAX_FILES_BYTES}")
    if len(data) < at or data[: len(_MAGIC)] != _MAGIC or data[at - 1] >= len(ENCODINGS):
        raise MalformedMessage(f"{len(data)} bytes that are no files of a base model")
    files: dict[str, bytes] = {}
    for name, most in FILES.items():
        size = int.from_bytes(data[at : at + 4], "little")
        if size > most:
            raise LimitExceeded(f"{name} of the base model has {size} bytes, over {most}")
        content, at = data[at + 4 : at + 4 + size], at + 4 + size
        if at > len(data):
            raise MalformedMessage(f"the base model's files end within {name}")
        if content:
            files[name] = cleaned(name, content) if name in CLEANED else content
    if at != len(data) or CONFIG not in files:
        raise MalformedMessage(f"the base model's files lack {CONFIG}, or go on after the last one")
    return BaseFiles(list(ENCODINGS)[data[len(_MAGIC)]], files)


def cleaned(name: str, content: bytes) -> bytes:
    """A JSON object without what could name code or places, its keys in order; raises MalformedMessage."""
    try:
        found = json.loads(content, parse_constant=_no_number)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        plain = _plain(found, MAX_DEPTH, [MAX_VALUES])
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"{name} of the base model cannot be used: {str(error)[:200]}") from None
    return json.dumps(plain, sort_keys=True).encode()


def only_named(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Those that are handed over, cleaned."""
    return {
        name: cleaned(name, files[name]) if name in CLEANED else files[name] for name in FILES if files.get(name)
    }


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _plain(value: Any, depth: int, left: list[int], key: str = "") -> Any:
    left[0] -= 1
    if depth < 0 or left[0] < 0:
        raise ValueError("it is nested too deep, or holds too much")
    match value:
        case dict():
            kept = {name: inner for name, inner in value.items() if not _LEFT_OUT.search(name)}
            return {name: _plain(inner, depth - 1, left, name) for name, inner in kept.items()}
        case list():
            return [_plain(inner, depth - 1, left, key) for inner in value]
        case str() if len(value) > MAX_TEXT:
            raise ValueError(f"{key[:80]} is a text of {len(value)} characters")
        case bool() | None | str():
            return value
        case int() if key == _UNLIMITED:
            return min(max(value, 0), MAX_INTEGER)
        case int() if abs(value) > (MAX_REPEATED if _REPEATED.search(key) else MAX_INTEGER):
            raise ValueError(f"{key[:80]} is {value}")
        case float() if not math.isfinite(value):
            raise ValueError(f"{key[:80]} is {value}")
    return value
