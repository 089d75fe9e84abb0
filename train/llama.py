"""The training command: `python -m train.llama --mesh seq=8`; exit code 2 where an argument cannot work."""

import json
import sys
from collections.abc import Sequence

from train.config import parse, settings_of
from train.exits import Stop
from train.flags import InputError


def main(arguments: Sequence[str]) -> int:
    """Trains as the arguments say and returns the exit code."""
    try:
        config = parse(arguments)
        if config.print_config:
            print(json.dumps(settings_of(config), indent=2))
            return 0
        # After the parse, so that --help and a wrong flag need not wait for JAX.
        from train.distributed import find_job, joined
        from train.loop import run

        with joined(find_job(config)):
            run(config, command=["python", "-m", "train.llama", *arguments])
    except InputError as error:
        # One line also where a value, such as the name of a file, has more.
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    except Stop as stop:
        print("error:", stop, file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
