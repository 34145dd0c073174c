"""Chats as text, by a model's chat template, and the ranges of the assistant's answers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any


def answers_of(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, by the model's template, and the ranges of the assistant's answers, with their end."""
    template = partial(tokenizer.apply_chat_template, tokenize=False, date_string="26 Jul 2024")
    if not isinstance(messages, list) or not all({"role", "content"} <= dict(turn).keys() for turn in messages):
        raise ValueError(f"messages are a list of {{'role': ..., 'content': ...}}, not {str(messages)[:200]}")
    cleaned: list[dict[str, Any]] = []
    for turn in messages:  # Arrow fills missing keys with None
        cleaned.append({name: value for name, value in turn.items() if value is not None})
    try:
        text = str(template(cleaned))
        answers = []
        for number, message in enumerate(cleaned):
            if message["role"] == "assistant":
                # A template may change earlier answers, as Qwen3's does, but not their words and their end.
                before = str(template(cleaned[:number], add_generation_prompt=True)) if number else ""
                answer, after = str(message["content"]).strip(), str(template(cleaned[: number + 1]))
                answer = after[after.rfind(answer) :]
                position = text.find(answer, len(before)) if text.startswith(before) else -1
                if position >= 0:
                    answers.append((len(before), position + len(answer)))
    except Exception as cause:  # a template may raise anything
        raise ValueError(f"the chat template refuses a chat ({cause}): {json.dumps(cleaned)[:200]}") from None
    return text, answers
