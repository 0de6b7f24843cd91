"""Time and memory of the start of a run over a data set of many rows, each in a process of its own.

    python -m benchmarks.data_memory [--rows 10000 1000000] [--in-memory]

Rows are word problems of about 200 bytes in a .jsonl file, read as env=gsm8k reads them, a tenth
(at most 200) held out; then the rows that exceed a limit of tokens are found, for a limit that
bytes decide and one that needs every row encoded; then 1,000 rows are drawn as iterations draw
them. Each size is started twice: what the first start finds out is kept. `own`: the most memory
that the process alone held (RssAnon, each 10 ms) above what it held before the data set.
`--in-memory` holds every row, as a data set below `envs.data.LARGE` is. Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MIB = 2**20
ROOM = {"by bytes": 4096, "encoded": 128}  # a row has about 100 tokens in 200 bytes


def own() -> float:
    """Return the memory that this process alone holds, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


class Most(threading.Thread):
    """The most memory that this process has held since this began."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = own()
        self.start()

    def run(self) -> None:
        while True:
            self.most = max(self.most, own())
            time.sleep(0.01)


def write(path: Path, count: int) -> None:
    """Write so many rows."""
    story = "A shop sells {} boxes of apples a day, each with {} apples; how many in a week? " * 2
    with open(path, "w") as file:
        for i in range(count):
            row = {
                "question": story.format(i, i % 7, i, i % 7),
                "answer": f"#### {i * (i % 7) * 7}",
            }
            file.write(f"{json.dumps(row)}\n")


def measure(path: str, in_memory: bool) -> None:
    """Read a data set in this process and print what it takes."""
    import envs.data
    import envs.mapped_rows
    from envs.tasks import MathWords
    from policies.chats.chat_template import Renderer
    from policies.models import find_model, load_tokenizer
    from trainer.fitting import Fit
    from trainer.sources import picks

    if in_memory:
        envs.data.LARGE = 1 << 62
    renderer = Renderer(load_tokenizer(find_model("tiny")), "chatml")
    Fit(renderer, 1, lambda row: [row["messages"]], True).too_long(
        [{"messages": [{"role": "user", "content": "a"}]}]
    )
    memory, took = Most(), {}

    def timed(name, call):
        wall, cpu = time.perf_counter(), time.process_time()
        out = call()
        took[name] = time.perf_counter() - wall, time.process_time() - cpu
        return out

    rows = timed("read", lambda: MathWords(path).rows("train"))
    for name, room in ROOM.items():
        fit = Fit(renderer, room, lambda row: [row["messages"]], True)
        timed(name, lambda fit=fit: fit.too_long(rows))
    chosen = [i for k in range(10) for i in picks(k, size=len(rows), count=100, seed=0)]
    timed("drawn", lambda: [rows[i] for i in chosen])
    read, by_bytes, encoded = (took[name] for name in ("read", *ROOM))
    print(
        f"{len(rows):>9,} rows {os.path.getsize(path) / MIB:6.1f} MiB"
        f"  read {read[0]:6.1f} s (CPU {read[1]:5.1f})"
        f"  too long? by bytes {by_bytes[0]:5.1f} s ({by_bytes[1]:5.1f}),"
        f" encoded {encoded[0]:6.1f} s ({encoded[1]:5.1f})"
        f"  own {memory.most - memory.before:6.1f} MiB, in the end {own() - memory.before:6.1f}"
        f"  a row drawn in {took['drawn'][0] / len(chosen) * 1e6:.0f} us",
        flush=True,
    )


def main() -> None:
    """Measure each size, twice: the second time the rows are on disk already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.path:
        measure(args.path, args.in_memory)
        return
    more = ["--in-memory"] if args.in_memory else []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LEASH_CACHE"] = f"{folder}/cache"
        for count in args.rows:
            path = Path(folder) / f"{count}.jsonl"
            write(path, count)
            for _ in range(2):
                command = [sys.executable, "-m", "benchmarks.data_memory", "--path", str(path)]
                subprocess.run([*command, *more], check=True)


if __name__ == "__main__":
    main()
