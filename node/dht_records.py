"""What stands in the DHT: key names, the bytes of a record, and the checks every node runs on each store and find.

A value is an Ed25519 signature (64 bytes) and a JSON body. A peer's signature covers the key, its subkey, the
expiration and the body, so a record cannot be moved, prolonged or altered; a spec's signature is its owner's, over the
text alone, so any node may renew it. hivemind shows a validator the SHA-1 of a key only, so the body names its run and
the validator derives the key from it: one validator serves all runs.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from peerloom.node.identity import Identity, verify
from peerloom.node.specs import MAX_SIGNED_BYTES, SIGNATURE_CONTEXT
from peerloom.protocol import checks, limits
from peerloom.protocol.errors import MalformedMessage, ProtocolError
from peerloom.protocol.types import NodeState, PeerId, PeerRecord, Reach, Role, RunId, SignedSpec, StageRole

PEER_LIFE_S: Final = 30.0
SPEC_LIFE_S: Final = 86_400.0
MAX_PEER_LIFE_S: Final = 60.0  # expiration past issue: the record's own life, and room for a tombstone to outrank it
SKEW_S: Final = 10.0  # clocks that differ by more are refused at join
OUTRANK_S: Final = 0.001  # the DHT prefers what expires later
MAX_PEER_VALUE_BYTES: Final = 16 << 10
MAX_SPEC_VALUE_BYTES: Final = 4 * MAX_SIGNED_BYTES  # JSON escapes line ends and quotes

RUNS_KEY: Final = b"peerloom/runs"
PEER_DOMAIN: Final = b"peerloom-peer-v1\0"

MAX_CHECKED: Final = 1024  # signatures remembered, at some 150 bytes each

_T = TypeVar("_T")
_checked: OrderedDict[bytes, bool] = OrderedDict()  # digest of who, what and signature; oldest first


def peers_key(run_id: RunId) -> bytes:
    """Where a run's peer records stand, subkey = peer id."""
    return f"{run_id}/peers".encode()


def spec_key(run_id: RunId) -> bytes:
    """Where a run's spec stands, subkey = owner."""
    return f"{run_id}/spec".encode()


def key_bytes(key: bytes) -> bytes:
    """The 20 bytes under which hivemind files `key`."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def spec_run_id(text: str) -> RunId:
    """The run id that follows from a spec's canonical text."""
    return RunId(hashlib.sha256(text.encode()).hexdigest()[: limits.RUN_ID_CHARS])


def spec_is_signed(spec: SignedSpec) -> bool:
    """Whether its owner signed this text; whether the text is a spec is specs.verify_spec's business."""
    return _verified(spec.owner, SIGNATURE_CONTEXT + spec.text.encode(), spec.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEntry:
    """One peer's newest word, `record` being None when it took its record away; times are Unix seconds."""

    peer_id: PeerId
    issued_at: float
    expires_at: float
    record: PeerRecord | None

    def outranks(self, other: PeerEntry | None) -> bool:
        """Whether this is the newer of two words of one peer."""
        return other is None or (self.issued_at, self.expires_at) > (other.issued_at, other.expires_at)


def _text(limit: int) -> Any:
    return Annotated[str, Field(max_length=limit), AfterValidator(_printable)]


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("holds characters that are not printable")
    return value


def _address(value: str) -> str:
    try:
        return checks.address(value)
    except ProtocolError as error:
        raise ValueError(str(error)) from error


def _relay(value: str) -> str:
    try:
        return checks.peer_id("relay", value)
    except ProtocolError as error:
        raise ValueError(str(error)) from error


def _multiaddr(value: str) -> str:
    try:
        return checks.multiaddr(value)
    except ProtocolError as error:
        raise ValueError(str(error)) from error


_Count = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
_Position = Annotated[int, Field(ge=0, le=limits.MAX_POSITION)]
_Version = Annotated[int, Field(ge=1, le=limits.MAX_PROTOCOL)]
_Wall = Annotated[float, Field(ge=0, le=limits.MAX_WALL_S)]
_SketchValue = Annotated[float, Field(ge=-limits.MAX_SKETCH_VALUE, le=limits.MAX_SKETCH_VALUE)]
_Hex = Annotated[str, Field(max_length=limits.MAX_DIGEST_CHARS, pattern=r"^[0-9a-f]*$")]
_RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_PeerIdText = Annotated[str, Field(max_length=limits.MAX_PEER_ID_CHARS)]


class _Model(BaseModel):
    # Unknown fields are passed over, so that a later version may add some.
    model_config = ConfigDict(
        strict=True, frozen=True, allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64"
    )


class _Record(_Model):
    peer_id: _PeerIdText
    name: _text(limits.MAX_NAME_CHARS)  # type: ignore[valid-type]
    role: Role
    addresses: Annotated[tuple[Annotated[str, AfterValidator(_address)], ...], Field(max_length=limits.MAX_ADDRESSES)]
    cert_der: Annotated[bytes, Field(max_length=limits.MAX_CERT_BYTES)]
    version: _text(limits.MAX_VERSION_CHARS)  # type: ignore[valid-type]
    protocol_min: _Version
    protocol_max: _Version
    instance: _text(limits.MAX_INSTANCE_CHARS)  # type: ignore[valid-type]
    started_at: _Wall
    issued_at: _Wall
    state: NodeState
    reason: _text(limits.MAX_TEXT_CHARS)  # type: ignore[valid-type]
    init_digest: _Hex
    layout_digest: _Hex
    round: _Position
    step: _Position
    tokens: _Count
    tokens_per_s: Annotated[float, Field(ge=0)]
    loss: float | None
    up_bytes: _Count
    down_bytes: _Count
    sketch: Annotated[tuple[_SketchValue, ...], Field(max_length=limits.MAX_SKETCH)] = ()
    reach: Reach = "unknown"
    via: Annotated[tuple[Annotated[str, AfterValidator(_relay)], ...], Field(max_length=limits.MAX_VIA)] = ()
    relays: bool = False
    libp2p: Annotated[tuple[Annotated[str, AfterValidator(_multiaddr)], ...], Field(max_length=limits.MAX_LIBP2P)] = ()
    state_hash: _Hex = ""
    messages: _Count = 0
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    stage: Annotated[int, Field(ge=-1, lt=limits.MAX_STAGES)] = -1
    stage_role: StageRole = ""
    up_bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    down_bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    last_partner: Annotated[str, Field(max_length=limits.MAX_PEER_ID_CHARS, pattern=r"^[1-9A-HJ-NP-Za-km-z]*$")] = ""
    last_met_at: _Wall = 0.0


class _PeerBody(_Model):
    kind: Literal["peer"] = "peer"
    run: _RunId
    record: _Record


class _GoneBody(_Model):
    kind: Literal["gone"] = "gone"
    run: _RunId
    peer_id: _PeerIdText
    issued_at: _Wall


class _SpecBody(_Model):
    kind: Literal["spec"] = "spec"
    owner: _PeerIdText
    text: Annotated[str, Field(max_length=MAX_SIGNED_BYTES)]


_BODY: TypeAdapter[_PeerBody | _GoneBody | _SpecBody] = TypeAdapter(
    Annotated[_PeerBody | _GoneBody | _SpecBody, Field(discriminator="kind")]
)


def fit(record: PeerRecord) -> PeerRecord:
    """This node's own record with its free text made fit to send, and a loss or sketch that is no number left out."""
    loss = record.loss if record.loss is not None and math.isfinite(record.loss) else None
    name = checks.shown(record.name, limits.MAX_NAME_CHARS)
    sketch = checks.fit_sketch(record.sketch)
    return replace(record, name=name, reason=checks.shown(record.reason), loss=loss, sketch=sketch)


def check_peer(record: PeerRecord) -> None:
    """Raises ValueError when a field of this node's own record is out of its range."""
    _Record.model_validate(asdict(fit(record)))


def next_expiry(now: float, last: float) -> float:
    """When a record published now ends, `last` being the end of this node's former one, which it must outrank.

    A `last` further ahead than a life was made by a clock that has been set back since; it no longer counts.
    """
    outranking = last + OUTRANK_S
    return max(now + PEER_LIFE_S, outranking if outranking <= now + PEER_LIFE_S + SKEW_S else 0.0)


def encode_peer(identity: Identity, run_id: RunId, record: PeerRecord, expires_at: float) -> bytes:
    """The signed value of this node's record; raises ValueError when a field is out of its range."""
    body = _PeerBody(run=run_id, record=_Record.model_validate(asdict(fit(record))))
    return _sign_peer(identity, run_id, body, expires_at)


def encode_gone(identity: Identity, run_id: RunId, issued_at: float, expires_at: float) -> bytes:
    """The signed value of this node's tombstone."""
    body = _GoneBody(run=run_id, peer_id=identity.peer_id, issued_at=issued_at)
    return _sign_peer(identity, run_id, body, expires_at)


def encode_spec(spec: SignedSpec) -> bytes:
    """The value of a spec, under either of its keys."""
    return spec.signature + _SpecBody(owner=spec.owner, text=spec.text).model_dump_json().encode()


def _sign_peer(identity: Identity, run_id: RunId, body: _PeerBody | _GoneBody, expires_at: float) -> bytes:
    text = body.model_dump_json().encode()
    return identity.sign(_peer_message(run_id, identity.peer_id, expires_at, text)) + text


def _peer_message(run_id: RunId, peer_id: PeerId, expires_at: float, body: bytes) -> bytes:
    key = key_bytes(peers_key(run_id))
    subkey = peer_id.encode()
    return PEER_DOMAIN + key + struct.pack(">Id", len(subkey), expires_at) + subkey + body


def decode_peer(run_id: RunId, peer_id: PeerId, value: bytes, expires_at: float) -> PeerEntry:
    """Reads and verifies one value under `peers_key(run_id)`; raises MalformedMessage."""
    signature, text, body = _parse(value, MAX_PEER_VALUE_BYTES)
    if isinstance(body, _SpecBody) or body.run != run_id:
        raise MalformedMessage("a record that belongs under another key")
    entry = _entry(body, expires_at)
    if entry.peer_id != peer_id:
        raise MalformedMessage("a record under another peer's id")
    if not (math.isfinite(expires_at) and 0 < expires_at - entry.issued_at <= MAX_PEER_LIFE_S):
        raise MalformedMessage("a record whose life is out of its range")
    if not _verified(peer_id, _peer_message(run_id, peer_id, expires_at, text), signature):
        raise MalformedMessage("a record with a wrong signature")
    return entry


def _entry(body: _PeerBody | _GoneBody, expires_at: float) -> PeerEntry:
    if isinstance(body, _GoneBody):
        return PeerEntry(peer_id=PeerId(body.peer_id), issued_at=body.issued_at, expires_at=expires_at, record=None)
    fields: dict[str, Any] = dict(body.record)
    record = PeerRecord(**fields)
    if record.protocol_min > record.protocol_max:
        raise MalformedMessage("protocol versions in the wrong order")
    return PeerEntry(peer_id=record.peer_id, issued_at=record.issued_at, expires_at=expires_at, record=record)


def decode_spec(value: bytes) -> tuple[RunId, SignedSpec]:
    """Reads and verifies a spec; raises MalformedMessage. The run id is derived from the text, never taken on trust."""
    signature, _, body = _parse(value, MAX_SPEC_VALUE_BYTES)
    if not isinstance(body, _SpecBody):
        raise MalformedMessage("not a spec")
    spec = SignedSpec(text=body.text, owner=PeerId(body.owner), signature=signature)
    if not spec_is_signed(spec):
        raise MalformedMessage("a spec with a wrong signature")
    return spec_run_id(spec.text), spec


def _parse(value: bytes, limit: int) -> tuple[bytes, bytes, _PeerBody | _GoneBody | _SpecBody]:
    if not limits.SIGNATURE_BYTES < len(value) <= limit:
        raise MalformedMessage(f"a value of {len(value)} bytes; the limit is {limit}")
    text = value[limits.SIGNATURE_BYTES :]
    try:
        return value[: limits.SIGNATURE_BYTES], text, _BODY.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise MalformedMessage(f"a value whose {'.'.join(map(str, first['loc']))} does not check") from error


def _verified(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """A record is seen again at each find of its life: verifying it once is enough. What is remembered are digests."""
    digest = hashlib.sha256(b"%s\0%s%s" % (peer_id.encode(), hashlib.sha256(message).digest(), signature)).digest()
    if (known := _checked.get(digest)) is None:
        known = _checked[digest] = verify(peer_id, message, signature)
        while len(_checked) > MAX_CHECKED:
            _checked.popitem(last=False)
    return known


class DhtRecord(Protocol):
    """hivemind.dht.DHTRecord, without the import, which a test or a tool may not need."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


class RecordValidator:
    """hivemind's RecordValidatorBase by its shape: refuses whatever is not one of our records, whole and signed.

    A record past its end still validates: one of them would otherwise make hivemind drop a whole dictionary.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall

    def validate(self, record: DhtRecord) -> bool:
        """Whether a store may be taken, or a find's answer believed."""
        try:
            self._check(record)
        except ProtocolError:
            return False
        return True

    def sign_value(self, record: DhtRecord) -> bytes:
        """Values are signed before they get here."""
        return record.value

    def strip_value(self, record: DhtRecord) -> bytes:
        """Readers check the signature again themselves."""
        return record.value

    def _check(self, record: DhtRecord) -> None:
        if len(record.value) > MAX_SPEC_VALUE_BYTES:
            raise MalformedMessage("too large")
        value, subkey = _unpack(record.value, bytes), _unpack(record.subkey, str)
        if msgpack.packb(subkey) != record.subkey:
            raise MalformedMessage("a subkey written in two ways")
        _, _, body = _parse(value, MAX_SPEC_VALUE_BYTES)
        if isinstance(body, _SpecBody):
            life = self._check_spec(record.key, subkey, value)
        else:
            life = MAX_PEER_LIFE_S
            decode_peer(RunId(body.run), PeerId(subkey), value, record.expiration_time)
            if record.key != key_bytes(peers_key(RunId(body.run))):
                raise MalformedMessage("a record under another key")
        if not record.expiration_time <= self._wall() + life + SKEW_S:  # NaN fails too
            raise MalformedMessage("a record from the future")

    def _check_spec(self, key: bytes, subkey: str, value: bytes) -> float:
        run_id, spec = decode_spec(value)
        places = {key_bytes(RUNS_KEY): run_id, key_bytes(spec_key(run_id)): spec.owner}
        if places.get(key) != subkey:
            raise MalformedMessage("a spec under another key")
        return SPEC_LIFE_S


def _unpack(data: bytes, kind: type[_T]) -> _T:
    try:
        value = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage("not msgpack") from error
    if not isinstance(value, kind):
        raise MalformedMessage("not of the type it should be")
    return value
