"""What the jobs of a sweep are called, by their overrides: their folders, and a line for each."""

import hashlib
import re
from collections.abc import Sequence

from trainer.runs.redact import redact_text

LONGEST = 200  # bytes of a job's folder name; file systems refuse more than 255


def job_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Name the folder of each job of a sweep by its overrides that not all jobs have, sorted.

    A job alone is named by all but its experiment.

    >>> job_names([["seed=1", "kl.coeff=0"], ["seed=1", "kl.coeff=0.1"]])
    ['kl.coeff=0', 'kl.coeff=0.1']
    """
    named = [[word for word in job if not word.startswith("hydra.")] for job in jobs]
    if len(jobs) > 1:
        shared = set(named[0]).intersection(*named)
    else:
        shared = {word for word in named[0] if word.startswith("experiment=")}
    own = [sorted(set(job) - shared) or sorted(job) for job in named]
    return [job_name(",".join(words)) for words in own]


def job_name(overrides: str) -> str:
    """Return overrides as the name of a folder.

    What a shell or a disk would take amiss is a `_`, what is too long is cut; such a name ends in
    a hash, so that no two jobs share one.

    >>> job_name("kl.coeff=0.1,seed=1"), job_name("policy.model=a/b"), job_name("")
    ('kl.coeff=0.1,seed=1', 'policy.model=a_b-07448723', 'job')
    """
    name = re.sub(r"[^\w.,=+~@-]+", "_", overrides, flags=re.ASCII)
    if name == overrides and len(name) <= LONGEST:
        return name or "job"
    most, pairs = LONGEST - 9, re.split(r",(?=[\w.+~@]+=)", name)
    cuts = (",".join(pair[:each] for pair in pairs) for each in range(most, 11, -1))
    cut = next((short for short in cuts if len(short) <= most), name[:most])
    return f"{cut}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


def job_line(number: int, jobs: Sequence[Sequence[str]], *, count: int | None = None) -> str:
    """Say which job of a sweep begins: its number, and the overrides that not all jobs have.

    >>> job_line(1, [["seed=1", "kl.coeff=0"], ["seed=1", "kl.coeff=0.1"]])
    'job 2 of 2: kl.coeff=0.1'
    """
    own = [word for word in jobs[number] if any(word not in job for job in jobs)]
    return redact_text(f"job {number + 1} of {count or len(jobs)}: {' '.join(own)}".rstrip(": "))
