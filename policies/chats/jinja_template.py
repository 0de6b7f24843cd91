"""Render a chat with a Jinja template, within limits of time and length."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from policies.chats.messages import OF_CHAT, Message
from policies.chats.text_encoder import Span

SECONDS = 5.0  # computing time allowed per chat; real templates take milliseconds
LONGEST = 1 << 20  # characters allowed if the text is over ten times as long as the messages
_RENDERING = threading.Lock()  # threads share the compiled template's tracker of tagged spans


@contextmanager
def bounded() -> Iterator[None]:
    """Raise TimeoutError in a block that computes for more than `SECONDS`.

    Signals reach only the main thread; in other threads the block is not bounded. A call into C,
    such as 10**10**10, is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + SECONDS

    def look(*_: Any) -> None:  # the timer also counts the computing time of other threads
        if time.thread_time() > end:
            raise TimeoutError(f"no end within {SECONDS:g} s of computing")

    handler = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS / 10, SECONDS / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


def render_template(
    messages: Sequence[Message],
    template: str,
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
    tagged: bool = False,
) -> tuple[str, list[Span]]:
    """Return the rendered text and, if `tagged`, the spans of its generation tags.

    The first message may have "tools": the template gets them as its variable `tools`.
    """
    chat = [{k: v for k, v in m.items() if v is not None and k not in OF_CHAT} for m in messages]
    try:
        with _RENDERING, bounded():
            rendered: Any = render_jinja_template(
                conversations=[chat],
                chat_template=template,
                return_assistant_tokens_mask=tagged,
                add_generation_prompt=add_generation_prompt,
                tools=messages[0].get("tools"),
                **variables,
            )
    except Exception as error:  # a template may raise anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"refuses a chat of {[m['role'] for m in messages]}: {reason}") from error
    texts, spans = rendered
    size = len(str(messages))
    if len(texts[0]) > LONGEST and len(texts[0]) > 10 * size:
        raise ValueError(f"writes {len(texts[0])} characters for a chat of {size}")
    return texts[0], spans[0] if tagged else []
