"""TensorBoard: metrics as scalars and replies as text in `<folder>/tensorboard`.

TensorBoard (`pip install -e '.[tensorboard]'`) is imported here only.
"""

from typing import Any

import yaml

from trainer.reports.trackers.mirror import Mirror


class TensorboardTracker(Mirror):
    """Write TensorBoard's event files too; after a resume repeated iterations stand once.

    `flush_s`: seconds until what is logged is on disk.
    """

    word = "tensorboard"

    def __init__(self, folder: str, *, flush_s: int = 10, **about: Any) -> None:
        self._flush_s = flush_s
        self._from: int | None = None  # first iteration that is logged again
        self._iteration = 0
        self._writer: Any = None
        super().__init__(folder, **about)
        self.hint = f"look at it with: tensorboard --logdir {self.folder / 'tensorboard'}"

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        """Go back in the files; TensorBoard drops what it has from there on."""
        super().resume(iteration, text, again=again, seconds=seconds)
        self._from = iteration + 1 - again

    def _log(self, line: dict[str, float], iteration: int) -> None:
        self._iteration = iteration
        for name, value in line.items():
            self._open().add_scalar(name, value, iteration)

    def _show(self, rows: list[dict[str, Any]], iteration: int) -> None:
        self._open().add_text("transcripts", "\n\n---\n\n".join(map(_markdown, rows)), iteration)

    def _alert(self, title: str, text: str, error: bool) -> None:
        self._open().add_text("alerts", f"**{title}**: {text}", self._iteration)

    def _stop(self, state: str) -> None:
        self._open().close()

    def _open(self) -> Any:
        """Return the writer, opened when `resume` has said where the run goes on."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(
                str(self.folder / "tensorboard"), purge_step=self._from, flush_secs=self._flush_s
            )
            self._writer.add_text("run", _block(yaml.safe_dump(self.about, sort_keys=False)))
        return self._writer


def _markdown(row: dict[str, Any]) -> str:
    numbers = {k: v for k, v in row.items() if isinstance(v, (int, float, bool))}
    numbers |= row.get("parts") or {}
    texts = {"reply": yaml.safe_dump(numbers), **{k: row.get(k) for k in ("prompt", "response")}}
    return "\n\n".join(f"**{name}**\n\n{_block(str(text or ''))}" for name, text in texts.items())


def _block(text: str) -> str:
    """Return Markdown that shows a text as it is: indented, so that no markup in it counts."""
    return "\n".join(f"    {line}" for line in text.splitlines())
