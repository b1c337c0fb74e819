"""Tightfit: mixed precision with gradient accumulation, exact, planned and reproducible."""

import signal
import sys

if sys.argv[0] == "-m":  # `python -m pipeline…`: Ctrl-C while it imports, seconds long, is no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
