"""Memory of a task over a data set of many rows, each size in a process of its own.

    python -m benchmarks.data_memory [--rows 10000 1000000] [--in-memory]

Rows are word problems of about 200 bytes in a .jsonl file, read as env=gsm8k reads them, a tenth
held out; then 1,000 rows are drawn as iterations draw them. `own`: the memory that the process
alone holds (RssAnon) above that of one without a data set; `most`: the peak of all resident
memory, with pages of files that the kernel may take back. `--in-memory` holds every row, as a data
set below `envs.data.LARGE` is. Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20


def memory(field: str) -> float:
    """Return RssAnon (own, now) or VmHWM (the most so far) in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


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
    from envs.tasks import MathWords
    from trainer.sources import picks

    if in_memory:
        envs.data.LARGE = 1 << 62
    else:
        import envs.mapped_rows
    before, start = memory("RssAnon"), time.perf_counter()
    rows = MathWords(path).rows("train")
    read, start = time.perf_counter() - start, time.perf_counter()
    drawn = [rows[i] for k in range(10) for i in picks(k, size=len(rows), count=100, seed=0)]
    each = (time.perf_counter() - start) / len(drawn)
    print(
        f"{len(rows):>9,} rows  {os.path.getsize(path) / MIB:7.1f} MiB on disk"
        f"  read in {read:6.1f} s"
        f"  own {memory('RssAnon') - before:7.1f} MiB  most {memory('VmHWM'):7.1f} MiB"
        f"  a row drawn in {each * 1e6:.0f} us"
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
