"""What a checkpoint says of itself, typed field by field: it may have come from a peer, or been edited by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from peerloom.node.checkpoint_manifest import FORMAT, Damaged
from peerloom.protocol.ledger import MAX_AHEAD, MAX_LANES

MAX_COUNT = 2**53  # of anything counted: JSON readers agree up to there
Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Words = Annotated[str, StringConstraints(max_length=256)]


@dataclass(frozen=True, slots=True)
class PipelineState:
    """Of a pipeline's stage; the ledger has (lane, all below are in, those ahead that are in too)."""

    stage: Count
    lane: Count
    ledger: Annotated[
        list[tuple[Count, Count, Annotated[list[Count], Field(max_length=MAX_AHEAD)]]], Field(max_length=MAX_LANES)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a checkpoint says of itself. `round` is the next to train; `spec_hash` and `layout_digest` are hex."""

    round: Count
    step: Count
    tokens: Count
    batch_cursor: Count
    spec_hash: Words
    layout_digest: Words
    adam_steps: Count  # inner steps since the moments were last fresh
    adopted_at: Count | None = None  # step at which a donor's state was taken, while the rate warms up again
    held_out_loss: float | None = None
    pipeline: dict[str, Any] | None = None  # a PipelineState of a pipeline's stage, whose theta this is
    distances: list[float] = field(default_factory=list)  # to partners, behind the clip's median
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


def parse_meta(data: bytes) -> Meta:
    """The meta of a checkpoint; raises Damaged for one whose fields are not what they are to be."""
    meta_form, pipeline_form = _forms()
    try:
        meta: Meta = meta_form.validate_json(data, strict=True)
        if meta.pipeline is not None:
            _check_ledger(pipeline_form.validate_json(json.dumps(meta.pipeline), strict=True))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise Damaged(f"meta.json, {'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}") from error
    if meta.format != FORMAT:
        raise Damaged(f"format {meta.format}, this version reads {FORMAT}")
    return meta


@cache
def _forms() -> tuple[TypeAdapter[Meta], TypeAdapter[PipelineState]]:
    return TypeAdapter(Meta), TypeAdapter(PipelineState)


def _check_ledger(state: PipelineState) -> None:
    if any(index <= below for _, below, ahead in state.ledger for index in ahead):
        raise Damaged("meta.json, pipeline.ledger: an index that is not ahead of its lane's gap")
