"""Every error Peerloom raises on purpose, in one tree, each with its stable exit code.

PeerloomError                     1   anything named below is one of these
├── SpecError                    10   a run.toml that does not check
│   └── BaseMissing              26   SeedFlow's base, or its tokenizer, cannot be loaded, and nobody is there to ask
├── ConfigError                  11   a flag, PEER_* variable or peer.toml key that does not check
├── IdentityError                12   the identity file is unreadable, too open, or not a key
├── IdentityInUse                13   another live node runs with this identity
├── InviteError                  14   an invite that does not parse
├── SeedUnreachable              15   no seed of the invite answered
├── RunMismatch                  16   the invite, the spec or the folder belongs to another run
├── PortInUse                    17   a port to listen on is taken
├── ClockSkew                    18   this machine's clock is too far from the swarm's
├── DataError                    19   the data path holds no text, or too little
├── StorageError                 20   a folder is read-only, full or missing
├── CheckpointError              21   no intact checkpoint where one is needed
├── WorkerFailed                 22   the training process kept dying
├── VersionMismatch              23   no protocol version in common
├── NoDonor                      24   no peer could hand over the model
├── DiscoveryLost                25   the libp2p daemon ended and does not come back
└── PeerError                    30   what a peer did or failed to do; scored, never fatal to the node
    ├── LinkError                     the connection failed, timed out or was refused
    └── ProtocolError                 what came over it breaks the protocol
        ├── MalformedMessage          does not parse, or a field is out of its range
        ├── LimitExceeded             larger, longer or more often than the limit
        ├── DigestMismatch            the bytes are not those that were announced
        ├── BadPayload                non-finite or absurd numbers
        └── AuthenticationError       the peer is not who it says it is
InvalidTransition                     a bug: a machine was given an event its state forbids
"""

from __future__ import annotations

from typing import ClassVar


class PeerloomError(Exception):
    """Base of all errors a user may see: one sentence that names the thing and the remedy."""

    exit_code: ClassVar[int] = 1


class SpecError(PeerloomError):
    """A run spec that does not check; `problems` holds one sentence a fault."""

    exit_code = 10

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class BaseMissing(SpecError):
    """The base model that the spec names, or its tokenizer, cannot be had on this machine."""

    exit_code = 26


class ConfigError(PeerloomError):
    """A node setting that does not check."""

    exit_code = 11


class IdentityError(PeerloomError):
    """The identity file cannot be used."""

    exit_code = 12


class IdentityInUse(PeerloomError):
    """Another live node runs with this identity."""

    exit_code = 13


class InviteError(PeerloomError):
    """An invite that does not parse."""

    exit_code = 14


class SeedUnreachable(PeerloomError):
    """No seed of the invite answered."""

    exit_code = 15


class RunMismatch(PeerloomError):
    """The invite, the spec or the folder belongs to another run."""

    exit_code = 16


class PortInUse(PeerloomError):
    """A port to listen on is taken."""

    exit_code = 17


class ClockSkew(PeerloomError):
    """This machine's clock is too far from the swarm's."""

    exit_code = 18


class DataError(PeerloomError):
    """The data path holds no text, or too little."""

    exit_code = 19


class StorageError(PeerloomError):
    """A folder is read-only, full or missing."""

    exit_code = 20


class CheckpointError(PeerloomError):
    """No intact checkpoint where one is needed."""

    exit_code = 21


class WorkerFailed(PeerloomError):
    """The training process kept dying."""

    exit_code = 22


class VersionMismatch(PeerloomError):
    """No protocol version in common."""

    exit_code = 23


class NoDonor(PeerloomError):
    """No peer could hand over the model."""

    exit_code = 24


class DiscoveryLost(PeerloomError):
    """The libp2p daemon ended and does not come back."""

    exit_code = 25


class PeerError(PeerloomError):
    """What a peer did or failed to do: scored, never fatal to the node."""

    exit_code = 30


class LinkError(PeerError):
    """The connection failed, timed out or was refused."""


class ProtocolError(PeerError):
    """What came over the connection breaks the protocol."""


class MalformedMessage(ProtocolError):
    """A message that does not parse, or a field out of its range."""


class LimitExceeded(ProtocolError):
    """Larger, longer or more often than the limit."""


class DigestMismatch(ProtocolError):
    """The bytes are not those that were announced."""


class BadPayload(ProtocolError):
    """Non-finite or absurd numbers."""


class AuthenticationError(ProtocolError):
    """The peer is not who it says it is."""


class InvalidTransition(RuntimeError):
    """A bug of ours: a machine was given an event that its state forbids; carries its recent history."""
