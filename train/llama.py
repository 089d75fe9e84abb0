"""The training command: `python -m train.llama --mesh seq=8`; exit codes are those of `train.exits`."""

import json
import sys
from collections.abc import Sequence

from train.config import parse, settings_of
from train.exits import Exit, mute, tell


def main(arguments: Sequence[str]) -> int:
    """Trains as the arguments say and returns the exit code."""
    try:
        config = parse(arguments)
        if config.print_config:
            print(json.dumps(settings_of(config), indent=2))
            return Exit.OK
        # After the parse, so that --help and a wrong flag need not wait for JAX.
        from train.job import find_job, joined
        from train.loop import run

        with joined(find_job(config)):
            run(config, command=["python", "-m", "train.llama", *arguments])
    except (Exception, KeyboardInterrupt) as error:
        return tell(error)
    return Exit.OK


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code:  # what was said of it stays the last line while Python ends
        mute()
    sys.exit(code)
