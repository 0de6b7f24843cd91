"""What a preflight says of tokens: the truth table of the first rows, and whether they are right.

How a line is judged: docs/preflight.md.
"""

import re
from collections.abc import Sequence

from tensordict import TensorDictBase

from policies.chats.rendering import Message
from trainer.fitting import chats_of
from trainer.modes.preflight.play import Findings, Iteration
from trainer.modes.preflight.template import THINK, Reader, Row, table
from trainer.sources import picks
from trainer.trainer import Trainer

SHOWN = 2  # rows
OPENS = re.compile(r"<think>\s*$")
REASON, ANSWER = "first this", "then that"


def check_tokens(loop: Trainer, played: Iteration, findings: Findings) -> None:
    """Show what the tokens of the first rows are and which are learnt; judge them."""
    batch, policy = played.batch, loop.policy
    reader, samples = Reader(policy.renderer, policy.stop_ids), "reward_raw" in batch
    chats = played.chats if samples else given_chats(loop)
    rows = first_rows(batch, reader, chats)
    colour = findings.console.is_terminal and not findings.console.no_color
    name = policy.renderer.name
    findings.section("Tokens: whose they are, and which are learnt", f"by {name}")
    for number, row in enumerate(rows, 1):
        learns = f"{sum(row.learnt)} of {len(row.ids)} tokens learnt"
        findings.say(f"row {number} of {len(batch)}, {learns}")
        for line in table(row, colour=colour):
            findings.say(line)
    judge_ends(batch, rows, findings, reader=reader, samples=samples)
    judge_thinking(rows, findings, reader=reader)
    judge_turns(chats, loop.source.env.max_turns, findings, reader=reader, samples=samples)
    judge_begin(rows[0], findings, reader=reader)
    if any("?" in row.kinds for row in rows):
        findings.say(
            "look: tokens of kind ? are not the template's chat: a transform, or the template, "
            "changed contents"
        )


def given_chats(loop: Trainer) -> list[list[Message]]:
    """Return the chats of this rank's rows in the first iteration of a run that samples nothing."""
    source = loop.source
    chosen = picks(0, size=len(source.rows), count=source.size, seed=loop.runtime.seed)
    mine = chosen[loop.runtime.mine(source.size)]
    return [chat for i in mine for chat in chats_of(source.env, False, source.rows[i])]


def first_rows(
    batch: TensorDictBase, reader: Reader, chats: Sequence[Sequence[Message]]
) -> list[Row]:
    """Return the first rows of a batch, of rollouts the first of each group."""
    places, samples = list(range(len(batch))), "reward_raw" in batch
    if samples:
        groups = batch.get("group_id").tolist()
        places = sorted({group: i for i, group in reversed(list(enumerate(groups)))}.values())
    rows = []
    for i in places[:SHOWN]:
        size = int(batch.get(("masks", "all_attention_mask"))[i].sum())  # rows are right-padded
        ids = batch.get(("tokens", "full"))[i, :size].tolist()
        learnt = batch.get("loss_mask")[i, :size].tolist()
        if samples:
            own = batch.get(("masks", "all_response_mask"))[i, :size].tolist()
            rows.append(reader.sampled(ids, own, learnt, chats))
        else:
            rows.append(reader.given(ids, chats[i], learnt))
    return rows


def judge_ends(
    batch: TensorDictBase,
    rows: Sequence[Row],
    findings: Findings,
    *,
    reader: Reader,
    samples: bool,
) -> None:
    """Say whether rows end by an end of turn that is learnt, and nothing behind it is."""
    ends = " or ".join(repr(reader.tokenizer.decode([i])) for i in sorted(reader.stop_ids))
    empty, ended = learnt(batch, reader.stop_ids)
    told = f"{ended} of {len(batch)} rows end by a learnt {ends}, {empty} learn nothing"
    behind = [
        text
        for row in rows
        for k, text in enumerate(row.texts[1:], 1)
        if row.ends[k - 1] and row.learnt[k] and row.kinds[k] == "template" and not row.ends[k]
    ]
    if empty == len(batch):
        findings.problem(
            "no reply has a token to learn; look at after_rollout and at dropped replies"
            if samples
            else "no row has a token to learn; set policy.chat_template=chatml, or to a template "
            "with {% generation %} tags"
        )
    elif not ended and samples:
        findings.judge(
            f"no reply of {len(batch)} ended by itself; raise policy.max_new_tokens, or begin with "
            "a model that knows this template (policy.chat_template)"
        )
    elif not ended:
        findings.problem(
            "no row ends by an end of turn that is learnt, so that replies would not stop; set "
            "policy.chat_template=chatml"
        )
    else:
        findings.say(f"ok: {told}")
    if behind:
        findings.problem(
            f"{behind[0]!r} behind the end of a turn is learnt, which no reply gets to; end the "
            "{% generation %} of the template at the end of turn"
        )


def judge_thinking(rows: Sequence[Row], findings: Findings, *, reader: Reader) -> None:
    """Say whose the template's empty block of thoughts is, if it knows one."""
    if "<think>" not in reader.outlines.template:
        return
    prompt = reader.text([{"role": "user", "content": ANSWER}], prompt=True).rpartition(ANSWER)[2]
    if any(THINK.search(row.written(learnt=True)) for row in rows):
        switch = "policy.chat_template_kwargs.enable_thinking=false puts it into the prompt"
        other = "a template that leaves it out helps (policy.chat_template)"
        findings.problem(
            "the template writes an empty <think></think> into the rows' replies, where it is "
            "learnt: the model would be taught not to think; "
            + (switch if "enable_thinking" in reader.outlines.template else other)
        )
    elif THINK.search(prompt):
        findings.say("ok: the empty <think></think> is the prompt's, a reply begins behind it")
    elif OPENS.search(prompt):
        findings.say("ok: the prompt opens <think>, a reply begins inside of it")
    else:
        findings.say("ok: no <think> in the prompt, a reply opens its own")


def judge_turns(
    chats: Sequence[Sequence[Message]],
    max_turns: int | None,
    findings: Findings,
    *,
    reader: Reader,
    samples: bool,
) -> None:
    """Say whether a turn stays as it was once the chat goes on, its reasoning too."""
    several = (max_turns or 2) > 1 if samples else any(_replies(chat) > 1 for chat in chats)
    asks = next((role for chat in chats if (role := _asks_on(chat))), "user")
    kinds = ("earlier turns", "the reasoning of earlier turns")
    changed = [kind for kind in kinds if not _kept(reader, kind, asks, samples=samples)]
    if not changed:
        findings.say("ok: earlier turns stay as they were when a chat goes on, reasoning too")
    elif not several:
        findings.say(f"ok: the template rewrites {changed[0]}, but no chat goes on here")
    else:
        limit = " or env.max_turns=1" if samples else " or demonstrations of one turn"
        findings.problem(
            f"the template rewrites {changed[0]} when a chat goes on, so that the ids of a "
            "turn would change: such a row is an error; set policy.chat_template=chatml, or to "
            f"one that keeps them,{limit}"
        )


def _replies(chat: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in chat)


def _asks_on(chat: Sequence[Message]) -> str | None:
    """Return the role that goes on with a chat after its first reply."""
    roles = [message["role"] for message in chat]
    after = roles.index("assistant") + 1 if "assistant" in roles else len(roles)
    return next(iter(roles[after:]), None)


def _kept(reader: Reader, kind: str, asks: str, *, samples: bool) -> bool:
    """Return whether a chat that goes on begins as its first turn was sampled, or rendered."""
    chat = [{"role": "user", "content": "Go"}]
    try:
        prompt = reader.text(chat, prompt=True)
        thought = f"{'' if OPENS.search(prompt) else '<think>'}\n{REASON}\n</think>\n\n"
        reply = f"{thought if 'reasoning' in kind else ''}{ANSWER}"
        chat.append({"role": "assistant", "content": reply})
        begin = prompt + reply if samples else reader.text(chat, prompt=False).rstrip()
        chat.append({"role": asks, "content": "On"})
        return reader.text(chat, prompt=True).startswith(begin)
    except ValueError:  # the template refuses this chat: nothing to be said of it
        return True


def judge_begin(row: Row, findings: Findings, *, reader: Reader) -> None:
    """Say whether the token that begins a text stands there once."""
    tokenizer = reader.tokenizer
    begin, first = tokenizer.bos_token_id, row.ids[:2]
    if begin is None or begin in reader.stop_ids:  # GPT-2's is its end too
        return
    token = tokenizer.bos_token
    plain = tokenizer("a")["input_ids"][:1]
    if first == [begin, begin]:
        findings.problem(
            f"{token} stands twice at the beginning; take one out of the template "
            "(policy.chat_template) or of the data"
        )
    elif begin in first[:1]:
        findings.say(f"ok: {token} stands once at the beginning, by the template")
    elif plain == [begin]:
        findings.say(
            f"look: no {token} at the beginning: the tokenizer puts one before plain texts, "
            "the template none"
        )


def learnt(batch: TensorDictBase, stop_ids: frozenset[int]) -> tuple[int, int]:
    """Return how many rows learn nothing, and how many end their learnt tokens with a stop id."""
    mask, ids = batch.get("loss_mask"), batch.get(("tokens", "full"))  # [B, T]
    places = mask.int().cumsum(-1).argmax(-1)  # [B] the last kept token
    last = ids.gather(-1, places.unsqueeze(-1)).squeeze(-1).tolist()
    some = mask.any(-1).tolist()
    ended = sum(any_ and token in stop_ids for any_, token in zip(some, last, strict=True))
    return some.count(False), ended
