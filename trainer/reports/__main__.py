"""python -m trainer.reports <folder>: write report.html or sweep.html again; see report.py."""

import sys

from trainer.reports.report import main

sys.exit(main())
