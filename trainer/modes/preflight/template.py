"""The truth table of a chat template: what the first rows' tokens are, and which are learnt.

Kinds: `template`, what the template writes itself; `prompt`, contents that the policy is given;
`reply`, contents of the assistant that the data brought; `sampled`, by the policy in a rollout; `?`
where a transform or the template changed contents, so that they cannot be told apart.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from rich.text import Text

from policies.chats.chat_template import Renderer
from policies.chats.rendering import Encoder, Message, Outlines, check_messages, fill
from policies.chats.templates import Template
from trainer.transcripts import token_texts

WIDTH = 77  # of a line of the table, behind its indentation
RUNS = 24  # of a row that are shown
THINK = re.compile(r"<think>\s*</think>")
Owned = list[tuple[str, int | None]]  # texts, and whose content each is; None = the template's


@dataclass(frozen=True)
class Row:
    """A row's tokens: their ids, kinds and texts, whether each is learnt, and ends a turn."""

    ids: list[int]
    kinds: list[str]
    texts: list[str]
    learnt: list[bool]
    ends: list[bool]

    def written(self, *, learnt: bool) -> str:
        """Return what the template wrote, where that is learnt or is not."""
        parts = zip(self.texts, self.kinds, self.learnt, strict=True)
        return "".join(t for t, kind, k in parts if kind == "template" and k == learnt)


class Reader:
    """Tell by a renderer's template whose each token of a row is."""

    def __init__(self, renderer: Renderer, stop_ids: frozenset[int]) -> None:
        self.tokenizer, self.stop_ids = renderer.tokenizer, stop_ids
        self.encoder = Encoder(self.tokenizer)
        template = Template(renderer.template, renderer.name)
        self.outlines = Outlines(template, self.tokenizer.special_tokens_map, self.encoder)

    def text(self, chat: Sequence[Message], *, prompt: bool) -> str:
        """Return what the template makes of a chat."""
        return self.outlines.text(chat, prompt)[0]

    def given(self, ids: list[int], chat: Sequence[Message], learnt: list[bool]) -> Row:
        """Return a row that the data brought whole; it may end before the template's last text."""
        kinds = self._kinds(self._owned(chat, prompt=False), chat, ids, cut=True)
        return self._row(ids, kinds or ["?"] * len(ids), learnt)

    def sampled(
        self,
        ids: list[int],
        sampled: list[bool],
        learnt: list[bool],
        chats: Sequence[Sequence[Message]],
    ) -> Row:
        """Return the row of a rollout; its chat is the one of `chats` that gives the other ids."""
        runs = [list(run) for _, run in groupby(range(len(ids)), key=sampled.__getitem__)]
        turns = sum(sampled[run[0]] for run in runs)
        for chat in chats:
            replies = [i for i, m in enumerate(chat) if m["role"] == "assistant"][-turns:]
            if len(replies) < turns:
                continue
            kinds = self._of_rollout(ids, runs, sampled, chat, replies)
            if "?" not in kinds:
                return self._row(ids, kinds, learnt)
        return self._row(ids, ["sampled" if own else "?" for own in sampled], learnt)

    def _of_rollout(
        self,
        ids: list[int],
        runs: list[list[int]],
        sampled: list[bool],
        chat: Sequence[Message],
        replies: list[int],
    ) -> list[str]:
        kinds, turn = [], 0
        for run in runs:
            if sampled[run[0]]:
                kinds += ["sampled"] * len(run)
                turn += 1
                continue
            before = chat[: replies[turn]] if turn < len(replies) else chat
            owned = self._owned(before, prompt=True)
            if turn:  # what stands behind the reply before
                last = [k for k, (_, whose) in enumerate(owned) if whose == replies[turn - 1]]
                owned = owned[last[-1] + 1 :] if last else []
            part = ids[run[0] : run[-1] + 1]
            kinds += self._kinds(owned, chat, part, late=turn > 0) or ["?"] * len(run)
        return kinds

    def _owned(self, chat: Sequence[Message], *, prompt: bool) -> Owned:
        """Return the texts of a rendered chat and whose they are."""
        chat = check_messages(chat)
        text, pieces = self.text(chat, prompt=prompt), self.outlines.of(chat, prompt).pieces
        texts = fill(pieces, chat, text)
        if texts is None:
            return list(_searched(text, chat))
        return [(text, piece.message) for text, piece in zip(texts, pieces, strict=True)]

    def _kinds(
        self,
        owned: Owned,
        chat: Sequence[Message],
        ids: list[int],
        *,
        cut: bool = False,
        late: bool = False,
    ) -> list[str] | None:
        """Return the kind of each of `ids`; None if the texts give others.

        `cut`: they may give more at the end; `late`: more at the beginning.
        """
        for encode in (self._whole, self._spelt):
            got, whose = encode(owned)
            extra = len(got) - len(ids)
            start = max(extra, 0) if late else 0
            here = slice(start, start + len(ids))
            if got[here] == ids and (extra == 0 or cut or late):
                return [_kind(owner, chat) for owner in whose[here]]
        return None

    def _whole(self, owned: Owned) -> tuple[list[int], list[int | None]]:
        """Return the ids of the texts as one, and whose each is: a content's if it has of one."""
        ids, offsets = self.encoder.encode("".join(text for text, _ in owned))
        ends = list(accumulate(len(text) for text, _ in owned))
        places = [(end - len(text), end, who) for (text, who), end in zip(owned, ends, strict=True)]
        whose = []
        for a, b in offsets:
            inside = [who for start, end, who in places if start < b and a < end]
            whose.append(next((who for who in inside if who is not None), None))
        return ids, whose

    def _spelt(self, owned: Owned) -> tuple[list[int], list[int | None]]:
        """Return the ids text by text, control tokens in contents spelled out, and whose."""
        ids, whose = [], []
        for text, who in owned:
            part = self.encoder.encode(text)[0] if who is None else self.encoder.spell(text)
            ids += part
            whose += [who] * len(part)
        return ids, whose

    def _row(self, ids: list[int], kinds: list[str], learnt: list[bool]) -> Row:
        ends = [i in self.stop_ids and k != "prompt" for i, k in zip(ids, kinds, strict=True)]
        return Row(ids, kinds, token_texts(ids, self.tokenizer), learnt, ends)


def _kind(owner: int | None, chat: Sequence[Message]) -> str:
    if owner is None:
        return "template"
    return "reply" if chat[owner]["role"] == "assistant" else "prompt"


def _searched(text: str, chat: Sequence[Message]) -> Iterator[tuple[str, int | None]]:
    """Yield the parts of a text whose template changes contents: those that are found in it.

    >>> chat = [{"role": "assistant", "content": "<think>why</think> so"}]
    >>> list(_searched("[so]", chat))
    [('[', None), ('so', 0), (']', None)]
    """
    done = 0
    for i, message in enumerate(chat):
        whole = message["content"].strip()
        thought, _, answer = whole.rpartition("</think>")
        parts = [whole] if whole in text[done:] else [thought.removeprefix("<think>"), answer]
        for part in filter(None, map(str.strip, parts)):
            if (at := text.find(part, done)) >= 0:
                yield text[done:at], None
                yield part, i
                done = at + len(part)
    yield text[done:], None


def table(row: Row, *, colour: bool) -> list[Text]:
    """Return a row as lines: runs of tokens of one kind, an end of turn as a run of its own."""
    out = [Text(f"{'tokens':>6} {'kind':<8} {'learnt':<6} text", style="bold")]
    keys = list(zip(row.kinds, row.learnt, row.ends, strict=True))
    runs = [list(run) for _, run in groupby(range(len(keys)), key=keys.__getitem__)]
    if (more := len(runs) - RUNS) > 0:
        runs[RUNS // 2 : -RUNS // 2] = [[]]
    for run in runs:
        if not run:
            out.append(Text(f"{'...':>6} {more} runs more"))
            continue
        kind, learns, ends = keys[run[0]]
        head = f"{len(run):>6} {kind:<8} {'yes' if learns else '-':<6} "
        note = "  <- end of turn" if ends else ""
        text = _shown("".join(row.texts[run[0] : run[-1] + 1]), WIDTH - len(head) - len(note))
        style = ("green" if learns else "dim") if colour else ""
        out.append(Text(head).append(text, style=style).append(note))
    return out


def _shown(text: str, width: int) -> str:
    """Return a text in one line that is no wider.

    >>> _shown("one\\ntwo three", 12)
    'one\\\\n...hree'
    """
    text = text.replace("\n", "\\n")
    text = "".join(c if c.isprintable() else " " for c in text)
    half = (width - 3) // 2
    if len(text) <= width:
        return text
    return f"{text[: width - 3 - half]}...{text[len(text) - half :]}"
