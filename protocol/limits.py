"""Every size limit of the wire, with its unit and its reason, and the checks that apply them."""

from __future__ import annotations

from peerloom.protocol.errors import LimitExceeded

CHUNK_BYTES = 1 << 20  # bytes of a Chunk or a StatePiece: large enough to fill a link, small enough to be many
LEAST_CHUNK_BYTES = 8 << 10  # of any chunk or piece but the last: small under a cap, yet no dripping in crumbs
LEAST_RATE = 32 << 10  # bytes a second: a transfer slower than this, over its whole length, is broken off
MAX_PIECES = 32_768  # pieces of a manifest, i.e. 32 GiB of fp32 theta: their digests then fill exactly one chunk
ENVELOPE_BYTES = 64 << 10  # bytes of a message beside its largest field
MAX_MESSAGE_BYTES = CHUNK_BYTES + ENVELOPE_BYTES  # bytes of any one message; grpc refuses larger ones unread
MAX_HELLO_BYTES = 16 << 10  # bytes of a message from a peer that has not proven who it is
MAX_PAYLOAD_BYTES = 1 << 40  # bytes an offer or a manifest may announce; nothing is ever allocated on its word
MAX_FRAGMENTS = 64  # parts of the model in a spec
MAX_STAGES = 256  # parts of a model in a pipeline
MAX_LEGS = 4096  # exchanges of a fragment in a round: a complete graph has as many as nodes

DIGEST_BYTES = 32  # BLAKE3 and SHA-256
LINK_DIGEST_BYTES = 16  # XXH3
EXCHANGE_ID_CHARS = 32  # 16 random bytes in hex
MAX_DIGEST_CHARS = 64  # a 32-byte digest in hex
RUN_ID_CHARS = 16  # hex
CHALLENGE_BYTES = 32  # what a client wants signed in a Hello
MAX_NONCE_BYTES = 128  # what a server wants signed in a Prove; its own business, so only bounded
SIGNATURE_BYTES = 64  # Ed25519
TOKEN_BYTES = 32  # a session's bearer token

MAX_PEER_ID_CHARS = 64  # an Ed25519 peer id has 52 characters
MAX_NAME_CHARS = 64  # a node's display name fits a table's column
MAX_TEXT_CHARS = 512  # a reason or a detail: one sentence
MAX_ERROR_CHARS = 1024  # an error as told to a peer: it may quote two hashes
MAX_VERSION_CHARS = 64  # a PEP 440 version
MAX_INSTANCE_CHARS = 64  # random hex of a process start
MAX_SNAPSHOT_CHARS = 128  # a donor's name for a snapshot
MAX_ADDRESSES = 16  # addresses of a record: a machine's interfaces; each costs a dialler a timeout
MAX_ADDRESS_CHARS = 262  # a DNS name of 253 characters, a colon, a port, brackets
MAX_VIA = 4  # relays of a record
MAX_LIBP2P = 8  # multiaddrs of a record
MAX_MULTIADDR_CHARS = 280  # a DNS name of 253 characters, its protocol and a port
MAX_CERT_BYTES = 2048  # a P-256 certificate has some 400 bytes
MAX_PROTOCOL = 65_535  # versions are small numbers
MAX_COUNT = (1 << 63) - 1  # tokens, bytes: what an int64 holds
MAX_POSITION = 1 << 53  # rounds and steps: exact in a float too, and far from where an int64 ends
MAX_TAKEN = MAX_POSITION >> 1  # a round or step that a node goes on from: as many again still fit in its record
MAX_LEAP = 10**7  # rounds that another may be ahead: years of them; further is a lie
MAX_PAST_RECORD = 1000  # rounds that a manifest may be past its donor's record, which is a minute old at most
MAX_STEPS_PAST_RECORD = 10**6  # steps likewise: more than any machine takes in that minute
MAX_PARTNERS = 4096  # partners named in a status
MAX_COUNTERS = 512  # metrics named in a status
MAX_METRIC_CHARS = 128  # a metric's name
MAX_SKETCH = 64  # numbers of a sketch: distances right within 9 %
MAX_SKETCH_VALUE = 1e30  # of a sketch's numbers, whose squares are still finite
MAX_WALL_S = 4_102_444_800.0  # Unix seconds, the year 2100: a time past it is not a time

CHAIN_BYTES = 16  # of an origin's hash chain in SeedFlow
MAX_FRAME_BYTES = 512 << 10  # bytes of one message of Flood.Push: a page of messages, or the heads of all origins
MAX_SEGMENT = 1024  # messages under one signature: what a proof of a lie has to hold
MAX_PAGE = 4096  # messages in one answer to a want, or in one push
MAX_WANTS = 256  # origins asked for at once
MAX_FLOOD_ORIGINS = 4096  # origins known to a node, or named on a stream; as many as a spec's sums have room for
MAX_FLOOD_CUT = 4096  # proofs kept
MAX_FLOOD_STEP = 10**9  # steps of a node in a run

MAX_STREAMS_PER_PEER = 4  # an exchange each way, a fetch, and one that is just ending
MAX_STREAMS = 64  # streams served at once; each may hold a few chunks in flight
MAX_SESSIONS = 4096  # proven clients remembered; the least recently used goes first and proves itself again
MAX_SESSIONS_PER_PEER = 8  # a peer needs one, and one more for each restart within the session's life
SESSION_IDLE_S = 3600.0  # seconds a session outlives its last call
NONCE_LIFE_S = 10.0  # seconds between a Hello and its Prove
HELLO_BURST = 256  # Hellos at once from one host: a whole demo swarm on one machine
HELLO_PER_S = 32.0  # and from then on, each costing a signature
DIAL_BACK_EVERY_S = 5.0  # seconds between two dial-backs for one peer
MAX_DIAL_BACKS = 8  # dial-backs at once
MAX_DIAL_BACK_ADDRESSES = 8  # tried in one
MAX_HELLO_HOSTS = 4096  # hosts whose Hellos are counted; the longest silent is forgotten


def check_size(what: str, size: int, limit: int) -> None:
    """Raises LimitExceeded when `size` is over `limit`; `what` opens the sentence."""
    if size > limit:
        raise LimitExceeded(f"{what} has {size} bytes; the limit is {limit}")


def check_number_of(what: str, count: int, limit: int) -> None:
    """Raises LimitExceeded when there are more than `limit`; `what` is a plural."""
    if count > limit:
        raise LimitExceeded(f"{count} {what}; the limit is {limit}")


def pieces_of(total_bytes: int, piece_bytes: int) -> int:
    """How many pieces of `piece_bytes` hold `total_bytes`, the last one perhaps shorter."""
    return -(-total_bytes // piece_bytes)


def piece_length(index: int, total_bytes: int, piece_bytes: int) -> int:
    """Bytes of piece `index`, 0 past the end."""
    return max(0, min(piece_bytes, total_bytes - index * piece_bytes))
