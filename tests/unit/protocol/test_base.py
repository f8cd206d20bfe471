"""What is believed of a base that a peer hands over, before a byte of its weights comes."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3

from peerloom.protocol.base import (
    ENCODINGS,
    FILES,
    MAX_FILES_BYTES,
    MAX_WEIGHT_BYTES,
    BaseFiles,
    Claim,
    choose_base,
    cleaned,
    pack_files,
    unpack_files,
    weight_bytes,
)
from peerloom.protocol.effects import ScorePeer
from peerloom.protocol.errors import LimitExceeded, MalformedMessage
from peerloom.protocol.messages import FetchRequest, StateManifest, StatePiece
from peerloom.protocol.transfer import (
    DonorFailed,
    FetchDone,
    FetchMachine,
    ManifestReceived,
    PieceReceived,
    StartFetch,
    StorePiece,
)
from peerloom.protocol.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
GOOD = BaseFiles("bf16", {"config.json": b'{"a": 1}', "tokenizer.json": b"{}"})


def test_the_base_of_most_trainers_is_taken_and_of_equals_the_one_with_most_messages() -> None:
    claims = [Claim(A, "x", 900), Claim(B, "y", 5), Claim(C, "y", 7), Claim(PeerId("d"), "", 10**6)]
    assert choose_base(claims) == ("y", (C, B))
    assert choose_base(claims[:2]) == ("x", (A,))
    assert choose_base(claims[3:]) == ("", ())


def test_files_come_back_as_they_were_packed() -> None:
    assert unpack_files(pack_files(GOOD)) == GOOD
    assert pack_files(BaseFiles("bf16", dict(reversed(GOOD.files.items())))) == pack_files(GOOD)


def test_files_that_are_cut_off_or_go_on_are_refused() -> None:
    data = pack_files(GOOD)
    for bad in [data[:at] for at in range(len(data))] + [data + b"x", b"peerloom-base-2\0" + data[16:]]:
        with pytest.raises(MalformedMessage):
            unpack_files(bad)
    with pytest.raises(MalformedMessage, match=r"lack config\.json"):
        unpack_files(pack_files(BaseFiles("fp32", {"tokenizer.json": b"{}"})))


def test_files_larger_than_their_limit_are_refused() -> None:
    for name, most in FILES.items():
        data = pack_files(GOOD)[:17]  # what comes before the first file
        for other, limit in FILES.items():
            data += (limit + 1 if other == name else 0).to_bytes(4, "little")
            if other == name:
                break
        with pytest.raises(LimitExceeded, match=f"{name} of the base model has {most + 1} bytes"):
            unpack_files(data)
    with pytest.raises(LimitExceeded):
        unpack_files(bytes(MAX_FILES_BYTES + 1))


@pytest.mark.parametrize(
    "text",
    [
        "[]", "7", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": -Infinity}', "\xff", '{"num_hidden_layers": 1025}',
        '{"text_config": {"n_layer": 100000}}', '{"num_local_experts": 4096}', '{"hidden_size": 10000000000000}',
        '{"a":' * 20 + "1" + "}" * 20, "[" * 100_000, json.dumps({"a": "x" * 70_000}), '{"a": ' + "9" * 5000 + "}",
    ],
)  # fmt: skip
def test_json_with_absurd_content_is_refused(text: str) -> None:
    with pytest.raises(MalformedMessage, match=r"config\.json of the base model cannot be used"):
        cleaned("config.json", text.encode("latin-1"))


def test_json_loses_what_could_name_code_or_places_and_keeps_the_rest() -> None:
    kept = {
        "hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}, "layer_types": ["full"], "conv_kernel": 4,
        "tie_word_embeddings": True, "eos_token_id": None, "eos_token": {"content": "</s>"},
    }  # fmt: skip
    dropped = {
        "auto_map": {"AutoConfig": "r--m.C"}, "_attn_implementation": "r/k", "experts_implementation": "r/k",
        "quantization_config": {}, "tokenizer_file": "/etc/passwd", "name_or_path": "/home", "chat_template": "{{ 1 }}",
        "transformers_weights": "x", "is_local": True, "torch_dtype": "bfloat16", "trust_remote_code": True,
        "custom_generate": "r",
    }  # fmt: skip
    assert json.loads(cleaned("config.json", json.dumps({**kept, **dropped}).encode())) == kept
    unlimited = b'{"model_max_length": 1000000000000000019884624838656}'
    assert json.loads(cleaned("tokenizer_config.json", unlimited)) == {"model_max_length": 1 << 40}


def test_weights_have_a_size_that_follows_from_the_configuration_and_a_limit() -> None:
    assert [weight_bytes(100, encoding) for encoding in ENCODINGS] == [400, 200]
    for numel in (0, MAX_WEIGHT_BYTES // 4 + 1):
        with pytest.raises(LimitExceeded):
            weight_bytes(numel, "fp32")


PIECE = 8192
WEIGHTS = bytes(range(256)) * 96  # three pieces
DIGESTS = tuple(blake3(WEIGHTS[at : at + PIECE]).digest() for at in range(0, len(WEIGHTS), PIECE))


def manifest(digests: tuple[bytes, ...] = DIGESTS, size: int = len(WEIGHTS)) -> StateManifest:
    return StateManifest("s", 0, 0, "L", size, PIECE, digests, None)


def test_weights_that_broke_off_go_on_from_another_donor_unless_it_has_others() -> None:
    """Of whoever has the same pieces: with a skew of -1 none stays that the new donor did not announce."""
    machine = FetchMachine([A, B, C], "L", len(WEIGHTS), -1, kind="base")
    assert machine.start() == [StartFetch(1, A, FetchRequest("L", kind="base"))]
    lie = (blake3(bytes(PIECE)).digest(), *DIGESTS[1:])
    assert machine.handle(ManifestReceived(1, manifest(lie))) == []
    assert machine.handle(PieceReceived(1, StatePiece(0, bytes(PIECE)))) == [StorePiece(0, 0)]
    assert machine.handle(PieceReceived(1, StatePiece(1, WEIGHTS[PIECE : 2 * PIECE]))) == [StorePiece(1, PIECE)]
    (asked,) = machine.handle(DonorFailed(1, "cut off"))
    assert asked == StartFetch(2, B, FetchRequest("L", start_piece=2, kind="base"))
    (again,) = machine.handle(ManifestReceived(2, manifest()))
    assert again == StartFetch(3, B, FetchRequest("L", "s", 0, kind="base")), "the lie in place is not B's"
    assert machine.handle(ManifestReceived(3, manifest())) == []
    machine.handle(PieceReceived(3, StatePiece(0, WEIGHTS[:PIECE])))
    machine.handle(PieceReceived(3, StatePiece(1, WEIGHTS[PIECE : 2 * PIECE])))
    (third,) = machine.handle(DonorFailed(3, "cut off"))
    assert third == StartFetch(4, C, FetchRequest("L", start_piece=2, kind="base"))
    assert machine.handle(ManifestReceived(4, manifest())) == []
    assert machine.handle(PieceReceived(4, StatePiece(2, WEIGHTS[2 * PIECE :]))) == [
        StorePiece(2, 2 * PIECE), FetchDone(C, 0, 0, None)
    ]  # fmt: skip


def test_weights_of_another_size_than_the_configuration_says_are_refused_with_their_manifest() -> None:
    machine = FetchMachine([A, B], "L", len(WEIGHTS), -1, kind="base")
    machine.start()
    oversize = manifest((*DIGESTS, bytes(32)), len(WEIGHTS) + 1)
    assert machine.handle(ManifestReceived(1, oversize)) == [
        ScorePeer(A, "bad_manifest"), StartFetch(2, B, FetchRequest("L", kind="base"))
    ]  # fmt: skip
