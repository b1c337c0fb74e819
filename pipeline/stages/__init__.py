"""The three stages of dvc.yaml. Each wires the other rooms together and is run as a module:

python -m pipeline.stages.prepare | train | evaluate
"""

import signal
import sys

if sys.argv[0] == "-m":  # run so: until `run_stage`, through seconds of imports, Ctrl-C is no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
