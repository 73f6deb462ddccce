"""Conversations as tokens, with the loss only on the assistant's turns."""

import numpy as np

from trellis.errors import UserError
from trellis.files import is_utf8

BEGINNING = "<|im_start|>"
ROLES = ("system", "user", "assistant", "tool")
# What a message may say beside its content. It would not be written out, and a model would learn a conversation in
# which it is missing.
_UNWRITTEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


# What a record may say beside its messages: what tools there are to call. It belongs into a message. Tables hold it as
# JSON, also where there is none.
_UNWRITTEN_BESIDE, _NOTHING = ("tools", "functions"), ("[]", "{}", "null")


def turn_texts(role: str) -> tuple[str, str]:
    """The text before and after a message (ChatML).

    >>> turn_texts("user")
    ('<|im_start|>user\\n', '<|im_end|>\\n')
    """
    return f"{BEGINNING}{role}\n", "<|im_end|>\n"


def check_messages(messages: object, beside: dict | None = None) -> str | None:
    """What is wrong with a conversation, or None.

    Args:
        messages: the conversation.
        beside: the object that it is in.

    >>> check_messages([{"role": "user", "content": "hi"}])
    >>> check_messages([{"role": "you", "content": "hi"}])
    "message 1 has the role 'you', not one of system, user, assistant, tool"
    """
    if not isinstance(messages, list) or not messages:
        return "a conversation is a list of messages"
    for name in _UNWRITTEN_BESIDE:
        if (told := (beside or {}).get(name)) and told not in _NOTHING:
            return f"it has `{name}`, which are not written out: only messages are"
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return f"message {i} is not an object with a string `content`"
        if message.get("role") not in ROLES:
            return f"message {i} has the role {message.get('role')!r}, not one of {', '.join(ROLES)}"
        if unwritten := next((name for name in _UNWRITTEN if message.get(name)), None):
            return f"message {i} has `{unwritten}`, which is not written out: only `content` is"
        if message.get("weight") not in (None, 0, 1):
            return f"message {i} has the weight {message['weight']!r}, not 0 or 1"
        if not is_utf8(message["content"]):
            return f"message {i} is not UTF-8: half of a surrogate pair"
    return None


def check_chat_tokenizer(tokenizer) -> None:
    """Refuses a tokenizer that changes what stands between the parts of a conversation, or ends a document there.

    Each part is encoded by itself, so that it is known which tokens count in the loss. Tokenizers that put a space
    before every text, as SentencePiece's do, would put one before every part.

    Args:
        tokenizer: a `trellis.data.Tokenizer`.
    """
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    ids, _ = encode_messages(talk, tokenizer.encode, tokenizer.encode_markup)
    turns = [(turn_texts(message["role"]), message["content"]) for message in talk]
    written = "".join(before + content + after for (before, after), content in turns)
    if (found := tokenizer.decode(ids)) != written:
        raise UserError(
            "The tokenizer of a chat must encode the parts of a conversation as they are.",
            seen=f"{found!r} for {written!r}",
            where="--tokenizer",
            fix="use a tokenizer that puts nothing before a text, such as a byte-level one without add_prefix_space",
        )
    if tokenizer.end_of_document in ids:
        raise UserError(
            "The token that ends a document cannot end a message: an answer would not see what it answers.",
            seen=tokenizer.end_of_document_text,
            where="--tokenizer",
            fix="name another one, as in --end-of-document '<|endoftext|>'",
        )


def encode_messages(messages: list[dict], encode, encode_markup) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a conversation and, for each, whether it counts in the loss.

    An assistant's message counts with the text that ends it, so that a model learns to stop; what starts it does not.
    One with the weight 0 does not count.

    Args:
        encode: text to ids, with special tokens taken as ordinary text.
        encode_markup: text to ids, with special tokens recognized.
    """
    ids, mask = [], []
    for message in messages:
        before, after = turn_texts(message["role"])
        counts = message["role"] == "assistant" and message.get("weight") != 0
        for part, on in (
            (encode_markup(before), False),
            (encode(message["content"]), counts),
            (encode_markup(after), counts),
        ):
            ids.append(np.asarray(part, np.int64))
            mask.append(np.full(len(part), on, np.uint8))
    return np.concatenate(ids), np.concatenate(mask)
