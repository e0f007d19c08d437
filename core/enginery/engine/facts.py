"""What an engine that is built says of itself."""

from __future__ import annotations

from enginery.contracts.engine import EngineFacts
from enginery.engine.build import BuiltParts


def facts_of(parts: BuiltParts) -> EngineFacts:
    """Of its parts, chosen and built."""
    choice, memory = parts.choice, parts.memory
    return EngineFacts(
        model_name=choice.checkpoint.name,
        served_names=choice.checkpoint.names,
        folder=str(choice.checkpoint.folder),
        tokenizer_folder=str(choice.checkpoint.tokenizer_folder),
        note=choice.checkpoint.note,
        max_model_len=choice.settings.max_model_len,
        vocab_size=choice.facts.vocab_size,
        dtype=choice.settings.dtype,
        attn_backend=choice.attention.name,
        num_pages=choice.parallel.num_lanes * memory.num_pages,
        page_size=memory.page_size,
        eos_token_ids=tuple(sorted(choice.checkpoint.eos_token_ids)),
        considered=choice.considered,
        decisions=tuple((decision.setting, decision.value, decision.reason) for decision in choice.decisions),
        memory_plan=str(memory),
        phases_s=dict(parts.phases_s),
    )
