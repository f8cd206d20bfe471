"""Every counter that a node keeps, with what it says: `Facts.counters`, which /metrics shows.

A test reads the code for names that are not told here; the table in deploy/README.md lists them all.
"""

from __future__ import annotations

from peerloom.protocol.messages import DeclineReason
from peerloom.protocol.tunnel import Refusal

_SINGLE = {  # the metric's name without its prefix, and what it says
    "rounds": "Rounds finished",
    "train_seconds": "Time in local steps",
    "exchange_seconds": "Time at exchange points, waiting and transferring",
    "exchange_seconds_max": "Longest time at an exchange point",
    "progress": "How far starting or fetching is, 0 to 1",
    "checkpoints_written": "Checkpoints written",
    "checkpoints_failed": "Checkpoints that the disk refused",
    "worker_deaths": "Times the training process died",
    "worker_stalls": "Times the training process made no step for long",
    "publish_failed": "Records that no other node took",
    "clock_jumps": "Times this machine's clock was set while the node ran",
    "peer_faults": "Faults held against peers",
    "peers_left_alone": "Times a peer was left alone for its faults",
    "state_served": "Model states handed to joiners",
    "state_fetched": "Model states taken over from peers",
    "states_refused": "Model states refused as worse than this node's own",
    "gossip_committed": "Exchanges committed",
    "gossip_in_doubt": "Exchanges that only one side may have committed",
    "gossip_broken": "Exchanges that broke off",
    "gossip_bad_payloads": "Payloads with numbers that are none",
    "gossip_clipped": "Exchanges in which a far-off peer counted less",
    "gossip_cut_short": "Rounds ended early for a waiting peer",
    "gossip_late_event": "Messages of exchanges that were over",
    "gossip_offer_lost": "Offers that went to a peer that had no time left",
    "gossip_alone": "Rounds finished without an exchange: no partner, or one that was lost",
    "gossip_idle": "Rounds in which this node was meant to rest",
    "gossip_refused_duplicate": "Second exchanges of one round that were refused",
    "gossip_stale_round": "Offers of a round too far from this node's",
    "gossip_unanswered": "Offers that nobody answered",
    "steps": "Steps of SeedFlow, each with its message",
    "updates": "Updates of this node's stage of a pipeline",
    "addresses_changed": "Times this node's addresses changed while it ran",
    "base_fetched": "Base models taken over from peers",
    "base_fetched_bytes": "Fetched for the base model, all attempts together",
    "base_refused": "Base models, or files of them, refused as false",
    "base_served": "Base models handed to joiners",
    "flood_cut": "Origins cut off with proof of two stories",
    "flood_duplicates": "Messages that came again, by another link or replayed: dropped",
    "flood_left_out": "Messages left out for a slow neighbour, which asks later",
    "flood_links": "Links of the flood that came up",
    "flood_links_failed": "Links of the flood that could not be opened",
    "flood_log_failed": "Batches that the disk refused to log",
    "flood_own": "Own messages flooded",
    "flood_own_overtaken": "Own steps dropped: earlier messages of this node came back meanwhile",
    "flood_payload_bytes": "Batches sent, without signatures and versions",
    "flood_refused_base": "States refused: of another base model",
    "flood_refused_bound": "Batches refused: a scalar outside the bound",
    "flood_refused_budget": "Batches refused: past the run's last step",
    "flood_refused_cut": "Batches refused: their origin was cut off",
    "flood_refused_doubtful": "Batches asked for again: their signature did not fit",
    "flood_refused_false_proof": "Proofs refused: they convict nobody",
    "flood_refused_forged": "Batches refused: not signed by their origin",
    "flood_refused_future": "Batches refused for now: a period too far ahead",
    "flood_refused_gap": "Batches refused for now: others before them are missing",
    "flood_refused_malformed": "Frames that could not be read",
    "flood_refused_older": "Batches refused: older than what is held",
    "flood_refused_origin": "Batches refused for now: of an unknown origin",
    "flood_refused_origins": "Batches refused: of one origin too many",
    "flood_refused_pace": "Links closed: the neighbour asked or repeated without end",
    "flood_refused_rate": "Batches refused for now: their origin sends too fast",
    "flood_refused_repeats": "Messages refused: a neighbour sent too much in vain",
    "flood_refused_talk": "Version vectors and questions refused: too many in the time",
    "flood_refused_wants": "Requests refused: a neighbour asked for too much",
    "flood_states_refused": "States of donors that others did not confirm",
    "flood_taken": "Messages of others that were new",
    "state_fetched_bytes": "Fetched as a late joiner of SeedFlow",
    "stage_busy_seconds": "Time in passes and updates of this node's stage",
    "stage_copies_fetched": "Copies of a stage fetched to keep or to take over",
    "stage_copies_kept": "Copies of a stage now on this node's disk",
    "stage_copies_sent": "Copies of this node's stage offered to its keeper",
    "stage_copies_served": "Copies of a stage handed to others",
    "stage_cpu_seconds": "CPU time of these passes and updates",
    "stages_left": "Stages this node gave up, to host another",
    "stages_taken_over": "Stages taken over from a host that was gone",
    "dht_sent_bytes": "Sent by the libp2p daemon for the DHT, beside all that is sent to peers",
    "dht_received_bytes": "Received by it likewise",
    "relayed_bytes": "Carried between others",
    "relays_left_alone": "Times a relay was left alone for its faults",
    "relays_lost": "Times a relay of this node was lost",
    "tunnel_sent_bytes": "Sent through tunnels that begin or end here",
    "tunnel_received_bytes": "Received through tunnels that begin or end here",
    "tunnel_legs_tcp": "Legs of tunnels, here and from here, over a relay's own TCP port",
    "tunnel_legs_libp2p": "Legs of tunnels, here and from here, over libp2p",
    "tunnel_strangers": "Connections to the relay port without a good token",
    "tunnels_opened": "Tunnels opened to peers that cannot be dialled",
    "tunnels_relayed": "Tunnels carried between others",
    "tunnels_delivered": "Tunnels that ended at this node",
    "tunnels_relayed_now": "Tunnels carried between others, open now",
    "tunnels_delivered_now": "Tunnels that end at this node, open now",
    "tunnels_half_open_now": "Tunnels being set up",
    "relay_places_now": "Peers that hold a place with this relay",
}

# families: a counter a reason, the reason last in its name
_DECLINED = "Offers that a peer declined: "
_REFUSED = "Offers of peers declined: "
_REASONS: dict[DeclineReason, str] = {
    "busy": "engaged with somebody else",
    "crossed": "both had offered at once",
    "round": "too many rounds apart, or not the scheduled round",
    "partner": "another partner was due",
    "plan": "the round's matchings were made without it",
    "incompatible": "another layout or encoding",
    "refused": "the peer that offered was left alone for its faults",
    "draining": "the node was about to leave",
}
_TUNNELS: dict[Refusal, str] = {
    "malformed": "no header that this version knows",
    "unknown": "nobody of that id holds a place here",
    "unwilling": "this node does not relay for that peer",
    "own": "a tunnel back to the peer that asked",
    "loop": "a relay asked to be relayed by its own relay",
    "greedy": "that peer had all the tunnels it may have",
    "busy": "this relay had all the tunnels it may have",
    "unreachable": "the target no longer answered",
}
_RELAYS: dict[str, str] = {
    "refused": "it refused a tunnel",
    "gone": "it could not be reached, or was lost",
    "corrupt": "it answered what no relay answers, or bytes did not arrive as sent",
    "stalled": "a tunnel through it fell silent",
    "broken": "a tunnel through it broke under a call",
}
COUNTERS: dict[str, str] = (
    _SINGLE
    | {f"gossip_declined_{reason}": _DECLINED + said for reason, said in _REASONS.items()}
    | {"gossip_declined_round": "Offers that a peer declined for its round, or took too many rounds behind"}
    | {f"gossip_refused_{reason}": _REFUSED + said for reason, said in _REASONS.items()}
    | {f"tunnels_refused_{refusal}": "Tunnels refused: " + said for refusal, said in _TUNNELS.items()}
    | {f"relay_faults_{fault}": "Faults held against relays: " + said for fault, said in _RELAYS.items()}
)
RENAMED = {  # these may fall, or are no counts
    "exchange_seconds_max": "longest_exchange_seconds",
    "progress": "progress_ratio",
    "tunnels_relayed_now": "open_tunnels_relayed",
    "tunnels_delivered_now": "open_tunnels_delivered",
    "tunnels_half_open_now": "half_open_tunnels",
    "relay_places_now": "relay_places",
}
