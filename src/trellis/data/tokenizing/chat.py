"""Conversations as tokens, with the loss only on the assistant's turns."""

import numpy as np

ROLES = ("system", "user", "assistant", "tool")


def turn_texts(role: str) -> tuple[str, str]:
    """The text before and after a message (ChatML).

    >>> turn_texts("user")
    ('<|im_start|>user\\n', '<|im_end|>\\n')
    """
    return f"<|im_start|>{role}\n", "<|im_end|>\n"


def check_messages(messages: object) -> str | None:
    """What is wrong with a conversation, or None.

    >>> check_messages([{"role": "user", "content": "hi"}])
    >>> check_messages([{"role": "you", "content": "hi"}])
    "message 1 has the role 'you', not one of system, user, assistant, tool"
    """
    if not isinstance(messages, list) or not messages:
        return "a conversation is a list of messages"
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return f"message {i} is not an object with a string `content`"
        if message.get("role") not in ROLES:
            return f"message {i} has the role {message.get('role')!r}, not one of {', '.join(ROLES)}"
    return None


def encode_messages(messages: list[dict], encode, encode_markup) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a conversation and, for each, whether it counts in the loss.

    An assistant's message counts with the text that ends it, so that a model learns to stop; what starts it does not.

    Args:
        encode: text to ids, with special tokens taken as ordinary text.
        encode_markup: text to ids, with special tokens recognized.
    """
    ids, mask = [], []
    for message in messages:
        before, after = turn_texts(message["role"])
        counts = message["role"] == "assistant"
        for part, on in (
            (encode_markup(before), False),
            (encode(message["content"]), counts),
            (encode_markup(after), counts),
        ):
            ids.append(np.asarray(part, np.int64))
            mask.append(np.full(len(part), on, np.uint8))
    return np.concatenate(ids), np.concatenate(mask)
