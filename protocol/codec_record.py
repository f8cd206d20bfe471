"""Peer records and statuses to and from protobuf."""

from __future__ import annotations

import math
from typing import cast

from peerloom.proto import common_pb2, peer_pb2
from peerloom.protocol import checks, limits
from peerloom.protocol.codec_base import finite_or_none, optional_finite, parse, serialize
from peerloom.protocol.types import NodeState, NodeStatus, PeerId, PeerRecord, Reach, Role, StageRole


def encode_record(record: PeerRecord) -> bytes:
    """A peer record; a loss that is not finite is left out, a reason is cut to one line."""
    return serialize(_record_message(record))


def decode_record(data: bytes) -> PeerRecord:
    """A peer record; its signature is the caller's business."""
    return _record(parse(common_pb2.PeerRecord, data))


def encode_status(status: NodeStatus) -> bytes:
    """The reply of Peer.Status; counters that are not finite are left out."""
    limits.check_number_of("partners", len(status.partners), limits.MAX_PARTNERS)
    limits.check_number_of("counters", len(status.counters), limits.MAX_COUNTERS)
    counters = {name: value for name, value in status.counters.items() if math.isfinite(value)}
    partners: dict[str, int] = dict(status.partners.items())
    return serialize(peer_pb2.NodeStatus(record=_record_message(status.record), partners=partners, counters=counters))


def decode_status(data: bytes) -> NodeStatus:
    """The reply of Peer.Status."""
    status = parse(peer_pb2.NodeStatus, data)
    limits.check_number_of("partners", len(status.partners), limits.MAX_PARTNERS)
    limits.check_number_of("counters", len(status.counters), limits.MAX_COUNTERS)
    return NodeStatus(
        record=_record(status.record),
        partners={
            PeerId(checks.peer_id("partner", peer)): checks.whole("exchanges with a partner", count)
            for peer, count in status.partners.items()
        },
        counters={
            checks.text("counter", name, limits.MAX_METRIC_CHARS, empty=False): checks.finite("counter", value)
            for name, value in status.counters.items()
        },
    )


def _record_message(record: PeerRecord) -> common_pb2.PeerRecord:
    fields = {name: getattr(record, name) for name in PeerRecord.__slots__}
    fields["reason"] = checks.shown(record.reason)
    fields["loss"] = finite_or_none(record.loss)
    fields["accuracy"] = finite_or_none(record.accuracy)
    fields["sketch"] = checks.fit_sketch(record.sketch)
    fields["stage"] = record.stage if record.stage >= 0 else None
    return common_pb2.PeerRecord(**fields)


def _record(record: common_pb2.PeerRecord) -> PeerRecord:
    limits.check_number_of("addresses", len(record.addresses), limits.MAX_ADDRESSES)
    limits.check_number_of("relays", len(record.via), limits.MAX_VIA)
    limits.check_number_of("multiaddrs", len(record.libp2p), limits.MAX_LIBP2P)
    check_versions(record)
    return PeerRecord(
        peer_id=PeerId(checks.peer_id("peer id", record.peer_id)),
        name=checks.text("name", record.name, limits.MAX_NAME_CHARS),
        role=cast(Role, checks.one_of("role", record.role, Role)),
        addresses=tuple(checks.address(address) for address in record.addresses),
        cert_der=checks.bounded("certificate", record.cert_der, limits.MAX_CERT_BYTES),
        version=checks.text("version", record.version, limits.MAX_VERSION_CHARS),
        protocol_min=record.protocol_min,
        protocol_max=record.protocol_max,
        instance=checks.text("instance", record.instance, limits.MAX_INSTANCE_CHARS),
        started_at=checks.wall_time("started_at", record.started_at),
        issued_at=checks.wall_time("issued_at", record.issued_at),
        state=cast(NodeState, checks.one_of("state", record.state, NodeState)),
        reason=checks.text("reason", record.reason, limits.MAX_TEXT_CHARS),
        init_digest=checks.hex_text("init digest", record.init_digest, limits.MAX_DIGEST_CHARS),
        layout_digest=checks.hex_text("layout digest", record.layout_digest, limits.MAX_DIGEST_CHARS),
        round=checks.position("round", record.round),
        step=checks.position("step", record.step),
        tokens=checks.whole("tokens", record.tokens),
        tokens_per_s=checks.finite("tokens per second", record.tokens_per_s),
        loss=optional_finite("loss", record, "loss"),
        up_bytes=checks.whole("bytes up", record.up_bytes),
        down_bytes=checks.whole("bytes down", record.down_bytes),
        sketch=checks.sketch("sketch", record.sketch),
        reach=cast(Reach, checks.one_of("reach", record.reach or "unknown", Reach)),
        via=tuple(PeerId(checks.peer_id("relay", peer)) for peer in record.via),
        relays=record.relays,
        libp2p=tuple(checks.multiaddr(address) for address in record.libp2p),
        state_hash=checks.hex_text("state hash", record.state_hash, limits.MAX_DIGEST_CHARS),
        messages=checks.whole("messages", record.messages),
        accuracy=optional_finite("accuracy", record, "accuracy"),
        stage=checks.whole("stage", record.stage, limits.MAX_STAGES - 1) if record.HasField("stage") else -1,
        stage_role=cast(StageRole, checks.one_of("stage role", record.stage_role, StageRole)),
        up_bytes_per_s=checks.finite("bytes up per second", record.up_bytes_per_s),
        down_bytes_per_s=checks.finite("bytes down per second", record.down_bytes_per_s),
        last_partner=checks.peer_id("last partner", record.last_partner) if record.last_partner else "",
        last_met_at=checks.wall_time("last_met_at", record.last_met_at),
    )


def check_versions(message: peer_pb2.HelloRequest | peer_pb2.HelloReply | common_pb2.PeerRecord) -> None:
    """Raises LimitExceeded or MalformedMessage."""
    checks.whole("newest protocol version", message.protocol_max, limits.MAX_PROTOCOL)
    checks.whole("oldest protocol version", message.protocol_min, message.protocol_max)
