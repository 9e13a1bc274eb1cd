"""Whether a draft model's token ids mean to the target what they mean to the draft. Looks at no weights."""

from typing import Any

from transformers import PretrainedConfig

#: Vocabularies are padded to round sizes: this share of difference in size is padding, more is another tokenizer.
_PADDING_SHARE = 0.02
#: Share of the draft's tokens that must carry the same id in the target. A few special tokens may differ.
_LEAST_AGREEMENT = 0.9


def pairing_problem(
    target_config: PretrainedConfig,
    draft_config: PretrainedConfig,
    target_tokenizer: Any,
    draft_tokenizer: Any,
) -> str | None:
    """Why the draft cannot draft for the target, or `None` if it can.

    With both tokenizers the vocabularies are compared by content, so that equal sizes with other ids are
    found out. With one missing (`None`) only the sizes can be compared; a wrong pair then costs speed,
    not correctness, as the target decides every token.
    """
    if target_tokenizer is not None and draft_tokenizer is not None:
        return _content_problem(target_tokenizer, draft_tokenizer)
    target_size = target_config.get_text_config(decoder=True).vocab_size
    draft_size = draft_config.get_text_config(decoder=True).vocab_size
    if abs(target_size - draft_size) > _PADDING_SHARE * max(target_size, draft_size):
        return (
            f"the draft's vocabulary has {draft_size} tokens and the target's {target_size}: they use different "
            "tokenizers; choose a draft model of the target's family"
        )
    return None


def _content_problem(target_tokenizer: Any, draft_tokenizer: Any) -> str | None:
    target_ids: dict[str, int] = target_tokenizer.get_vocab()
    draft_ids: dict[str, int] = draft_tokenizer.get_vocab()
    agreeing = sum(target_ids.get(token) == token_id for token, token_id in draft_ids.items())
    if agreeing >= _LEAST_AGREEMENT * len(draft_ids):
        return None
    # A vocabulary comes in another order in every run: the first by its id is always the same.
    by_id = sorted(draft_ids.items(), key=lambda item: (item[1], item[0]))
    token, token_id = next(item for item in by_id if target_ids.get(item[0]) != item[1])
    other = f"{target_ids[token]}" if token in target_ids else "not there"
    return (
        f"draft tokenizer {_name(draft_tokenizer)} and target tokenizer {_name(target_tokenizer)} give "
        f"only {agreeing} of {len(draft_ids)} tokens the same id ({token!r} is {token_id} in the draft, {other} in "
        "the target); choose a draft model of the target's family"
    )


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
