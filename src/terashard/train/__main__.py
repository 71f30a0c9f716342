"""A worker's process: ``python -m terashard.train RUN_DIR [--resume]``, started by the launcher.

Ready for signals before torch is imported, which takes seconds.
"""

import sys

from terashard.train.stop import StopFlag

if __name__ == "__main__":
    flag = StopFlag()
    flag.listen()
    from terashard.train.worker import main

    main(sys.argv[1:], flag)
