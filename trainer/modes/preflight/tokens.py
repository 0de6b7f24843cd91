"""The preflight check of tokens: the first rows with their loss mask, and how rows end."""

from itertools import groupby

from rich.text import Text
from tensordict import TensorDictBase

from trainer.length_filter import WRITES_END, count_ends
from trainer.modes.preflight.profile import Findings
from trainer.pages.formats import printable
from trainer.trainer import Trainer
from trainer.transcripts import token_texts

SHOWN = 2  # rows that are shown; for rollouts the first of two groups
WIDTH = 63  # characters per line of text
HALF = 300  # characters shown of each end of a longer span
FIRST, LAST = 8, 4  # ids shown of each end of a span


def check_tokens(loop: Trainer, batch: TensorDictBase, findings: Findings) -> None:
    """Print the loss mask of the first rows; check that it contains an end of turn."""
    policy, places = loop.policy, list(range(len(batch)))
    if samples := "reward_raw" in batch:
        groups = batch.get("group_id").tolist()
        places = sorted({group: i for i, group in reversed(list(enumerate(groups)))}.values())
    findings.section(
        f"Tokens of the first rows, and whether they are learnt ({policy.renderer.name})"
    )
    for i in places[:SHOWN]:
        size = int(batch.get(("masks", "all_attention_mask"))[i].sum())  # rows are right-padded
        ids = batch.get(("tokens", "full"))[i, :size].tolist()
        mask = batch.get("loss_mask")[i, :size].tolist()
        findings.say(f"row {i + 1} of {len(batch)}, {sum(mask)} of {size} tokens learnt")
        for line in table(ids, token_texts(ids, policy.tokenizer), mask):
            findings.say(line)
    ends = " or ".join(repr(policy.tokenizer.decode([i])) for i in sorted(policy.stop_ids))
    empty, ended = count_ends(batch, policy.stop_ids)
    if empty == len(batch):
        findings.problem(
            "no row has a token to learn; look at after_rollout and at dropped responses, or set "
            "policy.chat_template=<a template that writes the response>"
        )
    elif ended:
        cut = len(batch) - ended - empty
        rows = f"{ended} of {len(batch)} rows end by a learnt {ends}"
        findings.say(f"{rows}, {cut} are cut, {empty} are empty")
    else:
        findings.problem(
            "no row ends by an end of turn that is learnt; "
            + ("raise policy.max_new_tokens" if samples else WRITES_END),
            of_responses=samples,
        )


def table(ids: list[int], texts: list[str], mask: list[bool]) -> list[Text]:
    """Render a row: for each span with equal mask, lines of text and a line of ids."""
    runs = [list(run) for _, run in groupby(range(len(mask)), key=mask.__getitem__)]
    out = [Text(f"{'tokens':>6} {'learnt':<6} text", style="bold")]
    for run in runs:
        head = f"{len(run):>6} {'yes' if mask[run[0]] else '-':<6} "
        text = printable("".join(texts[run[0] : run[-1] + 1]).replace("\n", "\\n"))
        text = text if len(text) <= 2 * HALF + 3 else f"{text[:HALF]}...{text[-HALF:]}"
        style = "green" if mask[run[0]] else "dim"
        for place in range(0, max(len(text), 1), WIDTH):
            out.append(Text(head + text[place : place + WIDTH], style=style))
            head = " " * len(head)
        numbers = [str(i) for i in ids[run[0] : run[-1] + 1]]
        if len(numbers) > FIRST + LAST:
            numbers = [*numbers[:FIRST], "...", *numbers[-LAST:]]
        out.append(Text(f"{'ids':>13} {' '.join(numbers)}", style=style))
    return out
