"""The export: `python -m train.export RUN_DIR OUT_DIR` writes a run's newest checkpoint as a Hugging Face folder."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models import config_json
from models.config import LlamaConfig
from train.config import model_of
from train.flags import InputError

# What goes with a model's weights and config.json; no training changes it.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def main(arguments: Sequence[str]) -> int:
    """Exports as the arguments say and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.export", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a training run")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to be made: config.json, safetensors")
    try:
        given = parser.parse_args(arguments)
        export(given.run_dir, given.out_dir)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def export(run_dir: Path, out_dir: Path) -> None:
    """Writes OUT_DIR, which appears only once it is whole; the weights have the dtype of the model it began as.

    Raises:
        InputError: RUN_DIR holds no run with a whole checkpoint, or OUT_DIR is there.
    """
    if out_dir.exists():
        raise InputError(f"OUT_DIR {out_dir}: a name for a new folder")
    settings = read_settings(run_dir)
    model, origin = model_of(settings), settings["origin"]
    try:
        content = config_json.to_json(model, origin)
        dtype = config_json.weights_dtype(content)
    except ValueError as error:
        raise InputError(f"RUN_DIR {run_dir}: {error}") from error
    step, struct, read = _open_weights(run_dir, model)
    from models import huggingface

    source = settings["init_from"]
    copied = [name for name in _COMPANIONS if source and (Path(source) / name).is_file()]
    partial = out_dir.with_name(out_dir.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files = huggingface.save(partial, struct, read, dtype=dtype)
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        for name in copied:
            shutil.copyfile(Path(source) / name, partial / name)
        partial.rename(out_dir)
    except OSError as error:
        raise InputError(f"OUT_DIR {out_dir}: a folder that can be written ({error})") from error
    print(f"{out_dir}: step {step}, {model.num_parameters:,} parameters in {dtype}, {len(files)} file(s)")
    print(
        f"from {source}: {', '.join(copied)}" if copied else "no tokenizer, as none lies with what the run began from"
    )


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The config.json of a run.

    Raises:
        InputError: there is none.
    """
    try:
        settings = json.loads((run_dir / "config.json").read_text())
        return {"init_from": settings["init_from"], "origin": settings["origin"], **settings}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"RUN_DIR {run_dir}: a folder with the config.json of a run ({error!r})") from error


def _open_weights(run_dir: Path, model: LlamaConfig) -> tuple[int, dict[str, Any], Callable[[str], Any]]:
    """The newest step, its parameters' shapes, and what reads one of them; the optimizer's state stays on disk."""
    # Not above, so that a wrong argument need not wait for JAX.
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from models.llama import Llama
    from train.checkpoint import Checkpoints, by_name

    # The host has more memory than a GPU, and an array only passes through to its file.
    jax.config.update("jax_platforms", "cpu")
    made = nnx.eval_shape(
        lambda: Llama(
            model,
            attention=lambda q, k, v: q,
            remat=lambda layer: layer,
            gather=lambda name, weight: weight,
            dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
    )
    struct = nnx.to_pure_dict(nnx.state(made))
    step, read = Checkpoints(run_dir / "checkpoints").newest(by_name({"params": struct}))
    return step, struct, lambda name: np.asarray(read(f"params.{name}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
