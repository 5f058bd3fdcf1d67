"""Facts to bytes and back: what core.facts says, as JSON bodies in the store."""

from __future__ import annotations

import msgspec

from xce_supervisor.core.facts import AnyFact, Began, Dispatched, Ended, Noop, Submitted
from xce_supervisor.store.engine import Fact, StoredFact

_DECODERS: dict[str, msgspec.json.Decoder[AnyFact]] = {
    kind.KIND: msgspec.json.Decoder(kind) for kind in (Noop, Submitted, Dispatched, Began, Ended)
}
# Sorted keys: the same fact always has the same bytes, which is what makes appending it again harmless.
_encoder = msgspec.json.Encoder(order="deterministic")


def to_stored(fact: AnyFact) -> Fact:
    """Return the record to append."""
    return Fact(fact.KIND, fact.key, _encoder.encode(fact))


def from_stored(stored: StoredFact) -> AnyFact | None:
    """Return the fact, None for a kind that this program does not know (a newer one wrote it).

    Raises:
        ValueError: a known kind whose body cannot be read.
    """
    decoder = _DECODERS.get(stored.kind)
    if decoder is None:
        return None
    try:
        return decoder.decode(stored.body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"fact {stored.index} ({stored.kind} {stored.key}): {error}") from error
